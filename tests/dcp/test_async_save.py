"""`async_save`: private, in order, never interleaved, never silent."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from concurrent import futures
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader

import holdfast.dcp as dcp
from holdfast import _settings as settings
from holdfast._background import writer_process
from holdfast._background.queues import Lane, SaveQueue
from holdfast._dcp.writer import _FileSystemWriter
from holdfast.dcp import CheckpointException, DefaultSavePlanner, FileSystemWriter
from holdfast.dcp.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from holdfast.dcp.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from holdfast.dcp.storage import StorageWriter
from holdfast.errors import WriterProcessError
from tests.rank_pool import RankPool
from tests.sharding import mesh_of_all_ranks

THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
BOTH = pytest.mark.parametrize("where", [THREAD, PROCESS], ids=["thread", "process"])
WAIT = 60


@dataclass
class Progress:
    """An object in the state that is no container."""

    seen: list[int] = field(default_factory=list)


def numbered(number: int) -> dict[str, Any]:
    """A state in which everything says the same number."""
    state: dict[str, Any] = {
        "weight": torch.full((6, 4), float(number)),
        "step": torch.tensor(number),
        "history": [number],
        "nested": {"deep": {"list": [{"n": number}], "tensor": torch.full((2,), float(number))}},
        "pair": (number, torch.full((3,), float(number))),
    }
    if dist.is_initialized():
        mesh = mesh_of_all_ranks()
        state["sharded"] = distribute_tensor(torch.full((7, 2), float(number)), mesh, [Shard(0)])
        state["counter"] = distribute_tensor(torch.tensor(float(number)), mesh, [Replicate()])
    return state


def spoil(value: Any) -> None:
    """Change everything in place."""
    if isinstance(value, DTensor):
        value.to_local().fill_(-99)
    elif isinstance(value, torch.Tensor):
        value.fill_(-99)
    elif isinstance(value, dict):
        for item in value.values():
            spoil(item)
        value["spoilt"] = True
    elif isinstance(value, (list, tuple)):
        for item in value:
            spoil(item)
        if isinstance(value, list):
            value.append("spoilt")


def number_in(folder: Path) -> int:
    """The number that everything in a checkpoint says."""
    state = numbered(0)
    dcp.load(state, checkpoint_id=folder)
    number = int(state["step"])
    expected = numbered(number)
    for key in ("history", "nested", "pair"):
        assert repr(state[key]) == repr(expected[key]), key
    for key in ("weight", "sharded", "counter"):
        if key in state:
            same = state[key] == expected[key]
            assert bool((same.to_local() if isinstance(same, DTensor) else same).all()), key
    return number


class Gated(FileSystemWriter):
    """Writes when a file appears, and says that it waits by making another."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        gate = Path(self.path).parent / f"{Path(self.path).name}.open"
        gate.with_suffix(f".waiting{self.rank}").write_text(str(os.getpid()))
        wait_for(gate)
        return super().write_data(plan, planner)


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + WAIT
    while not path.exists() or not (path.suffix == ".open" or path.read_text()):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.005)
    return path.read_text()


def open_gate(folder: Path) -> None:
    (folder.parent / f"{folder.name}.open").touch()


# Privacy


def save_and_spoil(folder: Path, where: AsyncCheckpointerType, stager: str) -> int:
    state = numbered(1)
    stagers = {"default": None, "writer": None, "async": DefaultStager(StagingOptions(False, False, True, False))}
    writer = Gated(folder) if stager == "writer" else None
    if writer is None:
        open_gate(folder)
    saved: Any = dcp.async_save(
        state,
        checkpoint_id=folder,
        storage_writer=writer,
        async_stager=stagers[stager],
        async_checkpointer_type=where,
    )
    if stager == "async":
        assert isinstance(saved, AsyncSaveResponse)
        assert saved.staging_completion.result(WAIT) is None
        saved = saved.upload_completion
    spoil(state)
    open_gate(folder)
    metadata = saved.result(WAIT)
    assert "step" in metadata.state_dict_metadata
    return number_in(folder)


