"""Who wants to know how many bytes have come: what reads them says so, and knows nothing of who asked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_counting: ContextVar[Callable[[int], object] | None] = ContextVar("holdfast_byte_counts", default=None)


@contextmanager
def counting_bytes(count: Callable[[int], object]) -> Iterator[None]:
    """Have ``count`` called with the number of bytes, by any thread, whenever some have come in a ``with`` block.

    >>> found = []
    >>> with counting_bytes(found.append):
    ...     count_bytes(100)
    >>> found
    [100]
    """
    token = _counting.set(count)
    try:
        yield
    finally:
        _counting.reset(token)


def count_bytes(nbytes: int) -> None:
    """So many bytes have come from storage, or from another rank."""
    count = _counting.get()
    if count is not None:
        count(nbytes)
