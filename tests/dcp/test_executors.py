"""Background saves of states that a program has staged by itself, and states that ranks keep for each other."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import holdfast.dcp as dcp
from holdfast.dcp._async_executor import _AsyncCheckpointExecutor
from holdfast.dcp._async_process_executor import _ProcessBasedAsyncCheckpointExecutor
from holdfast.dcp._async_thread_executor import _ThreadBasedAsyncCheckpointExecutor, save_wrapper
from holdfast.dcp.staging import _ReplicationStager
from holdfast.errors import UnsupportedTensorError
from tests.rank_pool import RankPool
from tests.sharding import mesh_of_all_ranks

EXECUTORS = {"thread": _ThreadBasedAsyncCheckpointExecutor, "process": _ProcessBasedAsyncCheckpointExecutor}


@pytest.mark.parametrize("kind", EXECUTORS)
def test_a_staged_state_is_saved_in_the_background(kind: str, tmp_path: Path) -> None:
    executor = EXECUTORS[kind]()
    assert isinstance(executor, _AsyncCheckpointExecutor)

    saved = executor.execute_save({"w": torch.ones(3), "step": 5}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)

    assert sorted(saved.result().state_dict_metadata) == ["step", "w"]
    state = {"w": torch.zeros(3), "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    assert state["step"] == 5
    assert state["w"].tolist() == [1, 1, 1]


def test_a_state_may_still_be_being_staged(tmp_path: Path) -> None:
    staging: Future[dict[str, Any]] = Future()

    saved = _ThreadBasedAsyncCheckpointExecutor().execute_save(
        staging, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True
    )
    assert not saved.done()
    staging.set_result({"step": 5})

    assert sorted(saved.result().state_dict_metadata) == ["step"]
    assert sorted(save_wrapper(staging, checkpoint_id=tmp_path / "again").state_dict_metadata) == ["step"]


def test_a_save_without_a_place_is_refused_at_once() -> None:
    with pytest.raises(RuntimeError, match="`checkpoint_id` must be specified"):
        _ThreadBasedAsyncCheckpointExecutor().execute_save({"step": 5}, no_dist=True)


def save_on_ranks(path: Path) -> list[str]:
    rank = dist.get_rank()
    executors = [_ThreadBasedAsyncCheckpointExecutor(), _ProcessBasedAsyncCheckpointExecutor()]
    saves = [
        executor.execute_save({f"of {rank}": torch.full((2,), rank), "step": 5}, checkpoint_id=path / str(number))
        for number, executor in enumerate(executors)
    ]
    return [sorted(save.result().state_dict_metadata) for save in saves]


def test_all_ranks_save_together(ranks: RankPool, tmp_path: Path) -> None:
    for indexes in ranks(2).run(save_on_ranks, tmp_path):
        assert indexes == [["of 0", "of 1", "step"]] * 2


# Ranks that keep each other's states


def exchange(path: Path) -> Any:
    rank = dist.get_rank()
    stager = _ReplicationStager(dist.group.WORLD, timedelta(minutes=1), storage_dir=str(path / f"disk of {rank}"))
    staged = {}
    for step in (1, 2):
        state = {"w": torch.full((3,), float(rank + 10 * step)), "deep": [{"rank": rank}]}
        staged = stager.stage(state)
        assert state["deep"] == [{"rank": rank}]
    stager.synchronize_staging()
    stager.close()
    return {"w": staged["w"].tolist(), "deep": staged["deep"]}


def test_partners_stage_and_keep_each_others_state(ranks: RankPool, tmp_path: Path) -> None:
    staged = ranks(4).run(exchange, tmp_path)

    for rank, partner in enumerate([2, 3, 0, 1]):
        assert staged[rank] == {"w": [partner + 20.0] * 3, "deep": [{"rank": partner}]}
        (file,) = (tmp_path / f"disk of {rank}").iterdir()
        assert file.name == f"rank_{rank}_replica_partner_{partner}.pt"
        assert torch.load(file)["w"].tolist() == [partner + 20.0] * 3


def refused() -> list[str]:
    stager = _ReplicationStager(dist.group.WORLD)
    found = []
    mesh = mesh_of_all_ranks()
    for state in ({"w": 1}, {"deep": {"d": DTensor.from_local(torch.ones(2), mesh, [Shard(0)])}}):
        try:
            stager.stage(state)
        except (ValueError, UnsupportedTensorError) as error:
            found.append(str(error))
    return found


def test_what_partners_cannot_keep_is_refused(ranks: RankPool) -> None:
    for odd, *_ in ranks(3).run(refused):
        assert "3 rank(s) cannot keep copies of each other in pairs" in odd
    for (part,) in ranks(2).run(refused):
        assert "'deep.d' is a DTensor" in part


def test_a_state_is_left_alone_where_there_are_no_ranks(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}

    assert _ReplicationStager(None, storage_dir=str(tmp_path)).stage(state) is state  # type: ignore[arg-type]
