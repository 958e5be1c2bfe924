"""How far a long command is: a bar with rate and remaining time on a terminal, a line now and then elsewhere.

Both go to the standard error. A command that is done at once shows nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.progress import OnProgress, ProgressBar, is_terminal, render

_PATIENCE = 0.5
"""Seconds after which a bar appears: what takes less needs none."""
_PAUSE = 5.0
"""Seconds between two lines where nobody sees a bar."""


@contextmanager
def progress(label: str, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> Iterator[OnProgress]:
    """Show how far things are while the block runs, as often as what it gives is called.

    >>> with progress("verifying", quiet=True) as on_progress:
    ...     on_progress(50, 100)
    """
    if quiet:
        yield _nothing
    elif is_terminal(sys.stderr):
        with _bar(label, clock) as on_progress:
            yield on_progress
    else:
        yield _lines(label, clock)


def _nothing(done: int, total: int) -> None:
    pass


@contextmanager
def _bar(label: str, clock: Callable[[], float]) -> Iterator[OnProgress]:
    started = clock()
    with ProgressBar(0, label, clock=clock, transient=True) as bar:

        def on_progress(done: int, total: int) -> None:
            if clock() - started >= _PATIENCE:
                bar.show(done, total)

        yield on_progress


def _lines(label: str, clock: Callable[[], float]) -> OnProgress:
    started = last = clock()

    def on_progress(done: int, total: int) -> None:
        nonlocal last
        now = clock()
        if now - last >= _PAUSE:
            last = now
            print(_line(label, done, total, now - started), file=sys.stderr, flush=True)

    return on_progress


def _line(label: str, done: int, total: int, seconds: float) -> str:
    """What ``render`` says, without the drawing of a bar."""
    head, _, rest = render(done, total, seconds, label).partition(" [")
    return f"{head} {rest.partition('] ')[2]}"
