"""What is told of a phase, or of a call as a whole, when it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.plain_data import plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A phase of a call, or the whole of it, has ended on this rank.

    >>> event = Event(verb="save", phase="write", path="runs/a/step-500", began=0.0, seconds=2.0, nbytes=10**9)
    >>> event.name, event.rate
    ('save.write', 500000000.0)
    """

    verb: str
    """``save``, ``load``, ``delete``, ``restore`` or ``preflight``."""
    phase: str = ""
    """``capture``, ``stage``, ``plan``, ``write``, ``commit``, ``read``, ``delete``, ...; empty for the whole call."""
    path: str
    step: int | None = None
    """Of the training, if it is known."""
    rank: int = 0
    world_size: int = 1
    call: str = ""
    """Which call it was: all its phases have the same. Every rank has its own."""
    call_began: float = 0.0
    """When the call began, in seconds since the epoch."""
    began: float
    """When the phase began, in seconds since the epoch."""
    seconds: float
    nbytes: int = 0
    """In a phase those of this rank, in the call as a whole those of all ranks."""
    error: str | None = None
    """What it failed with."""
    slowest_rank: int | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else is known, as values of JSON."""

    @property
    def name(self) -> str:
        """Verb and phase."""
        return f"{self.verb}.{self.phase}" if self.phase else self.verb

    @property
    def is_whole(self) -> bool:
        """Whether it tells of the call as a whole, and not of a phase."""
        return not self.phase

    @property
    def rate(self) -> float:
        """Bytes in a second."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The fields, as values that every reader of JSON understands.

        >>> event = Event(verb="save", path="a", began=0.0, seconds=1.0, detail={"loss": float("nan")})
        >>> event.as_dict()["detail"]
        {'loss': 'nan'}
        """
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**fields, "detail": plain(self.detail)}
