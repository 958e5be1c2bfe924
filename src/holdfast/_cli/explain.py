"""``holdfast explain``: would a checkpoint load, and if not, why."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from holdfast._cli.app import Example, command
from holdfast._cli.console import reply
from holdfast._cli.options import AllowPickle, Exclude, Include, Json, Place, pairs

# States that the user names on the command line, as ``file.py:name`` or ``module:name``.


_NAMED = re.compile(r"(?P<where>.+?\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)")


def state_named(target: str) -> Any:
    """The state that an argument names, which runs code of the user; any other argument, which is a path, as it is."""
    named = _NAMED.fullmatch(target)
    if named is None or os.path.exists(target):
        return target
    module = _run(named["where"], lambda: _module_at(named["where"]))
    made = getattr(module, named["name"], None)
    if made is None:
        raise typer.BadParameter(f"{named['where']} has no {named['name']!r}", param_hint="TARGET")
    return _run(target, made) if callable(made) and not hasattr(made, "state_dict") else made


def _run(where: str, code: Callable[[], Any]) -> Any:
    """Run code of the user. A failure of it is not a bug of ours, and must not look like one."""
    try:
        return code()
    except typer.BadParameter:
        raise
    except (Exception, SystemExit) as error:
        raise typer.BadParameter(
            f"{where}: {type(error).__name__}: {error}, raised by the code that makes the state (--debug shows where)",
            param_hint="TARGET",
        ) from error


def _module_at(where: str) -> ModuleType:
    if not where.endswith(".py"):
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
                raise typer.BadParameter(f"there is no module {where!r}", param_hint="TARGET") from None
            raise
    path = Path(where)
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {where!r}", param_hint="TARGET")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # as if it was run: it may import modules beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


@command(
    "explain",
    examples=[
        Example("holdfast explain runs/a/step-00000300 model.py:make_state", "a function that makes the state"),
        Example("holdfast explain dcp runs/a/step-00000100", "in the place of another checkpoint"),
        Example("holdfast explain model.safetensors runs/a/step-00000100", "names that do not fit", status=1),
        Example(
            "holdfast explain model.safetensors dcp --rename 0=model.0 --rename 1=model.1 --allow-missing step",
            "the same, with the options that load would be given",
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
    """Say whether a checkpoint would load into a state, why not, and what would help.

    It says what holdfast.load would say, and changes nothing. The state is what a function of yours makes (file.py:name
    or module:name, which runs that code), or another checkpoint whose keys, shapes and dtypes are taken for those of a
    state. Exit status 1 if it would not load.
    """
    from holdfast._base.torch_needed import needing_torch

    with needing_torch("holdfast explain"):
        from holdfast._tools.inspecting.explain import explain as ask

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
