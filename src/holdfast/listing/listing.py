"""All that is at one place, at one moment: checkpoints of any format, saves that run, and what others have left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.errors import NotACheckpointError
from holdfast.listing.catalogue import Catalogue, Look
from holdfast.listing.entries import Entry, entry_of_unfinished
from holdfast.listing.liveliness import owner_in
from holdfast.manager.steps import step_of

_MOST_NAMED = 20


@dataclass(frozen=True)
class Listing:
    """What is at one place."""

    path: str
    kind: Literal["run", "folder", "checkpoint"]
    entries: Sequence[Entry]
    owner: str = ""
    """Who saves there now, or is not known to have ended."""
    run: str = ""
    """The id of the run, if it is one."""

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "path": self.path,
            "kind": self.kind,
            "owner": self.owner,
            "run": self.run,
            "entries": [entry.to_json() for entry in self.entries],
        }


def list_place(place: str) -> Listing:
    """The checkpoints at a place, the newest last. Raises ``NotACheckpointError`` if there are none.

    >>> import tempfile
    >>> list_place(tempfile.mkdtemp())
    Traceback (most recent call last):
    holdfast.errors.NotACheckpointError: there is no checkpoint at ...
    """
    catalogue = Catalogue(place)
    shelf, look = catalogue.shelf, catalogue.look()
    whole = {entry.name for entry in look.checkpoints}
    left = [folder for folder in look.folders if folder.name not in whole]
    unfinished = [entry_of_unfinished(folder, shelf.location_of(folder.name), look.run) for folder in left]
    entries = sorted([*look.checkpoints, *filter(None, unfinished)], key=_by_age)
    is_run = _is_run(look, entries)
    if not entries and (not is_run or shelf.single is not None):
        found = sorted(listed.name for listed in shelf.root.store.list())
        inner = "" if shelf.single is not None else ", nor in a folder directly inside of it"
        raise NotACheckpointError(
            f"there is no checkpoint at {shelf.location}{inner}. Check the path.",
            path=shelf.location,
            found=found[:_MOST_NAMED] if shelf.single is None else [],
        )
    owner = look.problem or owner_in(look.run) or ""
    if shelf.single is not None:
        return Listing(shelf.location, "checkpoint", entries)
    return Listing(shelf.location, "run" if is_run else "folder", entries, owner, look.run.run)


def _is_run(look: Look, entries: Sequence[Entry]) -> bool:
    """Whether a manager saved here, or checkpoints are named as if one had."""
    return bool(look.run.run or look.problem) or any(step_of(entry.name) is not None for entry in entries)


def _by_age(entry: Entry) -> tuple[Any, ...]:
    """Steps by their number, behind what has none; everything else by time."""
    when = 0.0 if entry.saved_at is None else entry.saved_at.timestamp()
    return (entry.step is not None, entry.step or 0, when, entry.name)
