"""``holdfast report``: a page for the browser about a checkpoint."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from holdfast._cli.app import Example, command
from holdfast._cli.console import progress, reply
from holdfast._cli.options import AllowPickle, Json, Memory, Place, Quiet
from holdfast._watching.progress import size


@command(
    "report",
    examples=[
        Example("holdfast report runs/a/step-00000200 -o report.html", "write a page about a checkpoint"),
        Example(
            "holdfast report runs/a/step-00000200 --compare runs/a/step-00000100 -o changes.html",
            "and what changed since another one",
        ),
        Example(
            "holdfast report runs/a/step-00000200 --verify --statistics 'model.*'", "check it, and look at all weights"
        ),
    ],
)
def report(
    checkpoint: Place,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to write it; NAME.html here if it is not given."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option("--compare", metavar="CHECKPOINT", help="An earlier checkpoint: show what changed since then."),
    ] = None,
    statistics: Annotated[
        list[str] | None,
        typer.Option(
            "--statistics",
            metavar="PATTERN",
            help="Tensors to describe, such as 'model.*', or 'all', or 'none'. May be given several times. By default "
            "the largest, as long as no more than 256 MiB are read for it.",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read everything, compare all digests, and show it.")
    ] = False,
    open_browser: Annotated[bool, typer.Option("--open", help="Show it in a browser.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE even if it is not a report.")] = False,
    memory: Memory = None,
    allow_pickle: AllowPickle = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """Write a page for the browser: sizes, contents, layout, balance, statistics, what changed.

    The page is one file that loads nothing from anywhere. It shows where the bytes are, a list of all entries that can
    be searched, how each tensor is cut over ranks and files, how even the ranks shared the work and how long each took.
    With --verify the exit status is 1 if there is damage; the page is written and shows it.
    """
    from holdfast._tools.reporting.assets import is_report, require_folder
    from holdfast._tools.reporting.report import make_report

    path = output or Path(default_name(checkpoint))
    require_folder(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file to write, such as {path / 'report.html'}")
    if path.exists() and not force and not is_report(path):
        raise FileExistsError(f"{path} exists and is not a report of holdfast; choose another name, or use --force")
    with progress("reading", quiet=quiet) as on_progress:
        made = make_report(
            checkpoint,
            compare=compare,
            statistics=_wanted(statistics),
            verify=verify,
            memory_budget=memory,
            allow_pickle=allow_pickle,
            on_progress=on_progress,
        )
    made.save(path)
    checked = made.facts["verify"]
    nbytes = path.stat().st_size
    answer = {
        "report": str(path),
        "bytes": nbytes,
        "checkpoint": made.path,
        "totals": made.facts["totals"],
        "verified": checked and {"ok": checked["ok"], "checked": checked["checked"], "damage": checked["damage"]},
    }
    reply(answer, f"{path} ({size(nbytes)})", as_json=as_json)
    if open_browser:
        webbrowser.open(path.resolve().as_uri())
    return 1 if checked and not checked["ok"] else 0


def default_name(checkpoint: str) -> str:
    """The name of a report that nobody named.

    >>> default_name("runs/a/step-00000200/"), default_name("model.safetensors"), default_name(".")
    ('step-00000200.html', 'model.safetensors.html', 'report.html')
    """
    last = checkpoint.replace("\\", "/").rstrip("/").rpartition("/")[2]
    return f"{last}.html" if last.strip(".") else "report.html"


def _wanted(patterns: list[str] | None) -> list[str] | bool | None:
    if patterns == ["all"]:
        return True
    return False if patterns == ["none"] else patterns
