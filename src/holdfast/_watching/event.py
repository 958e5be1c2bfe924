"""What is reported of a phase, or of a call as a whole, when it has ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast._base.texts import plain


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
        """Whether it is about the call as a whole, and not about a phase."""
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


# What a caller further up knows of the calls inside a ``with`` block.


class CallDetails(NamedTuple):
    """What the events of a call contain beyond what the call itself knows."""

    step: int | None
    detail: Mapping[str, Any]


_known: ContextVar[CallDetails] = ContextVar("holdfast_known", default=CallDetails(None, {}))  # noqa: B039 - nobody changes it


def known() -> CallDetails:
    """What is known here."""
    return _known.get()


@contextmanager
def about(step: int | None = None, **detail: Any) -> Iterator[None]:
    """Have the events of calls that begin in this block contain the step of the training, and more.

    It holds for this thread. A call that goes on in another one keeps what was known when it began.

    >>> from holdfast._watching.calls import Call
    >>> from holdfast.watching import subscribe
    >>> with subscribe(lambda event: print(event.step, event.detail["reason"])), about(step=500, reason="steps"):
    ...     Call("save", "runs/a").finish()
    500 steps
    """
    outer = _known.get()
    token = _known.set(CallDetails(outer.step if step is None else step, {**outer.detail, **detail}))
    try:
        yield
    finally:
        _known.reset(token)
