"""``holdfast diff``: what is different between two checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast._cli.app import Example, command
from holdfast._cli.console import progress, reply
from holdfast._cli.options import AllowPickle, Exclude, Include, Json, Memory, Quiet, pairs


@command(
    "diff",
    examples=[
        Example(
            "holdfast diff runs/a/step-00000100 runs/a/step-00000200", "what a hundred steps have changed", status=1
        ),
        Example("holdfast diff runs/a/step-00000200 dcp", "the same state in two formats does not differ"),
        Example(
            "holdfast diff model.safetensors model.pt --rename 0=model.0 --rename 1=model.1", "other names", status=1
        ),
        Example("holdfast diff dcp model.pt --no-values", "only keys, shapes and dtypes; nothing is read"),
    ],
)
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="The checkpoint before.", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="B", help="The checkpoint after.", show_default=False)],
    include: Include = None,
    exclude: Exclude = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            metavar="OLD=NEW",
            help="What keys of A, or their beginnings, are called in B. May be given several times.",
            show_default=False,
        ),
    ] = None,
    values: Annotated[bool, typer.Option("--values/--no-values", help="Compare the elements of tensors too.")] = True,
    memory: Memory = None,
    allow_pickle: AllowPickle = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """Compare two checkpoints: keys, shapes, dtypes, values, and every element.

    They may be of different formats, and saved by different numbers of ranks. Tensors that changed are listed with how
    many elements differ, by how much, and how much that is of their norm. Exit status 1 if anything differs.
    """
    from holdfast._tools.inspecting.diff import diff as compare

    with progress("comparing", quiet=quiet) as on_progress:
        report = compare(
            first,
            second,
            include=include,
            exclude=exclude,
            rename=pairs(rename, option="--rename") or None,
            values=values,
            memory_budget=memory,
            allow_pickle=allow_pickle,
            on_progress=on_progress,
        )
    reply(report.to_json(), str(report), as_json=as_json)
    return 0 if report.ok else 1
