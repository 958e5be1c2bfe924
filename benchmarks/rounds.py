"""Interleaved repetitions: in each round all contenders take their turn, in an order that moves on by one.

A slow moment of the disk, or of the machine, hits all of them alike. Whoever fails is left out from then on, with the
reason in its place; the others go on.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

LONGEST_TURN = 120.0
"""Seconds after which a turn is given up."""

WELL_BEHIND = 1.25
"""How many times slower than the best of its rivals a contender is that will not win any more."""


def nothing() -> None:
    """What there is to do before or after many a turn."""


@dataclass(frozen=True)
class Turn:
    """What one contender does in a round."""

    name: str
    timed: Callable[[], float | None]
    """What is measured: the time that it takes, or the number that it returns."""
    before: Callable[[], None] = nothing
    """What has to be ready, outside of the measured time."""
    after: Callable[[], None] = nothing
    rivals: str = ""
    """Of all that have the same word here, only the best counts in the end."""
    most_rounds: int | None = None
    """For those that are only there to be seen beside the others."""


@dataclass
class Measure:
    """What came out: for each contender one number of seconds per round, or the reason why there is none."""

    title: str
    nbytes: int
    samples: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    """The seconds of user and system time of all threads of this process, for each sample, where that is known."""


@dataclass(frozen=True)
class Allowance:
    """How long a measure may take, and how many rounds it has to have."""

    seconds: float
    fewest_rounds: int
    """For everybody. Whoever is well behind its rivals after them is left out: others can use the time."""
    rounds: int
    """For all that may count."""
    most_rounds: int


def measure(title: str, nbytes: int, turns: Sequence[Turn], allowance: Allowance) -> Measure:
    """Take rounds until the time is used up."""
    result = Measure(title, nbytes, {turn.name: [] for turn in turns})
    end = time.monotonic() + allowance.seconds
    longest_round = 0.0
    for number in range(allowance.most_rounds):
        began = time.monotonic()
        if number >= allowance.rounds and began + longest_round > end:
            break
        taking_part = [turn for turn in turns if turn.name not in result.failed]
        taking_part = [turn for turn in taking_part if turn.most_rounds is None or number < turn.most_rounds]
        if number >= allowance.fewest_rounds:
            taking_part = [turn for turn in taking_part if not _is_well_behind(turn, turns, result)]
        at = number % max(1, len(taking_part))
        for turn in taking_part[at:] + taking_part[:at]:
            take_turn(turn, result)
        longest_round = max(longest_round, time.monotonic() - began)
    return result


def _is_well_behind(turn: Turn, turns: Sequence[Turn], result: Measure) -> bool:
    rivals = [result.samples[other.name] for other in turns if turn.rivals and other.rivals == turn.rivals]
    best = min((statistics.median(samples) for samples in rivals if samples), default=None)
    return best is not None and statistics.median(result.samples[turn.name]) > WELL_BEHIND * best


def take_turn(turn: Turn, result: Measure) -> None:
    """One sample, or the reason why there is none."""
    try:
        with _deadline(LONGEST_TURN):
            turn.before()
            began, used = time.perf_counter(), time.process_time()
            own = turn.timed()
            seconds, used = time.perf_counter() - began, time.process_time() - used
            turn.after()
    except Exception as error:
        result.failed[turn.name] = f"failed: {one_line(error)}"
    else:
        result.samples[turn.name].append(seconds if own is None else own)
        result.cpu.setdefault(turn.name, []).append(used)


def one_line(error: BaseException) -> str:
    """An error for a cell of a table."""
    first = (str(error).strip().splitlines() or [""])[0]
    text = f"{type(error).__name__}: {first}"
    return text if len(text) <= 160 else text[:157] + "..."


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise TimeoutError(f"still running after {seconds:g} s")

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, give_up)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)  # somebody else's deadline, which goes on afterwards
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, max(0.01, left - (time.monotonic() - began)) if left else 0)
