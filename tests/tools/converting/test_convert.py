"""``holdfast.convert``: what is taken, left out, renamed and refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import contextmanager
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import holdfast
from holdfast import _settings as settings
from holdfast._load.checkpoint import source_of
from holdfast._load.renaming import rename as rename_leaves
from holdfast._load.stored_nodes import StoredNode
from holdfast._stores import large_files
from holdfast._stores.memory_store import MemoryStore
from holdfast.errors import (
    CheckpointExistsError,
    DamagedCheckpointError,
    UnknownKeyError,
    UnsupportedTensorError,
    UnsupportedValueError,
)
from tests.exact import assert_same


class Odd:
    """Nothing that a checkpoint holds without a pickle."""


def save_with_own_values(path):
    import torch.distributed as dist

    rank = dist.get_rank()
    state = {
        "w": torch.arange(6.0),
        "seed": holdfast.PerRank(10 + rank),
        "noise": holdfast.PerRank(torch.full((2,), float(rank))),
    }
    holdfast.save(state, path)


@pytest.fixture
def saved(tmp_path):
    model = torch.nn.Linear(3, 2)
    state = {
        "model": model,
        "step": 7,
        "betas": (0.9, 0.999),
        "mean": np.arange(4, dtype="<f4"),
        "list": [torch.ones(2)],
    }
    holdfast.save(state, tmp_path / "saved", metadata={"loss": 0.5})
    return tmp_path / "saved"


def test_values_metadata_and_arrays_stay_what_they_are(saved, tmp_path):
    report = holdfast.convert(saved, tmp_path / "new", to="native")

    assert_same(holdfast.open(tmp_path / "new").read(), holdfast.open(saved).read())
    assert holdfast.open(tmp_path / "new").metadata == {"loss": 0.5}
    assert holdfast.open(tmp_path / "new").provenance["converted_from"]["format"] == "native"
    assert (report.tensors, report.values, report.elements) == (4, 2, 14)
    assert str(tmp_path / "new") in str(report)
    assert json.loads(json.dumps(report.to_json()))["checked"] is True


def test_values_that_safetensors_cannot_hold_are_listed_and_nothing_is_written(saved, tmp_path):
    with pytest.raises(UnsupportedValueError, match="only_tensors=True") as raised:
        holdfast.convert(saved, tmp_path / "new", to="safetensors")
    assert set(raised.value.keys) == {"step", "betas"}
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]

    report = holdfast.convert(saved, tmp_path / "new.safetensors", to="safetensors", only_tensors=True)
    assert set(report.left_out) == {"step", "betas"}
    assert load_file(tmp_path / "new.safetensors").keys() == {"model.weight", "model.bias", "mean", "list.0"}


def test_types_that_safetensors_lack_are_listed(tmp_path):
    state = {"z": torch.ones(2, dtype=torch.complex128), "w": torch.ones(2), "s": np.array(["ab"])}
    holdfast.save(state, tmp_path / "saved")
    with pytest.raises(UnsupportedTensorError, match="complex128") as raised:
        holdfast.convert(tmp_path / "saved", tmp_path / "new", to="safetensors")
    assert raised.value.keys == ["z", "s"]
    assert holdfast.convert(tmp_path / "saved", tmp_path / "new", to="safetensors", exclude=["z", "s"]).tensors == 1


def test_keys_are_chosen_renamed_and_cast_by_the_names_of_the_source(saved, tmp_path):
    report = holdfast.convert(
        saved,
        tmp_path / "new",
        to="native",
        include=["model", "step"],
        exclude="*.bias",
        rename={"model": "net.inner"},
        cast={"model.weight": "bfloat16"},
    )
    loaded = holdfast.open(tmp_path / "new").read()
    expected = holdfast.open(saved).read("model.weight")["model"]["weight"].to(torch.bfloat16)
    assert loaded.keys() == {"net.inner", "step"}
    assert torch.equal(loaded["net.inner"]["weight"], expected)
    assert report.renamed == {"model.weight": "net.inner.weight"}
    assert report.cast == {"net.inner.weight": ("float32", "bfloat16")}
    assert set(report.left_out) == {"model.bias", "betas", "mean", "list.0"}


def test_a_cast_is_about_floating_point_tensors_alone(tmp_path):
    holdfast.save({"w": torch.ones(3), "n": torch.arange(3), "a": np.ones(3, "<f4")}, tmp_path / "saved")
    holdfast.convert(tmp_path / "saved", tmp_path / "new", to="native", cast=torch.float16)
    loaded = holdfast.open(tmp_path / "new").read()
    assert (loaded["w"].dtype, loaded["n"].dtype, loaded["a"].dtype) == (torch.float16, torch.int64, np.float32)


@pytest.mark.parametrize("pattern", ["embed", "head"])
@pytest.mark.parametrize(("to", "name"), [("native", "new"), ("safetensors", "new.safetensors")])
def test_any_name_of_a_tied_tensor_says_what_it_is_cast_to(tmp_path, pattern, to, name):
    shared = torch.randn(4, 3)
    holdfast.save({"embed": shared, "head": shared}, tmp_path / "saved")
    holdfast.convert(tmp_path / "saved", tmp_path / name, to=to, cast={pattern: "float16"}, rename={"head": "out"})
    for key in ("embed", "out"):
        assert torch.equal(holdfast.open(tmp_path / name)[key][...], shared.to(torch.float16))


def test_two_types_for_one_tensor_are_refused(tmp_path):
    shared = torch.randn(4, 3)
    holdfast.save({"embed": shared, "head": shared}, tmp_path / "saved")
    with pytest.raises(ValueError, match="'embed' and 'head' are one tensor"):
        holdfast.convert(
            tmp_path / "saved", tmp_path / "new", to="native", cast={"embed": "float16", "head": "bfloat16"}
        )


def test_the_first_pattern_that_fits_counts_and_those_that_fit_nothing_are_reported(saved, tmp_path):
    report = holdfast.convert(
        saved,
        tmp_path / "new",
        to="native",
        cast={"model.weight": "float16", "model": "float64", "modle": "bfloat16", re.compile("step|mean"): "float16"},
        rename={"modle": "net", "list": "tensors"},
    )
    loaded = holdfast.open(tmp_path / "new").read()
    assert loaded["model"]["weight"].dtype == torch.float16
    assert loaded["model"]["bias"].dtype == torch.float64
    assert report.unused == {"rename": ["modle"], "cast": ["modle", "step|mean"]}
    assert "rename matches nothing: 'modle'" in str(report)
    assert report.to_json()["unused"]["cast"] == ["modle", "step|mean"]
    assert not holdfast.convert(saved, tmp_path / "other", to="native", cast="float16", rename={"list": "x"}).unused


@pytest.mark.parametrize(("to", "name"), [("native", "new"), ("torch", "new.pt"), ("safetensors", "new.safetensors")])
def test_a_size_of_files_is_refused_where_there_is_no_folder_of_files(saved, tmp_path, to, name):
    with pytest.raises(ValueError, match="max_file_size"):
        holdfast.convert(saved, tmp_path / name, to=to, only_tensors=True, max_file_size="1MB")


def test_every_element_of_the_source_is_written_or_reported_as_left_out(tmp_path):
    shared = torch.randn(4, 3)
    holdfast.save({"embed": shared, "head": shared, "w": torch.ones(5), "mean": np.ones(7), "n": 1}, tmp_path / "saved")
    for to, name, once in (("native", "new", 1), ("torch", "new.pt", 1), ("dcp", "d", 2), ("safetensors", "s", 2)):
        report = holdfast.convert(tmp_path / "saved", tmp_path / name, to=to, exclude=["w", "mean", "n"])
        assert (report.elements, report.elements_left_out) == (once * 12, 12), to
        other = tmp_path / f"half {name}"
        half = holdfast.convert(tmp_path / "saved", other, to=to, exclude=["head", "n"])  # it is still there as 'embed'
        assert (half.elements, half.elements_left_out) == (24, 0), to


def test_a_tensor_that_gets_lost_on_the_way_is_noticed(saved, tmp_path):
    def forget_one(root, renaming):
        tree, renamed = rename_leaves(root, renaming)
        return StoredNode.of({**tree.value, "model": {"weight": tree.value["model"]["weight"]}}), renamed

    with (
        mock.patch("holdfast._tools.converting.preparing.rename_leaves", forget_one),
        pytest.raises(AssertionError, match="of 14 elements, 12 were written and 0 left out"),
    ):
        holdfast.convert(saved, tmp_path / "new", to="native")
    assert not (tmp_path / "new").exists()


ODD_KEYS = [
    {"a": {(1, 2): torch.ones(2)}, "n": torch.ones(3)},
    {"t": {True: torch.ones(2), None: torch.ones(3), 1.5: torch.ones(4)}},
    {"int": {1: torch.ones(2), (3, 4): torch.ones(3)}},
    {"a.b": torch.ones(2), "a": {"b": torch.ones(3)}},
    {'["x"]': torch.ones(2), "y": torch.ones(3)},
    {'["a"]["b"]': torch.ones(1), "a.b": torch.ones(2), "a": {"b": torch.ones(3)}},
]


@pytest.mark.parametrize("state", ODD_KEYS, ids=range(len(ODD_KEYS)))
@pytest.mark.parametrize(("to", "name"), [("dcp", "new"), ("safetensors", "new.safetensors"), ("torch", "new.pt")])
def test_keys_may_be_anything_that_the_format_can_tell_apart(tmp_path, state, to, name):
    holdfast.save(state, tmp_path / "saved")
    if to == "dcp" and "a.b" in state:
        with pytest.raises(UnsupportedValueError, match="is the key of"):
            holdfast.convert(tmp_path / "saved", tmp_path / name, to=to)
        return
    report = holdfast.convert(tmp_path / "saved", tmp_path / name, to=to)
    found = holdfast.open(tmp_path / name)
    assert report.tensors == len(found)
    sizes = sorted(len(tensor[...]) for tensor in found.values())
    assert sizes == sorted(len(tensor) for tensor in holdfast.open(tmp_path / "saved").values())


def test_names_of_flat_files_stay_as_they_are(tmp_path):
    state = {'["x"]': torch.ones(2), "a.b": torch.ones(3), "c[0]": torch.ones(4)}
    save_file(state, tmp_path / "a.safetensors")
    report = holdfast.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", to="safetensors")
    assert_same(load_file(tmp_path / "b.safetensors"), state)
    assert not report.renamed


def test_a_name_that_is_no_text_is_refused(tmp_path):
    holdfast.save({"\ud800": torch.ones(2)}, tmp_path / "saved")
    with pytest.raises(UnsupportedTensorError, match="lone surrogate"):
        holdfast.convert(tmp_path / "saved", tmp_path / "new", to="safetensors")


def test_a_rename_that_gives_one_key_twice_is_refused(saved, tmp_path):
    with pytest.raises(ValueError, match="both"):
        holdfast.convert(saved, tmp_path / "new", to="native", rename={re.compile("model.(weight|bias)"): "model.x"})
    with pytest.raises(ValueError, match=r"both 'model\.bias' and 'mean'"):
        holdfast.convert(saved, tmp_path / "new", to="safetensors", only_tensors=True, rename={"mean": "model.bias"})
    assert not (tmp_path / "new").exists()


def test_patterns_that_leave_nothing_are_an_error(saved, tmp_path):
    with pytest.raises(UnknownKeyError, match="leave nothing"):
        holdfast.convert(saved, tmp_path / "new", to="native", include="modle")


def test_tied_tensors_stay_one_tensor_where_the_format_can(tmp_path):
    shared = torch.randn(4, 3)
    holdfast.save({"embed": shared, "head": shared}, tmp_path / "saved")
    holdfast.convert(tmp_path / "saved", tmp_path / "new", to="native")
    holdfast.convert(tmp_path / "saved", tmp_path / "new.pt", to="torch")
    report = holdfast.convert(tmp_path / "saved", tmp_path / "new.safetensors", to="safetensors")
    holdfast.convert(tmp_path / "new.pt", tmp_path / "back", to="native")
    holdfast.convert(tmp_path / "new.pt", tmp_path / "again.pt", to="torch")

    assert len(source_of(holdfast.open(tmp_path / "back")).tensors) == 1
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert again["embed"].data_ptr() == again["head"].data_ptr()
    assert torch.equal(again["head"], shared)
    assert len(source_of(holdfast.open(tmp_path / "new")).tensors) == 1
    loaded = torch.load(tmp_path / "new.pt", weights_only=True)
    assert loaded["embed"].data_ptr() == loaded["head"].data_ptr()
    flat = load_file(tmp_path / "new.safetensors")
    assert torch.equal(flat["embed"], shared)
    assert torch.equal(flat["head"], shared)
    assert report.tensors == 2
    assert report.elements == 24


def test_values_of_each_rank_stay_so_in_our_format_and_become_lists_elsewhere(ranks, tmp_path):
    ranks(2).run(save_with_own_values, tmp_path / "saved")
    holdfast.convert(tmp_path / "saved", tmp_path / "new", to="native")
    holdfast.convert(tmp_path / "saved", tmp_path / "new.pt", to="torch")
    holdfast.convert(tmp_path / "saved", tmp_path / "new.safetensors", to="safetensors", only_tensors=True)

    assert (
        source_of(holdfast.open(tmp_path / "new")).tree["seed"]
        == source_of(holdfast.open(tmp_path / "saved")).tree["seed"]
    )
    assert holdfast.open(tmp_path / "new")["noise.1"].kind == "per_rank"
    expected = {"w": torch.arange(6.0), "seed": [10, 11], "noise": [torch.zeros(2), torch.ones(2)]}
    assert_same(holdfast.open(tmp_path / "new").read(), expected)
    assert_same(torch.load(tmp_path / "new.pt", weights_only=True), expected)
    assert load_file(tmp_path / "new.safetensors").keys() == {"w", "noise.0", "noise.1"}


def test_pickles_go_back_unread_to_our_format_and_are_refused_elsewhere(tmp_path):
    holdfast.save({"w": torch.ones(2), "odd": Odd()}, tmp_path / "saved", allow_pickle=True)
    holdfast.convert(tmp_path / "saved", tmp_path / "new", to="native")
    assert isinstance(holdfast.open(tmp_path / "new", allow_pickle=True)["odd"], Odd)
    with pytest.raises(UnsupportedValueError, match="allow_pickle=True"):
        holdfast.convert(tmp_path / "saved", tmp_path / "new.pt", to="torch")
    assert not (tmp_path / "new.pt").exists()


def test_notes_of_a_safetensors_file_stay(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", metadata={"format": "pt", "by": "somebody"})
    holdfast.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", to="safetensors")
    with safe_open(tmp_path / "b.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "by": "somebody"}


def test_a_store_takes_checkpoints_of_our_format_only(saved, tmp_path):
    report = holdfast.convert(saved, "memory://converted", to="native")
    assert_same(holdfast.open("memory://converted").read(), holdfast.open(saved).read())
    assert report.destination == "memory://converted"
    with pytest.raises(ValueError, match="local path"):
        holdfast.convert(saved, "memory://other", to="safetensors", only_tensors=True)
    with pytest.raises(CheckpointExistsError):
        holdfast.convert(saved, "memory://converted", to="native")


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_in_a_store_stays_until_the_new_one_is_proven(saved, tmp_path, overwrite):
    class Forgetful(MemoryStore):
        """Changes a bit of what is written."""

        @contextmanager
        def create(self, name, size=None, memory=None):
            with super().create(name, size, memory) as sink:
                write = sink.write

                def damaged(buffer):
                    content = bytearray(buffer)
                    content[-1] ^= name.startswith("data-")
                    write(content)

                yield SimpleNamespace(write=damaged)

    place = f"memory://{tmp_path.name}-{overwrite}"
    before = []
    if overwrite:
        holdfast.convert(saved, place, to="native", include="step")
        before = sorted(listed.name for listed in MemoryStore(place[9:]).list())
    with pytest.raises(DamagedCheckpointError):
        holdfast.convert(saved, Forgetful(place[9:]), to="native", overwrite=overwrite)
    assert sorted(listed.name for listed in MemoryStore(place[9:]).list()) == before
    if overwrite:
        assert holdfast.open(place).read() == {"step": 7}
        holdfast.convert(saved, MemoryStore(place[9:]), to="native", overwrite=True)
        assert_same(holdfast.open(place).read(), holdfast.open(saved).read())


def test_values_that_nobody_can_compare_are_reported(tmp_path):
    holdfast.save({"w": torch.ones(2), "odd": Odd(), "date": Fraction(1, 3)}, tmp_path / "saved", allow_pickle=True)
    report = holdfast.convert(tmp_path / "saved", tmp_path / "new.pt", to="torch", allow_pickle=True)
    assert report.not_compared == ["odd"]
    assert "cannot be compared: odd" in str(report)
    assert report.to_json()["not_compared"] == ["odd"]


def test_a_damaged_source_leaves_nothing_under_the_final_name(tmp_path):
    holdfast.save({"w": torch.randn(1 << 18), "v": torch.randn(9)}, tmp_path / "saved")
    data = next((tmp_path / "saved").glob("data-*"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    for to, name in (("native", "new"), ("safetensors", "new.safetensors"), ("torch", "new.pt"), ("dcp", "dcp")):
        with pytest.raises(DamagedCheckpointError, match="w"):
            holdfast.convert(tmp_path / "saved", tmp_path / name, to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_an_opened_checkpoint_is_taken_as_it_is_and_stays_open(saved, tmp_path):
    with holdfast.open(saved) as checkpoint:
        holdfast.convert(checkpoint, tmp_path / "new", to="native")
        assert checkpoint["model.bias"][...].shape == (2,)


def test_progress_goes_up_to_all_of_it(saved, tmp_path):
    seen = []
    holdfast.convert(saved, tmp_path / "new", to="native", on_progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (2 * 56, 2 * 56)


def test_an_unknown_format_is_refused(saved, tmp_path):
    with pytest.raises(ValueError, match="native, dcp, safetensors, torch"):
        holdfast.convert(saved, tmp_path / "new", to="onnx")


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_where_torch_is_needed_and_missing_this_is_said(tmp_path, to):
    holdfast.save({"w": torch.ones(3, 4)}, tmp_path / "saved")
    program = f"""
