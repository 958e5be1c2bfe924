"""Whatever is at a place is opened as what it is, or the error says what was found instead."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file

import holdfast
from holdfast._load.opening import open_source
from holdfast._stores.places import store_at
from holdfast.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    NotACheckpointError,
    UncommittedCheckpointError,
)
from tests.dcp.states import bits
from tests.formats.regions import whole
from tests.torches import ALONE

STATE = {"w": torch.ones(2)}
GENERATION = "00112233aabbccdd"


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="does not exist") as caught:
        open_source(tmp_path / "nothing")

    assert caught.value.path == str(tmp_path / "nothing")
    assert isinstance(caught.value, FileNotFoundError)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="empty"):
        open_source(tmp_path)


def test_an_empty_path() -> None:
    with pytest.raises(ValueError, match="empty"):
        open_source("")


def test_a_relative_path_and_a_url_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(STATE, tmp_path / "a state.pt")
    monkeypatch.chdir(tmp_path)

    assert open_source("a state.pt").location == str(tmp_path / "a state.pt")
    assert open_source((tmp_path / "a state.pt").as_uri()).location == str(tmp_path / "a state.pt")


@pytest.mark.parametrize(
    "left", [f"data-{GENERATION}-0-0.safetensors", f"index-{GENERATION}.safetensors", "__0_0.distcp"]
)
def test_what_a_save_has_left_behind_is_not_a_checkpoint(tmp_path: Path, left: str) -> None:
    save_file(STATE, tmp_path / left)

    with pytest.raises(UncommittedCheckpointError, match="cut off") as caught:
        open_source(tmp_path)

    assert isinstance(caught.value, CheckpointNotFoundError)


def test_leftovers_beside_a_model_do_not_hide_it(tmp_path: Path) -> None:
    stock.save(STATE, checkpoint_id=tmp_path, **ALONE)
    save_file(STATE, tmp_path / f"data-{GENERATION}-0-0.safetensors")

    assert open_source(tmp_path).format == "dcp"


def test_leftovers_beside_a_single_model_file_are_no_part_of_it(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    save_file({"w[0:1]": torch.ones(1), "w": torch.ones(3)}, tmp_path / f"data-{GENERATION}-0-0.safetensors")
    source = open_source(tmp_path)

    assert (source.format, dict(source.tree)) == ("safetensors", {"w": source.tensors["w"]})
    assert source.tensors["w"].shape == (2,)


def test_a_record_makes_it_a_checkpoint_of_ours_whatever_else_is_there(tmp_path: Path) -> None:
    stock.save(STATE, checkpoint_id=tmp_path, **ALONE)
    save_file(STATE, tmp_path / "model.safetensors")
    (tmp_path / "holdfast.json").write_text("{}")

    for place in (tmp_path, tmp_path / "holdfast.json"):
        with pytest.raises(DamagedCheckpointError, match=r"holdfast\.json"):
            open_source(place)


def test_places_that_are_no_paths() -> None:
    with pytest.raises(CheckpointNotFoundError, match="memory://nothing"):
        open_source("memory://nothing")

    store = store_at("memory://sources")
    store.put(f"data-{GENERATION}-0-0.safetensors", b"")
    with pytest.raises(UncommittedCheckpointError, match="cut off"):
        open_source(store)

    store.put("model.safetensors", b"")
    with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors is cut off"):
        open_source("memory://sources")

    store.put("holdfast.json", b"{}")
    with pytest.raises(DamagedCheckpointError, match=r"holdfast\.json"):
        open_source("memory://sources")


def test_a_data_file_of_ours_can_be_opened_by_itself(tmp_path: Path) -> None:
    file = tmp_path / f"data-{GENERATION}-0-0.safetensors"
    save_file(STATE, file)

    assert list(open_source(file).tensors) == ["w"]


def test_the_index_of_a_dcp_checkpoint_stands_for_its_folder(tmp_path: Path) -> None:
    stock.save(STATE, checkpoint_id=tmp_path, **ALONE)

    assert open_source(tmp_path / ".metadata").location == str(tmp_path)


def test_a_folder_of_other_things_says_what_is_there(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"notes{number}.txt").write_text("hello")

    with pytest.raises(NotACheckpointError, match=r"notes0\.txt.*and 2 more") as caught:
        open_source(tmp_path)
    assert len(caught.value.found) == 7


def test_checkpoints_one_level_down_are_pointed_at(tmp_path: Path) -> None:
    stock.save(STATE, checkpoint_id=tmp_path / "step-10", **ALONE)

    with pytest.raises(NotACheckpointError, match="checkpoints inside of it: step-10"):
        open_source(tmp_path)


def test_a_file_of_torch_in_a_folder_is_pointed_at(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "pytorch_model.bin")

    with pytest.raises(NotACheckpointError, match=r"give its path: pytorch_model\.bin"):
        open_source(tmp_path)


@pytest.mark.parametrize("content", [b"", b"hello world", b"\x00" * 100])
def test_a_file_of_something_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)

    with pytest.raises(NotACheckpointError, match="is not a checkpoint"):
        open_source(tmp_path / "file")


@pytest.mark.parametrize("form", ["dcp", "safetensors", "torch"])
def test_a_source_is_read_by_many_threads_at_once(tmp_path: Path, form: str) -> None:
    state = {f"w{number}": torch.full((64, 1000), number).T for number in range(8)}
    if form == "dcp":
        stock.save(state, checkpoint_id=tmp_path / form, **ALONE)
    elif form == "safetensors":
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, tmp_path / form)
    else:
        torch.save(state, tmp_path / form)
    source = open_source(tmp_path / form)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda key: (key, whole(source, key)), [*state] * 4))

    assert source.format == form
    assert [key for key, content in found if content != bits(state[key])] == []


def test_torch_is_only_imported_for_formats_that_need_it() -> None:
    program = "import sys, holdfast._load.opening; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_safetensors_file_whose_length_looks_like_a_pickle_is_one(tmp_path: Path) -> None:
    """The header has 640 bytes, so that the file begins like those of torch.save before 1.6."""
    header = b'{"w":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}'.ljust(640)
    (tmp_path / "model").write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    assert (tmp_path / "model").read_bytes()[:2] == b"\x80\x02"
    assert holdfast.open(tmp_path / "model")["w"][:].tolist() == [97, 98, 99]