@BOTH
@pytest.mark.parametrize("stager", ["default", "writer", "async"])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_changes_after_the_call_are_not_saved(ranks: RankPool, tmp_path, where, stager, world_size) -> None:
    found = ranks(world_size).run(save_and_spoil, tmp_path / "saved", where, stager)
    assert found == [1] * world_size


@BOTH
def test_it_works_without_a_process_group(tmp_path, where) -> None:
    state = numbered(3)
    saved = dcp.async_save(state, checkpoint_id=tmp_path, async_checkpointer_type=where)
    spoil(state)
    saved.result(WAIT)
    assert number_in(tmp_path) == 3


@BOTH
def test_stock_torch_loads_what_was_saved_in_the_background(tmp_path, where) -> None:
    dcp.async_save(numbered(4), checkpoint_id=tmp_path, async_checkpointer_type=where).result(WAIT)
    state = {"weight": torch.zeros(6, 4), "step": torch.tensor(0)}
    stock.load(state, checkpoint_id=tmp_path)
    assert state["step"] == 4
    assert state["weight"].tolist() == [[4.0] * 4] * 6


@BOTH
def test_the_index_is_that_of_a_save_in_the_foreground(tmp_path, where) -> None:
    state = {
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "channels": torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "view": torch.arange(10.0)[::3],
    }
    expected = dcp.save(state, checkpoint_id=tmp_path / "now")
    found = dcp.async_save(state, checkpoint_id=tmp_path / "later", async_checkpointer_type=where).result(WAIT)
    assert found.state_dict_metadata == expected.state_dict_metadata
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).glob("*.distcp")) for name in ("now", "later")]
    assert sizes[0] == sizes[1]


@BOTH
def test_a_tuple_of_tensors_takes_no_more_space_than_it_has_elements(tmp_path, where) -> None:
    state = {"large": torch.zeros(1_000_000), "pair": (torch.zeros(2), torch.zeros(3))}
    dcp.async_save(state, checkpoint_id=tmp_path, async_checkpointer_type=where).result(WAIT)
    assert sum(file.stat().st_size for file in tmp_path.glob("*.distcp")) < 4_010_000


# Order


def queue_of_saves(root: Path, where: AsyncCheckpointerType) -> list[int]:
    """Five saves at once, while the ranks go on talking on the group of the program."""
    saves = []
    for number in range(5):
        state = numbered(number)
        saves.append(dcp.async_save(state, checkpoint_id=root / f"{number % 3}", async_checkpointer_type=where))
        spoil(state)
        if dist.is_initialized():
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == dist.get_world_size()
    for saved in saves:
        saved.result(WAIT)
    return [number_in(root / name) for name in "012"]


@pytest.mark.parametrize(("where", "world_size"), [(THREAD, 1), (THREAD, 2), (THREAD, 4), (PROCESS, 1), (PROCESS, 2)])
def test_saves_in_flight_are_carried_out_in_order(ranks: RankPool, tmp_path, where, world_size) -> None:
    assert ranks(world_size).run(queue_of_saves, tmp_path, where) == [[3, 4, 2]] * world_size


def reuse_one_stager(root: Path, kind: str) -> list[int]:
    stager = DefaultStager(StagingOptions(False, True, False, False)) if kind == "default" else None
    first = Gated(root / "1", cache_staged_state_dict=True)
    writer = first if kind == "one writer" else Gated(root / "2", cache_staged_state_dict=True)
    saves = [
        dcp.async_save(numbered(1), storage_writer=first, checkpoint_id=root / "1", async_stager=stager),
        dcp.async_save(numbered(2), storage_writer=writer, checkpoint_id=root / "2", async_stager=stager),
    ]
    wait_for(root / f"1.waiting{dist.get_rank()}")
    open_gate(root / "1")
    open_gate(root / "2")
    for saved in saves:
        saved.result(WAIT)
    return [number_in(root / "1"), number_in(root / "2")]


