"""Ctrl-C and exit keep their meaning on the rank where they happen; the other ranks get an error that names it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import holdfast.dcp as dcp
from holdfast.dcp import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from tests.rank_pool import RankPool
from tests.safety.checkpoints import contents, found_in, save, state
from tests.safety.faults import FaultyFileSystem

pytestmark = pytest.mark.filterwarnings("ignore:.*holds a checkpoint:UserWarning")


def ctrl_c() -> None:
    """What the terminal does. The handler of the interpreter raises KeyboardInterrupt in the main thread."""
    os.kill(os.getpid(), signal.SIGINT)


def leave() -> None:
    raise SystemExit(3)


def outcome_of(call: Any) -> str:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        call()
        return "no error"
    except CheckpointException as error:
        return f"CheckpointException {[(rank, type(cause).__name__) for rank, (cause, _) in error.failures.items()]}"
    except BaseException as error:
        return repr(error)
    finally:
        signal.signal(signal.SIGINT, handler)


def interrupt_save(folder: Path, rank: int, method: str, interruption: Any, use_collectives: bool) -> str:
    planner = DefaultSavePlanner()
    if dist.get_rank() == rank:
        real = getattr(planner, method)

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            interruption()
            return real(*args, **kwargs)

        setattr(planner, method, interrupted)
    return outcome_of(
        lambda: dcp.save(state(2), checkpoint_id=folder, planner=planner, use_collectives=use_collectives)
    )


@pytest.mark.parametrize("use_collectives", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", ["create_local_plan", "finish_plan", "resolve_data"])
@pytest.mark.parametrize(
    ("interruption", "shown"), [(ctrl_c, "KeyboardInterrupt"), (leave, "SystemExit")], ids=["ctrl-c", "exit"]
)
def test_an_interrupted_save_stops_on_every_rank_and_leaves_the_old_checkpoint(
    ranks: RankPool, tmp_path, use_collectives, rank, method, interruption, shown
):
    ranks(2).run(save, 1, tmp_path, use_collectives=use_collectives)
    before = contents(tmp_path)
    outcomes = ranks(2).run(interrupt_save, tmp_path, rank, method, interruption, use_collectives)
    assert outcomes[rank] == ("KeyboardInterrupt()" if interruption is ctrl_c else "SystemExit(3)")
    assert outcomes[1 - rank] == f"CheckpointException [({rank}, '{shown}')]"
    assert contents(tmp_path) == before
    assert ranks(2).run(found_in, tmp_path) == [1, 1]


def interrupt_load(folder: Path, rank: int, method: str, interruption: Any) -> str:
    planner = DefaultLoadPlanner()
    if dist.get_rank() == rank:
        setattr(planner, method, lambda *args, **kwargs: interruption())
    return outcome_of(lambda: dcp.load(state(0), checkpoint_id=folder, planner=planner))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", ["create_local_plan", "load_bytes", "resolve_tensor"])
def test_an_interrupted_load_stops_on_every_rank(ranks: RankPool, tmp_path, rank, method):
    ranks(2).run(save, 1, tmp_path)
    outcomes = ranks(2).run(interrupt_load, tmp_path, rank, method, ctrl_c)
    assert outcomes[rank] == "KeyboardInterrupt()"
    assert outcomes[1 - rank] == f"CheckpointException [({rank}, 'KeyboardInterrupt')]"


@pytest.mark.parametrize("thread_count", [1, 3])
def test_ctrl_c_in_a_single_process_removes_what_was_written_so_far(tmp_path, thread_count):
    save(1, tmp_path)
    before = contents(tmp_path)
    opened: list[str] = []
    closed: list[str] = []
    once = threading.Lock()  # taken for good by the first thread that comes by: a second Ctrl-C would end the test run

    def hook(operation: str, name: str) -> None:
        if operation == "open" and name.endswith(".distcp"):
            opened.append(name)
        if operation == "close":
            closed.append(name)
            if len(closed) >= 2 and once.acquire(blocking=False):
                ctrl_c()

    writer = FileSystemWriter(tmp_path, thread_count=thread_count, single_file_per_rank=False)
    writer.fs = FaultyFileSystem(hook)
    assert outcome_of(lambda: dcp.save(state(2), storage_writer=writer)) == "KeyboardInterrupt()"
    assert len(opened) > 1
    assert contents(tmp_path) == before


def test_ctrl_c_after_the_commit_leaves_the_new_checkpoint(tmp_path):
    save(1, tmp_path)
    committed: list[str] = []

    def hook(operation: str, name: str) -> None:
        if committed:
            ctrl_c()
        if operation == "rename":
            committed.append(name)

    writer = FileSystemWriter(tmp_path)
    writer.fs = FaultyFileSystem(hook)
    assert outcome_of(lambda: dcp.save(state(2), storage_writer=writer)) == "KeyboardInterrupt()"
    assert found_in(tmp_path) == 2
