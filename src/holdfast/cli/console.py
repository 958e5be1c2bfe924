"""How commands answer: for people on a terminal, as plain text in a pipe, or as JSON.

An answer goes to the standard output and everything else (progress, questions, errors) to the standard error, so that
a pipe gets the answer alone.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from rich.console import Console, RenderableType
from rich.text import Text

from holdfast.plain_data import plain
from holdfast.progress import is_terminal

View: TypeAlias = "RenderableType | Callable[[], RenderableType]"

_WIDTH_OF_A_PIPE = 200
"""Wide enough for most tables: what is cut off in a pipe is lost."""


def reply(answer: Mapping[str, Any], view: View, *, as_json: bool) -> None:
    """Give the answer of a command: as one JSON object, or as it looks to people.

    ``view`` is a text, which is printed as it is, or anything that rich can print; or a function that gives one.
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
    """The standard error, for everything that is no answer."""
    return _console(is_error=True)


def note(text: str) -> None:
    """Tell something beside the answer."""
    err().print(Text(text), soft_wrap=True)


def asks() -> bool:
    """Whether somebody is there to answer a question."""
    return is_terminal(sys.stdin) and is_terminal(sys.stderr)


def _console(*, is_error: bool) -> Console:
    stream = sys.stderr if is_error else sys.stdout
    width = None if is_terminal(stream) else max(_WIDTH_OF_A_PIPE, shutil.get_terminal_size().columns)
    # Emoji codes and highlighted numbers have no place in keys and paths.
    return Console(stderr=is_error, width=width, highlight=False, emoji=False, markup=False)
