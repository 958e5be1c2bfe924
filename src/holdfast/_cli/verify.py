"""``holdfast verify``: is a checkpoint intact."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast._cli.app import Example, command
from holdfast._cli.console import progress, reply
from holdfast._cli.options import AllowPickle, Exclude, Include, Json, Memory, Quiet


@command(
    "verify",
    examples=[
        Example("holdfast verify runs/a/step-00000300", "read everything and compare all digests"),
        Example("holdfast verify runs/a/step-* model.pt", "several, of any format"),
        Example("holdfast verify damaged", "list all damage; the exit status says it too", status=1),
        Example("holdfast verify dcp --include 'model.*'", "only a part of it"),
    ],
)
def verify(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="CHECKPOINT", help="Checkpoints: folders, files or URLs.", show_default=False),
    ],
    include: Include = None,
    exclude: Exclude = None,
    memory: Memory = None,
    allow_pickle: AllowPickle = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """Read whole checkpoints, compare all digests, and list all damage.

    It goes on after the first damage, and names the tensors that are stored there. How much can be found depends on the
    format, which the answer says: checkpoints of Holdfast have a digest of every byte, those of torch have checksums
    of most, safetensors files have none. Exit status 1 if something is damaged.
    """
    from holdfast._tools.inspecting.verify import verify as verify_one

    reports = []
    for path in paths:
        with progress(f"verifying {path}", quiet=quiet) as on_progress:
            reports.append(
                verify_one(
                    path,
                    include=include,
                    exclude=exclude,
                    memory_budget=memory,
                    allow_pickle=allow_pickle,
                    on_progress=on_progress,
                )
            )
    is_intact = all(report.ok for report in reports)
    answer = {"ok": is_intact, "reports": [report.to_json() for report in reports]}
    reply(answer, "\n".join(map(str, reports)), as_json=as_json)
    return 0 if is_intact else 1
