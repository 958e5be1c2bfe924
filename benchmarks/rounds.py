"""Interleaved repetitions: in each round all contenders take their turn, in an order that moves on by one.

A slow moment of the disk, or of the machine, hits all of them alike. Whoever fails is left out from then on, with the
reason in its place; the others go on.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

LONGEST_TURN = 120.0
"""Seconds after which a turn is given up."""


def nothing() -> None:
    """What there is to do before or after many a turn."""


@dataclass(frozen=True)
class Turn:
    """What one contender does in a round."""

    name: str
    timed: Callable[[], None]
    before: Callable[[], None] = nothing
    """What has to be ready, outside of the measured time."""
    after: Callable[[], None] = nothing


@dataclass
class Measure:
    """What came out: for each contender one number of seconds per round, or the reason why there is none."""

    title: str
    nbytes: int
    samples: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Allowance:
    """How long a measure may take, and how many rounds it has to have."""

    seconds: float
    fewest_rounds: int
    most_rounds: int


def measure(title: str, nbytes: int, turns: Sequence[Turn], allowance: Allowance) -> Measure:
    """Take rounds until the time is used up."""
    result = Measure(title, nbytes, {turn.name: [] for turn in turns})
    end = time.monotonic() + allowance.seconds
    longest_round = 0.0
    for number in range(allowance.most_rounds):
        began = time.monotonic()
        if number >= allowance.fewest_rounds and began + longest_round > end:
            break
        taking_part = [turn for turn in turns if turn.name not in result.failed]
        at = number % max(1, len(taking_part))
        for turn in taking_part[at:] + taking_part[:at]:
            take_turn(turn, result)
        longest_round = max(longest_round, time.monotonic() - began)
    return result


def take_turn(turn: Turn, result: Measure) -> None:
    """One sample, or the reason why there is none."""
    try:
        with _deadline(LONGEST_TURN):
            turn.before()
            began = time.perf_counter()
            turn.timed()
            seconds = time.perf_counter() - began
            turn.after()
    except Exception as error:
        result.failed[turn.name] = f"failed: {one_line(error)}"
    else:
        result.samples[turn.name].append(seconds)


def one_line(error: BaseException) -> str:
    """An error for a cell of a table."""
    first = (str(error).strip().splitlines() or [""])[0]
    text = f"{type(error).__name__}: {first}"
    return text if len(text) <= 160 else text[:157] + "..."


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise TimeoutError(f"still running after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
