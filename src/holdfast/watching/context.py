"""What a caller further up knows of the calls inside a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple


class Known(NamedTuple):
    """What the events of a call shall tell beyond what the call itself knows."""

    step: int | None
    detail: Mapping[str, Any]


_known: ContextVar[Known] = ContextVar("holdfast_known", default=Known(None, {}))  # noqa: B039 - nobody changes it


def known() -> Known:
    """What is known here."""
    return _known.get()


@contextmanager
def about(step: int | None = None, **detail: Any) -> Iterator[None]:
    """Have the events of calls that begin in this block tell the step of the training, and more.

    It holds for this thread. A call that goes on in another one keeps what was known when it began.

    >>> from holdfast.watching import Call, subscribe
    >>> with subscribe(lambda event: print(event.step, event.detail["reason"])), about(step=500, reason="steps"):
    ...     Call("save", "runs/a").finish()
    500 steps
    """
    outer = _known.get()
    token = _known.set(Known(outer.step if step is None else step, {**outer.detail, **detail}))
    try:
        yield
    finally:
        _known.reset(token)