@pytest.mark.parametrize("kind", ["default", "one writer"])
def test_a_stager_does_not_overwrite_what_a_running_save_reads(ranks: RankPool, tmp_path, kind) -> None:
    assert ranks(2).run(reuse_one_stager, tmp_path, kind) == [[1, 2]] * 2


def two_groups_in_different_order(root: Path) -> list[int]:
    """Ranks that call for two groups in different order must not wait for each other."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    order = [0, 1] if dist.get_rank() == 0 else [1, 0]
    saves = {}
    for index in order:
        state = {"n": torch.tensor(index)}
        saves[index] = dcp.async_save(state, checkpoint_id=root / f"{index}", process_group=groups[index])
    for saved in saves.values():
        saved.result(WAIT)
    found = []
    for index in (0, 1):
        state = {"n": torch.tensor(-1)}
        dcp.load(state, checkpoint_id=root / f"{index}")
        found.append(int(state["n"]))
    return found


def test_groups_do_not_wait_for_each_other(ranks: RankPool, tmp_path) -> None:
    assert ranks(2).run(two_groups_in_different_order, tmp_path) == [[0, 1]] * 2


def save_in_a_subgroup(root: Path, where: AsyncCheckpointerType) -> int | None:
    group = dist.new_group([1, 2])
    if dist.get_rank() not in (1, 2):
        with pytest.raises(RuntimeError, match="not part of the process group"):
            dcp.async_save({"n": torch.tensor(1)}, checkpoint_id=root, process_group=group)
        return None
    rank = dist.get_rank(group)
    where_it_is = ShardMetadata(shard_offsets=[2 * rank], shard_sizes=[2], placement=f"rank:{dist.get_rank()}/cpu")
    part = LocalShard(torch.arange(2) + 2 * rank, where_it_is)
    state = {"n": init_from_local_shards([part], 4, process_group=group)}
    dcp.async_save(state, checkpoint_id=root, process_group=group, async_checkpointer_type=where).result(WAIT)
    loaded = {"n": torch.zeros(4, dtype=torch.int64)}
    dcp.load(loaded, checkpoint_id=root, no_dist=True)
    return loaded["n"].tolist()


@BOTH
def test_a_subgroup_can_save(ranks: RankPool, tmp_path, where) -> None:
    assert ranks(3).run(save_in_a_subgroup, tmp_path, where) == [None, [0, 1, 2, 3], [0, 1, 2, 3]]


def save_each_for_itself(root: Path, where: AsyncCheckpointerType) -> tuple[int, int]:
    rank = dist.get_rank()
    alone = dcp.async_save(
        {"n": torch.tensor(rank)}, checkpoint_id=root / f"alone{rank}", no_dist=True, async_checkpointer_type=where
    )
    apart = dcp.async_save(
        {f"n{rank}": torch.tensor(rank)},
        checkpoint_id=root / "apart",
        use_collectives=False,
        async_checkpointer_type=where,
    )
    alone.result(WAIT)
    apart.result(WAIT)
    state, part = {"n": torch.tensor(-1)}, {f"n{rank}": torch.tensor(-1)}
    dcp.load(state, checkpoint_id=root / f"alone{rank}", no_dist=True)
    dcp.load(part, checkpoint_id=root / "apart")
    return int(state["n"]), int(part[f"n{rank}"])


@BOTH
def test_ranks_can_save_for_themselves(ranks: RankPool, tmp_path, where) -> None:
    assert ranks(2).run(save_each_for_itself, tmp_path, where) == [(0, 0), (1, 1)]
    assert (tmp_path / "apart" / "__1.metadata").exists()


@pytest.mark.parametrize("shared", ["path", "other spelling", "writer", "planner"])
def test_a_save_in_the_foreground_waits_for_those_that_use_the_same(tmp_path, monkeypatch, shared) -> None:
    folder, other = tmp_path / "saved", tmp_path / "other"
    writer, planner = Gated(folder), DefaultSavePlanner()
    saved = dcp.async_save(numbered(1), storage_writer=writer, planner=planner)
    wait_for(tmp_path / "saved.waiting0")
    waits = SaveQueue.wait_for

    def open_gates_and_wait(queue: SaveQueue, claim: Any) -> None:
        open_gate(folder)
        open_gate(other)
        waits(queue, claim)

    monkeypatch.setattr(SaveQueue, "wait_for", open_gates_and_wait)
    monkeypatch.chdir(tmp_path)
    uses: dict[str, Any] = {
        "path": {"checkpoint_id": folder},
        "other spelling": {"checkpoint_id": "./saved/"},
        "writer": {"checkpoint_id": other, "storage_writer": writer},
        "planner": {"checkpoint_id": other, "planner": planner},
    }
    dcp.save(numbered(2), **uses[shared])
    assert saved.done()
    if shared in ("writer", "planner"):
        assert number_in(folder) == 1
        folder = other
    assert number_in(folder) == 2


@BOTH
def test_a_relative_path_is_that_of_the_moment_of_the_call(tmp_path, monkeypatch, where) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        saves = [
            dcp.async_save(numbered(1), checkpoint_id="id", async_checkpointer_type=where),
            dcp.async_save(numbered(2), storage_writer=FileSystemWriter("writer"), async_checkpointer_type=where),
        ]
        monkeypatch.chdir(tmp_path)
        for saved in saves:
            saved.result(WAIT)
    for name in ("one", "two"):
        assert [number_in(tmp_path / name / kind) for kind in ("id", "writer")] == [1, 2]


def save_and_destroy_the_group(folder: Path) -> int:
    saved = dcp.async_save(numbered(5), storage_writer=Gated(folder))
    wait_for(folder.parent / f"{folder.name}.waiting{dist.get_rank()}")
    dist.destroy_process_group()
    open_gate(folder)
    saved.result(WAIT)
    state = {"step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=folder)
    return int(state["step"])


def test_a_running_save_outlives_the_process_group(ranks: RankPool, tmp_path) -> None:
    assert ranks(2).run(save_and_destroy_the_group, tmp_path / "saved") == [5, 5]


# Who stages


class ForeignStager:
    """Derived from nothing of ours."""

    _synchronize_after_execute = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: Any) -> Any:
        self.calls.append("stage")
        return {"staged by": "a stranger", **state_dict}

    def synchronize_staging(self) -> None:
        self.calls.append("synchronize")

    def close(self) -> None:
        self.calls.append("close")


@BOTH
def test_a_foreign_stager_goes_before_the_writer(tmp_path, where) -> None:
    stager = ForeignStager()
    saved = dcp.async_save(
        {"n": torch.tensor(1)},
        storage_writer=FileSystemWriter(tmp_path),
        async_stager=stager,
        async_checkpointer_type=where,
    )
    assert set(saved.result(WAIT).state_dict_metadata) == {"staged by", "n"}
    assert stager.calls == ["stage", "synchronize"]


def test_a_foreign_stager_that_need_not_be_synchronized_is_not(tmp_path) -> None:
    stager = ForeignStager()
    stager._synchronize_after_execute = False
    dcp.async_save({"n": 1}, checkpoint_id=tmp_path, async_stager=stager).result(WAIT)
    assert stager.calls == ["stage"]


def test_a_stager_of_stock_torch_is_a_foreign_stager(tmp_path) -> None:
    state = {"n": torch.tensor(1)}
    stager = stock.staging.BlockingAsyncStager()
    if stager.stage(state)["n"].data_ptr() == state["n"].data_ptr():
        pytest.skip(f"torch {torch.__version__}: stock copies nothing that is on the CPU already")
    saved = dcp.async_save(state, checkpoint_id=tmp_path, async_stager=stager)
    state["n"].fill_(2)
    saved.result(WAIT)
    dcp.load(state, checkpoint_id=tmp_path)
    assert state["n"] == 1


def test_the_writer_stages_if_it_can(tmp_path) -> None:
    class Watched(FileSystemWriter):
        def stage(self, state_dict: Any) -> Any:
            return {**super().stage(state_dict), "staged by": "the writer"}

    metadata = dcp.async_save({"n": 1}, storage_writer=Watched(tmp_path)).result(WAIT)
    assert "staged by" in metadata.state_dict_metadata


@BOTH
def test_for_a_writer_that_cannot_a_default_stager_does(tmp_path, where) -> None:
    state = numbered(6)
    writer: StorageWriter = _FileSystemWriter(tmp_path)
    saved = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=where)
    spoil(state)
    saved.result(WAIT)
    assert number_in(tmp_path) == 6


def test_objects_give_their_state_before_the_call_returns(tmp_path) -> None:
    model = torch.nn.Linear(2, 2)
    saved = dcp.async_save({"model": model}, checkpoint_id=tmp_path)
    expected = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    saved.result(WAIT)
    dcp.load({"model": model}, checkpoint_id=tmp_path)
    assert torch.equal(model.weight, expected)


class Renaming(DefaultSavePlanner):
    """A planner of one's own."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        renamed = {f"renamed.{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


