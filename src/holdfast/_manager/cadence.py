"""When to save and when to stop: the same on every rank, at the same step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast._manager.preemption import Preemption
from holdfast.errors import RankDisagreementError

# Whether all ranks have made their manager alike: otherwise some would wait for others that do not come.


Options = Mapping[str, str]
"""The arguments of a manager that must be the same on all ranks, as str."""


def refuse_different_options(place: str, ranks: Sequence[Options]) -> None:
    """Raise if the ranks were given different options, and name only what differs.

    >>> refuse_different_options("runs/a", [{"every_steps": "10", "writer": "x"}, {"every_steps": "20", "writer": "x"}])
    Traceback (most recent call last):
    holdfast.errors.RankDisagreementError: ... different options: {0: 'every_steps=10', 1: 'every_steps=20'}. ...
    """
    names = [name for name in dict.fromkeys(name for each in ranks for name in each) if _differs(name, ranks)]
    if not names:
        return
    views = {rank: ", ".join(f"{name}={each.get(name)}" for name in names) for rank, each in enumerate(ranks)}
    raise RankDisagreementError(
        f"the ranks have managers of {place} with different options: {views}. Give all ranks the same ones: they "
        "save, delete and stop together.",
        views=views,
    )


def _differs(name: str, ranks: Sequence[Options]) -> bool:
    return len({each.get(name) for each in ranks}) > 1


# Ranks have clocks of their own, and a signal may reach only one of them, so they have to exchange what they know.
# They do that at steps that all of them know in advance: at each exchange rank 0 announces the next one, about a
# second of training later, and it takes place at the first step from there on. Between exchanges a step costs a few
# comparisons. What follows from the number of the step alone needs no exchange.


Reason = Literal["preemption", "steps", "minutes"]

_SECONDS_BETWEEN_EXCHANGES = 1.0
"""An exchange takes about a millisecond; and a second is little of what a cluster gives between SIGTERM and SIGKILL."""

_MOST_CALLS_BETWEEN_EXCHANGES = 100
"""Steps may get slower all at once, and those that were announced are waited for."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do at a step."""

    save: Reason | None = None
    """Why to save now, or None."""
    stop: bool = False
    """Whether the training should end, now or since an earlier step."""
    cause: str | None = None
    """What it should end for, such as "SIGTERM on rank 3"."""
    seconds_left: float | None = None
    """How long the rank that has least time will still live, if it is known."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank sends the others at an exchange."""

    step: int
    next_step: int
    """Where the next exchange should be. Rank 0's counts."""
    is_due: bool
    """Whether it is time for a save. Rank 0's counts."""
    signal: str | None
    """The signal that this rank got."""
    seconds_left: float | None
    """How long this rank will still live, if it got one and knows."""


Exchange = Callable[[int, Beat], Sequence[Beat]]
"""Gives the beats of all ranks at a step, in the order of ranks, on every rank."""


