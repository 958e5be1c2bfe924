"""Ranks that look at different checkpoints all get an error, instead of a mix or a deadlock."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock

import holdfast.dcp as dcp
from holdfast.dcp import CheckpointException
from holdfast.errors import CheckpointNotFoundError, RankDisagreementError, StateMismatchError
from tests.rank_pool import RankPool
from tests.safety.checkpoints import number_of, save, state
from tests.sharding import sharded


def load_each_its_own(folders: list[Path]) -> tuple[Any, dict[int, tuple[str, str]]]:
    """What is in the state afterwards, and the errors by rank."""
    loaded = state(0)
    failures: dict[int, tuple[str, str]] = {}
    try:
        dcp.load(loaded, checkpoint_id=folders[dist.get_rank()])
    except CheckpointException as error:
        failures = {rank: (type(cause).__name__, str(cause)) for rank, (cause, _) in error.failures.items()}
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, "still here")
    return number_of(loaded), failures


def test_ranks_that_see_different_saves_refuse_to_load(ranks: RankPool, tmp_path):
    folders = [tmp_path / "old", tmp_path / "new"]
    for number, folder in enumerate(folders, start=1):
        ranks(2).run(save, number, folder)
    one, other = ranks(2).run(load_each_its_own, folders)
    assert one == other
    found, failures = one
    assert found == 0
    assert {name for name, _ in failures.values()} == {RankDisagreementError.__name__}
    text = failures[0][1]
    assert text.startswith("the ranks look at different checkpoints: {0: 'an index of all ranks, save ")
    assert "1: 'an index of all ranks, save " in text


def test_ranks_that_see_copies_of_one_save_load_it(ranks: RankPool, tmp_path):
    ranks(2).run(save, 1, tmp_path / "original")
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    assert ranks(2).run(load_each_its_own, [tmp_path / "original", tmp_path / "copy"]) == [(1, {})] * 2


def save_rank_by_rank(folder: Path) -> None:
    save(1, folder, use_collectives=False)


def save_rank_by_rank_with_stock_torch(folder: Path) -> None:
    """Its parts have ids that tell nothing."""
    stock.save(state(1), checkpoint_id=folder, use_collectives=False)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("save_each", [save_rank_by_rank, save_rank_by_rank_with_stock_torch])
def test_ranks_that_see_different_flavours_refuse_to_load(ranks: RankPool, tmp_path, save_each, rank):
    ranks(2).run(save, 1, tmp_path / "together")
    ranks(2).run(save_each, tmp_path / "each")
    folders = [tmp_path / "together"] * 2
    folders[rank] = tmp_path / "each"
    one, other = ranks(2).run(load_each_its_own, folders)
    assert one == other
    found, failures = one
    assert found == 0
    assert {name for name, _ in failures.values()} == {RankDisagreementError.__name__}
    assert f"{rank}: 'indexes of single ranks" in failures[0][1]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("use_collectives", [True, False])
def test_a_rank_that_sees_no_checkpoint_fails_all(ranks: RankPool, tmp_path, use_collectives, rank):
    ranks(2).run(save, 1, tmp_path / "checkpoint", use_collectives=use_collectives)
    folders = [tmp_path / "checkpoint"] * 2
    folders[rank] = tmp_path / "not mounted"
    one, other = ranks(2).run(load_each_its_own, folders)
    assert one == other
    found, failures = one
    assert found == 0
    ((failed, (name, text)),) = failures.items()
    assert (failed, name) == (rank, CheckpointNotFoundError.__name__)
    assert "not mounted: the path does not exist" in text


def sharded_state(number: int) -> dict[str, Any]:
    return {"weight": sharded(torch.full((8,), float(number))), "step": number}


def save_sharded(number: int, folder: Path) -> None:
    dcp.save(sharded_state(number), checkpoint_id=folder, use_collectives=False)


def load_sharded(folder: Path) -> tuple[list[float], int, list[str]]:
    loaded = sharded_state(0)
    errors: list[str] = []
    try:
        dcp.load(loaded, checkpoint_id=folder)
    except CheckpointException as error:
        errors = sorted({type(cause).__name__ for cause, _ in error.failures.values()})
    return loaded["weight"].to_local().tolist(), loaded["step"], errors


def test_parts_of_different_saves_are_never_put_together(ranks: RankPool, tmp_path):
    """Somebody copied rank 1's files of another save into the folder."""
    ranks(2).run(save_sharded, 1, tmp_path / "one")
    ranks(2).run(save_sharded, 2, tmp_path / "two")
    assert ranks(2).run(load_sharded, tmp_path / "one") == [([1.0] * 4, 1, [])] * 2
    for path in (tmp_path / "two").glob("__1*"):
        shutil.copy(path, tmp_path / "one")
    outcomes = ranks(2).run(load_sharded, tmp_path / "one")
    assert outcomes == [([0.0] * 4, 0, [StateMismatchError.__name__])] * 2


def save_copies(number: int, folder: Path) -> None:
    dcp.save({"weight": torch.full((8,), float(number)), "step": number}, checkpoint_id=folder, use_collectives=False)


def load_copies(folder: Path) -> tuple[list[float], int]:
    loaded = {"weight": torch.zeros(8), "step": 0}
    dcp.load(loaded, checkpoint_id=folder)
    return loaded["weight"].unique().tolist(), loaded["step"]


@pytest.mark.filterwarnings("ignore:.*holds a checkpoint:UserWarning")
def test_parts_of_a_larger_number_of_ranks_are_not_mixed_in(ranks: RankPool, tmp_path):
    """A save of two ranks over one of three was killed when it had been committed, and nothing been removed yet."""
    ranks(3).run(save_copies, 1, tmp_path)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name.startswith("__2")}
    ranks(2).run(save_copies, 2, tmp_path)
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content)
    assert ranks(3).run(load_copies, tmp_path) == [([2.0], 2)] * 3
    assert ranks(2).run(load_copies, tmp_path) == [([2.0], 2)] * 2
