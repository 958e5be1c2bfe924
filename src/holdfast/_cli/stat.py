"""``holdfast stat``: one checkpoint in numbers."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast._cli.app import Example, command
from holdfast._cli.console import progress, reply
from holdfast._cli.options import AllowPickle, Json, Memory, Place, Quiet


@command(
    "stat",
    examples=[
        Example("holdfast stat runs/a/step-00000300", "who saved it, when, and how much of what is in it"),
        Example("holdfast stat model.safetensors --finite", "look for nan and infinities, too"),
    ],
)
def stat(
    path: Place,
    finite: Annotated[bool, typer.Option("--finite", help="Read all tensors and look for nan and infinities.")] = False,
    memory: Memory = None,
    allow_pickle: AllowPickle = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """Describe a checkpoint: its format, when and by what it was saved, and how much is in it.

    The answer has the number of ranks, the versions of everything, files and bytes, the elements of each dtype and of
    each part, the metadata that was given to save, and how long its phases took. With --finite exit status 1 means that
    there are elements that are nan or infinite.
    """
    from holdfast._load.checkpoint import open_checkpoint
    from holdfast._tools.inspecting.summary import summarize

    with open_checkpoint(path, allow_pickle=allow_pickle) as checkpoint:
        with progress("reading", quiet=quiet) as on_progress:
            summary = summarize(checkpoint, finite=finite, memory_budget=memory, on_progress=on_progress)
        reply(summary.to_json(), str(summary), as_json=as_json)
    return 0 if summary.ok else 1
