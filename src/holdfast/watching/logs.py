"""Events in the log: a line for people, and the fields for programs.

The logger is ``holdfast.events``. What happened as a whole is INFO on rank 0, the phases and the other ranks are DEBUG.
A failure has no higher level, since it is raised as well. ``record.event`` is the event as a dict.
"""

from __future__ import annotations

import logging

from holdfast.watching.event import Event
from holdfast.watching.lines import line

logger = logging.getLogger("holdfast.events")


def is_read(*, whole: bool) -> bool:
    """Whether a line might get anywhere."""
    return logger.isEnabledFor(logging.INFO if whole else logging.DEBUG)


def log(event: Event) -> None:
    """Write the line."""
    level = logging.INFO if event.is_whole and event.rank == 0 else logging.DEBUG
    if logger.isEnabledFor(level):
        logger.log(level, "%s", line(event), extra={"event": event.as_dict()})
