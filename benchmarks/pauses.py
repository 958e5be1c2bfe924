"""How long a thread that only wants to run Python is kept waiting while a save runs in the background.

That is what a training loop feels of it: Python lets one thread run at a time, and a call that does not let go of its
lock stops all others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from benchmarks.contenders import OURS, OURS_DCP, STOCK
from benchmarks.quiet import quietly
from benchmarks.rounds import Allowance, Measure, Turn, measure
from benchmarks.scales import SCALES
from benchmarks.states import WORKLOADS, State, few_bytes, filled
from benchmarks.suite import Suite, remove

_BETWEEN_LOOKS = 0.0005

NOTHING = "probe: nothing in the background"

Save = Callable[[State, Path], Callable[[], object]]
"""Begins a save, and returns what waits for its end."""


def measure_pauses(suite: Suite) -> None:
    """The longest pause of each save, by turns."""
    folder, scale = suite.place("pauses"), suite.scale.name
    for workload in ("small tensors", "huge tensor"):
        suite.log(f"pauses, {workload}")
        suite.measures[f"pauses {workload}"] = _measure(folder, f"{workload}: {_TITLE}", workload, scale)
    suite.log("pauses, two processes")
    title = f"small tensors, saved by two processes: {_TITLE}"
    by_rank = suite.ranks(2).run(_measure, folder, title, "small tensors", scale, deadline=300.0)
    suite.measures["pauses small tensors by 2"] = by_rank[0]  # the coordinator, which has the most to do


_TITLE = "longest pause of other threads during a save"


def _measure(folder: Path, title: str, workload: str, scale_name: str) -> Measure:
    """In this process, or in all processes of a group."""
    scale = SCALES[scale_name]
    state = filled(WORKLOADS[workload](scale))

    def remove_it() -> None:
        _meet()
        if _rank() == 0:
            remove(folder)
        _meet()

    turns = [
        Turn(
            name,
            timed=_pause_of(save, state, folder),
            after=remove_it,
            most_rounds=scale.fewest_rounds if name == STOCK else None,
        )
        for name, save in CONTENDERS.items()
    ]
    with quietly():
        for save in CONTENDERS.values():  # the first calls, which set up what they need
            save(few_bytes(), folder)()
            remove_it()
        return measure(title, 0, turns, Allowance(0, scale.rounds, scale.rounds, scale.rounds))


def _pause_of(save: Save, state: State, folder: Path) -> Callable[[], float]:
    return lambda: longest_pause(save(state, folder), looking=_rank() == 0)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def longest_pause(wait: Callable[[], object], *, looking: bool = True) -> float:
    """Look at the clock again and again until ``wait`` returns in another thread; the longest time between two looks.

    Without the short sleeps Python's lock would go to and fro all the time, and a save take minutes.
    """
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
    while looking and not done.is_set():
        time.sleep(_BETWEEN_LOOKS)
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
    done.wait()
    if failed:
        raise failed[0]
    return longest


def _nothing(_: State, __: Path) -> Callable[[], object]:
    return lambda: time.sleep(0.3)


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
