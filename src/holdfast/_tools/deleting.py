"""Deletes one checkpoint of any format: what makes it one goes first, so that a kill leaves nothing that looks intact.

Only files of checkpoints are removed, and a folder only if it is empty then.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from holdfast._formats.dcp import names as dcp_names
from holdfast._formats.folder_files import FolderFiles
from holdfast._formats.hf_folder import names as hf_names
from holdfast._formats.native import names as native_names
from holdfast._formats.native.names import RECORD
from holdfast._manager.run_file import RUN_FILE, RunFile, RunState
from holdfast._stores.places import local_path
from holdfast._stores.roots import Root
from holdfast._stores.store import Store
from holdfast._tools.listing.entries import Entry
from holdfast._tools.listing.listing import list_place
from holdfast._tools.listing.liveliness import (
    PATIENCE,
    around,
    last_change,
    owner_around,
    owner_in,
    run_at,
    why_perhaps_alive,
    without_owner_of_original,
)
from holdfast.errors import HoldfastError, NotACheckpointError, NotDeletedError, RunInUseError


def refuse_to_remove(entry: Entry, *, force: bool) -> None:
    """Raise if a checkpoint must not be deleted, or not without force."""
    path = local_path(entry.path)
    if path is not None and path.is_symlink():
        raise _kept(entry, "is a link to another place. Delete what is there, or remove the link yourself")
    root, name = around(entry.path)
    if _is_file(root, name):
        _refuse_a_part(root, entry)
        return
    store = root.child(name)
    run, trouble = run_at(root)
    if trouble:
        raise _kept(entry, f"may be in use: the run file beside it cannot be read ({trouble})")
    _refuse_in_use(root, name, entry, run)
    found = _files_in(store, entry.format)
    if not found.index and not _rest(found, entry.format):
        raise _kept(entry, "has no files that are certain to be its own. Delete them yourself")
    if force:
        return
    doubt = owner_around(store)
    if doubt is not None:
        raise _kept(entry, f"may be in use by {doubt}. --force deletes it anyway")
    if entry.pinned:
        raise _kept(entry, "is pinned. --force deletes it anyway")
    if entry.state == "being written":
        raise _kept(entry, "is being written, it seems. --force deletes it anyway")
    if entry.state == "unfinished":
        raise _kept(entry, f"may be being written: {entry.why}. --force deletes it anyway")
    newer = [name for save, names in found.of_our_saves().items() if save != entry.identity for name in names]
    alive = why_perhaps_alive(store, newer) if newer and entry.identity and entry.format != "dcp" else None
    if alive is not None:
        raise _kept(entry, f"has files of another save beside it: {alive}. --force deletes all of it anyway")


def _refuse_in_use(root: Root, name: str, entry: Entry, run: RunState) -> None:
    """Raise if a job is known to use the run, or has begun to write to this very folder and may be doing so."""
    owner = run.owner
    if owner is None or owner.life() == "dead":
        return
    if owner.life() == "alive":
        raise RunInUseError(
            f"{root.location} is in use by {owner}. Its manager deletes by its policy; or stop it first.",
            path=root.location,
            host=owner.host,
            pid=owner.pid,
            since=owner.since,
        )
    if run.unfinished.get(name) != "":
        return
    store = root.child(name)
    changed = last_change(store, [listed.name for listed in store.list()])
    if changed is None or time.time() - changed < PATIENCE:
        raise _kept(
            entry,
            f"is being written by {owner}, as the run file says, and from here nobody can see whether that job has "
            f"ended. Stop it first; what it has begun is deleted with --force when it has not changed for "
            f"{PATIENCE / 60:.0f} minutes, where that is known. Or delete the files yourself",
        )


def remove(entry: Entry) -> list[str]:
    """Delete a checkpoint. Returns the names of other files that are left in its folder.

    A run that it is in stays with the job that owns it, which may be alive on another machine and go on saving.
    """
    root, name = around(entry.path)
    if _is_file(root, name):
        root.store.delete([name])
        root.store.sync()
        return []
    store = root.child(name)
    with _noted(root, name, entry) as run:
        try:
            (now,) = list_place(entry.path).entries
        except HoldfastError as error:
            raise NotACheckpointError(f"{entry.path} is no longer a checkpoint.", path=entry.path, found=[]) from error
        if now.identity != entry.identity:
            raise _kept(entry, "has been replaced by another save meanwhile")
        found = _files_in(store, entry.format)
        if owner_in(run) is not None and entry.format == "native" and entry.identity:
            # The owner may begin to save here at any moment.
            found = replace(found, by_save={entry.identity: found.by_save.get(entry.identity, ())})
        store.delete(found.index)
        store.sync()  # a power cut must not bring it back when the files are gone
        store.delete(_rest(found, entry.format))
        store.sync()
        root.remove(name)
    return sorted(listed.name for listed in store.list())


def _files_in(store: Store, format_: str) -> FolderFiles:
    names = [listed.name for listed in store.list()]
    if format_ == "native":
        return native_names.files_in(names)
    if format_ == "dcp":
        return dcp_names.files_in(names)
    return hf_names.files_in(names, _files_of_model(store, names))


def _files_of_model(store: Store, names: Collection[str]) -> set[str]:
    """The files of a model with safetensors files: what its index names, or all if there is none."""
    from holdfast._formats.safetensors.source import SafetensorsSource

    try:
        with SafetensorsSource(local_path(store.location) or store) as source:
            return {name for name, _ in source.files()} - {hf_names.INDEX_NAME, hf_names.COMMIT_NAME}
    except HoldfastError:  # what cannot be opened is known by its name alone
        return set(hf_names.model_files(names))


def _rest(found: FolderFiles, format_: str) -> list[str]:
    """What goes after the index: the data, of saves that were cut off too, and what Holdfast has put beside it."""
    saves = [name for names in found.of_our_saves().values() for name in names]
    if format_ == "dcp":  # whose files are of the checkpoint whoever wrote them; other models may be beside a model
        saves = found.of_any_save()
    return [*found.needed, *saves, *found.unfinished, *found.notes, *found.copies]


def _is_file(root: Root, name: str) -> bool:
    return root.store.size(name) is not None


def _refuse_a_part(root: Root, entry: Entry) -> None:
    """Raise if a file is one of several that make up a checkpoint."""
    beside = {listed.name for listed in root.store.list()}
    is_ours = native_names.generation_of(entry.name) is not None or dcp_names.is_data_file(entry.name)
    found = hf_names.files_in(beside - {entry.name})
    is_of_a_model = hf_names.is_data_file(entry.name) and bool(found.index or found.by_save.get(""))
    if is_ours or is_of_a_model:
        raise _kept(entry, f"is a part of the checkpoint in {root.location}. Give that folder, to delete all of it")


@contextmanager
def _noted(root: Root, name: str, entry: Entry) -> Iterator[RunState]:
    """Note in the run, if there is one, what is being deleted: after a kill the next job goes on with that.

    The run is not claimed for it: that would take it from a job on another machine, which cannot be seen from here.
    """
    if root.store.size(RUN_FILE) is None:
        yield RunState()
        return

    def check(state: RunState) -> None:
        _refuse_in_use(root, name, entry, without_owner_of_original(state, root))

    run_file = RunFile(root)
    if entry.format != "native":  # jobs would not know what to finish
        run = run_file.read()
        check(run)
        yield without_owner_of_original(run, root)
        return
    run = run_file.begin_beside(name, entry.identity, check)
    try:
        yield without_owner_of_original(run, root)
    except BaseException:
        with suppress(OSError):
            if root.child(name).size(RECORD) is not None:  # nothing was deleted, so there is nothing to be finished
                run_file.end_beside(name, entry.identity, is_gone=False)
        raise
    unpinned = [entry.step] if entry.pinned and entry.step is not None else []
    run_file.end_beside(name, entry.identity, is_gone=True, unpinned=unpinned)


def _kept(entry: Entry, why: str) -> NotDeletedError:
    return NotDeletedError(f"{entry.path} {why}.", path=entry.path, reason=why)