@BOTH
def test_a_given_planner_is_used(tmp_path, where) -> None:
    saved = dcp.async_save({"n": 1}, checkpoint_id=tmp_path, planner=Renaming(), async_checkpointer_type=where)
    assert set(saved.result(WAIT).state_dict_metadata) == {"renamed.n"}


def save_what_differs(root: Path, where: AsyncCheckpointerType) -> str:
    with settings.override(replica_mismatch="error"):
        saved = dcp.async_save({"n": dist.get_rank()}, checkpoint_id=root, async_checkpointer_type=where)
    return str(saved.exception(WAIT))


@BOTH
def test_settings_of_the_caller_hold_in_the_background(ranks: RankPool, tmp_path, where) -> None:
    assert all("ReplicaMismatchError" in error for error in ranks(2).run(save_what_differs, tmp_path, where))


@BOTH
def test_objects_are_copied_too(tmp_path, where) -> None:
    state: dict[str, Any] = {"p": Progress([1])}
    saved = dcp.async_save(state, checkpoint_id=tmp_path, async_checkpointer_type=where)
    state["p"].seen.append(2)
    saved.result(WAIT)
    with settings.override(allow_pickle=True):
        dcp.load(state, checkpoint_id=tmp_path)
    assert state["p"].seen == [1]


