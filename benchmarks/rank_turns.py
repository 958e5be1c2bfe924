"""One turn of a contender that several processes take together: how long all of them took, and their processor time.

A turn lasts from when the first process leaves a barrier until the last one has finished. Its processor time is what
all threads of all processes used meanwhile, which says more where there are more processes than cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from benchmarks.rounds import Measure, one_line


class Taken(NamedTuple):
    """What one process notes of a turn."""

    began: float
    ended: float
    """On the clock that all processes share."""
    cpu: float
    """Seconds of user and system time, of all its threads."""


Answers = dict[str, list["Taken | str"]]
"""Of each contender, one for each round, or what went wrong."""


def timed(call: Callable[..., object], *arguments: Any) -> Taken | str:
    """Make the call together with all processes."""
    dist.barrier()
    began, used = time.monotonic(), time.process_time()
    try:
        call(*arguments)
    except Exception as error:
        return one_line(error)
    return Taken(began, time.monotonic(), time.process_time() - used)


def wall_time(title: str, nbytes: int, by_rank: Sequence[Answers]) -> Measure:
    """A round lasts until the slowest process is done."""
    return _combined(
        title, nbytes, by_rank, lambda turns: max(turn.ended for turn in turns) - min(turn.began for turn in turns)
    )


def cpu_time(title: str, by_rank: Sequence[Answers]) -> Measure:
    """That of all processes, added up."""
    return _combined(title, 0, by_rank, lambda turns: sum(turn.cpu for turn in turns))


def add_both(measures: dict[str, Measure], key: str, title: str, nbytes: int, by_rank: Sequence[Answers]) -> None:
    """Both measures, the processor time under the key with " CPU" at its end. More rounds may be added later."""
    for name, found in ((key, wall_time(title, nbytes, by_rank)), (f"{key} CPU", cpu_time(f"{title}, CPU", by_rank))):
        known = measures.setdefault(name, Measure(found.title, found.nbytes))
        for contender, samples in found.samples.items():
            known.samples.setdefault(contender, []).extend(samples)
        known.failed |= found.failed
        for contender in known.failed:
            known.samples[contender] = []


def _combined(title: str, nbytes: int, by_rank: Sequence[Answers], join: Callable[[Sequence[Taken]], float]) -> Measure:
    names = list(by_rank[0])
    result = Measure(title, nbytes, {name: [] for name in names})
    for name in names:
        rounds: Iterable[tuple[Taken | str, ...]] = zip(*(answers[name] for answers in by_rank), strict=True)
        for answers in rounds:
            reasons = [answer for answer in answers if isinstance(answer, str)]
            if reasons:
                result.failed[name] = f"failed: {reasons[0]}"
            else:
                result.samples[name].append(join([answer for answer in answers if isinstance(answer, Taken)]))
        if name in result.failed:
            result.samples[name].clear()
    return result
