"""Events of ``holdfast.load``."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast._load import read_division
from holdfast._watching import calls as calls_module
from holdfast.errors import StateMismatchError
from holdfast.watching import Event, about, subscribe, trace_to


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "step-1")
    holdfast.save({"w": torch.ones(1000), "step": 1}, path)
    return path


def test_a_load_tells_its_phases_and_what_it_read(path: str) -> None:
    events: list[Event] = []
    with subscribe(events.append), about(step=1):
        report = holdfast.load({"w": torch.zeros(1000), "step": 0}, path)

    assert [event.name for event in events] == ["load.plan", "load.read", "load.apply", "load"]
    assert {(event.path, event.step, event.rank, event.world_size) for event in events} == {(path, 1, 0, 1)}
    _, read, _, whole = events
    assert read.nbytes == whole.nbytes == report.bytes_read >= 4000
    assert whole.detail == {"keys": 2}
    assert whole.slowest_rank == 0
    assert all(event.error is None for event in events)


def test_verifying_first_is_a_phase(path: str) -> None:
    events: list[Event] = []
    with subscribe(events.append):
        holdfast.load({"w": torch.zeros(1000)}, path, verify_first=True)

    assert [event.phase for event in events] == ["plan", "verify", "read", "apply", ""]


def test_a_load_that_fails_tells_the_error_that_it_raises(path: str) -> None:
    events: list[Event] = []
    with subscribe(events.append), pytest.raises(StateMismatchError) as raised:
        holdfast.load({"w": torch.zeros(3)}, path)

    assert [event.name for event in events] == ["load.plan", "load"]
    assert events[-1].error == f"StateMismatchError: {raised.value}"


def test_a_subscriber_that_fails_leaves_the_load_alone(path: str, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.zeros(1000)}
    with subscribe(lambda event: 1 / 0):
        holdfast.load(state, path)

    assert torch.equal(state["w"], torch.ones(1000))
    assert sum("a subscriber failed" in record.getMessage() for record in caplog.records) == 1


def load_with_one_slow_rank(path: str, trace: str) -> tuple[list[Event], int]:
    events: list[Event] = []
    read_regions, late = read_division.read_regions, 0.0

    def read_slowly(*args: Any, **kwargs: Any) -> Any:
        nonlocal late
        late += 1000.0 if dist.get_rank() == 1 else 0.0
        return read_regions(*args, **kwargs)

    clock = SimpleNamespace(time=time.time, perf_counter=lambda: time.perf_counter() + late)
    with pytest.MonkeyPatch.context() as patch, subscribe(events.append), trace_to(trace):
        patch.setattr(read_division, "read_regions", read_slowly)
        patch.setattr(calls_module, "time", clock)
        report = holdfast.load({"w": torch.zeros(1000)}, path)
    return events, report.slowest_rank


def test_every_rank_tells_its_own_part_and_all_know_the_slowest(ranks: Any, path: str, tmp_path: Path) -> None:
    results = ranks(3).run(load_with_one_slow_rank, path, str(tmp_path / "trace.json"))

    assert [slowest for _, slowest in results] == [1, 1, 1]
    for rank, (events, _) in enumerate(results):
        assert [event.name for event in events] == ["load.plan", "load.read", "load.apply", "load"]
        assert {(event.rank, event.world_size) for event in events} == {(rank, 3)}
        assert events[-1].slowest_rank == 1
        assert events[-1].nbytes == sum(own[1].nbytes for own, _ in results)
        trace = json.loads((tmp_path / f"trace.rank-{rank}.json").read_text())
        assert [drawn["name"] for drawn in trace["traceEvents"] if drawn["ph"] == "X"] == [
            event.name for event in events
        ]
    # Those that wait for the slow one do not count as slow.
    assert [events[1].seconds >= 1000.0 for events, _ in results] == [False, True, False]


def fail_on_rank_1(path: str) -> list[str | None]:
    events: list[Event] = []
    state = {"w": torch.zeros(1000 if dist.get_rank() == 0 else 3)}
    with subscribe(events.append), pytest.raises(StateMismatchError):
        holdfast.load(state, path)
    return [(events[-1].error or "").partition(":")[0], str(events[-1].rank), os.path.basename(events[-1].path)]


def test_a_failure_of_one_rank_is_reported_by_all(ranks: Any, path: str) -> None:
    assert ranks(2).run(fail_on_rank_1, path) == [["StateMismatchError", str(rank), "step-1"] for rank in range(2)]
