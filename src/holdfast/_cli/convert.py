"""``holdfast convert``."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from holdfast._cli.app import Example, command
from holdfast._cli.console import progress, reply
from holdfast._cli.options import AllowPickle, Exclude, Include, Json, Memory, Quiet, pairs


class Format(str, Enum):
    """What can be written."""

    native = "native"
    dcp = "dcp"
    safetensors = "safetensors"
    torch = "torch"


Rename = Annotated[
    list[str] | None,
    typer.Option(
        "--rename",
        metavar="OLD=NEW",
        help="Another key, or another beginning of keys. May be given several times.",
        show_default=False,
    ),
]
Cast = Annotated[
    list[str] | None,
    typer.Option(
        "--cast",
        metavar="TYPE|PATTERN=TYPE",
        help="Another floating point type, for all tensors of such types or for some keys, such as bfloat16.",
        show_default=False,
    ),
]
ShardSize = Annotated[
    str, typer.Option("--max-file-size", metavar="SIZE", help="The most bytes of each file in a safetensors folder.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there, in one step.")]
NoCheck = Annotated[bool, typer.Option("--no-check", help="Do not read the result back to compare it.")]


@command(
    "convert",
    examples=[
        Example("holdfast convert runs/a/step-00000100 step-100.pt --to torch", "a file for torch.load"),
        Example(
            "holdfast convert runs/a/step-00000100 weights.safetensors --to safetensors --only-tensors",
            "all tensors in one file",
        ),
        Example("holdfast convert dcp moved --to native", "a DCP checkpoint in Holdfast's own format"),
    ],
)
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A checkpoint of any format.", show_default=False)],
    destination: Annotated[
        str, typer.Argument(metavar="DESTINATION", help="Where the new one goes.", show_default=False)
    ],
    to: Annotated[Format, typer.Option("--to", help="The format to write.", show_default=False)],
    include: Include = None,
    exclude: Exclude = None,
    rename: Rename = None,
    cast: Cast = None,
    max_file_size: ShardSize = "5GB",
    only_tensors: Annotated[bool, typer.Option("--only-tensors", help="Leave out all values.")] = False,
    overwrite: Overwrite = False,
    no_check: NoCheck = False,
    memory: Memory = None,
    allow_pickle: AllowPickle = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint of any format as one of another.

    Tensors go through in pieces, so that it takes little memory. The result is made beside the destination, read back
    and compared, and only then gets its name: there is all of it, or nothing. A destination that ends in .safetensors
    is a file, and so is one of --to torch; others are folders.
    """
    from holdfast._tools.converting.convert import convert as convert_

    with progress("converting", quiet=quiet) as on_progress:
        report = convert_(
            source,
            destination,
            to=to.value,
            include=include,
            exclude=exclude,
            rename=pairs(rename, option="--rename") or None,
            cast=cast_from(cast),
            max_file_size=max_file_size,
            overwrite=overwrite,
            only_tensors=only_tensors,
            check=not no_check,
            memory_budget=memory,
            allow_pickle=allow_pickle,
            on_progress=on_progress,
        )
    reply(report.to_json(), str(report), as_json=as_json)


def cast_from(texts: list[str] | None) -> str | dict[str, str] | None:
    """What ``--cast`` means: one type for all, or types by patterns.

    >>> cast_from(["bfloat16"]), cast_from(["model.*=float16", "float32"])
    ('bfloat16', {'model.*': 'float16', '*': 'float32'})
    """
    if not texts:
        return None
    if len(texts) == 1 and "=" not in texts[0]:
        return texts[0]
    # A type alone is for all that no pattern is about, and so it comes last.
    by_pattern = [text for text in texts if "=" in text] + [f"*={text}" for text in texts if "=" not in text]
    return pairs(by_pattern, option="--cast")