# Failures


class Failing(FileSystemWriter):
    """Fails on one rank."""

    def __init__(self, path: Any, rank: int) -> None:
        super().__init__(path)
        self.fails_on = rank

    def write_data(self, plan: Any, planner: Any) -> Any:
        if self.rank == self.fails_on:
            raise OSError("the disk is gone")
        return super().write_data(plan, planner)


def save_with_failure(root: Path, where: AsyncCheckpointerType) -> tuple[list[int], int]:
    failed = dcp.async_save(numbered(1), storage_writer=Failing(root / "1", 1), async_checkpointer_type=where)
    good = dcp.async_save(numbered(2), checkpoint_id=root / "2", async_checkpointer_type=where)
    with pytest.raises(CheckpointException, match="the disk is gone") as caught:
        failed.result(WAIT)
    good.result(WAIT)
    return list(caught.value.failures), number_in(root / "2")


@BOTH
def test_a_failure_reaches_every_rank_and_the_next_save_works(ranks: RankPool, tmp_path, where) -> None:
    assert ranks(2).run(save_with_failure, tmp_path, where) == [([1], 2)] * 2
    assert list((tmp_path / "1").iterdir()) == []


class NotToday:
    def state_dict(self) -> dict[str, Any]:
        raise LookupError("no state today")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def fail_to_stage(root: Path, how: str) -> tuple[str, int]:
    state = numbered(1)
    path: Path | None = root / "1"
    if dist.get_rank() == 1:
        if how == "no path":
            path = None
        else:
            state["odd"] = NotToday() if how == "stateful" else threading.Lock()
    try:
        error = dcp.async_save(state, checkpoint_id=path).exception(WAIT)
    except Exception as raised:
        error = raised
    dcp.async_save(numbered(2), checkpoint_id=root / "2").result(WAIT)
    return f"{type(error).__name__}: {error}", number_in(root / "2")


