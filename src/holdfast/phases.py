"""How long the phases of a call took."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from holdfast.watching import Call
from holdfast.watching.calls import Phase


class Phases:
    """The phases of one call on one rank, in the order in which they began.

    >>> phases = Phases(Call("save", "runs/a/step-500"))
    >>> with phases.during("write"):
    ...     pass
    >>> list(phases.seconds)
    ['write']
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        """Whose phases these are: it tells of each."""
        self.seconds: dict[str, float] = {}
        self.enter: Callable[[str], None] | None = None
        """Told of each phase when it begins."""

    @contextmanager
    def during(self, name: str) -> Iterator[Phase]:
        """A phase, or one more part of it."""
        if self.enter is not None:
            self.enter(name)
        phase = self.call.phase(name)
        try:
            with phase:
                yield phase
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + phase.seconds

    def elapsed(self) -> float:
        """Seconds since the call began."""
        return self.call.elapsed()


def by_phase(ranks: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The seconds of all ranks by phase, rounded to what matters.

    >>> by_phase([{"write": 1.00001}, {"write": 2.0}])
    {'write': [1.0, 2.0]}
    """
    names = {name: None for seconds in ranks for name in seconds}
    return {name: [round(seconds.get(name, 0.0), 4) for seconds in ranks] for name in names}
