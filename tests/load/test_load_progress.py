"""What a load reads counts as progress: a rank that reads slowly is waited for, and one that stands still is named."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

import holdfast
import holdfast.dcp
from holdfast._ranks.private_group import private_group_of
from holdfast._stores.memory_store import MemoryStore
from holdfast._watching.calls import Call
from tests.many_ranks import run_forked

TIMEOUT = 3.0
TENSORS = 16


def state_of(value: float) -> dict[str, Any]:
    return {f"t{n}": torch.full((1 << 18,), value + n if value else 0.0) for n in range(TENSORS)}


# --- all formats ---


@pytest.mark.parametrize("form", ["native", "dcp", "safetensors", "torch"])
def test_what_is_read_is_counted(tmp_path, monkeypatch, form):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if form == "native":
            holdfast.save(state_of(1.0), tmp_path / "c")
        elif form == "dcp":
            holdfast.dcp.save(state_of(1.0), checkpoint_id=tmp_path / "c")
        elif form == "safetensors":
            safetensors.torch.save_file(state_of(1.0), tmp_path / "c")
        else:
            torch.save(state_of(1.0), tmp_path / "c")
    calls = []

    class Noted(Call):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            calls.append(self)

    monkeypatch.setattr("holdfast._load.load.Call", Noted)
    state = state_of(0.0)
    holdfast.load(state, tmp_path / "c")
    assert torch.equal(state["t3"], state_of(1.0)["t3"])
    (call,) = calls
    assert call.done_bytes >= TENSORS << 20


# --- ranks ---


class SlowStore(MemoryStore):
    """Objects in memory, so that reading them is no input of the process. Slices wait until they may be given out."""

    def __init__(self, folder: Path, may_go_on: Any) -> None:
        super().__init__("slow/checkpoint")
        self.location = "slow://checkpoint"
        self._may_go_on = may_go_on
        for file in folder.iterdir():
            self.put(file.name, file.read_bytes())

    @contextmanager
    def reader(self, name: str) -> Iterator[Any]:
        with super().reader(name) as reader:
            yield SlowReader(reader, self._may_go_on)


class SlowReader:
    def __init__(self, reader: Any, may_go_on: Any) -> None:
        self._reader = reader
        self._may_go_on = may_go_on
        self.size = reader.size

    def read_into(self, begin: int, buffer: Any) -> None:
        if memoryview(buffer).nbytes >= 1 << 19:
            self._may_go_on()
        self._reader.read_into(begin, buffer)


class Slices:
    """Lets a rank read a slice whenever the notes of the ranks were looked at, until that took longer than allowed."""

    def __init__(self, *, stops_after: int | None = None) -> None:
        self.began: float | None = None
        self.given = 0
        self._stops_after = stops_after
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            self.given += 1
            self.began = self.began or time.monotonic()
            if self.given == self._stops_after:
                threading.Event().wait()
            watch = private_group_of(None, "calls")._watch
            beat = watch._beat
            while time.monotonic() - self.began < 1.5 * TIMEOUT and watch._beat == beat:
                time.sleep(0.01)


def load_slowly(folder: Path, share_reads: Any) -> tuple[float, bool]:
    slices = Slices()
    store = SlowStore(folder, slices.wait if dist.get_rank() == 1 else lambda: None)
    state, expected = state_of(0.0), state_of(1.0)
    holdfast.load(state, store, share_reads=share_reads, timeout=TIMEOUT)
    took = time.monotonic() - (slices.began or 0.0)
    return took, all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.mark.ranks
@pytest.mark.parametrize("share_reads", ["off", "job"])
def test_a_rank_that_reads_slowly_is_waited_for(tmp_path, share_reads):
    holdfast.save(state_of(1.0), tmp_path / "c")
    found = run_forked(3, load_slowly, tmp_path / "c", share_reads)
    assert found[1][0] > TIMEOUT  # since it was given the first slice
    assert all(is_right for _, is_right in found)


def load_and_stop(folder: Path, share_reads: Any) -> str:
    slices = Slices(stops_after=2)
    store = SlowStore(folder, slices.wait if dist.get_rank() == 1 else lambda: None)
    with pytest.raises(holdfast.errors.MissingRanksError) as info:
        holdfast.load(state_of(0.0), store, share_reads=share_reads, timeout=TIMEOUT)
    return str(info.value)


@pytest.mark.ranks
@pytest.mark.parametrize("share_reads", ["off", "job"])
def test_a_rank_whose_reading_stands_still_is_named(tmp_path, share_reads):
    holdfast.save(state_of(1.0), tmp_path / "c")
    found = run_forked(3, load_and_stop, tmp_path / "c", share_reads, may_die=[1])
    for rank in (0, 2):
        assert "rank 1 (it was last seen in holdfast.load" in found[rank]
        assert "phase read" in found[rank]
