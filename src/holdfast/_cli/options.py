"""Options and arguments that several commands share. A command annotates its parameters with them.

``Json`` goes with every command, ``Quiet`` where there is progress to see, ``Memory`` where tensors are read and
``AllowPickle`` where files of other programs are opened.
"""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast._base.arguments import parse_size


def size_in_bytes(text: str | int) -> int:
    """A number of bytes as people write it. One that is a number already, as defaults are, stays as it is.

    >>> size_in_bytes("256MB"), size_in_bytes("1.5 GiB"), size_in_bytes("4096")
    (256000000, 1610612736, 4096)
    """
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def pairs(texts: list[str] | None, *, option: str) -> dict[str, str]:
    """What was given as ``OLD=NEW``, as often as one likes.

    >>> pairs(["model.*=bfloat16"], option="--cast")
    {'model.*': 'bfloat16'}
    """
    found: dict[str, str] = {}
    for text in texts or ():
        old, sign, new = text.rpartition("=")
        if not sign or not old:
            raise typer.BadParameter(f"{text!r} has no '='; write it as OLD=NEW", param_hint=option)
        found[old] = new
    return found


Place = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help="A folder, a file or a URL that holds a checkpoint.", show_default=False),
]
Places = Annotated[
    list[str],
    typer.Argument(metavar="PATH", help="Checkpoints, or folders that hold some.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]
Memory = Annotated[
    int | None,
    typer.Option(
        "--memory",
        parser=size_in_bytes,
        metavar="SIZE",
        help="How much memory buffers may take, such as 256MB.",
        show_default=False,
    ),
]
AllowPickle = Annotated[
    bool,
    typer.Option("--allow-pickle", help="Load values that were stored as pickles. They can run any code."),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="PATTERN",
        help="Only keys that match, such as 'model.*'. May be given several times.",
        show_default=False,
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude", metavar="PATTERN", help="No keys that match. May be given several times.", show_default=False
    ),
]
