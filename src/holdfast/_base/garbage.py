"""Python's ways to get rid of objects, which take their time, with all threads waiting, when there are very many."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast._base.tuning import FREED_AT_ONCE

_LOOKED_AT_IN_A_MOMENT = 10_000
"""New objects that the collector has looked at within a millisecond or so. No other thread can run meanwhile."""


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
            _let_many_new_objects_count_as_old()
            gc.enable()


def _let_many_new_objects_count_as_old() -> None:
    """Spare them the look that the collector takes at all new objects as soon as it is on.

    It would stop every thread for as long as that takes. Old objects have their turn when the program has made many
    more of them. To freeze and unfreeze puts all objects among the old ones without touching any, but those that the
    program has frozen itself must stay so.
    """
    if gc.get_count()[0] > _LOOKED_AT_IN_A_MOMENT and not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()


def let_go_in_parts(objects: list[Any]) -> None:
    """Empty a list of many objects that nobody else needs, so that other threads get their turn meanwhile.

    To free the last list or dict of them frees them all in one go. Who has them here too can drop those first.

    >>> plan = [object() for _ in range(3)]
    >>> leftovers = list(plan)
    >>> del plan
    >>> let_go_in_parts(leftovers)
    >>> leftovers
    []
    """
    while objects:
        del objects[-FREED_AT_ONCE:]
