"""The ``holdfast`` command, to which every module of a command adds its own.

A command is a function with a docstring, of which the first line is shown in lists. It answers through
``console.reply`` and returns the exit status, which is 0 if it returns nothing:

    @command("ls", examples=[Example("holdfast ls runs/a", "the checkpoints of a run")])
    def ls(paths: Places, as_json: Json = False) -> None:
        \"\"\"List checkpoints.\"\"\"

What costs time to import is imported inside of that function, so that other commands begin at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import typer

F = TypeVar("F", bound=Callable[..., Any])

STATUSES: Mapping[int, str] = MappingProxyType(
    {
        0: "fine",
        1: "the answer is bad: damage (also that repair leaves), differences, a state that would not load, nan",
        2: "it could not be done: a wrong option, no such checkpoint, an error",
        130: "interrupted by Ctrl-C",
    }
)
"""What the exit status means."""

app = typer.Typer(
    name="holdfast",
    no_args_is_help=True,
    add_completion=False,  # `holdfast completion` does this, and says what it does
    rich_markup_mode=None,  # keys have brackets, which are not markup
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@dataclass(frozen=True)
class Example:
    """A line to type, which the tests do, in a folder with the checkpoints that it names."""

    line: str
    says: str
    status: int = 0
    """With which it ends."""
    runs: bool = True
    """Whether the tests can run it: a server, for one, does not end."""


@dataclass(frozen=True)
class Declared:
    """A command of the app."""

    name: str
    function: Callable[..., Any]
    examples: Sequence[Example] = ()


COMMANDS: dict[str, Declared] = {}
"""All that were declared, by their names."""


def command(name: str, *, examples: Sequence[Example] = ()) -> Callable[[F], F]:
    """Declare a command of ``holdfast``. The examples become the end of its help."""

    def declare(function: F) -> F:
        COMMANDS[name] = Declared(name, function, tuple(examples))
        app.command(name, epilog=_epilog(examples))(function)
        return function

    return declare


def _epilog(examples: Sequence[Example]) -> str | None:
    if not examples:
        return None
    shown = "\n".join(f"  {example.line}\n      {example.says}" for example in examples)
    return f"\b\nExamples:\n{shown}"


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from holdfast._version import __version__

        print(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def holdfast(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where in the program an error comes from. May be given anywhere.")
    ] = False,
) -> None:
    """Look inside, check, compare and convert checkpoints of PyTorch.

    Every command takes checkpoints of Holdfast, of torch.distributed.checkpoint, safetensors files, Hugging Face
    folders and files of torch.save. With --json the answer is one JSON object on the standard output.

    \b
    Exit status: 0 if all is well, 1 if the answer is bad (damage, differences),
    2 if it could not be done, 130 after Ctrl-C.
    """
