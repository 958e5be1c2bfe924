"""What was rebuilt of a checkpoint, as it is noted in it (``written.repaired``), and what follows for trusting it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

REPAIRED = "repaired"
DIGESTS_COMPUTED = "digests_computed"
"""The note in columns whose digests are not those of the save."""

_NAMED = {"columns": "the columns (where chunks lie, and digests) were", "record": "the record was"}

What = Literal["columns", "record"]
Origin = Literal["computed", "kept"]


@dataclass(frozen=True, slots=True)
class Repair:
    """A part of a checkpoint that was rebuilt."""

    what: str
    """``columns`` or ``record``."""
    time: str
    """When."""
    source: str
    """From what."""
    digests: str
    """``computed`` from the data files as they were then, or ``kept`` as they were."""

    @property
    def has_new_digests(self) -> bool:
        """Whether the digests vouch for nothing that happened before. They do not if that is not known."""
        return self.digests != "kept"

    def __str__(self) -> str:
        named = {"columns": "the columns (where chunks lie, and digests)", "record": "the record"}.get(
            self.what, self.what
        )
        text = f"{named} of this checkpoint were rebuilt" if self.what == "columns" else f"{named} was rebuilt"
        text += f" by a repair at {self.time}, from {self.source}."
        if self.has_new_digests:
            text += (
                " The digests are of the data as it was then: damage since then is noticed, damage from before is not, "
                "and nobody can vouch for that data."
            )
        else:
            text += " The data agreed with the digests that were taken when it was saved."
        if self.what == "record":
            text += " Values, ties, metadata and tensors without elements were lost."
        return text

    def to_json(self) -> dict[str, str]:
        """As it is stored."""
        members = asdict(self)
        return {"what": members["what"], "time": members["time"], "from": members["source"], "digests": self.digests}


def noted(written: Mapping[str, Any], repair: Repair) -> dict[str, Any]:
    """How a checkpoint was written, with one more repair.

    >>> noted({"by": "me"}, Repair("columns", "2026-01-01", "the record", "computed"))["repaired"]
    [{'what': 'columns', 'time': '2026-01-01', 'from': 'the record', 'digests': 'computed'}]
    """
    before = [found.to_json() for found in repairs_in(written)]
    return {**written, REPAIRED: [*before, repair.to_json()]}


def repairs_in(written: Any) -> tuple[Repair, ...]:
    """The repairs that a checkpoint tells of, the oldest first. Whatever is noted in another way is one too."""
    noted_there = written.get(REPAIRED) if isinstance(written, Mapping) else None
    if noted_there is None:
        return ()
    rows = noted_there if isinstance(noted_there, list) else [noted_there]
    return tuple(_repair(row if isinstance(row, Mapping) else {}) for row in rows)


def _repair(row: Mapping[str, Any]) -> Repair:
    def text(name: str, otherwise: str) -> str:
        found = row.get(name)
        return found if isinstance(found, str) else otherwise

    return Repair(
        text("what", "a part"),
        text("time", "an unknown time"),
        text("from", "the data files"),
        text("digests", "computed"),
    )
