"""Which checkpoints stay. Pure functions of a list of steps and a moment: nothing here touches a disk.

Policies say what to keep, and are joined by ``|``. Some steps stay whatever a policy says: those that are pinned, the
newest one, those that are set aside, and all that this run did not save.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from holdfast._base.arguments import Size, checked_size
from holdfast._manager.steps import Mode, StepInfo, by_metric

_WITNESSES = 3
"""How many saves must agree on what time it is before others are too old by that: a machine may have booted with a
clock that is a year ahead, and what is deleted does not come back when the clock is set."""
_SHORTEST_LEAP = timedelta(hours=1)
"""What is less is no reason to doubt a clock: saves may be further apart than they are to be kept."""


class Policy(ABC):
    """Says which steps to keep. A policy of one's own implements ``choose``.

    Example:
        >>> policy = last(2) | every(1000)
        >>> steps = [StepInfo(step, f"runs/a/step-{step}", is_ours=True) for step in (500, 1000, 1500, 2000, 2500)]
        >>> policy.kept(steps, datetime.now().astimezone())
        {1000: 'every 1000', 2000: 'last 2, every 1000', 2500: 'newest, last 2'}
    """

    @abstractmethod
    def choose(self, steps: Sequence[StepInfo], now: datetime) -> dict[int, str]:
        """Which of these steps to keep, and why. They are usable ones of this run, by their number."""

    def kept(self, steps: Sequence[StepInfo], now: datetime) -> dict[int, str]:
        """Which steps stay, and why: those that are chosen, and those that always stay."""
        candidates = _candidates(steps)
        reasons = [_not_to_be_touched(steps), always_kept(candidates), self.choose(candidates, now)]
        return dict(sorted(_joined(reasons).items()))

    @property
    def keeps_everything(self) -> bool:
        """Whether it is known that nothing is ever deleted."""
        return False

    def best_of(self, steps: Sequence[StepInfo], now: datetime) -> frozenset[int]:
        """The steps that are kept for a metric, which on a full disk go last: no later step makes up for them.

        >>> steps = [StepInfo(step, "", metrics={"loss": step}, is_ours=True) for step in (1, 2, 3)]
        >>> sorted((last(3) | best(1, "loss")).best_of(steps, datetime.now().astimezone()))
        [1]
        """
        return self._best_among(_candidates(steps), now)

    def _best_among(self, candidates: Sequence[StepInfo], now: datetime) -> frozenset[int]:
        return frozenset()

    @property
    def most_kept(self) -> int | None:
        """How many steps it keeps at most, pinned ones aside; None if nobody knows.

        >>> (last(3) | best(1, "loss")).most_kept, (last(3) | every(1000)).most_kept
        (4, None)
        """
        return None

    def within(self, *, max_age: timedelta | None = None, max_bytes: Size | None = None) -> Policy:
        """The same, but nothing that is older, and no more bytes (such as ``"2TB"``) in all: the oldest go first.

        What always stays is not affected, but its bytes count.

        >>> str(last(10).within(max_bytes="1TB"))
        'last 10, at most 1000000000000 bytes'
        """
        if max_age is None and max_bytes is None:
            return self
        return _Limited(self, max_age, checked_size("max_bytes", max_bytes))

    def __str__(self) -> str:
        return type(self).__name__

    def __or__(self, other: Policy) -> Policy:
        if not isinstance(other, Policy):
            return NotImplemented
        return _Either(self, other)


def plan_deletions(steps: Sequence[StepInfo], policy: Policy, now: datetime) -> list[StepInfo]:
    """What a policy has deleted, the oldest first."""
    kept = policy.kept(steps, now)
    return sorted((info for info in steps if info.step not in kept), key=lambda info: info.step)


def always_kept(candidates: Sequence[StepInfo]) -> dict[int, str]:
    """Those that no policy and no limit can have deleted.

    After a return to an earlier step the one that was saved last is not the one with the highest number. Both stay.
    """
    if not candidates:
        return {}
    newest = {max(info.step for info in candidates)}
    timed = [(info.saved_at, info.step) for info in candidates if info.saved_at is not None]
    if timed:
        newest.add(max(timed)[1])
    pinned = {info.step: "pinned" for info in candidates if info.pinned}
    return _joined([dict.fromkeys(sorted(newest), "newest"), pinned])


def everything() -> Policy:
    """Keep all steps.

    >>> str(everything())
    'everything'
    """
    return _Everything()


def last(count: int) -> Policy:
    """Keep the ``count`` steps with the highest numbers.

    >>> str(last(3))
    'last 3'
    """
    return _Last(_positive("the number of steps to keep", count))


def best(count: int, metric: str, mode: Mode = "min") -> Policy:
    """Keep the ``count`` steps with the smallest metric, or with ``mode="max"`` the largest; newer ones among equals.

    Steps without the metric do not take part, nor do those where it is not a finite number.

    >>> str(best(1, "accuracy", "max"))
    'best 1 by accuracy'
    """
    by_metric([], metric, mode)  # raises if there is no such mode
    return _Best(_positive("the number of steps to keep", count), metric, mode)


def every(steps: int) -> Policy:
    """Keep the first checkpoint at or after each multiple of ``steps``.

    That is the multiple itself if it was saved, and it works just as well if saves happen by the clock.

    >>> str(every(1000))
    'every 1000'
    """
    return _Every(_positive("the distance of steps to keep", steps))


def newer_than(age: timedelta) -> Policy:
    """Keep what was saved less than ``age`` ago. After a leap of the clock, only when three saves confirm it.

    >>> str(newer_than(timedelta(hours=6)))
    'newer than 6:00:00'
    """
    return _NewerThan(_duration("the age", age))


@dataclass(frozen=True)
class _Everything(Policy):
    @property
    def keeps_everything(self) -> bool:
        return True

    def choose(self, steps: Sequence[StepInfo], now: datetime) -> dict[int, str]:
        return {info.step: str(self) for info in steps}

    def __str__(self) -> str:
        return "everything"


@dataclass(frozen=True)
class _Last(Policy):
    count: int

    @property
    def most_kept(self) -> int:
        return self.count

    def choose(self, steps: Sequence[StepInfo], now: datetime) -> dict[int, str]:
        return {info.step: str(self) for info in steps[-self.count :]}

    def __str__(self) -> str:
        return f"last {self.count}"


@dataclass(frozen=True)
class _Best(Policy):
    count: int
    metric: str
    mode: Mode

    @property
    def most_kept(self) -> int:
        return self.count

    def choose(self, steps: Sequence[StepInfo], now: datetime) -> dict[int, str]:
        return {info.step: str(self) for info in by_metric(steps, self.metric, self.mode)[: self.count]}

    def _best_among(self, candidates: Sequence[StepInfo], now: datetime) -> frozenset[int]:
        return frozenset(self.choose(candidates, now))

    def __str__(self) -> str:
        return f"best {self.count} by {self.metric}"


@dataclass(frozen=True)
class _Every(Policy):
    distance: int

    def choose(self, steps: Sequence[StepInfo], now: datetime) -> dict[int, str]:
        first: dict[int, int] = {}
        for info in steps:
            first.setdefault(info.step // self.distance, info.step)
        # Behind 0 there is no multiple before the first one: only step 0 itself is one.
        return {step: str(self) for multiple, step in first.items() if multiple > 0 or step == 0}

    def __str__(self) -> str:
        return f"every {self.distance}"


@dataclass(frozen=True)
class _NewerThan(Policy):
    age: timedelta

    def choose(self, steps: Sequence[StepInfo], now: datetime) -> dict[int, str]:
        too_old = _older_ones(steps, self.age, now)
        return {info.step: str(self) for info in steps if info.step not in too_old}

    def __str__(self) -> str:
        return f"newer than {self.age}"


@dataclass(frozen=True)
class _Either(Policy):
    one: Policy
    other: Policy

    @property
    def most_kept(self) -> int | None:
        one, other = self.one.most_kept, self.other.most_kept
        return None if one is None or other is None else one + other

    def choose(self, steps: Sequence[StepInfo], now: datetime) -> dict[int, str]:
        return _joined([self.one.choose(steps, now), self.other.choose(steps, now)])

    def _best_among(self, candidates: Sequence[StepInfo], now: datetime) -> frozenset[int]:
        return self.one._best_among(candidates, now) | self.other._best_among(candidates, now)

    def __str__(self) -> str:
        return f"{self.one}, {self.other}"


@dataclass(frozen=True)
class _Limited(Policy):
    policy: Policy
    max_age: timedelta | None
    max_bytes: int | None

    @property
    def most_kept(self) -> int | None:
        return self.policy.most_kept

    def __post_init__(self) -> None:
        if self.max_age is not None:
            _duration("max_age", self.max_age)

    def choose(self, steps: Sequence[StepInfo], now: datetime) -> dict[int, str]:
        chosen = self.policy.choose(steps, now)
        if self.max_age is not None:
            too_old = _older_ones(steps, self.max_age, now)
            chosen = {step: reason for step, reason in chosen.items() if step not in too_old}
        if self.max_bytes is not None:
            self._drop_oldest(chosen, steps, self.max_bytes)
        return chosen

    def _best_among(self, candidates: Sequence[StepInfo], now: datetime) -> frozenset[int]:
        return self.policy._best_among(candidates, now) & self.choose(candidates, now).keys()

    def _drop_oldest(self, chosen: dict[int, str], steps: Sequence[StepInfo], limit: int) -> None:
        always = always_kept(steps)
        total = sum(info.nbytes for info in steps if info.step in chosen or info.step in always)
        for info in steps:
            if total <= limit:
                return
            if info.step in chosen and info.step not in always:
                del chosen[info.step]
                total -= info.nbytes

    def __str__(self) -> str:
        age = "" if self.max_age is None else f", at most {self.max_age} old"
        size = "" if self.max_bytes is None else f", at most {self.max_bytes} bytes"
        return f"{self.policy}{age}{size}"


def _candidates(steps: Sequence[StepInfo]) -> list[StepInfo]:
    return sorted((info for info in steps if info.is_ours and info.is_usable), key=lambda info: info.step)


def _not_to_be_touched(steps: Sequence[StepInfo]) -> dict[int, str]:
    """Those that policies are not asked about."""
    reasons = {}
    for info in steps:
        if info.damage is not None or info.unreadable is not None:
            reasons[info.step] = "cannot be read"
        elif info.set_aside is not None:
            reasons[info.step] = "set aside"
        elif not info.is_ours:
            reasons[info.step] = "not saved by this run"
    return reasons


def _joined(reasons: Sequence[Mapping[int, str]]) -> dict[int, str]:
    joined: dict[int, str] = {}
    for part in reasons:
        for step, reason in part.items():
            joined[step] = f"{joined[step]}, {reason}" if step in joined else reason
    return joined


def _older_ones(steps: Sequence[StepInfo], age: timedelta, now: datetime) -> set[int]:
    present = _present(steps, age, now)
    return {info.step for info in steps if info.saved_at is not None and present - info.saved_at >= age}


def _present(steps: Sequence[StepInfo], age: timedelta, now: datetime) -> datetime:
    """The moment that ages are measured from: now, or the last save before a leap that too few saves confirm.

    A leap by which much of what was saved before it becomes too old is a pause of the run, or a wrong clock. Nobody
    knows which, so the saves after it decide. A time that is still to come says nothing about the present.
    """
    leap, later = max(age / 2, _SHORTEST_LEAP), now
    save_times = sorted(
        (info.saved_at for info in steps if info.saved_at is not None and info.saved_at <= now), reverse=True
    )
    for saved_at in save_times[:_WITNESSES]:
        if later - saved_at >= leap:
            return saved_at
        later = saved_at
    return now


def _positive(what: str, number: int) -> int:
    if type(number) is not int or number < 1:
        raise ValueError(f"{what} is a whole number from 1 on, not {number!r}")
    return number


def _duration(what: str, age: timedelta) -> timedelta:
    if not isinstance(age, timedelta):
        raise TypeError(f"{what} is a datetime.timedelta, as in timedelta(days=2), not {age!r}")
    if age <= timedelta(0):
        raise ValueError(f"{what} must be positive, got {age}")
    return age
