"""A save of a Hugging Face folder that is killed leaves the old model or the new one, intact.

The SIGKILL comes just before the n-th system call by which the save changes the disk, for every n. Readers that do not
know how we replace files never find an index whose files are of different saves.
"""

from __future__ import annotations

import json
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import holdfast.dcp as dcp
from holdfast.dcp._consolidate_hf_safetensors import consolidate_safetensors_files
from holdfast.dcp.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from holdfast.errors import CheckpointException
from tests.rank_pool import RankPool
from tests.safety.syscalls import require_tracing, watch

INDEX = "model.safetensors.index.json"
MAPPING = {"a": 1, "b": 2}
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "parts": {"save_distributed": True},
    "parts and whole": {"save_distributed": True, "enable_consolidation": True},
}


@pytest.fixture(autouse=True, scope="module")
def _tracing() -> None:
    require_tracing()


def save(number: int, path: Path, mode: str) -> None:
    state = {key: torch.full((5,), float(number)) for key in MAPPING}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = HuggingFaceStorageWriter(path, fqn_to_index_mapping=MAPPING, **MODES[mode])
        dcp.save(state, storage_writer=writer, no_dist=True)


def consolidate(number: int, path: Path, mode: str) -> None:
    save(number, path / "input", "parts")
    consolidate_safetensors_files(path / "input", path, MAPPING)


def found_in(path: Path) -> Any:
    """The number that was saved, as our reader sees it."""
    state = {key: torch.zeros(5) for key in MAPPING}
    try:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
    except CheckpointException as error:
        return str(error.failures[0][0])
    numbers = {number for tensor in state.values() for number in tensor.tolist()}
    return numbers.pop() if len(numbers) == 1 else numbers


def found_by_index(path: Path) -> set[float]:
    """The numbers that a reader finds which goes by the index alone; none if there is no index."""
    if not (path / INDEX).exists():
        return set()
    weights = json.loads((path / INDEX).read_text())["weight_map"]
    return {number for key, name in weights.items() for number in load_file(path / name)[key].tolist()}


def kill_everywhere(folder: Path, mode: str, step: str) -> list[tuple[str, Any, set[float], Any, list[str]]]:
    """For every change of the disk: what it was, what was found after a kill before it, and after another save."""
    act = consolidate if step == "consolidate" else save
    original = folder / "original"
    act(1, original, mode)
    (original / "config.json").write_text("not ours")
    moments = []
    for number in range(1000):
        place = folder / str(number)
        shutil.copytree(original, place)
        watched = watch([partial(act, 2, place, mode)], place, kill_at=number)
        found = (found_in(place), found_by_index(place))
        if watched.killed_before is None:
            assert found[0] == 2
            return moments
        act(3, place, mode)
        left = [
            str(path.relative_to(place)) for path in place.rglob("*") if path.name.endswith((".tmp", "commit.json"))
        ]
        assert (place / "config.json").read_text() == "not ours"
        moments.append((watched.killed_before, *found, found_in(place), left))
    raise AssertionError


@pytest.mark.parametrize("mode", MODES)
def test_a_kill_leaves_the_old_model_or_the_new_one(mode: str, ranks: RankPool, tmp_path: Path) -> None:
    (moments,) = ranks(1).run(kill_everywhere, tmp_path, mode, "save", process_group=False)

    check(moments)


def test_a_kill_while_consolidating_leaves_the_old_model_or_the_new_one(ranks: RankPool, tmp_path: Path) -> None:
    (moments,) = ranks(1).run(kill_everywhere, tmp_path, "whole", "consolidate", process_group=False)

    check(moments)


def check(moments: list[tuple[str, Any, set[float], Any, list[str]]]) -> None:
    found = [moment[1] for moment in moments]
    assert set(found) == {1.0, 2.0}, moments
    assert found == sorted(found), "once the new one is there, it stays"
    assert [moment for moment in moments if len(moment[2]) > 1] == []
    assert {moment[3] for moment in moments} == {3.0}
    assert [moment for moment in moments if moment[4]] == []


def record_a_save(path: Path, mode: str) -> list[Any]:
    save(1, path, mode)
    return watch([partial(save, 2, path, mode)], path).changes


@pytest.mark.parametrize("mode", MODES)
def test_everything_is_durable_before_it_gets_its_name(mode: str, ranks: RankPool, tmp_path: Path) -> None:
    (changes,) = ranks(1).run(record_a_save, tmp_path / "model", mode, process_group=False)

    renamed = [change for change in changes if change.call.startswith("rename")]
    commit = next(n for n, change in enumerate(changes) if str(change.new_path).endswith("commit.json"))
    for change in renamed:
        before = changes[: changes.index(change)]
        synced = [one for one in before if one.call == "fsync" and one.inode == change.inode]
        assert synced, f"{change} before its content was synced"
        assert synced[-1].content, f"{change} was synced empty"
    first_name = next(n for n, change in enumerate(changes) if change in renamed and n > commit)
    between = changes[commit + 1 : first_name]
    assert any(change.call == "fsync" and change.is_folder for change in between), "the commit is made durable first"
    names = [Path(change.new_path).name for change in renamed]
    assert names[0] == "model.safetensors.commit.json"
    assert mode == "parts" or names[-1] == INDEX, "the index comes last"
    assert all(change.call != "create" or change.path.endswith(".tmp") for change in changes), (
        "no file under its final name"
    )
