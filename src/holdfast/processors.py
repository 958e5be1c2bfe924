"""How many processors there are for us."""

from __future__ import annotations

import os


def count_processors() -> int:
    """How many this process may use: containers and schedulers often give it fewer than the machine has.

    >>> count_processors() >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
