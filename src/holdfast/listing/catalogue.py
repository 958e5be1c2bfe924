"""The checkpoints at a place, as they are found from time to time. What has not changed is not read again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.listing.entries import Entry, entry_of_other, entry_of_step
from holdfast.listing.liveliness import run_at
from holdfast.listing.seen import SeenFolder
from holdfast.listing.shelf import Shelf
from holdfast.manager.run_file import Row, RunState
from holdfast.manager.steps import StepInfo, folder_of, list_steps, look_at, rows_of, step_of
from holdfast.stores.roots import Root


@dataclass(frozen=True)
class Look:
    """What was there at one moment."""

    folders: Sequence[SeenFolder]
    checkpoints: Sequence[Entry]
    """By step, those without one last."""
    run: RunState = field(default_factory=RunState)
    problem: str = ""
    """What is wrong with the folder or with its run file."""


class Catalogue:
    """The checkpoints in a folder, or a single one.

    Example:
        >>> import tempfile, torch
        >>> import holdfast as hf
        >>> folder = tempfile.mkdtemp()
        >>> saved = hf.save({"w": torch.ones(4)}, folder + "/step-500")
        >>> [(entry.step, entry.state, entry.format) for entry in Catalogue(folder).look().checkpoints]
        [(500, 'committed', 'native')]
    """

    def __init__(self, place: str | os.PathLike[str] | Root) -> None:
        self.shelf = Shelf(place)
        self._rows: dict[str, Row] = {}
        self._known: dict[str, tuple[Any, Entry | None]] = {}

    def look(self) -> Look:
        """What there is now."""
        run, problem = run_at(self.shelf.root)
        folders = self.shelf.look()
        if self.shelf.is_gone:
            problem = f"there is nothing at {self.shelf.root.location} any more: it was deleted, moved or unmounted"
        return Look(folders, self._checkpoints(run, folders), run, problem)

    def _checkpoints(self, run: RunState, folders: Sequence[SeenFolder]) -> list[Entry]:
        root = self.shelf.root
        seen = {folder.name: folder for folder in folders}
        remembered = replace(run, rows={**self._rows, **run.rows})
        found: dict[str, Entry] = {}
        steps = self._steps(remembered, seen)
        for info in steps:
            folder = seen.get(info.name)
            if folder is not None:  # or else it came since, or is not to be shown
                known = info, folder
                entry = self._recalled(info.name, known) or entry_of_step(info, folder)
                self._known[info.name] = known, entry
                found[info.name] = entry
        fresh = [info for info in steps if info.identity and info.name not in remembered.rows]
        self._rows = {**{name: row for name, row in self._rows.items() if name in seen}, **rows_of(root, fresh, run)}
        for name, folder in seen.items():
            if name not in found:
                other = self._other(root, folder)
                if other is not None:
                    found[name] = other
        return sorted(found.values(), key=lambda entry: (entry.step is None, entry.step or 0, entry.name))

    def _steps(self, run: RunState, seen: Iterable[str]) -> list[StepInfo]:
        """The steps of the run; of a single checkpoint no more than that, for there may be thousands beside it."""
        root, single = self.shelf.root, self.shelf.single
        step = None if single is None else step_of(single)
        if single is None or (step is not None and single != folder_of(step)):
            return list_steps(root, run)
        info = None if step is None or single not in seen else look_at(root, step, run)
        return [] if info is None else [info]

    def _other(self, root: Root, folder: SeenFolder) -> Entry | None:
        entry = self._recalled(folder.name, folder)
        if entry is None:
            store = None if folder.is_file else root.child(folder.name)
            entry = entry_of_other(folder, self.shelf.location_of(folder.name), store)
            self._known[folder.name] = folder, entry
        return entry

    def _recalled(self, name: str, known: Any) -> Entry | None:
        """What was found out about a folder, if nothing of what was seen of it has changed since."""
        before = self._known.get(name)
        return before[1] if before is not None and before[0] == known else None
