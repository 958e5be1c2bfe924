"""``holdfast ls``: the checkpoints of a run, or of any folder."""

from __future__ import annotations

from datetime import datetime, timezone
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast._cli.app import Example, command
from holdfast._cli.console import printable, reply
from holdfast._cli.options import Json
from holdfast._watching.progress import size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from holdfast._tools.listing.entries import Entry
    from holdfast._tools.listing.listing import Listing


class Order(str, Enum):
    """By what checkpoints are sorted."""

    step = "step"
    age = "age"
    size = "size"
    name = "name"


@command(
    "ls",
    examples=[
        Example("holdfast ls runs/a", "the checkpoints of a run, the newest last"),
        Example("holdfast ls runs/a --sort size", "the largest last"),
        Example("holdfast ls runs/* --json", "for programs"),
    ],
)
def ls(
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH", help="Runs, checkpoints, or folders that hold some; here if none is given."),
    ] = None,
    sort: Annotated[Order, typer.Option(help="What to sort by; the largest or newest comes last.")] = Order.step,
    as_json: Json = False,
) -> None:
    """List checkpoints: step, state, size, age, metrics.

    A folder of checkpoints of any format can be given, or the folder of a run. States are: committed; set aside, after
    damage was found; damaged, if its record cannot be read or its files are missing or cut off; being written;
    unfinished, if it is unknown whether somebody still writes it; leftover, which a killed save has left. Only
    records are read. What the data files hold is checked by holdfast verify.
    """
    from holdfast._tools.listing.listing import list_place

    listings = [list_place(path) for path in paths or ["."]]
    answer = {"places": [_as_json(listing, sort) for listing in listings]}
    reply(answer, lambda: _view(listings, sort), as_json=as_json)


def _as_json(listing: Listing, order: Order) -> dict[str, Any]:
    return {**listing.to_json(), "entries": [entry.to_json() for entry in _sorted(listing.entries, order)]}


def _sorted(entries: Any, order: Order) -> list[Entry]:
    if order is Order.age:
        return sorted(entries, key=lambda entry: (entry.saved_at is not None, entry.saved_at or 0))
    if order is Order.size:
        return sorted(entries, key=lambda entry: entry.nbytes)
    return sorted(entries, key=lambda entry: entry.name) if order is Order.name else list(entries)


def _view(listings: list[Listing], order: Order) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for listing in listings:
        if len(listings) > 1 or listing.kind != "checkpoint":
            parts.append(Text(printable(_headline(listing)), style="bold"))
        parts.append(_table(_sorted(listing.entries, order)))
    return Group(*parts)


def _headline(listing: Listing) -> str:
    total = size(sum(entry.nbytes for entry in listing.entries))
    owner = f"; in use by {listing.owner}" if listing.owner else ""
    count = len(listing.entries)
    return f"{listing.path}: {count} checkpoint{'' if count == 1 else 's'}, {total}{owner}"


def _table(entries: list[Entry]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    metrics = sorted({name for entry in entries for name in entry.metrics})
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("NAME", no_wrap=True)
    table.add_column("STATE")
    table.add_column("SIZE", justify="right", no_wrap=True)
    table.add_column("AGE", justify="right", no_wrap=True)
    table.add_column("FORMAT", no_wrap=True)
    for name in metrics:
        table.add_column(Text(printable(name)), justify="right", no_wrap=True)
    for entry in entries:
        numbers = [f"{entry.metrics[name]:.6g}" if name in entry.metrics else "" for name in metrics]
        state = Text(printable(_state(entry)), _STYLES.get(entry.state, ""))
        rest = (size(entry.nbytes), age(entry.saved_at), entry.format, *numbers)
        table.add_row(Text(printable(entry.name)), state, *map(Text, rest))
    return table


_STYLES = {"set aside": "yellow", "damaged": "red", "being written": "cyan", "unfinished": "cyan", "leftover": "dim"}


def _state(entry: Entry) -> str:
    state = f"{entry.state}, pinned" if entry.pinned else entry.state
    state = f"{state}, {entry.repaired} rebuilt" if entry.repaired else state
    return f"{state}: {entry.why}" if entry.why else state


def age(moment: datetime | None) -> str:
    """How long ago something was, in the largest unit that fits.

    >>> from datetime import timedelta
    >>> age(datetime.now(timezone.utc) - timedelta(hours=30)), age(None)
    ('30 h', '')
    """
    if moment is None:
        return ""
    seconds = max(0.0, (datetime.now(timezone.utc) - moment.astimezone(timezone.utc)).total_seconds())
    for unit, length, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < length * most:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
