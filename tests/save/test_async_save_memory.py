"""The memory of background saves: kept for the next one, never touched while one is in flight, and bounded."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast._background import step_hooks
from holdfast._background.arenas import ArenaPool
from holdfast._background.copy_jobs import Copies, Copy
from holdfast._background.writer_process import WriterProcess
from holdfast._base.tuning import SMALLEST_BUDGET
from holdfast._save import captured_copies
from holdfast._save.async_save import _POOLS
from holdfast._save.captured_copies import CopiedTensor
from holdfast.errors import SaveInProgressError
from tests.save.overlapping import PATIENCE, GatedStore

SIZE = 300_000
"""Elements of a tensor that has more than a few pages."""


@pytest.fixture
def lent(monkeypatch) -> list[int]:
    """Where the memory was that snapshots were given."""
    addresses: list[int] = []
    for pool in _POOLS.values():
        pool._free.clear()
    lend = ArenaPool.lend

    def noting(pool: ArenaPool, size: int) -> Any:
        lease = lend(pool, size)
        addresses.append(lease.tensor(0, 1).data_ptr())
        return lease

    monkeypatch.setattr(ArenaPool, "lend", noting)
    return addresses


@pytest.fixture
def waits(monkeypatch) -> list[Any]:
    """Is told when a call begins to wait for an earlier save: ``waits.append`` may be called to open a gate then."""
    found: list[Any] = []
    wait = concurrent.futures.wait

    def noting(futures: Any) -> Any:
        found.append(len(futures))
        for gate in [each for each in found if isinstance(each, threading.Event)]:
            gate.set()
        return wait(futures, PATIENCE)

    monkeypatch.setattr(captured_copies.concurrent.futures, "wait", noting)
    return found


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_memory_is_used_again(tmp_path, lent: list[int], writer: Any) -> None:
    model = nn.Linear(500, 500)
    for step in range(4):
        holdfast.async_save({"model": model}, tmp_path / str(step), writer=writer).result()
    assert len(lent) == 4
    assert len(set(lent)) == 1


@contextmanager
def gated_writer_process(gate: threading.Event) -> Any:
    """Writer processes get nothing to do before the gate is open."""
    save = WriterProcess.save

    def late(*args: Any, **kwargs: Any) -> Any:
        assert gate.wait(PATIENCE)
        return save(*args, **kwargs)

    with mock.patch.object(WriterProcess, "save", late):
        yield


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_memory_of_a_save_in_flight_is_left_alone(tmp_path, lent: list[int], writer: Any) -> None:
    state = {"w": torch.full((SIZE,), 1.0), "array": np.full(SIZE, 1.0)}
    store = GatedStore(tmp_path / "first")
    with gated_writer_process(store.gate):
        place = store if writer == "thread" else tmp_path / "first"
        first = holdfast.async_save(state, place, writer=writer)
        state["w"].fill_(2)
        state["array"].fill(2)
        gc.collect()
        second = holdfast.async_save(state, tmp_path / "second", writer=writer, when_busy="copy")
        assert len(set(lent)) == 2
        assert not first.done()
        store.gate.set()
        first.result()
    second.result()
    state["w"].fill_(3)
    third = holdfast.async_save(state, tmp_path / "third", writer=writer)  # the memory of either is free by now
    third.result()
    assert lent[2] in lent[:2]
    for number, name in enumerate(("first", "second"), start=1):
        assert holdfast.open(tmp_path / name)["w"][:].eq(number).all()
        assert (holdfast.open(tmp_path / name).read()["array"] == number).all()


def test_a_busy_call_waits(tmp_path, lent: list[int], waits: list[Any]) -> None:
    state = {"w": torch.full((SIZE,), 1.0)}
    store = GatedStore(tmp_path / "first")
    first = holdfast.async_save(state, store)
    assert store.reached.wait(PATIENCE)
    assert not waits
    waits.append(store.gate)
    second = holdfast.async_save(state, tmp_path / "second", when_busy="wait")
    assert waits[1:] == [1]
    assert first.done()
    second.result()
    assert len(set(lent)) == 1


def test_a_third_copy_waits_for_the_first(tmp_path, lent: list[int], waits: list[Any]) -> None:
    state = {"w": torch.full((SIZE,), 1.0)}
    stores = [GatedStore(tmp_path / str(number)) for number in range(2)]
    pending = [holdfast.async_save(state, store, when_busy="copy") for store in stores]
    assert not waits
    waits.append(stores[0].gate)
    pending.append(holdfast.async_save(state, tmp_path / "2", when_busy="copy"))
    assert waits[1:] == [1]
    assert pending[0].done()
    assert not pending[1].done()
    stores[1].gate.set()
    for each in pending:
        each.result()
    assert len(set(lent)) == 2


def test_a_busy_call_raises_if_that_is_wanted(tmp_path) -> None:
    state = {"w": torch.ones(3)}
    store = GatedStore(tmp_path / "first")
    first = holdfast.async_save(state, store, when_busy="error")
    with pytest.raises(SaveInProgressError, match="when_busy='wait'") as caught:
        holdfast.async_save(state, tmp_path / "second", when_busy="error")
    assert caught.value.pending == 1
    store.gate.set()
    first.result()
    assert not (tmp_path / "second").exists()
    holdfast.async_save(state, tmp_path / "second", when_busy="error").result()


def test_unknown_wishes_are_refused(tmp_path) -> None:
    for wish in ({"when_busy": "never"}, {"writer": "pigeon"}):
        with pytest.raises(ValueError, match=f"{next(iter(wish))} must be '.*', not '{next(iter(wish.values()))}'"):
            holdfast.async_save({}, tmp_path / "x", **wish)
    with pytest.raises(TypeError, match=r"optimizers must be .* objects, not 3"):
        holdfast.async_save({}, tmp_path / "x", optimizers=[3])
    assert not (tmp_path / "x").exists()


# --- budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_a_budget_that_is_too_small_is_refused_with_what_it_takes(tmp_path, kind: str) -> None:
    value = torch.ones(16_000) if kind == "tensor" else np.ones(16_000, np.float32)
    needed = 64_000 + SMALLEST_BUDGET
    with pytest.raises(ValueError, match=f"needs 64,000 for a copy .* and {SMALLEST_BUDGET:,} to write"):
        holdfast.async_save({"w": value}, tmp_path / "x", memory_budget=needed - 1)
    assert holdfast.async_save({"w": value}, tmp_path / "x", memory_budget=needed).result().tensor_count == 1


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_a_second_copy_is_taken_only_within_the_budget(tmp_path, waits: list[Any], kind: str) -> None:
    state = {"w": torch.ones(SIZE) if kind == "tensor" else np.ones(SIZE, np.float32)}
    size = 4 * SIZE
    for number, (budget, must_wait) in enumerate(
        [(2 * size + SMALLEST_BUDGET, False), (2 * size + SMALLEST_BUDGET - 1, True), (None, False)]
    ):
        store = GatedStore(tmp_path / f"first-{number}")
        first = holdfast.async_save(state, store, memory_budget=budget)
        waits[:] = [store.gate]
        second = holdfast.async_save(state, tmp_path / f"{number}", when_busy="copy", memory_budget=budget)
        assert waits[1:] == [1] * must_wait, budget
        assert first.done() == must_wait
        store.gate.set()
        first.result()
        second.result()


# --- leaks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fast_path(tmp_path) -> Iterator[Path]:
    """A folder in memory where there is one: nothing is to be found out about disks."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder) / "x"


def _children() -> int:
    return sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_many_saves_leave_nothing_behind(fast_path, writer: Any) -> None:
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def save(times: int) -> list[Any]:
        pending = []
        for _ in range(times):
            pending.append(
                holdfast.async_save({"m": model}, fast_path, overwrite=True, optimizers=optimizer, writer=writer)
            )
            model(torch.randn(2, 1000)).sum().backward()
            optimizer.step()
        pending[-1].result()
        return pending

    def left() -> tuple[Any, ...]:
        gc.collect()
        made = [each for each in gc.get_objects() if type(each) in (Copies, Copy, CopiedTensor)]
        return threading.active_count(), len(os.listdir("/proc/self/fd")), len(made), _children()

    save(5)
    before, memory = left(), _resident_bytes()
    kept = save(30)
    assert left() == before
    assert _resident_bytes() - memory < 16e6  # four of the thirty copies
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert all(each.done() for each in kept)


def test_an_optimizer_that_is_gone_leaves_nothing_behind(tmp_path) -> None:
    model = nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    holdfast.async_save({"m": model}, tmp_path / "x", optimizers=optimizer).result()
    gone = weakref.ref(optimizer)
    assert optimizer in step_hooks._awaited
    del optimizer
    gc.collect()
    assert gone() is None
