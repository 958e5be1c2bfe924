"""``holdfast repair``: puts right what can be put right, after showing what that would be."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast._cli.app import Example, command
from holdfast._cli.console import progress, reply
from holdfast._cli.options import Json, Memory, Quiet


@command(
    "repair",
    examples=[
        Example("holdfast repair runs/a", "what is wrong in a run, and what could be done; changes nothing"),
        Example("holdfast repair damaged", "a checkpoint whose tables are lost", status=1),
        Example("holdfast repair damaged --apply", "do it"),
        Example("holdfast repair runs/a --sweep --apply", "also remove what killed saves have left"),
    ],
)
def repair(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A checkpoint, or a folder of some, such as a run.", show_default=False),
    ],
    apply: Annotated[bool, typer.Option("--apply", help="Do it. Without this nothing is changed.")] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="With --apply: remove files that killed saves and conversions left behind.")
    ] = False,
    generation: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="If a record is lost: the save to make one of, by the id in the names of its files. Needed if "
            "there are several, or if nothing proves that all files of it are there.",
        ),
    ] = None,
    memory: Memory = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """Rebuild what is lost from data files, and sweep leftover files.

    Without --apply it is a dry run. Of Holdfast's own format, the tables of data files are rebuilt from the record and
    the headers of these files, and a record from the data files alone, where all tensors are complete (other values are
    lost then). Of a Hugging Face folder, the index is rebuilt and a killed save is finished. A checkpoint of DCP cannot
    be rebuilt without its index; lost keys are listed. Nothing is destroyed: what is replaced is kept as
    NAME.before-repair, and data files that are written again stay beside the new ones.

    The content of tensors is not checked here; holdfast verify does that. Exit status: 1 if something is wrong and was
    not repaired.
    """
    from holdfast._tools.repairing.repair import repair as repair_place

    with progress("reading", quiet=quiet) as on_progress:
        report = repair_place(
            path, apply=apply, sweep=sweep, generation=generation, memory_budget=memory, on_progress=on_progress
        )
    reply(report.to_json(), lambda: str(report), as_json=as_json)
    return 0 if report.ok else 1
