"""``holdfast explain``: would a checkpoint load, and if not, why."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.app import Example, command
from holdfast.cli.console import reply
from holdfast.cli.options import AllowPickle, Exclude, Include, Json, Place, pairs


@command(
    "explain",
    examples=[
        Example("holdfast explain runs/a/step-00000300 model.py:make_state", "a function that makes the state"),
        Example("holdfast explain dcp runs/a/step-00000100", "in the place of another checkpoint"),
        Example("holdfast explain model.safetensors runs/a/step-00000100", "names that do not fit", status=1),
        Example(
            "holdfast explain model.safetensors dcp --rename 0=model.0 --rename 1=model.1 --allow-missing step",
            "the same, with what load would be told",
        ),
    ],
)
def explain(
    path: Place,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="Another checkpoint; or file.py:name or module:name, which is imported, run, and gives a state.",
            show_default=False,
        ),
    ],
    include: Include = None,
    exclude: Exclude = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            metavar="OLD=NEW",
            help="What stored keys, or their beginnings, are called in the state. May be given several times.",
            show_default=False,
        ),
    ] = None,
    cast: Annotated[bool, typer.Option("--cast", help="Allow conversions to other dtypes.")] = False,
    strict: Annotated[bool, typer.Option("--strict/--no-strict", help="Refuse missing and unexpected keys.")] = True,
    allow_missing: Annotated[
        list[str] | None,
        typer.Option("--allow-missing", metavar="PATTERN", help="Keys that may be missing.", show_default=False),
    ] = None,
    allow_unexpected: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-unexpected", metavar="PATTERN", help="Stored keys that need no place.", show_default=False
        ),
    ] = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> int:
    """Tell whether a checkpoint would load into a state, why not, and what would help.

    It says what holdfast.load would say, and changes nothing. The state is what a function of yours makes (file.py:name
    or module:name, which runs that code), or another checkpoint whose keys, shapes and dtypes are taken for those of a
    state. Exit status 1 if it would not load.
    """
    from holdfast.cli.given_states import state_named
    from holdfast.torch_needed import needing_torch

    with needing_torch("holdfast explain"):
        from holdfast.inspecting.explain import explain as ask

    answer = ask(
        path,
        state_named(target),
        include=include,
        exclude=exclude,
        rename=pairs(rename, option="--rename") or None,
        cast=cast,
        strict=strict,
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
        allow_pickle=allow_pickle,
    )
    reply(answer.to_json(), str(answer), as_json=as_json)
    return 0 if answer.ok else 1
