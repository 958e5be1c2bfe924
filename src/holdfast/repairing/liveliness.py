"""Whether somebody may be writing at a place just now."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.manager.run_file import RunFile
from holdfast.stores.places import local_path
from holdfast.stores.roots import Root, root_at
from holdfast.stores.store import Store

if os.name == "posix":
    import fcntl

PATIENCE = 600.0
"""Seconds for which files must not have changed before the save that wrote them is taken for dead."""


def owner_of(root: Root) -> str | None:
    """Who saves to the run in this folder, or may do so; None if nobody does."""
    try:
        owner = RunFile(root).read().owner
    except (HoldfastError, OSError) as error:
        return f"somebody, perhaps: {error}"
    if owner is None or not owner.owns(root.marks()) or owner.life() == "dead":
        return None
    return str(owner) if owner.life() == "alive" else f"{owner}, of which nobody knows here whether it has ended"


def owner_around(store: Store) -> str | None:
    """Who owns the run that a checkpoint lies in."""
    folder = local_path(store.location)
    parent = str(folder.parent) if folder is not None else store.location.rstrip("/").rpartition("/")[0]
    try:
        return owner_of(root_at(parent))
    except ValueError:  # a place of one's own, which has nothing around it that could be found
        return None


def last_change(store: Store, names: Iterable[str]) -> float | None:
    """When one of these files was last written; None where that is not told."""
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
    owner = owner_around(store)
    if owner is not None:
        return f"the run is in use by {owner}"
    changed = last_change(store, names)
    if changed is None:
        return "it cannot be told when it was written"
    if time.time() - changed < PATIENCE:
        return f"it was written less than {PATIENCE / 60:.0f} minutes ago, and a save may be going on"
    return None


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock on a file or folder."""
    if os.name != "posix":
        return True  # nobody knows
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except OSError:  # no locks here, so nobody has one
        return False
    finally:
        os.close(descriptor)
    return False
