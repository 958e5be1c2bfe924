"""A line on a terminal that shows how far things are: those of rank 0 about saves that go on in the background."""

from __future__ import annotations

import atexit
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TextIO

from holdfast._watching.progress import amounts, is_terminal, share

logger = logging.getLogger(__name__)

_PAUSE = 0.1
_WIDTH = 30


class ProgressBar:
    """A line that shows how many bytes are done. It shows nothing unless ``stream`` is a terminal.

    One that is ``transient`` leaves nothing behind, and what the program prints meanwhile begins where the line does.

    >>> with ProgressBar("saving") as bar:
    ...     bar.show(60, 100)
    """

    def __init__(
        self,
        label: str = "",
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        transient: bool = False,
    ) -> None:
        self._done = self._total = 0
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = is_terminal(self._stream)
        self._is_transient = transient
        self._clock = clock
        self._started = clock()
        self._last_drawn: float | None = None

    def show(self, done: int, total: int, label: str | None = None) -> None:
        """So many of ``total`` bytes are done now."""
        self._done, self._total = done, total
        self._label = self._label if label is None else label
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
        line = render(self._done, self._total, now - self._started, self._label)
        self._write("\r" + line[:columns].ljust(columns) + ("\r" if self._is_transient else ""))

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone, which is no reason to stop
            self._is_shown = False


def render(done: int, total: int, seconds: float, label: str = "") -> str:
    """One line about how far things are.

    >>> render(250_000_000, 1_000_000_000, 2.0, "saving")
    'saving  25% [#######.......................] 250.0 MB of 1.0 GB, 125.0 MB/s, 0:06 left'
    """
    part = share(done, total)
    filled = int(_WIDTH * part)
    bar = "#" * filled + "." * (_WIDTH - filled)
    return f"{label} {part:4.0%} [{bar}] {amounts(done, total, seconds)}".lstrip()


def _columns() -> int:
    """How long a line may be without wrapping."""
    return shutil.get_terminal_size().columns - 1


_terminal = threading.Lock()
"""There is one line at the bottom of a terminal. Saves are shown one after the other, as they are carried out."""


class Pending(Protocol):
    """A save that goes on, such as a ``PendingSave``."""

    def progress(self) -> tuple[str, int, int]:
        """The phase, and how many bytes of how many are done."""
        ...

    def done(self) -> bool:
        """Whether it has ended."""
        ...


class ProgressLine:
    """Shows how far a save is until it ends, and then leaves nothing behind. Only on rank 0, and only on a terminal.

    A save that is shorter than ``patience`` seconds is not shown. A thread looks after the line, which ends with the
    save; ``close`` ends it earlier.

    >>> class Saved:
    ...     def progress(self):
    ...         return "committed", 100, 100
    ...     def done(self):
    ...         return True
    >>> with ProgressLine(Saved(), "step 500") as line:
    ...     line.is_shown                  # where stderr is not a terminal
    False
    """

    def __init__(
        self,
        pending: Pending,
        label: str = "save",
        *,
        rank: int = 0,
        stream: TextIO | None = None,
        patience: float = 0.5,
    ) -> None:
        self._pending = pending
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._patience = patience
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.is_shown = rank == 0 and self._stream is not None and is_terminal(self._stream)
        if self.is_shown:
            self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._show, name="holdfast-progress", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python is ending, or there are no threads to be had
            self.is_shown = False
            return
        self._thread = thread
        # Python must not end while the thread writes. It waits for pending saves before, so it is seen till then.
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the line, if it is there still."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            atexit.unregister(self.close)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _show(self) -> None:
        try:
            if self._closing.wait(self._patience):
                return
            while not _terminal.acquire(timeout=_PAUSE):
                if self._is_over():
                    return
            try:
                self._draw()
            finally:
                _terminal.release()
        except Exception:
            logger.exception("how far a save is cannot be shown any longer: %s", self._label)
        finally:
            if not self._closing.is_set():  # or else whoever closes does it
                atexit.unregister(self.close)

    def _draw(self) -> None:
        with ProgressBar(self._label, stream=self._stream, transient=True) as bar:
            while not self._is_over():
                phase, done, total = self._pending.progress()
                bar.show(done, total, f"{self._label}: {phase}")
                self._closing.wait(_PAUSE)

    def _is_over(self) -> bool:
        return self._closing.is_set() or self._pending.done()