@pytest.mark.parametrize(
    ("how", "error"), [("stateful", "LookupError"), ("lock", "SnapshotError"), ("no path", "RuntimeError")]
)
def test_a_rank_that_cannot_stage_does_not_keep_the_others_waiting(ranks: RankPool, tmp_path, how, error) -> None:
    (other, after), (own, after_own) = ranks(2).run(fail_to_stage, tmp_path, how)
    assert own.startswith(error)
    assert other.startswith("CheckpointException")
    assert error in other
    assert after == after_own == 2


class LaterStager(BlockingAsyncStager):
    """Stages in the background, and fails there on one rank."""

    def stage(self, state_dict: Any) -> Any:
        staged: Future[Any] = Future()
        if dist.get_rank() == 1:
            staged.set_exception(MemoryError("no room for a copy"))
        else:
            staged.set_result(super().stage(state_dict))
        return staged


def fail_to_stage_later(root: Path) -> tuple[str, str]:
    response = dcp.async_save(numbered(1), checkpoint_id=root, async_stager=LaterStager())
    staging, upload = (done.exception(WAIT) for done in (response.staging_completion, response.upload_completion))
    return type(staging).__name__, f"{type(upload).__name__}: {upload}"


def test_staging_that_fails_in_the_background_is_reported_by_both_futures(ranks: RankPool, tmp_path) -> None:
    (staged, others), (failed, own) = ranks(2).run(fail_to_stage_later, tmp_path)
    assert (staged, failed) == ("NoneType", "MemoryError")
    assert own.startswith("MemoryError")
    assert others.startswith("CheckpointException")
    assert "no room for a copy" in others


def test_a_missing_path_is_said_at_once() -> None:
    with pytest.raises(RuntimeError, match="`checkpoint_id` must be specified"):
        dcp.async_save({"n": 1})


def test_objects_of_stock_torch_are_refused_at_once(tmp_path) -> None:
    with pytest.raises(TypeError, match=r"holdfast\.dcp"):
        dcp.async_save({"n": 1}, storage_writer=stock.FileSystemWriter(tmp_path))  # type: ignore[arg-type]


def test_a_failure_that_nobody_looked_at_is_reported_by_the_next_save(tmp_path) -> None:
    saved = dcp.async_save({"n": 1}, storage_writer=Failing(tmp_path / "1", 0))
    Lane.of(None, alone=True).queue.wait_until_idle()
    with pytest.warns(RuntimeWarning, match=r"background save to .*1 failed.*\n.*(\n.*)*the disk is gone"):
        dcp.async_save({"n": 1}, checkpoint_id=tmp_path / "2").result(WAIT)
    assert isinstance(saved.exception(), CheckpointException)


def test_a_failure_whose_future_was_thrown_away_is_logged(tmp_path, caplog) -> None:
    with caplog.at_level(logging.ERROR, logger="holdfast"):
        saved = dcp.async_save({"n": 1}, storage_writer=Failing(tmp_path, 0))
        done = saved.done
        while not done():
            time.sleep(0.001)
        del saved, done
        Lane.of(None, alone=True).queue.wait_until_idle()
        gc.collect()
    assert "the disk is gone" in caplog.text
    assert str(tmp_path) in caplog.text
    forget_what_was_not_looked_at()


def forget_what_was_not_looked_at() -> None:
    from holdfast._background import futures

    futures.forget_failures()


