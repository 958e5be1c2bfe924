"""Deletes one checkpoint of any format: what makes it one goes first, so that a kill leaves nothing that looks whole.

Only files of checkpoints are removed, and a folder only if it is empty then.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.cli.listing import Entry, look_at_store
from holdfast.errors import NotACheckpointError, NotDeletedError, RunInUseError
from holdfast.formats.native.names import RECORD, generation_of
from holdfast.manager.run_file import RUN_FILE, RunFile
from holdfast.manager.steps import SET_ASIDE
from holdfast.repairing.liveliness import owner_around, why_perhaps_alive
from holdfast.repairing.native import KEPT
from holdfast.storage.hf_names import COMMIT_NAME, INDEX_NAME
from holdfast.stores.places import local_path
from holdfast.stores.roots import Root, root_at
from holdfast.stores.store import Store


def refuse_to_remove(entry: Entry, *, force: bool) -> None:
    """Raise if a checkpoint must not be deleted, or not without force."""
    path = local_path(entry.path)
    if path is not None and path.is_symlink():
        raise _kept(entry, "is a link to another place. Delete what is there, or remove the link yourself")
    if path is not None and path.is_file():
        return
    root, name = _around(entry.path)
    store = root.child(name)
    run_file = RunFile(root)
    owner = run_file.read().owner
    if owner is not None and owner.owns(root.marks()) and owner.life() == "alive":
        raise RunInUseError(
            f"{root.location} is in use by {owner}. Its manager deletes by its policy; or stop it first.",
            path=root.location,
            host=owner.host,
            pid=owner.pid,
            since=owner.since,
        )
    if force:
        return
    doubt = owner_around(store)
    if doubt is not None:
        raise _kept(entry, f"may be in use by {doubt}. --force deletes it nevertheless")
    if entry.step is not None and entry.step in run_file.read().pinned:
        raise _kept(entry, "is pinned. --force deletes it nevertheless")
    if entry.state == "being written":
        raise _kept(entry, "is being written, it seems. --force deletes it nevertheless")
    newer = [listed.name for listed in store.list() if generation_of(listed.name) not in (None, entry.identity)]
    alive = why_perhaps_alive(store, newer) if newer and entry.identity else None
    if alive is not None:
        raise _kept(entry, f"has files of another save beside it: {alive}. --force deletes all of it nevertheless")


def remove(entry: Entry) -> list[str]:
    """Delete a checkpoint. Returns the names of other files that are left in its folder."""
    path = local_path(entry.path)
    if path is not None and path.is_file():
        path.unlink()
        return []
    root, name = _around(entry.path)
    store = root.child(name)
    with _noted(root, name, entry):
        now = look_at_store(store, name)
        if now is None:
            raise NotACheckpointError(f"{entry.path} is no checkpoint any more.", path=entry.path, found=[])
        if now.identity != entry.identity:
            raise _kept(entry, "has been replaced by another save meanwhile")
        _remove_files(store, _Names.of(store, entry.format))
        root.remove(name)
    return sorted(listed.name for listed in store.list())


class _Names:
    """The files of a checkpoint: what makes it one, and the rest."""

    def __init__(self, first: list[str], rest: list[str]) -> None:
        self.first = first
        self.rest = rest

    @classmethod
    def of(cls, store: Store, format_: str) -> _Names:
        names = [listed.name for listed in store.list()]
        if format_ == "native":
            rest = [
                name for name in names if generation_of(name) or name == SET_ASIDE or KEPT in name or _temporary(name)
            ]
            return cls([RECORD], rest)
        if format_ == "dcp":
            indexes = [name for name in names if name.endswith(".metadata")]
            return cls(indexes, [name for name in names if name.endswith(".distcp") or ".metadata." in name])
        first = [name for name in names if name in (INDEX_NAME, COMMIT_NAME)]
        return cls(first, [name for name in names if name.endswith(".safetensors") or ".safetensors." in name])


def _temporary(name: str) -> bool:
    return name.startswith((f".{RECORD}.", f".{SET_ASIDE}.")) and name.endswith(".tmp")


def _remove_files(store: Store, names: _Names) -> None:
    store.delete(names.first)
    store.sync()  # a power cut must not bring it back when the files are gone
    store.delete(names.rest)
    store.sync()


@contextmanager
def _noted(root: Root, name: str, entry: Entry) -> Iterator[None]:
    """Own the run meanwhile, if there is one, and note in it what is being deleted: the next job goes on with that."""
    if root.store.size(RUN_FILE) is None:
        yield
        return
    run_file, token = RunFile(root), secrets.token_hex(8)
    run_file.claim(token)
    try:
        run_file.begin(token, {name: entry.identity})
        yield
        run_file.end(token, [name], gone=[name])
        if entry.step is not None:
            with suppress(OSError):
                run_file.unpin(entry.step)
    finally:
        run_file.release(token)


def _around(place: str) -> tuple[Root, str]:
    """The folder that a checkpoint lies in, and its name there."""
    path = local_path(place)
    if path is not None:
        return root_at(Path(path).parent), path.name
    parent, _, name = place.rstrip("/").rpartition("/")
    return root_at(parent), name


def _kept(entry: Entry, why: str) -> NotDeletedError:
    return NotDeletedError(f"{entry.path} {why}.", path=entry.path, reason=why)
