"""How an exception of one rank travels to the others, whatever it is made of."""

from __future__ import annotations

import pickle
import traceback
from typing import Any, NamedTuple

from holdfast.errors import WRAPPED_EXCEPTION, RemoteError


def wrap_exception(exc: BaseException) -> WRAPPED_EXCEPTION:
    """Pair an exception with its stack, in a form that can be pickled."""
    stack = traceback.extract_tb(exc.__traceback__)
    # Frame summaries of newer Pythons hold code objects; plain tuples of the same facts do not.
    plain = [(frame.filename, frame.lineno, frame.name, frame.line) for frame in stack]
    return exc, traceback.StackSummary.from_list(plain)  # type: ignore[arg-type]


def is_wrapped_exception(obj: Any) -> bool:
    """Whether ``obj`` is what ``wrap_exception`` returns."""
    return (
        isinstance(obj, tuple)
        and len(obj) == 2
        and isinstance(obj[0], BaseException)
        and isinstance(obj[1], traceback.StackSummary)
    )


MOST_FAILURES = 16
"""Of how many ranks the failures travel in full. Of the others it is only said that they failed."""

_LARGEST_PICKLE, _LONGEST_TEXT = 1 << 18, 1 << 16
"""What a failure may take on its way. A larger one is described."""


class PackedFailure(NamedTuple):
    """A wrapped exception as bytes, with a description for ranks that cannot rebuild it."""

    pickled: bytes | None
    type_name: str
    text: str
    stack: list[tuple[str, int | None, str, str | None]]


def pack_failure(wrapped: WRAPPED_EXCEPTION) -> PackedFailure:
    """Turn a wrapped exception into something that always pickles."""
    error, stack = wrapped
    kind = type(error)
    return PackedFailure(
        pickled=_pickle_if_it_survives(error),
        type_name=f"{kind.__module__}.{kind.__qualname__}",
        text=_text_of(error),
        stack=[(frame.filename, frame.lineno, frame.name, frame.line) for frame in stack],
    )


def unpack_failure(packed: PackedFailure) -> WRAPPED_EXCEPTION:
    """The wrapped exception again; a ``RemoteError`` with the same text if this rank cannot rebuild it."""
    error: Any = None
    if packed.pickled is not None:
        try:
            error = pickle.loads(packed.pickled)  # noqa: S301 - sent by another rank of this job
        except Exception:  # any kind of failure here only means: describe it instead
            error = None
    if not isinstance(error, BaseException):
        message = f"{packed.type_name}: {packed.text} (the original exception could not be sent between ranks)"
        error = RemoteError(message, type_name=packed.type_name, text=packed.text)
    return error, traceback.StackSummary.from_list(packed.stack)  # type: ignore[arg-type]


def _pickle_if_it_survives(error: BaseException) -> bytes | None:
    # Many exceptions pickle well and cannot be unpickled (a constructor with other arguments), so try both ways here,
    # where a failure costs nothing.
    try:
        data = pickle.dumps(error)
        if len(data) > _LARGEST_PICKLE:
            return None
        copy = pickle.loads(data)  # noqa: S301 - made in the line above
        return data if type(copy) is type(error) else None
    except Exception:
        return None


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:_LONGEST_TEXT]
    except Exception:
        return "(its text cannot be shown)"