def test_a_failure_that_somebody_looked_at_is_reported_nowhere_else(tmp_path, caplog, recwarn) -> None:
    caplog.set_level(logging.ERROR, logger="holdfast")
    for look in ("exception", "result"):
        saved = dcp.async_save({"n": 1}, storage_writer=Failing(tmp_path / look, 0))
        try:
            getattr(saved, look)(WAIT)
        except CheckpointException:
            pass
        del saved
        gc.collect()
    dcp.async_save({"n": 1}, checkpoint_id=tmp_path / "good").result(WAIT)
    assert [record for record in caplog.records if record.name.startswith("holdfast")] == []
    assert [warning for warning in recwarn if "background save" in str(warning.message)] == []


class GatedFailing(Gated):
    def write_data(self, plan: Any, planner: Any) -> Any:
        super().write_data(plan, planner)
        raise OSError("the disk is gone")


def test_looking_before_the_end_is_not_looking_at_the_failure(tmp_path) -> None:
    saved = dcp.async_save({"n": 1}, storage_writer=GatedFailing(tmp_path / "saved"))
    with pytest.raises(futures.TimeoutError):  # until Python 3.10, it is not the built-in one
        saved.result(0.01)
    assert not saved.cancel()
    open_gate(tmp_path / "saved")
    Lane.of(None, alone=True).queue.wait_until_idle()
    with pytest.warns(RuntimeWarning, match="the disk is gone"):
        dcp.async_save({"n": 1}, checkpoint_id=tmp_path / "2").result(WAIT)
    assert isinstance(saved.exception(), CheckpointException)


def fork_after_a_save(folder: Path) -> list[int]:
    """Children of all kinds, while a save is running and while none is."""
    found = []
    for number in range(2):
        saved = dcp.async_save(numbered(number), storage_writer=Gated(folder / f"{number}"))
        wait_for(folder / f"{number}.waiting{dist.get_rank()}")
        child = os.fork()
        if child == 0:
            dcp.async_save({"n": torch.tensor(1)}, checkpoint_id=folder / f"{os.getpid()}", no_dist=True).result(WAIT)
            os._exit(7)
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        loader = DataLoader(torch.arange(8), num_workers=1, multiprocessing_context="fork", timeout=WAIT)
        found.append(int(sum(loader)))
        open_gate(folder / f"{number}")
        saved.result(WAIT)
    return found


def test_a_program_with_background_saves_can_fork(ranks: RankPool, tmp_path) -> None:
    assert ranks(2).run(fork_after_a_save, tmp_path) == [[7, 28, 7, 28]] * 2


def test_a_staging_future_that_is_cancelled_ends_both(tmp_path) -> None:
    class Cancelling(BlockingAsyncStager):
        def stage(self, state_dict: Any) -> Any:
            staged: Future[Any] = Future()
            staged.cancel()
            staged.set_running_or_notify_cancel()
            return staged

    response = dcp.async_save({"n": 1}, checkpoint_id=tmp_path, async_stager=Cancelling())
    for ended in (response.staging_completion, response.upload_completion):
        with pytest.raises(CancelledError):
            ended.result(WAIT)


def test_a_kept_future_keeps_no_copy_of_the_state(tmp_path) -> None:
    before = {id(tensor) for tensor in live_tensors()}
    futures = [
        dcp.async_save({"n": torch.zeros(12345)}, checkpoint_id=tmp_path / "1"),
        dcp.async_save({"n": torch.zeros(12345)}, storage_writer=Failing(tmp_path / "2", 0)),
    ]
    for saved in futures:
        saved.exception(WAIT)
    Lane.of(None, alone=True).queue.wait_until_idle()
    assert [tensor for tensor in live_tensors() if id(tensor) not in before] == []


def live_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and thing.numel() == 12345]


def save_with_accelerator_only(folder: Path) -> str:
    group = dist.new_group(backend="cuda:fake")
    with pytest.raises(AssertionError) as caught:
        dcp.async_save({"n": 1}, checkpoint_id=folder, process_group=group)
    return str(caught.value)


def test_a_group_without_a_cpu_backend_is_refused(ranks: RankPool, tmp_path) -> None:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

    (message,) = ranks(1).run(save_with_fake_backend, tmp_path)
    assert "A CPU backend must be enabled for async save" in message
    assert "'cpu:gloo,cuda:nccl'" in message


