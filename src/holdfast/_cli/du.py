"""``holdfast du``: disk usage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from holdfast._cli.app import Example, command
from holdfast._cli.console import printable, reply
from holdfast._cli.options import AllowPickle, Json, Places
from holdfast._watching.progress import size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from holdfast._formats.source import Source


class GroupBy(str, Enum):
    """What sizes are added up by."""

    tree = "tree"
    dtype = "dtype"
    rank = "rank"
    file = "file"


class UsageRow(NamedTuple):
    """A part of a checkpoint and what it takes."""

    name: str
    nbytes: int
    tensors: int

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"name": self.name, "bytes": self.nbytes, "tensors": self.tensors}


@command(
    "du",
    examples=[
        Example("holdfast du runs/a/step-00000200", "the parts of a checkpoint, the largest last"),
        Example("holdfast du runs/a/step-00000200 --depth 2", "one level further down"),
        Example("holdfast du dcp --by rank", "who wrote how much"),
        Example("holdfast du runs/a", "the checkpoints of a run, and what is left over"),
    ],
)
def du(
    paths: Places,
    by: Annotated[GroupBy, typer.Option(help="What to add up by.")] = GroupBy.tree,
    depth: Annotated[int, typer.Option(min=1, help="How many parts of keys to show, with --by tree.")] = 1,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Show disk usage, within a checkpoint or of several.

    For a checkpoint: the sizes of its tensors by part of the tree, by dtype, by the rank that wrote them, or by file.
    For a run or a folder: the sizes of the checkpoints in it, and of files that are no longer needed. Nothing but
    names, records and indexes is read.
    """
    places = [_place(path, by, depth, allow_pickle) for path in paths]
    reply({"places": places}, lambda: _view(places, by), as_json=as_json)


def _place(path: str, by: GroupBy, depth: int, allow_pickle: bool) -> dict[str, Any]:
    from holdfast._tools.listing.listing import list_place

    listing = list_place(path)
    if listing.kind == "checkpoint" and listing.entries[0].state in ("committed", "set aside"):
        return _checkpoint(path, by, depth, allow_pickle)
    from holdfast._tools.repairing.leftovers import leftovers_at

    rows = [UsageRow(entry.name, entry.bytes_on_disk, 0) for entry in listing.entries]
    return {
        "path": listing.path,
        "kind": listing.kind,
        "bytes_on_disk": sum(row.nbytes for row in rows),
        "leftover_bytes": sum(leftover.nbytes for leftover in leftovers_at(path) if leftover.obstacle is None),
        "rows": [row.to_json() for row in sorted(rows, key=lambda row: row.nbytes)],
    }


def _checkpoint(path: str, by: GroupBy, depth: int, allow_pickle: bool) -> dict[str, Any]:
    from holdfast._load.opening import open_source

    with open_source(path, allow_pickle=allow_pickle) as source:
        rows = sorted(_rows(source, by, depth), key=lambda row: (row.nbytes, row.name))
        return {
            "path": source.location,
            "kind": "checkpoint",
            "format": source.format,
            "tensor_bytes": sum(ref.nbytes for ref in source.tensors.values()),
            "bytes_on_disk": sum(nbytes for _, nbytes in source.files()),
            "by": by.value,
            "rows": [row.to_json() for row in rows],
        }


def _rows(source: Source, by: GroupBy, depth: int) -> Iterator[UsageRow]:
    nbytes: dict[str, int] = defaultdict(int)
    tensors: dict[str, set[str]] = defaultdict(set)
    if by is GroupBy.file:
        nbytes |= dict(source.files())
    for key, ref in source.tensors.items():
        if by is GroupBy.tree or by is GroupBy.dtype:
            name = part_of_key(key, depth) if by is GroupBy.tree else str(ref.dtype)
            nbytes[name] += ref.nbytes
            tensors[name].add(key)
            continue
        for chunk in source.chunk_places(key):
            name = chunk.file if by is GroupBy.file else f"rank {'?' if chunk.rank is None else chunk.rank}"
            tensors[name].add(key)
            if by is GroupBy.rank:
                nbytes[name] += chunk.nbytes
    for name, number in nbytes.items():
        yield UsageRow(name, number, len(tensors[name]))


def part_of_key(key: str, depth: int) -> str:
    """The first parts of a key.

    >>> part_of_key("model.layers.0.weight", 2), part_of_key("step", 2), part_of_key('["a.b"]["c"]', 1)
    ('model.layers', 'step', '["a.b"]')
    """
    if key.startswith("["):
        return "]".join(key.split("]")[:depth]) + "]"
    return ".".join(key.split(".")[:depth])


def _view(places: list[dict[str, Any]], by: GroupBy) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    for place in places:
        is_one = place["kind"] == "checkpoint"
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("SIZE", justify="right", no_wrap=True)
        table.add_column("SHARE", justify="right", no_wrap=True)
        if is_one:
            table.add_column("TENSORS", justify="right", no_wrap=True)
        table.add_column(by.value.upper() if is_one else "NAME", no_wrap=True)
        total = sum(row["bytes"] for row in place["rows"]) or 1
        for row in place["rows"]:
            count = [str(row["tensors"])] if is_one else []
            table.add_row(size(row["bytes"]), f"{row['bytes'] / total:.0%}", *count, Text(printable(row["name"])))
        parts += [Text(printable(_headline(place)), style="bold"), table]
    return Group(*parts)


def _headline(place: dict[str, Any]) -> str:
    on_disk = size(place["bytes_on_disk"])
    if place["kind"] == "checkpoint" and "tensor_bytes" in place:
        return f"{place['path']}: {on_disk} on the disk, {size(place['tensor_bytes'])} of tensors ({place['format']})"
    leftover = place["leftover_bytes"]
    tail = f", {size(leftover)} of leftover files (holdfast repair --sweep --apply removes them)" if leftover else ""
    return f"{place['path']}: {on_disk} on the disk{tail}"