import sys
sys.modules["torch"] = None
from holdfast._cli.main import run
sys.exit(run(["convert", {str(tmp_path / "saved")!r}, {str(tmp_path / "new")!r}, "--to", {to!r}]))
"""
    run = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert run.returncode == 2
    assert "needs torch" in run.stderr
    assert "defect" not in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_torch_is_not_needed_between_native_and_safetensors(tmp_path):
    holdfast.save({"model": {"w": torch.ones(3, 4)}, "opt": {"lr": 0.1}}, tmp_path / "saved")
    program = f"""
import sys
from holdfast._cli.main import run
assert run(["export", {str(tmp_path / "saved")!r}, {str(tmp_path / "hf")!r}, "--cast", "bfloat16", "--quiet"]) == 0
assert run(["convert", {str(tmp_path / "hf")!r}, {str(tmp_path / "back")!r}, "--to", "native"]) == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
    assert torch.equal(holdfast.open(tmp_path / "back")["w"][...], torch.ones(3, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize(("check", "ways"), [(True, {"avoid"}), (False, {"auto"})])
def test_what_is_read_back_comes_from_the_disk(tmp_path, monkeypatch, check, ways):
    seen = set()
    choose = large_files.choose_way

    def noting(*arguments: Any) -> Any:
        seen.add(settings.current().page_cache)
        return choose(*arguments)

    holdfast.save({"w": torch.arange(1_000_000)}, tmp_path / "saved")
    monkeypatch.setattr(large_files, "choose_way", noting)
    for to, name in (("native", "native"), ("safetensors", "one.safetensors"), ("dcp", "dcp")):
        holdfast.convert(tmp_path / "saved", tmp_path / name, to=to, check=check)
    assert seen == ways