def save_with_fake_backend(folder: Path) -> str:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

    return save_with_accelerator_only(folder)


# Writer processes


def writer_pid() -> int:
    """The process that wrote last, and waits for the next save."""
    pid = writer_process._idle[-1].pid
    assert pid is not None
    return pid


def test_what_cannot_be_pickled_fails_and_the_writer_process_stays(tmp_path) -> None:
    dcp.async_save({"n": 1}, checkpoint_id=tmp_path / "0", async_checkpointer_type=PROCESS).result(WAIT)
    pid = writer_pid()

    planner = DefaultSavePlanner()
    planner.secret = lambda: None  # type: ignore[attr-defined]
    failed = dcp.async_save({"n": 1}, checkpoint_id=tmp_path / "1", planner=planner, async_checkpointer_type=PROCESS)
    with pytest.raises(Exception, match="lambda"):
        failed.result(WAIT)
    dcp.async_save({"n": 1}, checkpoint_id=tmp_path / "2", async_checkpointer_type=PROCESS).result(WAIT)
    assert writer_pid() == pid


def kill_a_writer(root: Path, victim: int) -> tuple[str, str, int]:
    rank = dist.get_rank()
    first = dcp.async_save(numbered(1), checkpoint_id=root / "good", async_checkpointer_type=PROCESS)
    first.result(WAIT)
    saved = dcp.async_save(numbered(2), storage_writer=Gated(root / "bad"), async_checkpointer_type=PROCESS)
    pid = int(wait_for(root / f"bad.waiting{rank}"))
    if rank == victim:
        os.kill(pid, signal.SIGKILL)
    dist.barrier()
    open_gate(root / "bad")
    error = saved.exception(WAIT)
    dcp.async_save(numbered(3), checkpoint_id=root / "good", async_checkpointer_type=PROCESS).result(WAIT)
    assert (writer_pid() == pid) == (rank != victim)
    return type(error).__name__, str(error), number_in(root / "good")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_writer_process_is_reported_to_all_and_replaced(ranks: RankPool, tmp_path, victim) -> None:
    results = ranks(2).run(kill_a_writer, tmp_path, victim)
    assert [number for *_, number in results] == [3, 3]
    kind, message, _ = results[victim]
    assert kind == WriterProcessError.__name__
    assert "killed by signal 9" in message
    assert str(tmp_path / "bad") in message
    kind, message, _ = results[1 - victim]
    assert kind == "CheckpointException"
    assert f"rank {victim} gave up" in message
    assert not (tmp_path / "bad" / ".metadata").exists()


def test_a_writer_process_that_died_between_saves_is_replaced(tmp_path, caplog) -> None:
    dcp.async_save({"n": 1}, checkpoint_id=tmp_path / "1", async_checkpointer_type=PROCESS).result(WAIT)
    os.kill(writer_pid(), signal.SIGKILL)
    os.waitid(os.P_PID, writer_pid(), os.WEXITED | os.WNOWAIT)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        dcp.async_save({"n": 1}, checkpoint_id=tmp_path / "2", async_checkpointer_type=PROCESS).result(WAIT)
    assert "killed by signal 9; a new one is started" in caplog.text


def test_many_tensors_take_few_descriptors(tmp_path) -> None:
    state = {f"{number}": torch.full((3,), float(number)) for number in range(1000)}
    before = len(os.listdir("/proc/self/fd"))
    saved = dcp.async_save(state, storage_writer=Gated(tmp_path / "s"), async_checkpointer_type=PROCESS)
    pid = wait_for(tmp_path / "s.waiting0")
    assert len(os.listdir("/proc/self/fd")) <= before + 5
    assert len(os.listdir(f"/proc/{pid}/fd")) < 40
    open_gate(tmp_path / "s")
    saved.result(WAIT)
    loaded = {key: torch.zeros(3) for key in state}
    dcp.load(loaded, checkpoint_id=tmp_path / "s")
    assert all(torch.equal(loaded[key], state[key]) for key in state)
