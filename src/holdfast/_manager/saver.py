"""How a manager saves a step: now or in the background, with the run kept in order around it."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from holdfast._background.queues import Claim, wait_for_conflicting_saves
from holdfast._base.notices import warn_caller
from holdfast._manager.full_disk import WhenFull, save_despite_full_disk
from holdfast._manager.options import Background, OnFailure, OnFullDisk
from holdfast._manager.pending import PendingSaves
from holdfast._manager.run import Run
from holdfast._manager.steps import folder_of, step_number
from holdfast._manager.summaries import noted_metadata
from holdfast._ranks.meeting import meeting, own_place
from holdfast._save.async_save import How, begin_save
from holdfast._save.options import CheckedOptions, SaveOptions, refuse_unknown_options
from holdfast._save.pending import PendingSave
from holdfast._save.report import SaveReport
from holdfast._save.save import save_together
from holdfast._state.unwrapping import optimizers_in
from holdfast._stores.store import Store
from holdfast._watching.calls import Call
from holdfast._watching.event import about
from holdfast._watching.progress_line import ProgressLine

if TYPE_CHECKING:
    from holdfast._ranks.shared_steps import Collectives

logger = logging.getLogger(__name__)

_LAST_CHANCES = ("preemption", "end")
"""What is saved whatever became of earlier saves. Their failures are reported afterwards."""

_SPARE_TIME = 2.0
"""How many times as long as the last save there should be for one. The disk may be busy with that of other jobs."""


@dataclass(frozen=True)
class SaveIntent:
    """What is to be saved."""

    step: int
    state: Any
    metrics: Mapping[str, Any] | None = None
    metadata: Mapping[str, Any] | None = None

    @staticmethod
    def of(
        step: int, state: Any, metrics: Mapping[str, Any] | None = None, metadata: Mapping[str, Any] | None = None
    ) -> SaveIntent:
        """What a user gave. It may be kept for a while, and a loss would keep alive what it was computed from."""
        number = step_number(step)
        if metrics is not None and not isinstance(metrics, Mapping):
            raise TypeError(f"metrics is a dict of names and numbers, not {metrics!r}")
        detached = metrics and {
            name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()
        }
        return SaveIntent(number, state, detached, metadata)


@dataclass(frozen=True)
class Saving:
    """How steps are saved."""

    background: Background | None = None
    """None if every save is waited for."""
    on_full_disk: OnFullDisk = OnFullDisk()
    parts: Sequence[str] | None = None
    save_options: SaveOptions | None = None

    def check(self) -> None:
        """Raise for what is wrong."""
        refuse_unknown_options("save_options", self.save_options or {})
        self.options("", SaveIntent(0, dict.fromkeys(self.parts or ())), "")

    def options(self, run: str, wanted: SaveIntent, reason: str) -> CheckedOptions:
        """The options for one save. Raises for a state that has other parts than it must have."""
        self._refuse_other_parts(wanted.state)
        given = self.save_options or {}
        metadata = {**(given.get("metadata") or {}), **(wanted.metadata or {})}
        noted = noted_metadata(run, wanted.step, wanted.metrics, reason, metadata)
        return CheckedOptions.of({**given, "metadata": noted}, overwrite=True)

    def how_to_save(self, state: Any, background: Background) -> How:
        """How to save this state in the background."""
        optimizers = optimizers_in(state) if background.overlap else ()
        budget = (self.save_options or {}).get("memory_budget")
        return replace(background.how, optimizers=optimizers, memory_budget=budget)

    def _refuse_other_parts(self, state: Any) -> None:
        if self.parts is None:
            return
        found = set(state) if isinstance(state, Mapping) else set()
        missing, more = sorted(set(self.parts) - found), sorted(map(str, found - set(self.parts)))
        if missing or more:
            raise ValueError(
                f"a checkpoint of this run has the parts {sorted(self.parts)}. Of the state, {missing or 'none'} are "
                f"missing and {more or 'none'} are too many. Nothing was saved."
            )


class Saver:
    """Saves steps of a run. All ranks call it alike."""

    def __init__(
        self, run: Run, saving: Saving, process_group: dist.ProcessGroup | None, timeout: float | None = None
    ) -> None:
        saving.check()
        self._run = run
        self._saving = saving
        self._group = process_group
        self._timeout = timeout
        self._newest: SaveReport | None = None
        self._end: float | None = None
        self._has_warned = False
        on_failure: OnFailure = "error" if saving.background is None else saving.background.on_failure
        self.pending = PendingSaves(
            run.root.location,
            on_failure,
            process_group,
            may_be_damaged=run.verifies_before_deletions,
            timeout=timeout,
        )
        run.on_damage = self.pending.note_damage

    def end_within(self, seconds: float | None) -> None:
        """The program will be ended by then, if somebody knows. No save waits for longer on a full disk."""
        if seconds is None:
            return
        self._end = time.monotonic() + seconds
        newest = self._newest
        if newest is not None and seconds < _SPARE_TIME * newest.seconds:
            logger.warning(
                "only %.0f s are left to save in before the program is ended, and the last save took %.0f s. If your "
                "cluster waits for longer, say so with OnSignal(grace_seconds=...)",
                seconds,
                newest.seconds,
            )

    def save(self, wanted: SaveIntent, reason: str, *, wait: bool) -> PendingSave | SaveReport:
        """Save a step, and ``wait`` until it is committed; or else in the background."""
        store = self._run.root.child(folder_of(wanted.step))
        if wait:
            self.pending.wait()
        if reason not in _LAST_CHANCES:
            self.pending.raise_failures()
        # Called where a rank that fails does not leave the others waiting.
        make_options = functools.partial(self._saving.options, self._run.id, wanted, reason)
        with about(step=wanted.step, reason=reason):
            if wait:
                report = self._save_now(wanted, store, make_options)
                self.pending.forget_newest()
                return report
            background = self._saving.background or Background()  # which one save may be, of a manager that waits
            how = self._saving.how_to_save(wanted.state, background)
            how = replace(how, attempts=functools.partial(self._attempts, wanted.step))

            def make_options_and_warn() -> CheckedOptions:
                if background.overlap and how.optimizers == []:
                    self._warn_of_no_optimizers()
                return make_options()

            pending = self.pending.add(
                wanted.step,
                lambda: begin_save(wanted.state, store, make_options_and_warn, how, self._group, timeout=self._timeout),
            )
        ProgressLine(pending, f"step {wanted.step}", rank=own_place(self._group)[0])
        return pending

    def _warn_of_no_optimizers(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warn_caller(
            "overlap=True has no effect: there is no torch.optim.Optimizer in the state, so all of it is copied before "
            "the save returns. Put the optimizer itself into the state, not its state_dict().",
            RuntimeWarning,
        )

    def _save_now(self, wanted: SaveIntent, store: Store, make_options: Callable[[], CheckedOptions]) -> SaveReport:
        wait_for_conflicting_saves(Claim(store.location))
        call = f"holdfast.CheckpointManager.save of step {wanted.step} to {store.location}"
        rank, world_size = own_place(self._group)
        event = Call("save", store.location, rank=rank, world_size=world_size)
        with event, meeting(call, self._group, timeout=self._timeout, progress=event) as ranks:
            return self._attempts(
                wanted.step, ranks, lambda: save_together(ranks, wanted.state, store, make_options, event)
            )

    def _attempts(self, step: int, ranks: Collectives, save: Callable[[], SaveReport]) -> SaveReport:
        """A save, around which the coordinator keeps the run in order."""
        root, committed = self._run.root, False
        when_full = WhenFull(
            self._saving.on_full_disk.action,
            wait_seconds=self._saving.on_full_disk.wait_seconds,
            prune=self._run.prune,
            free_bytes=root.free_bytes,
            clean_up=lambda: self._run.clean_up(step),
            give_up_at=lambda: self._end,
        )
        ranks.broadcast("begin", lambda: self._run.begin(step))
        try:
            report = save_despite_full_disk(
                save, root.child(folder_of(step)).location, when_full, needed=self._needed, ranks=ranks
            )
            committed, self._newest = True, report
        finally:
            if ranks.is_coordinator:
                self._run.end(step, is_committed=committed)
        return report

    def _needed(self, ranks: Collectives) -> int | None:
        """About as much as for the save before, if there was one."""
        if self._saving.on_full_disk.action == "prune":
            return None  # some disks show late what a deletion has freed, and one more checkpoint would go meanwhile
        return ranks.broadcast("size", lambda: None if self._newest is None else self._newest.bytes_written)
