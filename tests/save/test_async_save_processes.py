"""Background saves where a thread cannot be had, and in processes that were forked while one was under way."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
import holdfast.dcp as dcp
from holdfast._background.arenas import ArenaPool
from holdfast._background.copy_jobs import Copies, finish_copies
from holdfast.dcp.staging import DefaultStager, StagingOptions
from holdfast.errors import OtherProcessError
from tests.rank_pool import RankPool
from tests.save.overlapping import GatedStore, assert_same_content, held_back

PATIENCE = 60.0


@contextmanager
def no_threads() -> Iterator[None]:
    """No thread can be started, since the system has no memory for such a stack."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    return model, optimizer


# --- no thread -------------------------------------------------------------------------------------------------------


def save_without_threads(folder: Path) -> None:
    """On a rank of its own, which can be killed if it waits for ever."""
    torch.set_num_threads(1)
    model, optimizer = model_and_optimizer()
    state = {"model": model, "optimizer": optimizer}
    holdfast.save(state, folder / "now")
    with no_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        threading.Thread(target=int).start()
    with no_threads():
        pending = holdfast.async_save(state, folder / "later", optimizers=optimizer)
        optimizer.step()
        holdfast.load(state, folder / "now")
        pending.result(PATIENCE)
    holdfast.load(state, folder / "later")
    assert_same_content(folder / "later", folder / "now")


def test_a_background_save_without_a_thread_is_made_in_the_call_and_the_next_load_does_not_wait_for_ever(
    ranks: RankPool, tmp_path
) -> None:
    ranks(1).run(save_without_threads, tmp_path, process_group=False, deadline=120)


def test_what_is_waited_for_needs_no_second_thread() -> None:
    copies = Copies()
    tensors = [torch.full((1_000_000,), float(number)) for number in range(3)]
    made = [copies.add(str(number), tensor) for number, tensor in enumerate(tensors)]
    copies.begin(ArenaPool())
    with held_back() as held:
        copies.copy_later()
        with no_threads():
            finish_copies()
        assert held.waits == 1
    assert [copy.twin[0].item() for copy in made] == [0.0, 1.0, 2.0]


def test_a_stager_without_a_thread_copies_at_once_and_never_again() -> None:
    stager = DefaultStager(StagingOptions(False, False, True, False))
    weights = torch.zeros(1000)
    with no_threads():
        staged: Any = stager.stage({"weights": weights})
        assert staged.done()
    weights.fill_(1)
    after: Any = stager.stage({"weights": weights})
    assert after.result(PATIENCE)["weights"].sum() == 1000
    assert staged.result(PATIENCE)["weights"].sum() == 0
    stager.close()


# --- another process -------------------------------------------------------------------------------------------------


def in_a_child(act: Callable[[], Any]) -> str:
    """What an act in a forked process comes to: the error that it raises, or what it returns."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told = f"returned {act()!r}"
        except BaseException as error:
            told = (
                f"{type(error).__name__}: {error}" if isinstance(error, OtherProcessError) else traceback.format_exc()
            )
        os.write(writing, told.encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        told = stream.read().decode()
    os.waitpid(child, 0)
    return told


def ask_in_children(folder: Path) -> dict[str, str]:
    store = GatedStore(folder / "native")
    model, optimizer = model_and_optimizer()
    with held_back() as held:
        pending = holdfast.async_save({"m": model}, store, optimizers=optimizer)
        asked: dict[str, Callable[[], Any]] = {
            "result": pending.result,
            "result, for a second": lambda: pending.result(1),
            "exception": pending.exception,
            "committed": pending.committed.result,
            "exception of committed": pending.committed.exception,
            "staged": pending.staged.result,
            "done": pending.done,
            "progress": pending.progress,
            "repr": lambda: repr(pending),
        }
        found = {name: in_a_child(act) for name, act in asked.items()}
        held.let_go()
    store.gate.set()
    pending.result(PATIENCE)
    found["ended"] = in_a_child(lambda: pending.done() and pending.result().tensor_count)
    return found


def test_in_a_forked_process_a_save_of_its_parent_is_an_error_at_once_and_not_a_wait(ranks: RankPool, tmp_path) -> None:
    (found,) = ranks(1).run(ask_in_children, tmp_path, process_group=False, deadline=120)
    assert found.pop("ended") == "returned 2"
    assert "PendingSave to" in (shown := found.pop("repr"))
    assert "of process" in shown
    for name, told in found.items():
        assert told.startswith("OtherProcessError"), name
        assert "belongs to process" in told
        assert "wait for it in process" in told
    assert str(tmp_path / "native") in found["result"]


def ask_managers_in_children(folder: Path) -> list[str]:
    model, optimizer = model_and_optimizer()
    with (
        holdfast.CheckpointManager(folder / "run", background=holdfast.Background(overlap=True)) as manager,
        held_back() as held,
    ):
        manager.save(1, {"m": model, "o": optimizer})
        found = [in_a_child(manager.wait)]
        held.let_go()
    return found


def test_a_manager_in_a_forked_process_does_not_wait_for_saves_of_the_parent(ranks: RankPool, tmp_path) -> None:
    (found,) = ranks(1).run(ask_managers_in_children, tmp_path, process_group=False, deadline=120)
    assert found[0].startswith("OtherProcessError")


def stage_in_children(folder: Path) -> list[str]:
    stager = DefaultStager(StagingOptions(False, False, True, False))
    tensor = torch.ones(10)
    first: Any = stager.stage({"a": tensor})
    first.result(PATIENCE)

    def close_here() -> None:
        stager.synchronize_staging()
        stager.close()

    with held_back() as held:
        second: Any = stager.stage({"a": tensor})

        def stage_here() -> Any:
            held.let_go()  # what this process copies; the thread that has begun is the parent's
            staged: Any = stager.stage({"a": tensor})
            return isinstance(staged, Future) and staged.result(PATIENCE)["a"].sum().item()

        found = [in_a_child(second.result), in_a_child(stage_here), in_a_child(close_here)]
        held.let_go()
    assert second.result(PATIENCE)["a"].sum() == 10
    stager.close()
    return found


def test_a_stager_works_in_a_forked_process_and_waits_for_no_thread_of_the_parent(ranks: RankPool, tmp_path) -> None:
    (found,) = ranks(1).run(stage_in_children, tmp_path, process_group=False, deadline=120)
    assert found[0].startswith("OtherProcessError: the copy of a state")
    assert found[1:] == ["returned 10.0", "returned None"]


def ask_of_the_drop_in(folder: Path) -> list[str]:
    gate = threading.Event()

    class Gated(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            gate.wait(PATIENCE)
            return super().write_data(plan, planner)

    saved: Any = dcp.async_save({"n": torch.ones(3)}, storage_writer=Gated(folder / "dcp"))
    found = [in_a_child(saved.result)]
    gate.set()
    saved.result(PATIENCE)
    return found


def test_futures_of_the_drop_in_tell_the_same(ranks: RankPool, tmp_path) -> None:
    (found,) = ranks(1).run(ask_of_the_drop_in, tmp_path, process_group=False, deadline=120)
    assert found[0].startswith("OtherProcessError")
