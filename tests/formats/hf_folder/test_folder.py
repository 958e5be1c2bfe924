"""Which files of a Hugging Face folder count, and what is noticed about them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file

import holdfast.dcp as dcp
from holdfast._formats.hf_folder.commit import Folder, Switch, make_index
from holdfast._formats.hf_folder.folder import Contents, read_contents
from holdfast._stores.local_filesystem import FileSystem
from holdfast.dcp._consolidate_hf_safetensors import consolidate_safetensors_files
from holdfast.dcp.default_planner import DefaultLoadPlanner
from holdfast.dcp.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from holdfast.errors import CheckpointException, CheckpointNotFoundError, DamagedCheckpointError, UnsafePathError
from tests.torches import ALONE

INDEX = "model.safetensors.index.json"
RECORD = "model.safetensors.commit.json"
MODEL = "model-00001-of-00001.safetensors"


def contents(path: Path, threads: int = 1) -> Contents:
    return read_contents(Folder(FileSystem(), path), threads)


def keys(path: Path) -> dict[str, tuple[int, ...]]:
    return {key: stored.size for key, stored in contents(path).keys.items()}


def save(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(path, **options), no_dist=True)


def value(path: Path, key: str = "w") -> float:
    state = {key: torch.zeros(3)}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
    (found,) = set(state[key].tolist())
    return found


def part(path: Path, name: str, tensor: torch.Tensor, offsets: list[int], key: str = "w", **notes: Any) -> None:
    """A file with a part of a tensor, as another writer of the layout makes it."""
    path.mkdir(exist_ok=True)
    told = {"DCP_SHARDING_INFO": json.dumps({key: {"saved_offsets": offsets}})}
    save_file({key: tensor}, path / name, told | {name: json.dumps(note) for name, note in notes.items()})


def shard(number: int) -> str:
    return f"shard-{number:05d}-model-00001-of-00001.safetensors"


# --- which files count -----------------------------------------------------------------------------------------------


def test_what_the_index_does_not_list_does_not_count(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path)
    save_file({"old": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"other": torch.ones(1)}, tmp_path / "adapter.safetensors")

    assert keys(tmp_path) == {"w": (3,)}


def test_tensors_of_a_listed_file_that_the_index_does_not_list_do_not_count(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3), "left over": torch.ones(1)}, tmp_path / MODEL)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"w": MODEL}}))

    assert keys(tmp_path) == {"w": (3,)}


def test_without_an_index_all_files_count(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    save_file({"v": torch.ones(2)}, tmp_path / "b.safetensors")

    assert keys(tmp_path) == {"w": (3,), "v": (2,)}


@pytest.mark.parametrize("first", [{}, {"save_distributed": True}])
@pytest.mark.parametrize("second", [{}, {"save_distributed": True}])
def test_a_save_leaves_nothing_of_an_earlier_one_but_the_files_of_others(
    first: dict[str, Any], second: dict[str, Any], tmp_path: Path
) -> None:
    """Stock torch loads what an earlier save has left as if it were of this one."""
    mapping = {"w": 1, "old": 2}
    save({"w": torch.zeros(3), "old": torch.zeros(3)}, tmp_path, fqn_to_index_mapping=mapping, **first)
    theirs = {
        "config.json": b"{}",
        "tokenizer.model": b"x",
        "adapter.safetensors": b"not ours",
        "model.safetensors": b"",
    }
    for name, content in theirs.items():
        (tmp_path / name).write_bytes(content)

    save({"w": torch.ones(3)}, tmp_path, **second)

    names = {shard(1)} if second else {MODEL, INDEX}
    assert {file.name for file in tmp_path.iterdir()} == {*names, *theirs}
    for name, content in theirs.items():
        assert (tmp_path / name).read_bytes() == content
        (tmp_path / name).unlink()
    assert keys(tmp_path) == {"w": (3,)}
    assert value(tmp_path) == 1


def test_a_save_clears_what_stock_torch_has_left(tmp_path: Path) -> None:
    writer = stock.HuggingFaceStorageWriter(str(tmp_path), {"w": 1, "old": 2})
    stock.save({"w": torch.zeros(3), "old": torch.zeros(3)}, storage_writer=writer, **ALONE)

    save({"w": torch.ones(3)}, tmp_path)

    assert keys(tmp_path) == {"w": (3,)}
    found = stock.HuggingFaceStorageReader(str(tmp_path)).read_metadata()
    assert found.state_dict_metadata.keys() == {"w"}


# --- files of different saves ----------------------------------------------------------------------------------------


def test_a_listed_file_of_another_save_is_refused(tmp_path: Path) -> None:
    mapping = {"w": 1, "v": 2}
    for number in (1, 2):
        state = {"w": torch.full((3,), float(number)), "v": torch.ones(2)}
        save(state, tmp_path / str(number), fqn_to_index_mapping=mapping)
    shutil.copy(tmp_path / "1" / "model-00001-of-00002.safetensors", tmp_path / "2")

    with pytest.raises(DamagedCheckpointError, match=r"different saves: model-00001-of-00002.safetensors"):
        contents(tmp_path / "2")


def test_parts_of_different_saves_are_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        save(
            {"w": torch.full((3,), float(number)), f"only {number}": torch.ones(1)},
            tmp_path / str(number),
            save_distributed=True,
        )
    shutil.copy(tmp_path / "1" / shard(1), tmp_path / "2" / shard(2))

    with pytest.raises(DamagedCheckpointError, match="different saves"):
        contents(tmp_path / "2")


def test_parts_of_stock_torch_among_ours_are_refused(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path, save_distributed=True)
    part(tmp_path, shard(2), torch.ones(1), [0], key="v")

    with pytest.raises(DamagedCheckpointError, match=f"different saves: {shard(2)}"):
        contents(tmp_path)


def test_parts_of_another_save_beside_an_index_are_refused(tmp_path: Path) -> None:
    """Stock torch saves parts beside our index and leaves it there: nobody could tell which of the two is meant."""
    save({"w": torch.ones(3)}, tmp_path)
    writer = stock.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    stock.save({"w": torch.zeros(3)}, storage_writer=writer, **ALONE)

    with pytest.raises(DamagedCheckpointError, match=f"different saves: {shard(1)}"):
        contents(tmp_path)


def test_a_model_that_stock_torch_saved_over_ours_is_loaded(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path)
    writer = stock.HuggingFaceStorageWriter(str(tmp_path))
    stock.save({"w": torch.full((3,), 2.0)}, storage_writer=writer, **ALONE)

    assert value(tmp_path) == 2


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("gone", [False, True])
def test_a_file_that_is_replaced_while_a_load_is_going_on_is_noticed(gone: bool, threads: int, tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path)

    class Slow(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            if gone:
                (tmp_path / MODEL).unlink()
            else:
                save({"w": torch.full((3,), 2.0)}, tmp_path)
            return plan

    state = {"w": torch.zeros(3)}
    reader = HuggingFaceStorageReader(tmp_path, threads)
    with pytest.raises(CheckpointException, match="a save has replaced it meanwhile"):
        dcp.load(state, storage_reader=reader, planner=Slow(), no_dist=True)
    assert state["w"].tolist() == [0, 0, 0]


# --- parts that do not tile their tensors ----------------------------------------------------------------------------


def test_parts_tile_the_tensor(tmp_path: Path) -> None:
    part(tmp_path, shard(1), torch.ones(2, 3), [0, 0])
    part(tmp_path, shard(2), torch.ones(1, 3), [2, 0])

    assert keys(tmp_path) == {"w": (3, 3)}


def test_a_hole_between_parts_is_refused(tmp_path: Path) -> None:
    part(tmp_path, shard(1), torch.ones(1, 3), [0, 0])
    part(tmp_path, shard(2), torch.ones(1, 3), [2, 0])

    with pytest.raises(DamagedCheckpointError, match=r"'w' has chunks .*: 6 of its 9 elements") as refused:
        contents(tmp_path)
    assert refused.value.key == "w"


def test_a_missing_last_part_is_noticed(tmp_path: Path) -> None:
    """Nothing in the files of stock torch tells how large a tensor is."""
    part(tmp_path, shard(1), torch.ones(1, 3), [0, 0], HOLDFAST_SAVE={"id": "x", "sizes": {"w": [2, 3]}})

    with pytest.raises(
        DamagedCheckpointError,
        match=r"'w' has chunks .*: 3 of its 6 .* offsets \[1, 0\] of sizes \[1, 3\]",
    ):
        contents(tmp_path)


def test_overlapping_parts_are_refused_with_their_files(tmp_path: Path) -> None:
    part(tmp_path, shard(1), torch.ones(2, 3), [0, 0])
    part(tmp_path, shard(2), torch.ones(2, 3), [1, 0])

    with pytest.raises(DamagedCheckpointError, match=f"'w' .* chunks in {shard(1)} and in {shard(2)} overlap"):
        contents(tmp_path)


def test_the_same_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"w": torch.tensor(1.0)}, tmp_path / name)

    with pytest.raises(DamagedCheckpointError, match="overlap"):
        contents(tmp_path)


def test_a_part_outside_of_its_tensor_is_refused(tmp_path: Path) -> None:
    part(tmp_path, shard(1), torch.ones(2), [1], HOLDFAST_SAVE={"id": "x", "sizes": {"w": [2]}})

    with pytest.raises(DamagedCheckpointError, match=r"chunk in .* is outside of a tensor of shape \[2\]"):
        contents(tmp_path)


@pytest.mark.parametrize(("tensor", "offsets"), [(torch.ones(2).double(), [2]), (torch.ones(2, 1), [2, 0])])
def test_parts_of_different_kinds_are_refused(tensor: torch.Tensor, offsets: list[int], tmp_path: Path) -> None:
    part(tmp_path, shard(1), torch.ones(2), [0])
    part(tmp_path, shard(2), tensor, offsets)

    with pytest.raises(DamagedCheckpointError, match=r"'w' has (a part|parts)"):
        contents(tmp_path)


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    for number, key in enumerate("abc"):
        part(tmp_path, shard(number + 1), torch.ones(1), [number], key=key)

    with pytest.raises(DamagedCheckpointError, match=r"2 tensor\(s\).*'b'.*'c'") as refused:
        contents(tmp_path)
    assert refused.value.found.keys() == {"b", "c"}


def test_empty_parts_beside_others_are_passed_over(tmp_path: Path) -> None:
    part(tmp_path, shard(1), torch.ones(2, 3), [0, 0])
    part(tmp_path, shard(2), torch.ones(0, 3), [0, 0])
    part(tmp_path, shard(3), torch.ones(0, 3), [2, 0])

    found = contents(tmp_path).keys["w"]

    assert found.size == (2, 3)
    assert [chunk.sizes for chunk in found.chunks] == [(2, 3)]


@pytest.mark.parametrize("note", [
    {"DCP_SHARDING_INFO": "no json"},
    {"DCP_SHARDING_INFO": "[]"},
    {"DCP_SHARDING_INFO": '{"w": [0]}'},
    {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [-1]}}'},
    {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [0, 0]}}'},
    {"HOLDFAST_SAVE": '{"id": 3}'},
    {"HOLDFAST_SAVE": '{"id": "x", "sizes": {"w": ["1"]}}'},
    {"HOLDFAST_SAVE": '{"id": "x", "sizes": []}'},
])  # fmt: skip
def test_notes_that_make_no_sense_are_refused(note: dict[str, str], tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "file.safetensors", note)

    with pytest.raises(DamagedCheckpointError):
        contents(tmp_path)


# --- the index -------------------------------------------------------------------------------------------------------


NO_INDEX = ["", "[]", "{}", '{"a":' * 100_000, '{"weight_map": 3}', '{"weight_map": {"w": 3}}', "\xff"]


@pytest.mark.parametrize("text", NO_INDEX, ids=[text[:30] for text in NO_INDEX])
def test_an_index_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / MODEL)
    (tmp_path / INDEX).write_text(text)

    with pytest.raises(DamagedCheckpointError, match=r"weight_map|JSON") as refused:
        contents(tmp_path)
    assert refused.value.file == str(tmp_path / INDEX)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_file_that_the_index_lists_and_is_missing_is_named(threads: int, tmp_path: Path) -> None:
    save({"w": torch.ones(3), "v": torch.ones(3)}, tmp_path, fqn_to_index_mapping={"w": 1, "v": 2})
    (tmp_path / "model-00002-of-00002.safetensors").unlink()

    with pytest.raises(DamagedCheckpointError, match=r"model-00002-of-00002.safetensors is missing") as refused:
        contents(tmp_path, threads)
    assert refused.value.key == "v"


def test_a_tensor_that_the_index_lists_and_is_missing_is_named(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / MODEL)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": MODEL, "gone": MODEL}}))

    with pytest.raises(DamagedCheckpointError, match=f"'gone' is not in {MODEL}"):
        contents(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/secret.safetensors", "a/../../secret.safetensors", ""])
def test_an_index_that_points_outside_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))

    with pytest.raises(UnsafePathError):
        contents(tmp_path)


def test_a_file_cut_off_is_named(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path)
    content = (tmp_path / MODEL).read_bytes()
    (tmp_path / MODEL).write_bytes(content[:-1])

    with pytest.raises(DamagedCheckpointError, match=f"{MODEL}: 'w' is cut off"):
        contents(tmp_path)


# --- nothing to load -------------------------------------------------------------------------------------------------


def test_what_is_there_instead_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        contents(tmp_path / "nowhere")
    with pytest.raises(CheckpointNotFoundError, match=r"no .safetensors files"):
        contents(tmp_path)
    dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointNotFoundError, match="FileSystemReader"):
        contents(tmp_path / "dcp")
    (tmp_path / "parts" / "sharded").mkdir(parents=True)
    with pytest.raises(CheckpointNotFoundError, match="folder 'sharded'"):
        contents(tmp_path / "parts")


# --- the record of a save that was killed when its files were getting their names ------------------------------------


def half_switched(path: Path, **options: Any) -> Path:
    """A folder with an old save, and a new one that is committed and whose first file has its name."""
    folder = Folder(FileSystem(), path)
    mapping = {"w": 1, "v": 2}
    save({"w": torch.zeros(3), "v": torch.zeros(3)}, path, fqn_to_index_mapping=mapping, **options)
    save({"w": torch.ones(3), "v": torch.ones(3)}, path / "new", fqn_to_index_mapping=mapping, **options)
    files, index = {}, None
    for file in sorted((path / "new").iterdir()):
        if file.name == INDEX:
            index = json.loads(file.read_text())
        else:
            files[file.name] = f"{file.name}.0badcafe.tmp"
            file.rename(path / files[file.name])
    save_id = contents_id(path / next(iter(files.values())))
    switch = Switch("0badcafe", save_id, files, index)
    folder.prepare(switch)
    folder.commit(switch)
    name, temporary = next(iter(files.items()))
    (path / temporary).rename(path / name)
    return path


def contents_id(file: Path) -> str:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()["HOLDFAST_SAVE"])["id"]


@pytest.mark.parametrize("options", [{}, {"save_distributed": True}])
def test_files_are_found_under_either_name(options: dict[str, Any], tmp_path: Path) -> None:
    path = half_switched(tmp_path, **options)

    assert value(path, "w") == value(path, "v") == 1
    save({"w": torch.full((3,), 2.0)}, path, **options)
    assert value(path) == 2
    assert not list(path.glob("*.tmp"))
    assert not (path / RECORD).exists()


def test_parts_under_either_name_are_consolidated(tmp_path: Path) -> None:
    path = half_switched(tmp_path, save_distributed=True)

    consolidate_safetensors_files(path, tmp_path / "whole")

    assert value(tmp_path / "whole", "w") == value(tmp_path / "whole", "v") == 1


def test_a_part_that_was_replaced_after_the_commit_is_refused(tmp_path: Path) -> None:
    path = half_switched(tmp_path, save_distributed=True)
    save_file({"w": torch.full((3,), 9.0)}, path / "shard-00001-model-00001-of-00002.safetensors")

    with pytest.raises(DamagedCheckpointError, match="different saves"):
        contents(path)


def test_a_file_that_was_replaced_after_the_commit_is_refused(tmp_path: Path) -> None:
    path = half_switched(tmp_path)
    save_file({"w": torch.full((3,), 9.0)}, path / "model-00001-of-00002.safetensors")

    with pytest.raises(DamagedCheckpointError, match=r"different saves.*folder of their own"):
        contents(path)


def record(name: str, temporary: str) -> str:
    return json.dumps({"generation": "0badcafe", "files": {name: temporary}})


NO_RECORD = [
    "no json",
    "[]",
    record("/etc/model-00001-of-00001.safetensors", "model-00001-of-00001.safetensors.0badcafe.tmp"),
    record("model-00001-of-00001.safetensors", "../model-00001-of-00001.safetensors.0badcafe.tmp"),
    record("model-00001-of-00001.safetensors", "/etc/passwd"),
    record("config.json", "model-00001-of-00001.safetensors.0badcafe.tmp"),
    '{"generation": "0badcafe", "files": {"model-00001-of-00001.safetensors": 3}}',
    '{"generation": "0badcafe", "files": {}, "index": {"weight_map": 3}}',
    '{"generation": "0badcafe", "files": []}',
    '{"generation": 3, "files": {}, "index": {"weight_map": {}}}',
    '{"generation": "0badcafe", "save_id": 3, "files": {}, "index": {"weight_map": {}}}',
    '{"generation": "0badcafe", "generation": "0badcafe", "files": {}, "index": {"weight_map": {}}}',
    '{"files":' * 100_000,
]


@pytest.mark.parametrize("content", NO_RECORD, ids=[content[:60] for content in NO_RECORD])
def test_a_record_that_makes_no_sense_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text(content)

    with pytest.raises(DamagedCheckpointError, match=RECORD):
        contents(tmp_path)


def test_a_folder_that_cannot_be_looked_into_is_not_called_empty(tmp_path: Path) -> None:
    class Forbidden(FileSystem):
        def ls(self, path: Any) -> list[str]:
            raise PermissionError(13, "Permission denied", str(path))

    save_file({"w": torch.ones(1)}, tmp_path / MODEL)

    with pytest.raises(PermissionError):
        read_contents(Folder(Forbidden(), tmp_path))


@pytest.mark.parametrize("name", ["", ".", "/a.safetensors", "../a.safetensors", "a/../../b.safetensors", "a\0b"])
def test_names_of_an_index_stay_in_its_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))

    with pytest.raises(UnsafePathError, match="Do not load"):
        contents(tmp_path)


def test_an_index_names_its_save_if_there_is_one() -> None:
    assert make_index({"b": "x", "a": "y"}, 3, None) == {
        "metadata": {"total_size": 3},
        "weight_map": {"a": "y", "b": "x"},
    }
    assert make_index({}, 0, "id")["metadata"] == {"total_size": 0, "holdfast_save_id": "id"}
