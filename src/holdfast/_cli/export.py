"""``holdfast export``."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast._cli.app import Example, command
from holdfast._cli.console import progress, reply
from holdfast._cli.convert import Cast, NoCheck, Overwrite, Rename, ShardSize, cast_from
from holdfast._cli.options import AllowPickle, Json, Memory, Quiet, pairs


@command(
    "export",
    examples=[
        Example("holdfast export runs/a/step-00000100 model-hf", "a folder that Hugging Face's loaders read"),
        Example(
            "holdfast export runs/a/step-00000100 model-bf16 --cast bfloat16 --max-file-size 2GB",
            "in half the bytes, in files of 2 GB",
        ),
    ],
)
def export(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A checkpoint of any format.", show_default=False)],
    destination: Annotated[str, typer.Argument(metavar="FOLDER", help="The folder to make.", show_default=False)],
    part: Annotated[
        str | None,
        typer.Option(
            "--part",
            metavar="KEY",
            help="Where in the state the model is; found by its name if not given.",
            show_default=False,
        ),
    ] = None,
    max_file_size: ShardSize = "5GB",
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include",
            metavar="PATTERN",
            help="Only names of the model that match, such as '*.weight'. May be given several times.",
            show_default=False,
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="PATTERN",
            help="No names of the model that match. May be given several times.",
            show_default=False,
        ),
    ] = None,
    rename: Rename = None,
    cast: Cast = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="MODEL",
            help="A model whose names and shapes must be the same, or else nothing is written.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file",
            metavar="FILE",
            help="Another file to put there, such as config.json. May be given several times.",
            show_default=False,
        ),
    ] = None,
    overwrite: Overwrite = False,
    no_check: NoCheck = False,
    memory: Memory = None,
    allow_pickle: AllowPickle = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write the weights of a model as a Hugging Face folder.

    It needs nothing but the checkpoint: no model class, no GPU, no other processes, and little memory however large
    the model is. Names of the model are those below its part of the state; patterns and renames are about these. The
    answer lists what was taken for the model, and what was left out.
    """
    from holdfast._tools.converting.export import export as export_

    with progress("exporting", quiet=quiet) as on_progress:
        report = export_(
            source,
            destination,
            part=part,
            max_file_size=max_file_size,
            include=include,
            exclude=exclude,
            rename=pairs(rename, option="--rename") or None,
            cast=cast_from(cast),
            like=like,
            files=file or (),
            overwrite=overwrite,
            check=not no_check,
            memory_budget=memory,
            allow_pickle=allow_pickle,
            on_progress=on_progress,
        )
    reply(report.to_json(), str(report), as_json=as_json)
