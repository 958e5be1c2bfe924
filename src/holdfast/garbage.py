"""Python's collector of cyclic garbage, which takes its time when many small objects are made that will live on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep the collector from running, for work that makes many objects and no cyclic garbage.

    It would look at all of them again and again, which takes as long as the work itself. Threads may do this at the
    same time: it is on again as soon as the first of them is done, and never stays off.

    >>> with no_garbage_collection():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