class Cadence:
    """Decides at every step of the training. All ranks must ask at the same steps, and with the same options.

    Without an ``exchange`` this process decides alone.

    >>> cadence = Cadence(every_steps=100)
    >>> cadence.at_step(99).save, cadence.at_step(100).save
    (None, 'steps')
    """

    def __init__(
        self,
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        preemption: Preemption | None = None,
        exchange: Exchange | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if every_steps is not None and (type(every_steps) is not int or every_steps < 1):
            raise ValueError(f"every_steps={every_steps!r} is not a number of steps; use 1 or more, or None for never")
        minutes: object = every_minutes
        if minutes is not None and not (isinstance(minutes, (int, float)) and minutes > 0):
            raise ValueError(f"every_minutes={every_minutes!r} is not a time; use more than 0, or None for never")
        self._every_steps = every_steps
        self._every_seconds = None if every_minutes is None else every_minutes * 60
        self._preemption = preemption
        self._exchange = exchange
        self._clock = clock
        self._rhythm = _Rhythm(clock, _seconds_between_exchanges(preemption))
        self._saved_at = clock()
        self._last_step: int | None = None
        self._next_exchange: int | None = None
        self._cause: str | None = None
        self._deadline: float | None = None

    @property
    def should_stop(self) -> bool:
        """Whether the ranks have agreed to end the training."""
        return self._cause is not None

    def resume_after(self, step: int) -> None:
        """The training goes on after ``step``, which is saved already."""
        self._last_step = step
        self._next_exchange = None  # what is announced may be far away from here
        self.restart_minutes()

    def restart_minutes(self) -> None:
        """A save was made that this cadence did not decide on: the next one by time has a full interval again."""
        self._saved_at = self._clock()

    def at_step(self, step: int) -> Decision:
        """What to do now that ``step`` is done."""
        beats = self._exchange_beats(step) if self._is_exchange(step) else ()
        reason: Reason | None = None
        if not self.should_stop and self._hear_signals(beats):
            reason = "preemption"
        elif self._completes_interval(step):
            reason = "steps"
        elif beats and beats[0].is_due:
            reason = "minutes"
        if reason is not None:
            self.restart_minutes()
        self._last_step = step
        return Decision(reason, self.should_stop, self._cause, self._seconds_left())

    def _completes_interval(self, step: int) -> bool:
        """Whether a multiple of ``every_steps`` was reached since the last step, which need not be the one before."""
        if self._every_steps is None or step == self._last_step:
            return False
        if self._last_step is None or step < self._last_step:
            return step % self._every_steps == 0
        return step // self._every_steps > self._last_step // self._every_steps

    def _is_exchange(self, step: int) -> bool:
        if self._every_seconds is None and (self._preemption is None or self.should_stop):
            return False  # there is nothing to be learnt from other ranks
        self._rhythm.count(step)
        if self._next_exchange is None or self._last_step is None or step < self._last_step:
            return True  # nothing is announced, or it was for a training that has been taken back to an earlier step
        return step >= self._next_exchange

    def _exchange_beats(self, step: int) -> Sequence[Beat]:
        interval = math.inf if self._every_seconds is None else self._every_seconds
        seconds_to_due = self._saved_at + interval - self._clock()
        is_due = seconds_to_due <= 0
        notice = None if self._preemption is None else self._preemption.notice
        mine = Beat(
            step=step,
            next_step=self._announce(step, interval if is_due else seconds_to_due),
            is_due=is_due,
            signal=None if notice is None else notice.signal,
            seconds_left=None if self._preemption is None else self._preemption.seconds_left(),
        )
        beats = [mine] if self._exchange is None else self._exchange(step, mine)
        _refuse_different_steps(beats)
        self._next_exchange = beats[0].next_step
        return beats

    def _announce(self, step: int, seconds_to_due: float) -> int:
        return step + 1 if self._exchange is None else self._rhythm.next_exchange(step, seconds_to_due)

    def _hear_signals(self, beats: Sequence[Beat]) -> bool:
        """Remember whether and until when to stop, if any rank got a signal."""
        heard = [(rank, beat) for rank, beat in enumerate(beats) if beat.signal is not None]
        if not heard:
            return False
        rank, beat = heard[0]
        self._cause = f"{beat.signal} on rank {rank}" if len(beats) > 1 else beat.signal
        known = [beat.seconds_left for _, beat in heard if beat.seconds_left is not None]
        if known:
            self._deadline = self._clock() + min(known)
        return True

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())


class _Rhythm:
    """How fast this rank's steps follow each other, and so how many of them fit between two exchanges."""

    def __init__(self, clock: Callable[[], float], seconds_between: float) -> None:
        self._clock = clock
        self._seconds_between = seconds_between
        self._began = clock()
        self._calls = 0
        self._most_calls = 1
        self._last_step: int | None = None
        self._stride: int | None = None

    def count(self, step: int) -> None:
        """A step is done."""
        if self._last_step is not None and step > self._last_step:
            stride = step - self._last_step
            # The smallest: if the numbers of steps grow faster again, the exchange comes early, and not late.
            self._stride = stride if self._stride is None else min(self._stride, stride)
        self._last_step = step
        self._calls += 1

    def next_exchange(self, step: int, seconds_to_due: float) -> int:
        """The step for the next exchange, judged by the steps since the last one."""
        now = self._clock()
        seconds_per_call = (now - self._began) / max(self._calls, 1)
        wanted = min(self._seconds_between, seconds_to_due)
        fitting = wanted / seconds_per_call if seconds_per_call > 0 else math.inf
        # By small increases at first: what comes before the first steps says little about how long they take.
        calls = max(1, int(min(fitting, 2 * self._most_calls, _MOST_CALLS_BETWEEN_EXCHANGES)))
        next_step = step + calls * (self._stride or 1)
        self._began, self._calls, self._most_calls, self._stride = now, 0, calls, None
        return next_step


def _seconds_between_exchanges(preemption: Preemption | None) -> float:
    grace = math.inf if preemption is None or preemption.grace_seconds is None else preemption.grace_seconds
    return min(_SECONDS_BETWEEN_EXCHANGES, grace / 10)


def _refuse_different_steps(beats: Sequence[Beat]) -> None:
    views = {rank: f"step {beat.step}" for rank, beat in enumerate(beats)}
    if len(set(views.values())) > 1:
        raise RankDisagreementError(
            f"the ranks are at different steps: {views}. All ranks must call the manager at the same steps.",
            views=views,
        )
