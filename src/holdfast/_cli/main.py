"""The entry point of the ``holdfast`` command: runs it, and turns what goes wrong into a message and an exit status."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import typer

from holdfast._base.torch_needed import is_about_torch
from holdfast._cli.app import app
from holdfast._cli.console import note, print_json
from holdfast.errors import HoldfastError

MODULES = (
    "ls",
    "show",
    "stat",
    "verify",
    "diff",
    "explain",
    "report",
    "serve",
    "convert",
    "export",
    "repair",
    "du",
    "rm",
    "bench",
    "simulate",
    "completion",
)
"""The modules of commands in this package, in the order in which the help lists them."""

_USAGE_ERROR: type[Any] = next(kind for kind in reversed(typer.BadParameter.__mro__) if hasattr(kind, "format_message"))
"""What the parser of arguments raises, whichever package typer takes it from."""
_SIGPIPE = 128 + int(getattr(signal, "SIGPIPE", 13))
_INTERRUPTED = 130
_COULD_NOT = 2


def main() -> None:
    """Run the command line of this process, and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command line, and return its exit status.

    >>> run(["--version"])
    holdfast ...
    0
    """
    import_commands()
    words, has_json, has_debug = _common(arguments)
    try:
        status = app(words, prog_name="holdfast", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        return _reader_is_gone()
    except (KeyboardInterrupt, typer.Abort):
        note("Interrupted.")
        return _INTERRUPTED
    except SystemExit as error:  # by the parser, if the reader of a pipe is gone
        return _reader_is_gone() if isinstance(error.__context__, BrokenPipeError) else _status_of(error.code)
    except _USAGE_ERROR as error:
        if has_debug and error.__cause__ is not None:  # code of the user has failed
            raise
        return _refused(error, has_json)
    except Exception as error:
        if has_debug:
            raise
        return _failed(error, has_json)
    return _status_of(status)


def import_commands() -> None:
    """Let every module declare its command."""
    for name in MODULES:
        importlib.import_module(f"holdfast._cli.{name}")


def _common(arguments: Sequence[str]) -> tuple[list[str], bool, bool]:
    """The arguments without ``--debug``, whether ``--json`` is among them, and whether ``--debug`` was.

    Both count wherever they stand, and also if the rest makes no sense.
    """
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    options, rest = words[:end], words[end:]
    return [word for word in options if word != "--debug"] + rest, "--json" in options, "--debug" in options


def _status_of(status: Any) -> int:
    return status if isinstance(status, int) else 0


def _refused(error: Any, has_json: bool) -> int:
    """What the parser of arguments does not take."""
    if has_json:
        print_json({"error": {"type": "UsageError", "message": error.format_message()}})
    else:
        error.show()
    return _COULD_NOT


def _failed(error: Exception, has_json: bool) -> int:
    is_expected = isinstance(error, (HoldfastError, OSError, ValueError, TypeError))
    message = str(error) or type(error).__name__
    if isinstance(error, ImportError) and is_about_torch(error):
        message = "this needs torch, which is not installed (pip install torch)"
    elif not is_expected:
        message = f"{type(error).__name__}: {message} (a bug in holdfast; --debug shows where)"
    if has_json:
        fields = error.fields if isinstance(error, HoldfastError) else {}
        print_json({"error": {**fields, "type": type(error).__name__, "message": message}})
    else:
        note(f"Error: {message}")
    return _COULD_NOT


def _reader_is_gone() -> int:
    """End in silence, as commands do whose reader has seen enough, such as ``head``."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())  # or else the interpreter complains when it flushes at its end
    os.close(devnull)
    return _SIGPIPE
