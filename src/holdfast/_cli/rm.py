"""``holdfast rm``: deletes checkpoints."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast._cli.app import Example, command
from holdfast._cli.console import asks, note, printable, reply
from holdfast._cli.options import Json, Yes
from holdfast._watching.progress import size

if TYPE_CHECKING:
    from holdfast._tools.listing.entries import Entry


@command(
    "rm",
    examples=[
        Example("holdfast rm runs/a/step-00000100 --dry-run", "what would be deleted"),
        Example("holdfast rm runs/a/step-00000100 --yes", "delete it, without asking"),
    ],
)
def rm(
    paths: Annotated[
        list[str], typer.Argument(metavar="CHECKPOINT", help="Folders or files of checkpoints.", show_default=False)
    ],
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only show what would be deleted.")] = False,
    force: Annotated[bool, typer.Option(help="Also what is pinned, or may be being written.")] = False,
    as_json: Json = False,
) -> int:
    """Delete checkpoints; their records go first.

    It asks first if there is a terminal; otherwise --yes is needed. The record of a checkpoint, or its index, goes
    first, so that a kill leaves nothing that looks intact. Only files of checkpoints are deleted, and a folder if it is
    empty then. What is not a checkpoint is refused, and so is what is pinned (unless --force is given) and what is in a
    run that a job is using. Whether a job on another machine is alive is unknown: with --force its checkpoints are
    deleted, except one that it is writing, and it goes on saving. If one of several is refused, none is deleted.
    """
    from holdfast._tools.deleting import refuse_to_remove, remove

    entries = list({_real(entry.path): entry for entry in map(_checkpoint_at, paths)}.values())  # each once
    for entry in entries:
        refuse_to_remove(entry, force=force)
    total = sum(entry.bytes_on_disk for entry in entries)
    if not dry_run and not yes and not _are_to_go(entries, total):
        note("Nothing was deleted.")
        return 2
    left = {} if dry_run else {entry.path: remove(entry) for entry in entries}
    answer: dict[str, Any] = {
        "deleted": not dry_run,
        "bytes": total,
        "checkpoints": [{**entry.to_json(), "files_left": left.get(entry.path, [])} for entry in entries],
    }
    reply(answer, lambda: _text(entries, left, dry_run=dry_run), as_json=as_json)
    return 0


def _checkpoint_at(path: str) -> Entry:
    from holdfast._formats.format_names import stands_for_its_folder
    from holdfast._tools.listing.listing import list_place
    from holdfast.errors import NotACheckpointError

    listing = list_place(path)
    name = path.rstrip("/").rpartition("/")[2]
    if stands_for_its_folder(name) and listing.path.rpartition("/")[2] != name:
        raise NotACheckpointError(
            f"{path} is only a file of the checkpoint {listing.path}. Give that folder, to delete all of it.",
            path=path,
            found=[listing.path],
        )
    if listing.kind != "checkpoint":
        raise NotACheckpointError(
            f"{listing.path} is not one checkpoint but a folder of {len(listing.entries)}. Give those that are to be "
            f"deleted, such as {listing.entries[0].path if listing.entries else listing.path + '/...'}.",
            path=listing.path,
            found=[entry.name for entry in listing.entries],
        )
    return listing.entries[0]


def _real(place: str) -> str:
    from holdfast._stores.places import local_path

    path = local_path(place)
    return place if path is None else os.path.realpath(path)


def _are_to_go(entries: list[Entry], total: int) -> bool:
    """What somebody at the terminal says."""
    if not asks():
        raise typer.BadParameter(
            "there is no terminal to ask on; give --yes to delete, or --dry-run to look", param_hint="--yes"
        )
    for entry in entries:
        note(f"{printable(entry.path)}  {size(entry.bytes_on_disk)}  {entry.state}")
    return typer.confirm(f"Delete {len(entries)} checkpoint(s), {size(total)}?", err=True)


def _text(entries: list[Entry], left: dict[str, list[str]], *, dry_run: bool) -> str:
    word = "would delete" if dry_run else "deleted"
    lines = []
    for entry in entries:
        others = left.get(entry.path, [])
        tail = f"; left what is not part of it: {', '.join(others[:5])}" if others else ""
        lines.append(printable(f"{word} {entry.path}, {size(entry.bytes_on_disk)}{tail}"))
    return "\n".join(lines)
