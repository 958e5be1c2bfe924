"""``holdfast.load`` from checkpoints of others, and from what is no checkpoint at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import holdfast
import holdfast.dcp
from holdfast.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    NotACheckpointError,
    StateMismatchError,
    UncommittedCheckpointError,
)
from tests.load.test_load_ranks import LAYOUTS, blank, content, ddp, fsdp2, plain, same, trained
from tests.rank_pool import RankPool


def save_raw(place: str, layout: Any, library: str) -> dict[str, Any]:
    """As many programs do it: the plain state dicts of wrapped models and of optimizers with numbers."""
    state = blank(layout, with_optimizer=True)
    torch.manual_seed(8)
    state["model"](torch.rand(5, 4)).sum().backward()
    state["optim"].step()
    module = stock if library == "stock" else holdfast.dcp
    module.save({"model": state["model"].state_dict(), "optim": state["optim"].state_dict()}, checkpoint_id=place)
    return content(state)


def load_raw(place: str, layout: Any) -> Any:
    state = blank(layout, with_optimizer=True)
    report = holdfast.load(state, place)
    return content(state), report


@pytest.mark.parametrize("library", ["stock", "ours"])
@pytest.mark.parametrize("layout", [ddp, fsdp2])
def test_plain_state_dicts_of_wrapped_models_load_into_all_layouts(ranks: RankPool, tmp_path, layout, library):
    place = str(tmp_path / "saved")
    expected = ranks(2).run(save_raw, place, layout, library)[0]
    for target in LAYOUTS:
        for found, report in ranks(3).run(load_raw, place, target):
            assert same(found, expected), target
            assert report.unexpected == report.missing == []
            assert bool(report.renamed) == (layout is ddp)


def test_flattened_optimizer_states_load(tmp_path):
    state = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(state["model"], state["optim"], options=options)
    stock.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path)
    found = blank(plain, with_optimizer=True)
    holdfast.load(found, tmp_path)
    assert same(content(found), content(state))


@pytest.mark.parametrize("library", [stock, holdfast.dcp], ids=["stock", "ours"])
def test_an_optimizer_without_state_was_stored_as_settings_alone(tmp_path, library):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    library.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path)
    target = nn.Linear(2, 2)
    state = {"model": target, "optim": torch.optim.SGD(target.parameters(), lr=0.5), "loss": nn.MSELoss()}
    holdfast.load(state, tmp_path)
    assert state["optim"].param_groups[0]["lr"] == 0.25
    assert torch.equal(target.weight, model.weight)


def test_nested_states_of_dcp_and_torch_keep_their_structure(tmp_path):
    stored = {"a": [torch.ones(2), {"b": torch.zeros(1)}], "c": {"d": 4, "list": [1, 2, 3]}, "text": "x"}
    stock.save(stored, checkpoint_id=tmp_path / "dcp")
    torch.save(stored, tmp_path / "torch.pt")
    for place in ["dcp", "torch.pt"]:
        state: dict[str, Any] = {"a": [torch.zeros(2), {"b": torch.ones(1)}], "c": {}, "text": None}
        holdfast.load(state, tmp_path / place)
        assert state["a"][0].tolist() == [1, 1]
        assert state["a"][1]["b"].item() == 0
        assert state["c"] == {"d": 4, "list": [1, 2, 3]}
        assert state["text"] == "x"


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module."])
def test_names_of_wrappers_in_the_keys_of_others_are_looked_through_and_noted(tmp_path, prefix):
    model, target = nn.Linear(2, 2), nn.Linear(2, 2)
    tensors = {f"{prefix}{key}": value for key, value in model.state_dict().items()}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors")
    report = holdfast.load(target, tmp_path / "m.safetensors")
    assert torch.equal(target.weight, model.weight)
    assert report.renamed == {f"{prefix}weight": "weight", f"{prefix}bias": "bias"}


def test_names_that_mean_two_stored_keys_are_not_guessed(tmp_path):
    tensors = {"module.weight": torch.ones(2, 2), "_orig_mod.weight": torch.zeros(2, 2), "bias": torch.ones(2)}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(StateMismatchError) as raised:
        holdfast.load(nn.Linear(2, 2), tmp_path / "m.safetensors")
    assert raised.value.missing == ["weight"]


def test_code_in_files_of_torch_runs_only_if_that_is_allowed(tmp_path):
    torch.save({"w": torch.ones(2), "code": io.StringIO}, tmp_path / "file.pt")
    with pytest.raises(holdfast.HoldfastError):
        holdfast.load({"w": torch.zeros(2), "code": None}, tmp_path / "file.pt")
    state: dict[str, Any] = {"w": torch.zeros(2), "code": None}
    holdfast.load(state, tmp_path / "file.pt", allow_pickle=True)
    assert state["code"] is io.StringIO
    stock.save({"w": torch.ones(2), "code": io.StringIO}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(StateMismatchError, match="allow_pickle=True") as raised:
        holdfast.load({"w": torch.zeros(2), "code": None}, tmp_path / "dcp")
    assert list(raised.value.kinds) == ["code"]


def test_what_is_no_checkpoint_is_reported_by_its_own_class(tmp_path):
    state = {"a": torch.zeros(1)}
    with pytest.raises(CheckpointNotFoundError) as missing:
        holdfast.load(state, tmp_path / "nothing")
    assert missing.value.path == str(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="empty"):
        holdfast.load(state, tmp_path / "empty")
    (tmp_path / "notes.txt").write_text("hello, world")
    with pytest.raises(NotACheckpointError) as other:
        holdfast.load(state, tmp_path / "notes.txt")
    assert other.value.found == b"hello, wo"
    with pytest.raises(NotACheckpointError):
        holdfast.load(state, tmp_path)
    holdfast.save({"a": torch.ones(1)}, tmp_path / "saved")
    (tmp_path / "saved/holdfast.json").rename(tmp_path / "record")
    with pytest.raises(UncommittedCheckpointError) as uncommitted:
        holdfast.load(state, tmp_path / "saved")
    assert uncommitted.value.path == str(tmp_path / "saved")
    (tmp_path / "saved/holdfast.json").write_bytes((tmp_path / "record").read_bytes()[:-9])
    with pytest.raises(DamagedCheckpointError) as damaged:
        holdfast.load(state, tmp_path / "saved")
    assert damaged.value.file == str(tmp_path / "saved/holdfast.json")
    with pytest.raises(ValueError, match="empty"):
        holdfast.load(state, "")
    assert state["a"].item() == 0


def load_on_ranks(place: str) -> str:
    try:
        holdfast.load({"a": torch.zeros(1)}, place)
    except holdfast.HoldfastError as error:
        return f"{type(error).__name__} {dist.get_world_size()}"
    return "loaded"


def test_the_same_error_ends_the_load_on_all_ranks(ranks: RankPool, tmp_path):
    assert ranks(2).run(load_on_ranks, str(tmp_path / "x")) == ["CheckpointNotFoundError 2"] * 2
    (tmp_path / "y").write_text("hello, world")
    assert ranks(2).run(load_on_ranks, str(tmp_path / "y")) == ["NotACheckpointError 2"] * 2


@pytest.mark.parametrize("first", [False, True])
def test_damage_in_files_of_others_is_found(tmp_path: Path, first):
    holdfast.dcp.save({"a": torch.ones(5000)}, checkpoint_id=tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(data)
    state = {"a": torch.zeros(5000)}
    with pytest.raises(DamagedCheckpointError) as raised:
        holdfast.load(state, tmp_path, verify_first=first)
    assert ("Nothing was changed" in str(raised.value)) == first
    assert ("partly loaded" in str(raised.value)) == (not first)
