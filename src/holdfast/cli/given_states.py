"""States that the user names on the command line, as ``file.py:name`` or ``module:name``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

_NAMED = re.compile(r"(?P<where>.+?\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)")


def state_named(target: str) -> Any:
    """The state that a text names, which runs code of the user; any other text, which is a path, as it is."""
    named = _NAMED.fullmatch(target)
    if named is None or os.path.exists(target):
        return target
    module = _run(named["where"], lambda: _module_at(named["where"]))
    made = getattr(module, named["name"], None)
    if made is None:
        raise typer.BadParameter(f"{named['where']} has no {named['name']!r}", param_hint="TARGET")
    return _run(target, made) if callable(made) and not hasattr(made, "state_dict") else made


def _run(where: str, code: Callable[[], Any]) -> Any:
    """Run code of the user. That it fails is no defect of ours, and must not look like one."""
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
    sys.path.insert(0, str(path.parent.resolve()))  # as if it was run: it may import what lies beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module
