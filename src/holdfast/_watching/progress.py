"""How far long work is: counted, drawn on the terminal, and in numbers for people."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO, TypeAlias

OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that are done and with those there are in all, by one thread at a time."""

_PAUSE = 0.1
_WIDTH = 30
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


class ProgressBar:
    """Shows how many of ``total`` bytes are done. It shows nothing unless ``stream`` is a terminal.

    One that is ``transient`` leaves nothing behind, and what the program prints meanwhile begins where the line does.

    >>> with ProgressBar(100, "saving") as bar:
    ...     bar.advance(60)
    >>> bar.done
    60
    """

    def __init__(
        self,
        total: int,
        label: str = "",
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        transient: bool = False,
    ) -> None:
        self.total = total
        self.label = label
        self.done = 0
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = is_terminal(self._stream)
        self._is_transient = transient
        self._clock = clock
        self._started = clock()
        self._last_drawn: float | None = None

    def advance(self, nbytes: int) -> None:
        """That many more bytes are done."""
        self.show(self.done + nbytes)

    def show(self, done: int, total: int | None = None, label: str | None = None) -> None:
        """That many bytes are done now. What is not given stays."""
        self.done = done
        self.total = self.total if total is None else total
        self.label = self.label if label is None else label
        now = self._clock()
        if self._is_shown and (self._last_drawn is None or now - self._last_drawn >= _PAUSE):
            self._last_drawn = now
            self._draw(now)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Draw the last state and leave the line to what comes next."""
        if not self._is_shown:
            return
        if self._is_transient:
            if self._last_drawn is not None:
                self._write("\r" + " " * _columns() + "\r")
        else:
            self._draw(self._clock())
            self._write("\n")

    def _draw(self, now: float) -> None:
        columns = _columns()
        line = render(self.done, self.total, now - self._started, self.label)
        self._write("\r" + line[:columns].ljust(columns) + ("\r" if self._is_transient else ""))

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone, which is no reason to stop
            self._is_shown = False


class Tally:
    """How many bytes are done. Any thread may add to it.

    >>> tally = Tally(10, lambda done, total: print(done, "of", total))
    >>> tally.add(4)
    4 of 10
    """

    def __init__(self, total: int, on_progress: OnProgress | None = None) -> None:
        self.total = total
        self.done = 0
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """That many more are done. Never are more told than there are."""
        with self._lock:
            self.done += nbytes
            if self._on_progress is not None:
                self._on_progress(min(self.done, self.total), self.total)


def render(done: int, total: int, seconds: float, label: str = "") -> str:
    """One line about how far things are.

    >>> render(250_000_000, 1_000_000_000, 2.0, "saving")
    'saving  25% [#######.......................] 250.0 MB of 1.0 GB, 125.0 MB/s, 0:06 left'
    """
    part = min(done / total, 1.0) if total else 1.0
    filled = int(_WIDTH * part)
    rate = done / seconds if seconds > 0 else 0.0
    left = f", {duration((total - done) / rate)} left" if rate and done < total else ""
    bar = "#" * filled + "." * (_WIDTH - filled)
    return f"{label} {part:4.0%} [{bar}] {size(done)} of {size(total)}, {size(rate)}/s{left}".lstrip()


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


def _columns() -> int:
    """How long a line may be without wrapping."""
    return shutil.get_terminal_size().columns - 1
