"""The files of a folder, by whose they are. ``files_in`` of each format's ``names.py`` answers that for its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

KEPT = ".before-repair"
"""At the end of the names of what a repair has replaced, and keeps beside it."""
_KEPT_COPY = re.compile(rf"(.+){re.escape(KEPT)}[0-9]*", re.DOTALL)


@dataclass(frozen=True)
class FolderFiles:
    """Names of files in a folder. What is in none of these fields is somebody else's, and nobody's to remove."""

    index: Sequence[str] = ()
    """What makes it a checkpoint, and is removed first if it is deleted: a record, indexes."""
    needed: Sequence[str] = ()
    """Data of the checkpoint."""
    by_save: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Data that the checkpoint does not need, by the generation of the save that wrote it: one that was replaced, was
    killed, or is writing now. Under "" stands what other writers of the format have left, who have no generations."""
    unfinished: Sequence[str] = ()
    """Temporary files of commits that were killed, or are under way."""
    notes: Sequence[str] = ()
    """What a run has noted beside the checkpoint."""
    copies: Sequence[str] = ()
    """What repairs have replaced."""

    def of_our_saves(self) -> dict[str, Sequence[str]]:
        """Data that the checkpoint does not need, of saves by Holdfast."""
        return {save: names for save, names in sorted(self.by_save.items()) if save}

    def of_any_save(self) -> list[str]:
        """Data that the checkpoint does not need, whoever wrote it."""
        return sorted(name for names in self.by_save.values() for name in names)


def original_of(name: str) -> str:
    """What a file was called that a repair has replaced; empty for other files.

    >>> original_of("holdfast.json.before-repair2")
    'holdfast.json'
    """
    found = _KEPT_COPY.fullmatch(name)
    return "" if found is None else found.group(1)
