"""How commands answer: for people on a terminal, as plain text in a pipe, or as JSON, and how far they are."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from rich.console import Console, RenderableType
from rich.text import Text

from holdfast._base.texts import plain
from holdfast._watching.progress import OnProgress, amounts, is_terminal, share

# Texts that others have written, such as names of folders, as they can be shown on a terminal.


def printable(text: str) -> str:
    """The text with everything escaped that would move the cursor, ring the bell or change colours.

    >>> print(printable("step\\x1b[31m 1\\n"), printable("größe"))
    step\\x1b[31m 1\\n größe
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


# How commands answer: for people on a terminal, as plain text in a pipe, or as JSON.
#
# An answer goes to the standard output and everything else (progress, questions, errors) to the standard error, so
# that a pipe gets the answer alone.


View: TypeAlias = "RenderableType | Callable[[], RenderableType]"

_WIDTH_OF_A_PIPE = 200
"""Wide enough for most tables: what is cut off in a pipe is lost."""


def reply(answer: Mapping[str, Any], view: View, *, as_json: bool) -> None:
    """Give the answer of a command: as one JSON object, or as it looks to people.

    ``view`` is a str, which is printed as it is, or anything that rich can print; or a function that gives one.
    """
    if as_json:
        print_json(answer)
        return
    shown = view() if callable(view) else view
    console = out()
    if isinstance(shown, str):
        console.print(Text(shown), soft_wrap=True)
    elif console.is_terminal:
        console.print(shown)
    else:
        with console.capture() as capture:
            console.print(shown)
        print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def print_json(answer: Mapping[str, Any]) -> None:
    """One JSON object on the standard output."""
    text = json.dumps(plain(answer), ensure_ascii=False, allow_nan=False)
    print(text.encode("utf-8", "backslashreplace").decode("utf-8"))


def out() -> Console:
    """The standard output: with colours on a terminal, unless NO_COLOR is set; plain in a pipe."""
    return _console(is_error=False)


def err() -> Console:
    """The standard error, for everything that is not an answer."""
    return _console(is_error=True)


def note(text: str) -> None:
    """Print something that is not part of the answer."""
    err().print(Text(text), soft_wrap=True)


def asks() -> bool:
    """Whether somebody is there to answer a question."""
    return is_terminal(sys.stdin) and is_terminal(sys.stderr)


def _console(*, is_error: bool) -> Console:
    stream = sys.stderr if is_error else sys.stdout
    width = None if is_terminal(stream) else max(_WIDTH_OF_A_PIPE, shutil.get_terminal_size().columns)
    # Emoji codes and highlighted numbers have no place in keys and paths.
    return Console(stderr=is_error, width=width, highlight=False, emoji=False, markup=False)


# How far a long command is: a bar with rate and remaining time on a terminal, a line now and then elsewhere.
#
# Both go to the standard error. A command that is done at once shows nothing.


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
    from rich import progress as bars  # only for what takes long

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    # What is printed meanwhile is an answer, which must not go where the bar is.
    bar = bars.Progress(*columns, console=err(), transient=True, redirect_stdout=False, get_time=clock)
    task = bar.add_task(label, total=None)
    started = clock()

    def on_progress(done: int, total: int) -> None:
        if clock() - started >= _PATIENCE:
            bar.start()
            bar.update(task, completed=done, total=total)

    try:
        yield on_progress
    finally:
        with suppress(OSError, ValueError):  # the terminal is gone, which is no reason for a command to fail
            bar.stop()


def _lines(label: str, clock: Callable[[], float]) -> OnProgress:
    started = last = clock()

    def on_progress(done: int, total: int) -> None:
        nonlocal last
        now = clock()
        if now - last >= _PAUSE:
            last = now
            line = f"{label} {share(done, total):4.0%} {amounts(done, total, now - started)}"
            print(line, file=sys.stderr, flush=True)

    return on_progress
