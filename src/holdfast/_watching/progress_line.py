"""A line on rank 0's terminal about a save that goes on in the background."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from types import TracebackType
from typing import Protocol, TextIO

from holdfast._watching.progress import ProgressBar, is_terminal

logger = logging.getLogger(__name__)

_PAUSE = 0.1

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
    ...     line.is_shown                  # where stderr is no terminal
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
        with ProgressBar(0, self._label, stream=self._stream, transient=True) as bar:
            while not self._is_over():
                phase, done, total = self._pending.progress()
                bar.show(done, total, f"{self._label}: {phase}")
                self._closing.wait(_PAUSE)

    def _is_over(self) -> bool:
        return self._closing.is_set() or self._pending.done()
