"""How long a thread that only wants to run Python is kept waiting while a save runs in the background.

That is what a training loop feels of it: Python lets one thread run at a time, and a call that does not let go of its
lock stops all others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import states
from benchmarks.contenders import OURS, OURS_DCP, STOCK
from benchmarks.rounds import Measure, one_line
from benchmarks.scales import Scale
from benchmarks.states import State
from benchmarks.suite import Suite, remove

NOTHING = "probe: nothing in the background"

Save = Callable[[State, Path], Callable[[], object]]
"""Begins a save, and returns what waits for its end."""

WORKLOADS: dict[str, Callable[[Scale], State]] = {"small": states.small_tensors, "huge": states.huge_tensor}


def measure_pauses(suite: Suite) -> None:
    """The longest pause of each save, by turns."""
    for workload, make in WORKLOADS.items():
        suite.log(f"pauses, {make.__name__.replace('_', ' ')}")
        state = make(suite.scale)
        title = f"{make.__name__.replace('_', ' ')}: longest pause of other threads during a save"
        result = Measure(title, 0, {name: [] for name in CONTENDERS})
        for _ in range(suite.scale.fewest_rounds):
            for name, save in CONTENDERS.items():
                if name not in result.failed:
                    _take_turn(name, save, state, suite.place(f"pauses {name}"), result)
        suite.measures[f"pauses {workload}"] = result


def _take_turn(name: str, save: Save, state: State, folder: Path, result: Measure) -> None:
    try:
        result.samples[name].append(longest_pause(save(state, folder)))
    except Exception as error:
        result.failed[name] = f"failed: {one_line(error)}"
    finally:
        remove(folder)


def longest_pause(wait: Callable[[], object]) -> float:
    """Do nothing but look at the clock until ``wait`` returns in another thread; the longest time between two looks."""
    done = threading.Event()
    failed: list[BaseException] = []

    def wait_for_it() -> None:
        try:
            wait()
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    threading.Thread(target=wait_for_it).start()
    longest = 0.0
    last = time.perf_counter()
    while not done.is_set():
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
    if failed:
        raise failed[0]
    return longest


def _nothing(_: State, __: Path) -> Callable[[], object]:
    return lambda: time.sleep(1)


def _ours(state: State, folder: Path) -> Callable[[], object]:
    import holdfast

    return lambda: holdfast.save(state, folder)


def _ours_dcp(state: State, folder: Path) -> Callable[[], object]:
    import holdfast.dcp

    return holdfast.dcp.async_save(state, checkpoint_id=folder).result


def _stock(state: State, folder: Path) -> Callable[[], object]:
    import torch.distributed.checkpoint as dcp

    return dcp.async_save(state, checkpoint_id=folder).result


CONTENDERS: dict[str, Save] = {NOTHING: _nothing, OURS: _ours, OURS_DCP: _ours_dcp, STOCK: _stock}
