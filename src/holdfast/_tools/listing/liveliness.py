"""Whether somebody may be writing at a place just now. Whatever is reported or removed is decided here."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from holdfast._manager.run_file import RunFile, RunState
from holdfast._stores.places import local_path
from holdfast._stores.roots import Root, root_at
from holdfast._stores.store import Store
from holdfast.errors import HoldfastError

PATIENCE = 600.0
"""Seconds for which files must not have changed before the save that wrote them is taken for dead."""


def around(place: str) -> tuple[Root, str]:
    """The folder that a checkpoint is in, and its name there.

    >>> around("memory://run/step-1")
    (MemoryRoot('memory://run'), 'step-1')
    """
    path = local_path(place)
    if path is not None:
        return root_at(path.parent), path.name
    parent, _, name = place.rstrip("/").rpartition("/")
    return root_at(parent), name


def run_at(root: Root) -> tuple[RunState, str]:
    """What the run file in a folder says, and what is wrong with it. A copy of a run has no owner."""
    try:
        return without_owner_of_original(RunFile(root).read(), root), ""
    except (HoldfastError, OSError) as error:
        return RunState(), str(error)


def without_owner_of_original(run: RunState, root: Root) -> RunState:
    """What the run file in a folder says, without an owner if that is the owner of a folder of which this is a copy."""
    return run if run.owner is None or run.owner.owns(root.marks()) else replace(run, owner=None)


def owner_of(root: Root) -> str | None:
    """Who saves to the run in this folder, or may do so; None if nobody does."""
    run, trouble = run_at(root)
    return f"somebody, perhaps: {trouble}" if trouble else owner_in(run)


def owner_in(run: RunState) -> str | None:
    """The same, of a run file that was read."""
    if run.owner is None or run.owner.life() == "dead":
        return None
    is_sure = run.owner.life() == "alive"
    return str(run.owner) if is_sure else f"{run.owner}, and it is unknown here whether it has ended"


def owner_around(store: Store) -> str | None:
    """Who owns the run that a checkpoint is in."""
    try:
        return owner_of(around(store.location)[0])
    except ValueError:  # a place of one's own, which has nothing around it that could be found
        return None


def last_change(store: Store, names: Iterable[str]) -> float | None:
    """When one of these files was last written; None where that is unknown."""
    folder = local_path(store.location)
    if folder is None:
        return None
    times = []
    for name in names:
        with suppress(FileNotFoundError):
            times.append(os.stat(folder / name).st_mtime)
    return max(times, default=None)


def why_perhaps_alive(store: Store, names: Iterable[str]) -> str | None:
    """Why these files may be those of a save that still goes on; None if they cannot be."""
    changed = last_change(store, names)
    quiet = None if changed is None else time.time() - changed
    try:
        root, name = around(store.location)
    except ValueError:  # a place of one's own, which has nothing around it that could be found
        return why_perhaps_writing(RunState(), "", quiet)
    run, trouble = run_at(root)
    return f"the run may be in use: {trouble}" if trouble else why_perhaps_writing(run, name, quiet)


def why_perhaps_writing(run: RunState, name: str, quiet: float | None) -> str | None:
    """Why a save may go on in the folder ``name`` of a run; None if it cannot.

    ``quiet`` is for how many seconds none of its files has changed, if that is known.
    """
    if was_cut_off(run, name):
        return None
    owner = owner_in(run)
    if owner is not None:
        return f"the run is in use by {owner}"
    if quiet is None:
        return "it is unknown when it was written"
    if quiet < PATIENCE:
        return f"it was written less than {PATIENCE / 60:.0f} minutes ago, and a save may be going on"
    return None


def was_cut_off(run: RunState, name: str) -> bool:
    """Whether the job that is known to have begun to change this folder is known to have ended."""
    return name in run.unfinished and run.owner is not None and run.owner.life() == "dead"


def is_at_work(run: RunState, name: str, quiet: float | None) -> bool:
    """Whether all speaks for a save that goes on: its job is alive, or its files have changed of late."""
    if was_cut_off(run, name):
        return False
    is_begun = name in run.unfinished and run.owner is not None and run.owner.life() == "alive"
    return is_begun or (quiet is not None and quiet < PATIENCE)
