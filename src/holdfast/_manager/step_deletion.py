"""Deletes checkpoints of a run: the record first, so that a kill in between leaves nothing that looks like one.

Only files that a save of this run has written are removed, and a folder only if it is empty then. A deletion that
failed half-way is tried again with the next ones; after a restart the run file says what was left.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from holdfast._formats.native.names import RECORD, files_in
from holdfast._formats.native.record import decode_record
from holdfast._formats.native.source import NativeSource
from holdfast._manager.background_jobs import BackgroundJobs
from holdfast._manager.probing import is_probe, remove_probe
from holdfast._manager.run_file import RunFile, RunState
from holdfast._manager.steps import DAMAGE, StepInfo, identity_in, set_aside, step_of
from holdfast._stores.roots import Root
from holdfast._stores.store import Store
from holdfast.errors import HoldfastError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Deletion:
    """What became of a step that was to be deleted."""

    step: int
    path: str
    nbytes: int
    seconds: float
    outcome: Literal["deleted", "would be deleted", "kept", "failed"]
    reason: str = ""
    """Why it was kept, or what failed."""

    @property
    def is_gone(self) -> bool:
        """Whether it has been deleted."""
        return self.outcome == "deleted"


class Deleter:
    """Deletes steps of the run that ``token`` owns, one after the other, in one background thread.

    ``on_deletion`` is called with every outcome, in the thread where it happens, and ``on_damage`` for a checkpoint
    that was to be verified first and is damaged. With ``dry_run`` nothing is changed.
    """

    def __init__(
        self,
        run_file: RunFile,
        token: str,
        *,
        dry_run: bool = False,
        on_deletion: Callable[[Deletion], None] | None = None,
        on_damage: Callable[[StepInfo, Exception], None] | None = None,
    ) -> None:
        self._root = run_file.root
        self._run_file = run_file
        self._token = token
        self._dry_run = dry_run
        self._on_deletion = on_deletion
        self._on_damage = on_damage
        self._failed: dict[str, StepInfo] = {}
        self._deleting = threading.Lock()
        self._folders = threading.Condition()
        self._protected: dict[str, int] = {}
        self._in_work: str | None = None
        self._jobs = BackgroundJobs("holdfast-delete")
        self._is_closing = threading.Event()

    @property
    def failed(self) -> Sequence[StepInfo]:
        """What could not be deleted, and will be tried again."""
        return tuple(self._failed.values())

    def submit(self, doomed: Sequence[StepInfo], *, verify_first: StepInfo | None = None) -> Future[list[Deletion]]:
        """Delete these in the background, and what is left of deletions that failed.

        With ``verify_first`` all of that checkpoint is read before. If it is damaged, nothing is deleted and it is set
        aside. What goes wrong is logged; the future has it too.
        """
        return self._jobs.submit(lambda: self._in_background(tuple(doomed), verify_first))

    def delete(self, doomed: Sequence[StepInfo]) -> list[Deletion]:
        """Delete these now, and what is left of deletions that failed.

        What failed before its record was gone is an intact checkpoint, and left alone unless it is among these.

        Raises ``RunTakenError`` if the run is another job's, and ``ValueError`` for what this run did not save.
        """
        _refuse_what_is_not_ours(doomed)
        with self._deleting:
            wanted = {**self._failed, **{info.name: info for info in doomed}}
            if self._dry_run:
                return [self._reported(info, "would be deleted") for info in wanted.values()]
            return self._delete_all(wanted, {info.name for info in doomed})

    def sweep(self) -> list[str]:
        """Remove what saves and deletions of this run left in folders when they were killed. Returns those folders."""
        with self._deleting:
            state = self._run_file.check(self._token)
            if self._dry_run or not state.unfinished:
                return []
            known = [name for name in state.unfinished if self._is_ours_to_sweep(name)]
            swept = [name for name in known if self._sweep_one(name, state)]
            unknown = [name for name in state.unfinished if name not in known]
            self._run_file.end(self._token, [*swept, *unknown])
            return swept

    def protect(self, name: str) -> None:
        """Keep off a folder that is about to be written to. If it is being deleted just now, wait for that."""
        with self._folders:
            self._folders.wait_for(lambda: self._in_work != name)
            self._protected[name] = self._protected.get(name, 0) + 1

    def unprotect(self, name: str) -> None:
        """Undo one ``protect``."""
        with self._folders:
            left = self._protected.get(name, 0) - 1
            if left > 0:
                self._protected[name] = left
            else:
                self._protected.pop(name, None)

    def wait(self, seconds: float) -> bool:
        """Wait until everything that was submitted is done, but not longer. Whether it is."""
        return self._jobs.wait(seconds)

    def close(self, seconds: float = math.inf) -> bool:
        """Wait like ``wait``. If that is too short, the deletion that has begun is the last one.

        Should it not come to its end, the next job finishes it.
        """
        is_done = self._jobs.wait(min(seconds, threading.TIMEOUT_MAX))
        if not is_done:
            self._is_closing.set()
            self._jobs.give_up()
        return is_done

    def _in_background(self, doomed: Sequence[StepInfo], verify_first: StepInfo | None) -> list[Deletion]:
        try:
            if verify_first is not None:
                self._verify(verify_first)
            return self.delete(doomed)
        except Exception as error:
            logger.warning("no checkpoint was deleted: %s", error)
            raise

    def _is_ours_to_sweep(self, name: str) -> bool:
        """Not what somebody wrote into the run file, and not what somebody has put elsewhere with a link to it."""
        return (step_of(name) is not None or is_probe(name)) and not self._root.is_linked(name)

    def _sweep_one(self, name: str, state: RunState) -> bool:
        identity = state.unfinished[name]
        if not self._take(name):
            return False
        try:
            store = self._root.child(name)
            if is_probe(name):
                remove_probe(self._root, name)
            elif identity_in(store) is None:
                return _remove_uncommitted_files(self._root, name, identity)
            elif not identity:
                _remove_all_but_the_checkpoint(store)
        except (HoldfastError, OSError) as error:
            logger.warning("what a kill left in %s could not be removed: %s", store.location, error)
            return False
        finally:
            self._give_back()
        return True

    def _verify(self, info: StepInfo) -> None:
        store = self._root.child(info.name)
        try:
            with closing(NativeSource(store)) as source:
                source.verify()
        except DAMAGE as error:
            if identity_in(store) == info.identity:  # and was not deleted or replaced while it was read
                set_aside(store, str(error))
                if self._on_damage is not None:
                    self._on_damage(info, error)
            raise

    def _delete_all(self, wanted: Mapping[str, StepInfo], doomed: Collection[str]) -> list[Deletion]:
        deletions = []
        for name, info in wanted.items():
            if self._is_closing.is_set():
                break
            deletion = self._delete_one(info, is_doomed=name in doomed)
            deletions.append(deletion)
            if deletion.outcome == "failed":
                self._failed[name] = info
            else:
                self._failed.pop(name, None)
        return deletions

    def _delete_one(self, info: StepInfo, *, is_doomed: bool) -> Deletion:
        """Each is noted by itself and in its turn, so that it can be pinned until then."""
        started = time.perf_counter()
        if not self._take(info.name):
            return self._reported(info, "kept", "it is being written")
        try:
            before = self._run_file.check(self._token).unfinished.get(info.name)
            state = self._run_file.begin(self._token, {info.name: info.identity})
            try:
                kept = self._reason_to_keep(info, state, is_doomed=is_doomed)
                if kept is None:
                    _invalidate(self._root.child(info.name))
                    # A save that failed in this folder has left files too. It is noted there, and only now.
                    _remove_files(self._root, info.name, "" if before == "" else info.identity)
            except Exception as error:
                logger.warning("%s could not be deleted and will be tried again: %s", info.path, error)
                if before == "":
                    self._note_as_before(info.name, before)
                return self._reported(info, "failed", str(error), started)
            if kept is not None:
                self._note_as_before(info.name, before)
                return self._reported(info, "kept", kept)
            if not self._is_closing.is_set():  # or else the run may be another job's by now, which looks for itself
                self._run_file.end(self._token, [info.name], gone=[info.name])
        finally:
            self._give_back()
        return self._reported(info, "deleted", "", started)

    def _reason_to_keep(self, info: StepInfo, state: RunState, *, is_doomed: bool) -> str | None:
        present = identity_in(self._root.child(info.name))
        if info.step in state.pinned:
            return "it was pinned meanwhile"
        if self._root.is_linked(info.name):
            return "a link is in its place"
        if present not in (info.identity, None):
            return "another record is in its place"
        if present is not None and not is_doomed:
            return "it could not be deleted earlier, and is intact"
        return None

    def _note_as_before(self, name: str, before: str | None) -> None:
        if before == "":
            self._run_file.begin(self._token, {name: ""})
        else:
            self._run_file.end(self._token, [name])

    def _reported(
        self,
        info: StepInfo,
        outcome: Literal["deleted", "would be deleted", "kept", "failed"],
        reason: str = "",
        started: float | None = None,
    ) -> Deletion:
        seconds = 0.0 if started is None else time.perf_counter() - started
        deletion = Deletion(info.step, info.path, info.nbytes, seconds, outcome, reason)
        if self._on_deletion is not None:
            try:
                self._on_deletion(deletion)
            except Exception:
                logger.exception("a callback failed when it was called for %s", info.path)
        return deletion

    def _take(self, name: str) -> bool:
        """Begin to work on a folder. False if somebody writes to it."""
        with self._folders:
            if name in self._protected:
                return False
            self._in_work = name
            return True

    def _give_back(self) -> None:
        with self._folders:
            self._in_work = None
            self._folders.notify_all()


def _invalidate(store: Store) -> None:
    """Take the record away, for good: a power cut must not bring it back when the files are gone."""
    store.delete([RECORD])
    store.sync()


def _remove_files(root: Root, name: str, identity: str) -> None:
    """Remove the files of a save without a record, and the folder if nothing else is in it.

    If it is not known which save that was, files of all saves are removed: none of them was committed.
    """
    store = root.child(name)
    store.delete(_left_by(identity, store))
    root.remove(name)


def _remove_uncommitted_files(root: Root, name: str, identity: str) -> bool:
    """Remove the files of a save that was not committed. False, and nothing is removed, if it is by now.

    Its job was taken for dead, and may be alive on another machine.
    """
    store = root.child(name)
    left = _left_by(identity, store)
    if identity_in(store) is not None:
        return False
    store.delete(left)
    root.remove(name)
    return True


def _remove_all_but_the_checkpoint(store: Store) -> None:
    """Remove what a killed save left in a folder beside the checkpoint that it was to replace."""
    # Listed before the record is read, which may be replaced just now by one of these.
    names = [listed.name for listed in store.list()]
    record = decode_record(store.read(RECORD), store.path_of(RECORD))
    store.delete(files_in(names, record.file_names()).of_any_save())


def _left_by(identity: str, store: Store) -> list[str]:
    """The files of a save without a record, and what belongs to none."""
    found = files_in(listed.name for listed in store.list())
    data = found.by_save.get(identity, ()) if identity else found.of_any_save()
    return [*data, *found.unfinished, *found.notes]


def _refuse_what_is_not_ours(doomed: Collection[StepInfo]) -> None:
    for info in doomed:
        if not info.is_ours:
            raise ValueError(
                f"{info.path} was not saved by this run, or is a link, so this run does not delete it. Remove it "
                "yourself"
            )
