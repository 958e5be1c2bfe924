"""How far long work is: counted, and in numbers for people."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TextIO, TypeAlias

OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that are done and with those there are in all, by one thread at a time."""

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


class Progress:
    """How many bytes are done, of how many. Any thread may count.

    >>> progress = Progress(10, lambda done, total: print(done, "of", total))
    >>> progress.advance(4)
    4 of 10
    """

    def __init__(self, total_bytes: int, on_progress: OnProgress | None = None) -> None:
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def advance(self, nbytes: int) -> None:
        """So many more are done. ``on_progress`` never hears of more than there are."""
        with self._lock:
            self.done_bytes += nbytes
            if self._on_progress is not None:
                self._on_progress(min(self.done_bytes, self.total_bytes), self.total_bytes)


def share(done: int, total: int) -> float:
    """How much is done, between 0 and 1."""
    return min(done / total, 1.0) if total else 1.0


def amounts(done: int, total: int, seconds: float) -> str:
    """How far, how fast and how much longer.

    >>> amounts(250_000_000, 1_000_000_000, 2.0)
    '250.0 MB of 1.0 GB, 125.0 MB/s, 0:06 left'
    """
    rate = done / seconds if seconds > 0 else 0.0
    left = f", {duration((total - done) / rate)} left" if rate and done < total else ""
    return f"{size(done)} of {size(total)}, {size(rate)}/s{left}"


def size(nbytes: float) -> str:
    """A number of bytes for people.

    >>> size(999), size(1_500_000)
    ('999 B', '1.5 MB')
    """
    unit = 0
    while round(nbytes, 1) >= 1000 and unit < len(_UNITS) - 1:
        nbytes /= 1000
        unit += 1
    return f"{nbytes:.1f} {_UNITS[unit]}" if unit else f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """A time span for people.

    >>> duration(75), duration(3661)
    ('1:15', '1:01:01')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def time_taken(seconds: float) -> str:
    """How long something took, for people.

    >>> time_taken(0.0834), time_taken(12.34), time_taken(75)
    ('0.08 s', '12.3 s', '1:15')
    """
    if round(seconds, 1) >= 60:
        return duration(seconds)
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def is_terminal(stream: TextIO) -> bool:
    """Whether somebody may be looking."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False
