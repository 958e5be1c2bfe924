"""Events in the log: a line for people, and the fields for programs."""

from __future__ import annotations

import logging

from holdfast._watching.event import Event
from holdfast._watching.progress import duration, size

# Events as lines for people.


_DONE = {
    "save": "saved",
    "load": "loaded",
    "delete": "deleted",
    "restore": "restored",
    "preflight": "checked",
}


def line(event: Event) -> str:
    """An event as one line.

    >>> line(Event(verb="save", path="runs/a/step-500", step=500, world_size=4, began=0.0, seconds=1.8,
    ...            nbytes=2_200_000_000, slowest_rank=3, detail={"stalled": 0.012}))
    'step 500: saved 2.2 GB in 1.8 s (1.2 GB/s), stalled 12 ms, slowest rank 3'
    >>> line(Event(verb="load", phase="read", path="runs/b", rank=1, world_size=2, began=0.0, seconds=0.5,
    ...            nbytes=10**6))
    'load.read of runs/b on rank 1: 1.0 MB in 500 ms (2.0 MB/s)'
    """
    return _of_the_whole(event) if event.is_whole else _of_a_phase(event)


def time_span(seconds: float) -> str:
    """A time span for people, as exact as anyone wants to know.

    >>> [time_span(seconds) for seconds in (0.0004, 0.012, 1.84, 75, 3661)]
    ['0.4 ms', '12 ms', '1.8 s', '1:15 min', '1:01:01 h']
    """
    if seconds < 0.00995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    return f"{duration(seconds)} {'h' if round(seconds) >= 3600 else 'min'}"


def _of_the_whole(event: Event) -> str:
    begin = "" if event.step is None else f"step {event.step}: "
    where = f" {_PREPOSITION.get(event.verb, 'at')} {event.path}" if event.step is None else ""
    if event.error is not None:
        return f"{begin}{event.verb}{where} failed after {time_span(event.seconds)}: {_first_line(event.error)}"
    return f"{begin}{_DONE.get(event.verb, event.verb)}{_amount(event)}{where}{_numbers(event)}"


_PREPOSITION = {"save": "to", "load": "from", "restore": "from"}


def _of_a_phase(event: Event) -> str:
    rank = f" on rank {event.rank}" if event.world_size > 1 else ""
    begin = f"{event.name} of {event.path}{rank}"
    if event.error is not None:
        return f"{begin} failed after {time_span(event.seconds)}: {_first_line(event.error)}"
    return f"{begin}:{_amount(event)}{_numbers(event)}"


def _amount(event: Event) -> str:
    return f" {size(event.nbytes)}" if event.nbytes else ""


def _numbers(event: Event) -> str:
    text = f" in {time_span(event.seconds)}"
    if event.nbytes and event.rate:
        text += f" ({size(event.rate)}/s)"
    stalled = event.detail.get("stalled")
    if event.is_whole and isinstance(stalled, (int, float)):
        text += f", stalled {time_span(stalled)}"
    if event.slowest_rank is not None and event.world_size > 1:
        text += f", slowest rank {event.slowest_rank}"
    return text


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


# The logger is ``holdfast.events``. What happened as a whole is INFO on rank 0, the phases and the other ranks are
# DEBUG. A failure has no higher level, since it is raised as well. ``record.event`` is the event as a dict.


logger = logging.getLogger("holdfast.events")


def is_read(*, whole: bool) -> bool:
    """Whether a line might get anywhere."""
    return logger.isEnabledFor(logging.INFO if whole else logging.DEBUG)


def log(event: Event) -> None:
    """Write the line."""
    level = logging.INFO if event.is_whole and event.rank == 0 else logging.DEBUG
    if logger.isEnabledFor(level):
        logger.log(level, "%s", line(event), extra={"event": event.as_dict()})
