"""``holdfast.CheckpointManager``: when to save, what is complete, what is newest, what to delete, how to go on."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from holdfast import _settings as settings
from holdfast._load.load import load
from holdfast._load.report import LoadReport
from holdfast._manager import steps as steps_of_run
from holdfast._manager.cadence import Beat, Cadence, refuse_different_options
from holdfast._manager.options import (
    Background,
    OnFullDisk,
    OnSignal,
    Retention,
    RunOptions,
    as_texts,
    background_of,
    expect,
    retention_of,
)
from holdfast._manager.preflight import run_preflight
from holdfast._manager.preflight_report import PreflightReport
from holdfast._manager.restoring import RestoredStep, Restoring, chosen_step
from holdfast._manager.retention import Policy
from holdfast._manager.run import Run
from holdfast._manager.saver import SaveIntent, Saver, Saving
from holdfast._manager.steps import Mode, StepInfo, step_number
from holdfast._ranks.meeting import meeting, own_place
from holdfast._save.options import SaveOptions
from holdfast._save.pending import PendingSave
from holdfast._save.report import SaveReport
from holdfast._stores.roots import Root, root_at
from holdfast._watching.event import about
from holdfast.errors import RankDisagreementError

if TYPE_CHECKING:
    from holdfast._ranks.shared_steps import Collectives

logger = logging.getLogger(__name__)

T = TypeVar("T")


class CheckpointManager:
    """The checkpoints of one run, in one folder.

    With a process group all its ranks make a manager and call the same methods at the same steps. In a ``with`` block
    the last step is saved at the end if it was not, pending saves are waited for, and other jobs may have the run.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Root,
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        save_at_end: bool = True,
        keep_last: int | None = None,
        keep: Policy | Retention | None = None,
        background: bool | Background = True,
        on_signal: OnSignal | None = OnSignal(),
        on_full_disk: OnFullDisk = OnFullDisk(),
        save_options: SaveOptions | None = None,
        run_options: RunOptions = RunOptions(),
        process_group: dist.ProcessGroup | None = None,
        timeout: float | None = None,
    ) -> None:
        """Nothing is touched before the ``with`` block, or the first call.

        Args:
            root: the folder of the run: a path, a URL such as ``s3://bucket/run``, or a ``Root`` of one's own.
            every_steps: save when a multiple of this is reached.
            every_minutes: save when so much time has passed since the last save, by the clock of the first rank.
            save_at_end: save the last step at the end of the ``with`` block, if it was not or that failed. Not after an
                exception. What is saved is the state of that moment, under the step of the last ``maybe_save``.
            keep_last: keep so many of the newest ones. Without this and ``keep`` all checkpoints are kept.
            keep: which others to keep: a policy of ``holdfast.keep``, or a ``Retention`` that also says how carefully
                the rest is deleted.
            background: save in the background, perhaps as a ``Background`` says. With False every save is waited for;
                ``save(..., wait=True)`` and the last save are in any case.
            on_signal: save and stop when the cluster says that it will end the program. None lets signals alone.
            on_full_disk: what to do when there is no space for a checkpoint.
            save_options: arguments of ``save``, such as ``{"exclude": "model.frozen.*", "metadata": {"git": "1a2b"}}``.
                ``memory_budget`` is that of ``async_save`` if saves are in the background.
            run_options: which run it must be, whether to take it from another job or only look at it, which parts every
                state has.
            process_group: the ranks of the run; all by default.
            timeout: as for ``save``, in all that the ranks do together.

        Example:
            >>> import tempfile, torch
            >>> import holdfast
            >>> root, state = tempfile.mkdtemp(), {"weights": torch.zeros(2)}
            >>> with holdfast.CheckpointManager(root, every_steps=10, keep_last=2) as manager:
            ...     for step in range(1, 36):
            ...         state["weights"] += 1
            ...         saved = manager.maybe_save(step, state, metrics={"loss": 1 / step})
            >>> with holdfast.CheckpointManager(root) as manager:
            ...     restored = manager.restore(state)
            ...     [info.step for info in manager.steps()], restored.step
            ([30, 35], 35)
        """
        expect("on_full_disk", on_full_disk, OnFullDisk)
        expect("run_options", run_options, RunOptions)
        expect("on_signal", on_signal, OnSignal, type(None))
        self.root = root_at(root)
        self.run_id = ""
        """The id of the run, once it is open."""
        self._retention = retention_of(keep_last, keep)
        self._background = background_of(background)
        self._run = Run(self.root, self._retention)
        self._saving = Saving(self._background, on_full_disk, run_options.parts, save_options)
        self._saver = Saver(self._run, self._saving, process_group, timeout)
        self._saves_at_end = save_at_end
        self._every = (every_steps, every_minutes)
        self._cadence = Cadence(every_steps=every_steps, every_minutes=every_minutes)
        self._preemption = (on_signal or OnSignal(signals=())).preemption()
        self._run_options = run_options
        self._is_read_only = run_options.read_only
        self._must_be_alike = as_texts(
            self._retention,
            self._background or Background(),
            on_full_disk,
            run_options,
            every_steps=every_steps,
            every_minutes=every_minutes,
            save_at_end=save_at_end,
            background=self._background is not None,
            signals=self._preemption.names,
        )
        self._group = process_group
        self._timeout = timeout
        self._place_at_opening: tuple[int, int] | None = None
        self._opened_by: int | None = None
        self._while_open = ExitStack()
        self._is_closed = False
        self._newest: SaveIntent | None = None
        self._unsaved: SaveIntent | None = None
        self._last_saved: int | None = None

    # Opening and closing

    def __enter__(self) -> CheckpointManager:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close_after_an_error(error)

    def close(self) -> None:
        """Save the last step if it was not saved, wait for pending saves, and let other jobs have the run.

        Raises what a pending save raised. Does nothing the second time, nor in a process that was forked.
        """
        if self._is_closed or self._is_of_another_process():
            return
        self._is_closed = True
        with self._while_open:
            if self._saves_at_end:
                self._save_at_end()
            self._newest = self._unsaved = None
            self.wait()

    def _save_at_end(self) -> None:
        last, pending = self._newest, self._saver.pending
        if last is None or not pending.is_newest(last.step):
            if self._unsaved is not None:
                self._save(self._unsaved, "end", wait=True)
        elif pending.newest_report() is None:
            try:
                self._save(last, "end", wait=True)
            except Exception as error:  # what failed first is raised by ``wait``
                logger.error("step %d could not be saved at the second attempt either: %s", last.step, error)  # noqa: TRY400
            else:
                logger.warning("step %d could not be saved in the background, but at the end", last.step)
                pending.note_saved_again(last.step)

    def _close_after_an_error(self, error: BaseException) -> None:
        """Nothing more is saved, for nobody knows what the state is worth. What is pending is waited for.

        A failure of that is not raised, since there is an error already; what nobody looks at is reported by the next
        call of the library, and by the exit code.
        """
        if self._is_closed or self._is_of_another_process():
            return
        self._is_closed = True
        if self._unsaved is not None and self._saves_at_end:
            why = type(error).__name__
            logger.warning("step %d is not saved, because the block was left by %s", self._unsaved.step, why)
        self._newest = self._unsaved = None
        with self._while_open:
            for step in self._saver.pending.wait(settings.current().drain_seconds):
                logger.error("the save of step %d was not finished when the program failed", step)
            self._run.wait_for_deletions()

    def _open(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"the manager of {self.root.location} was closed; make a new one")
        if self._is_of_another_process():
            raise RuntimeError(
                f"the manager of {self.root.location} belongs to process {self._opened_by}, and this is process "
                f"{os.getpid()}, which was forked from it. Here it can only look: steps(), latest(), best(). Save and "
                "restore in the process that has opened it."
            )
        if self._place_at_opening is not None:
            return
        place = own_place(self._group)
        if place[1] > 1 and not self.root.is_shared:
            raise ValueError(
                f"{self.root.location} is in the memory of one process, and this run has {place[1]} ranks, which could "
                "not load what the others saved. Use a path that all of them see."
            )
        with ExitStack() as opening, self._meeting("open the run") as ranks:
            refuse_different_options(self.root.location, ranks.all_gather_object(self._must_be_alike))
            self._run.id = self.run_id = ranks.broadcast("open the run", lambda: self._claim(opening))
            if not self._is_read_only:
                with ranks.step("listen to signals"):
                    opening.enter_context(self._preemption)
            self._while_open = opening.pop_all()
        every_steps, every_minutes = self._every
        self._cadence = Cadence(
            every_steps=every_steps,
            every_minutes=every_minutes,
            preemption=None if self._is_read_only else self._preemption,
            exchange=self._exchange if dist.is_available() and dist.is_initialized() else None,
        )
        self._place_at_opening = self._run.place = place
        self._opened_by = os.getpid()

    def _is_of_another_process(self) -> bool:
        """Whether this is a copy in a forked process. The run, the threads and the handlers are the parent's."""
        return self._opened_by not in (None, os.getpid())

    def _claim(self, opening: ExitStack) -> str:
        if self._is_read_only:
            return self._run.look_up()
        claimed = self._run.claim(self._run_options.run_id, take_over=self._run_options.take_over)
        opening.callback(self._run.release)
        return claimed

    def _open_to(self, what: str) -> None:
        """Open the run to change something of it."""
        self._refuse_if_read_only(what)
        self._open()

    def _refuse_if_read_only(self, what: str) -> None:
        if self._is_read_only:
            raise RuntimeError(f"the manager of {self.root.location} is read-only and cannot {what}; make another one")

    # Saving

    @property
    def should_stop(self) -> bool:
        """Whether all ranks have agreed to stop, because one of them got a signal. The state is saved by then."""
        return self._cadence.should_stop

    def maybe_save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> PendingSave | SaveReport | None:
        """Save if it is time to. To be called after every step, by all ranks.

        Costs microseconds when it is not. ``metrics`` are numbers, to be found in ``steps()`` and by ``best``; those of
        the first rank count. Tensors are looked at only if something is saved.
        """
        self._open_to("save")
        wanted = SaveIntent.of(step, state, metrics, metadata)
        is_saved = wanted.step == self._last_saved
        self._newest = wanted
        if not is_saved:
            self._unsaved = wanted
        decision = self._cadence.at_step(wanted.step)
        if decision.save == "preemption":
            logger.warning("%s: step %d is saved and the training should stop", decision.cause, wanted.step)
            self._saver.end_within(decision.seconds_left)
            return self._save_before_a_stop(wanted)
        if decision.save is None or is_saved:
            return None
        return self._save(wanted, decision.save, wait=self._background is None)

    def _save_before_a_stop(self, wanted: SaveIntent) -> SaveReport | PendingSave | None:
        """Nothing is saved twice: there may be little time."""
        if self._saver.pending.is_newest(wanted.step):
            report = self._saver.pending.newest_report()
            if report is not None:
                return report
            saved = self._save(wanted, "preemption", wait=True)
            self._saver.pending.note_saved_again(wanted.step)
            return saved
        if wanted.step == self._last_saved:
            return None
        return self._save(wanted, "preemption", wait=True)

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        wait: bool | None = None,
    ) -> PendingSave | SaveReport:
        """Save now, whatever the cadence. ``wait`` until it is committed, unless the manager saves in the background.

        A checkpoint of the same step is replaced, in one step.
        """
        self._open_to("save")
        self._cadence.restart_minutes()
        wait = self._background is None if wait is None else wait
        return self._save(SaveIntent.of(step, state, metrics, metadata), "asked for", wait=wait)

    def _save(self, wanted: SaveIntent, reason: str, *, wait: bool) -> PendingSave | SaveReport:
        self._refuse_other_ranks()
        saved = self._saver.save(wanted, reason, wait=wait)
        self._last_saved, self._unsaved = wanted.step, None
        if wait:
            self._newest = None  # is committed, and needs no second attempt
        return saved

    def _refuse_other_ranks(self) -> None:
        """Without their group, the ranks would all save as if they were alone, to the same place."""
        place = own_place(self._group)
        if self._place_at_opening not in (None, place):
            raise RuntimeError(
                f"the manager of {self.root.location} was opened as rank {self._place_at_opening[0]} of "
                f"{self._place_at_opening[1]}, and now this is rank {place[0]} of {place[1]}. Nothing was saved. Close "
                "the manager before the process group is destroyed, and make a new one for another group."
            )

    def wait(self) -> None:
        """Return when all saves are committed and older checkpoints are deleted. Raises what a save raised.

        Deletions are waited for no longer than ``HOLDFAST_DRAIN_SECONDS``: they go on, or are finished the next time.
        """
        self._saver.pending.wait()
        self._run.wait_for_deletions()  # which may have found out that a new checkpoint is damaged
        self._saver.pending.raise_own_failures()

    # Restoring

    def restore(
        self, state: Any, *, step: int | None = None, parts: Sequence[str] | None = None, **options: Any
    ) -> RestoredStep | None:
        """Load the newest checkpoint that is intact, or that of a ``step``. None if there is none: a fresh start.

        Damaged ones are set aside with a note of the reason, and what is lost by that is logged. If there are
        checkpoints and all are damaged, that is an error.

        Args:
            state: what to load into, in place, as for ``load``.
            step: one step and no other. Damage is an error then.
            parts: names at the top of the state; only these are loaded, and only their bytes are read.
            options: other arguments of ``load``, such as ``cast=True``.
        """
        began = time.perf_counter()
        self._open()
        if isinstance(parts, str):
            raise TypeError(f"parts is a list of names, not the str {parts!r}")
        wanted = state if parts is None else _parts_of(state, parts)
        if step is None:
            restored = self._restoring(wanted, options).newest()
        else:
            number = step_number(step)
            info = self._decided("find the step", lambda: chosen_step(self.steps(), number, self.root.location))
            report = self._load(wanted, info, options)
            restored = RestoredStep(info.step, info.path, report, info.metrics, info.metadata)
        if restored is not None:
            self._cadence.resume_after(restored.step)
            self._last_saved, self._newest, self._unsaved = restored.step, None, None
            self._saver.pending.forget_newest()
            restored.report_event(began, *own_place(self._group))
        return restored

    def _restoring(self, state: Any, options: Mapping[str, Any]) -> Restoring:
        if options.get("allow_missing") is not None or not options.get("strict", True):
            # What an older checkpoint does not have must not be left as a damaged newer one has made it.
            options = {"verify_first": options.get("verify", True), **options}
        return Restoring(
            place=self.root.location,
            list_steps=lambda: self._decided("list the steps", self.steps),
            load=lambda info: self._load(state, info, options),
            is_as_listed=lambda info: self._decided("look again", lambda: self._run.is_as_listed(info)),
            set_aside=self._set_aside,
        )

    def _load(self, state: Any, info: StepInfo, options: Mapping[str, Any]) -> LoadReport:
        with about(step=info.step):
            options = {"timeout": self._timeout, **options}
            return load(state, self.root.child(info.name), process_group=self._group, **options)

    def _set_aside(self, info: StepInfo, reason: str) -> None:
        if not self._is_read_only:
            self._decided("set aside", lambda: self._run.set_aside(info, reason))

    # Looking and tidying

    def steps(self) -> list[StepInfo]:
        """All committed checkpoints, by their step. Any rank may ask by itself."""
        return self._run.steps()

    def latest(self) -> StepInfo | None:
        """The newest one that can be restored."""
        return steps_of_run.latest(self.steps())

    def best(self, metric: str, mode: Mode = "min") -> StepInfo | None:
        """The one with the lowest metric, or the highest with ``mode="max"``."""
        return steps_of_run.best(self.steps(), metric, mode)

    def pin(self, step: int) -> None:
        """Keep a checkpoint whatever the policy says. All ranks call this, or none but the first.

        Another job may do this while one trains, if it calls nothing else that changes the run.
        """
        self._pin(step, pinned=True)

    def unpin(self, step: int) -> None:
        """Let the policy decide about a checkpoint again."""
        self._pin(step, pinned=False)

    def _pin(self, step: int, *, pinned: bool) -> None:
        self._refuse_if_read_only("pin")
        number = step_number(step)
        if self._is_coordinator():
            self._run.pin(number, pinned=pinned)

    def delete(self, step: int) -> None:
        """Delete a checkpoint of this run, pinned or not. Raises ``NotDeletedError`` if that is not possible."""
        number = step_number(step)
        self._open_to("delete")
        if self._is_coordinator():
            self._run.delete(number)

    def would_delete(self) -> list[StepInfo]:
        """What the policy would have deleted now."""
        return self._run.plan_deletions()

    def preflight(self, state: Any) -> PreflightReport:
        """Find out before the first step whether saves will go well: permissions, space, memory, speed.

        All ranks call this. Raises ``PreflightError`` with all problems; prints what to expect otherwise.
        """
        not_opened: Exception | None = None
        try:
            self._open_to("save")
        except (OSError, RankDisagreementError) as error:
            if isinstance(error, RankDisagreementError) and not all(map(_is_opening, error.views.values())):
                raise  # some rank is elsewhere, and would not come to the preflight
            not_opened = error  # on all ranks, and there may be more to report than this
        background = self._background or Background()
        with self._run.probes() if not_opened is None else nullcontext(_note_nothing) as note:
            report = run_preflight(
                state,
                self.root,
                kept=None if self._retention.policy is None else self._retention.policy.most_kept,
                stored_bytes=lambda: sum(info.nbytes for info in self.steps() if info.is_ours),
                async_save=self._background is not None,
                writer=background.writer,
                copies=2 if background.when_busy == "copy" else 1,
                memory_budget=(self._saving.save_options or {}).get("memory_budget"),
                options=lambda: self._saving.options(self.run_id, SaveIntent(0, state), "preflight"),
                note=note,
                process_group=self._group,
                timeout=self._timeout,
            )
        if not_opened is not None:
            raise not_opened
        if self._is_coordinator():
            print(report)  # noqa: T201 - that is what it is for
        return report

    # Ranks

    def _decided(self, what: str, decide: Callable[[], T]) -> T:
        """What the coordinator finds, on all ranks; its error, if it fails."""
        with self._meeting(what) as ranks:
            return ranks.broadcast(what, decide)

    def _exchange(self, step: int, beat: Beat) -> Sequence[Beat]:
        with self._meeting(f"maybe_save at step {step}") as ranks:
            return ranks.all_gather_object(beat)

    def _meeting(self, what: str) -> AbstractContextManager[Collectives]:
        what = f"holdfast.CheckpointManager of {self.root.location}: {what}"
        return meeting(what, self._group, timeout=self._timeout)

    def _is_coordinator(self) -> bool:
        return own_place(self._group)[0] == 0


def _parts_of(state: Any, parts: Sequence[str]) -> dict[str, Any]:
    """What of a state is to be restored."""
    if not isinstance(state, Mapping):
        raise TypeError(f"parts are names of a dict, and the state is a {type(state).__name__}")
    unknown = [name for name in parts if name not in state]
    if unknown:
        there = ", ".join(map(repr, state)) or "none"
        raise ValueError(
            f"the state has no part {', '.join(map(repr, unknown))}. Its parts are: {there}. Nothing was loaded."
        )
    return {name: state[name] for name in parts}


def _is_opening(call: str) -> bool:
    return call.endswith(": open the run")


def _note_nothing(folder: str) -> None:
    """For probes in a folder that could not be opened."""
