"""A run as one job sees it that saves to it: the run file, the checkpoints, and what is deleted of them."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from holdfast import _settings as settings
from holdfast._formats.native.names import SET_ASIDE
from holdfast._manager.full_disk import next_to_go
from holdfast._manager.options import Retention
from holdfast._manager.retention import everything, plan_deletions
from holdfast._manager.run_file import RunFile, RunState
from holdfast._manager.step_deletion import Deleter, Deletion
from holdfast._manager.steps import (
    StepInfo,
    folder_of,
    identity_in,
    list_steps,
    look_at,
    put_back,
    rows_of,
    set_aside,
    was_saved_by,
)
from holdfast._stores.roots import Root
from holdfast._watching.calls import Call
from holdfast.errors import CheckpointExistsError, CheckpointNotFoundError, NotDeletedError, UnreadableCheckpointError

_LONGEST_DELETION = 10.0
"""What has not been deleted by then has failed, or was given up by a job that was killed; in seconds."""
_BETWEEN_LOOKS = 0.02

logger = logging.getLogger(__name__)


class Run:
    """What the coordinator does. Other ranks only look (``steps``)."""

    def __init__(self, root: Root, retention: Retention) -> None:
        self.root = root
        self.id = ""
        """Of the run, once a manager has opened it."""
        self.place = (0, 1)
        """This rank and the number of ranks, for those who watch."""
        self._file = RunFile(root)
        self._token = secrets.token_hex(16)
        self._retention = retention
        self._policy = retention.policy or everything()
        self._saved_last: int | None = None
        self._has_waited_in_vain = False
        self.on_damage: Callable[[int, Exception], None] = lambda step, error: None
        """Called with a step that was committed, and turned out to be damaged before older ones were deleted."""
        self._deleter = Deleter(
            self._file,
            self._token,
            on_deletion=lambda deletion: _publish(deletion, *self.place),
            on_damage=lambda info, error: self.on_damage(info.step, error),
        )

    @property
    def verifies_before_deletions(self) -> bool:
        """Whether a step may turn out to be damaged before older ones are deleted."""
        return self._retention.verify_before_delete

    def look_up(self) -> str:
        """The id of the run; empty if there is none yet."""
        return self._file.read().run

    def claim(self, name: str | None, *, take_over: bool) -> str:
        """Make this job the one that saves here. Returns the id of the run."""
        state = self._file.claim(self._token, take_over=take_over, run=name)
        if self._file.has_rival:  # which may be writing just now; what is left then is for the next job to sweep
            return state.run
        swept = [] if self._retention.dry_run else self._deleter.sweep()
        if swept:
            logger.info("removed what saves that were killed had left in %s: %s", self.root.location, ", ".join(swept))
        return state.run

    def steps(self) -> list[StepInfo]:
        """All checkpoints, by their step."""
        return list_steps(self.root, self._file.read())

    def begin(self, step: int) -> None:
        """A save to this step is about to begin. Raises if another job has taken the run.

        Raises as well if there is a checkpoint of this step that this run did not save: that one cannot be had again.
        """
        folder = folder_of(step)
        self._deleter.protect(folder)
        try:
            self._refuse_to_replace_others(step)  # before it is noted: what is noted is tidied up after a kill
            self._file.begin(self._token, {folder: ""})
        except BaseException:
            self._deleter.unprotect(folder)
            raise

    def _refuse_to_replace_others(self, step: int) -> None:
        state = self._file.check(self._token)
        info = look_at(self.root, step, state)
        if info is None or info.is_ours:
            return
        is_legible = info.damage is None and info.unreadable is None
        if not is_legible and was_saved_by(state, info.name):
            return
        if info.unreadable is not None:
            raise UnreadableCheckpointError(
                f"step {step} is not saved, because it is unknown whether there is already a checkpoint at "
                f"{info.path}: {info.unreadable}. Save again when the disk answers; check who may read that folder.",
                path=info.path,
                step=step,
                reason=info.unreadable,
            )
        what = "was not saved by this run" if is_legible else "cannot be read"
        what = "is a link to another place" if self.root.is_linked(info.name) else what
        raise CheckpointExistsError(
            f"step {step} is not saved, because there is a checkpoint at {info.path} that {what} ({state.run}). Move "
            "it away if this run should save that step, or use another folder for this run.",
            path=info.path,
        )

    def end(self, step: int, *, is_committed: bool) -> None:
        """The save has ended. If it is committed, what is not to be kept any more is deleted in the background."""
        folder = folder_of(step)
        try:
            if is_committed:
                self._note(step)
            else:
                self.clean_up(step)
        except Exception as error:  # a checkpoint that is there is there, whatever became of this
            outcome = "is saved, but" if is_committed else "is not saved, and"
            logger.warning(
                "step %d %s the run file or other checkpoints could not be changed: %s", step, outcome, error
            )
        finally:
            self._deleter.unprotect(folder)

    def _note(self, step: int) -> None:
        store = self.root.child(folder_of(step))
        state = self._file.check(self._token)
        info = look_at(self.root, step, state)
        if info is None:
            return
        if store.size(SET_ASIDE) is not None:
            put_back(store)  # what was damaged has been replaced
        state = self._file.end(self._token, [info.name], rows=rows_of(self.root, [info], _without(state, info.name)))
        self._saved_last = step
        to_delete = self._to_delete(state)
        if self._retention.dry_run:
            for each in to_delete:
                _publish(Deletion(each.step, each.path, each.nbytes, 0.0, "would be deleted"), *self.place)
        elif to_delete or self._deleter.failed:
            newest = look_at(self.root, step, state) if self._retention.verify_before_delete else None
            self._deleter.submit(to_delete, verify_first=newest)

    def plan_deletions(self) -> list[StepInfo]:
        """What would be deleted now."""
        return self._to_delete(self._file.read())

    def _to_delete(self, state: RunState) -> list[StepInfo]:
        policy = self._policy
        if policy.keeps_everything:
            return []  # and to look at all steps would take longer with each
        to_delete = plan_deletions(list_steps(self.root, state), policy, datetime.now(timezone.utc))
        # By clocks that were set back, or after a return to an earlier step, it need not look like the newest.
        return [info for info in to_delete if info.step != self._saved_last]

    def prune(self) -> str | None:
        """Delete the oldest checkpoint that may go, because the disk is full. Its name; None if there is none."""
        if self._retention.dry_run:
            return None
        steps = [info for info in self.steps() if info.unreadable is None]  # who knows what that is
        best = self._policy.best_of(steps, datetime.now(timezone.utc))
        going = next_to_go(steps, spare=best, saved_last=self._saved_last)
        if going is None:
            return None
        # What could not be deleted earlier is tried again on this occasion, and says nothing about this one.
        outcomes = [each for each in self._deleter.delete([going]) if each.path == going.path]
        return going.name if any(each.is_gone for each in outcomes) else None

    def clean_up(self, step: int) -> None:
        """Remove the folder of a failed save, if nothing is in it."""
        self.root.remove(folder_of(step))

    @contextmanager
    def probes(self) -> Iterator[Callable[[str], None]]:
        """While folders that are not checkpoints are made: gives a function to call with each, before it is made.

        Those that a kill leaves are removed by the next job.
        """
        folders: list[str] = []

        def note(folder: str) -> None:
            folders.append(folder)
            self._file.begin(self._token, {folder: ""})

        try:
            yield note
        finally:
            if folders:
                left = set(self.root.children())
                self._file.end(self._token, [folder for folder in folders if folder not in left])

    def delete(self, step: int) -> None:
        """Delete a checkpoint now, pinned or not. Raises if it is still there then."""
        info = self._found(step)
        if info.unreadable is not None:
            raise NotDeletedError(
                f"{info.path} was not deleted, because it could not be looked at: {info.unreadable}. Try again when "
                "the disk answers, and check who may read that folder.",
                path=info.path,
                reason=info.unreadable,
            )
        if info.pinned:
            self._file.unpin(step)
        for deletion in self._deleter.delete([info]):
            if deletion.step == step and not deletion.is_gone:
                raise NotDeletedError(
                    f"{info.path} was not deleted: {deletion.reason}", path=info.path, reason=deletion.reason
                )

    def pin(self, step: int, *, pinned: bool) -> None:
        """Keep a checkpoint whatever the policy says, or no more."""
        if pinned:
            self._found(step)
            if self._file.pin(step).unfinished.get(folder_of(step)):
                self._see_a_deletion_through(step)
            return
        if step not in self._file.read().pinned:  # a pinned one may have been removed by hand
            self._found(step)
        self._file.unpin(step)

    def _see_a_deletion_through(self, step: int) -> None:
        """A deletion that had begun before the step was pinned goes on. Raises if nothing is left to be pinned."""
        deadline = time.monotonic() + _LONGEST_DELETION
        while self._file.read().unfinished.get(folder_of(step)) and time.monotonic() < deadline:
            time.sleep(_BETWEEN_LOOKS)
        try:
            self._found(step)
        except CheckpointNotFoundError:
            self._file.unpin(step)
            raise

    def is_as_listed(self, info: StepInfo) -> bool:
        """Whether a checkpoint is still there, and was not replaced by another."""
        present = identity_in(self.root.child(info.name))
        return present is not None and info.identity in ("", present)

    def set_aside(self, info: StepInfo, reason: str) -> None:
        """Pass a damaged checkpoint over from now on."""
        set_aside(self.root.child(info.name), reason)

    def wait_for_deletions(self) -> None:
        """Return when nothing is being deleted, or when that takes longer than the end of the program may."""
        patience = settings.current().drain_seconds
        self._has_waited_in_vain = not self._deleter.wait(patience)
        if self._has_waited_in_vain:
            logger.warning("checkpoints in %s are still being deleted after %g s", self.root.location, patience)

    def release(self) -> None:
        """Let other jobs save here. A deletion that does not end is finished by the next job."""
        self._deleter.close(0.0 if self._has_waited_in_vain else settings.current().drain_seconds)
        self._file.release(self._token)

    def _found(self, step: int) -> StepInfo:
        info = look_at(self.root, step, self._file.read())
        if info is None:
            there = ", ".join(str(each.step) for each in self.steps()) or "none"
            raise CheckpointNotFoundError(
                f"there is no checkpoint of step {step} in {self.root.location}. There are: {there}.",
                path=self.root.child(folder_of(step)).location,
            )
        return info


def _without(state: RunState, name: str) -> RunState:
    """The state without what it remembers of a folder, which has just been written anew."""
    rows: Mapping[str, Any] = {known: row for known, row in state.rows.items() if known != name}
    return RunState(state.run, state.owner, state.pinned, state.unfinished, rows)


def _publish(deletion: Deletion, rank: int, world_size: int) -> None:
    if deletion.outcome in ("kept", "would be deleted"):
        why = f": {deletion.reason}" if deletion.reason else ""
        logger.info("step %d at %s %s%s", deletion.step, deletion.path, _NOT_DELETED[deletion.outcome], why)
        return
    began = time.perf_counter() - deletion.seconds
    call = Call("delete", deletion.path, deletion.step, rank=rank, world_size=world_size, started=began)
    failed = deletion.reason if deletion.outcome == "failed" else None
    call.finish(nbytes=deletion.nbytes, error=failed, outcome=deletion.outcome)


_NOT_DELETED = {"kept": "is kept", "would be deleted": "would be deleted (dry run)"}
