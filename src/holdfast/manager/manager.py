"""``holdfast.CheckpointManager``: when to save, what is complete, what is newest, what to delete, how to go on."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist

from holdfast import settings
from holdfast.background.lanes import wait_for_conflicting_saves
from holdfast.background.queues import Claim
from holdfast.coordination.meeting import meeting
from holdfast.errors import CheckpointNotFoundError
from holdfast.manager import steps as steps_of_run
from holdfast.manager.full_disk import OnFull, WhenFull, save_despite_full_disk
from holdfast.manager.preemption import USUAL_SIGNALS, Preemption
from holdfast.manager.preflight import run_preflight
from holdfast.manager.preflight_report import PreflightReport
from holdfast.manager.pulse import Beat, Pulse
from holdfast.manager.restoring import RestoredStep, restore_newest
from holdfast.manager.retention import Policy, best, every, everything, last
from holdfast.manager.run import Retention, Run
from holdfast.manager.steps import Mode, StepInfo, folder_of
from holdfast.notices import warn_caller
from holdfast.save_report import SaveReport
from holdfast.stores.roots import Root, root_at
from holdfast.verbs.async_save import How, Writer, begin_save
from holdfast.verbs.load import load
from holdfast.verbs.pending_save import PendingSave
from holdfast.verbs.save import save_together
from holdfast.verbs.save_options import SaveOptions
from holdfast.verbs.snapshots import WhenBusy
from holdfast.watching import Call, Event, about, subscribe, trace_to
from holdfast.watching.progress_line import ProgressLine

if TYPE_CHECKING:
    from holdfast.coordination.collectives import Collectives

logger = logging.getLogger(__name__)

T = TypeVar("T")

OnFailure = Literal["raise", "warn"]


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
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[int, str] | tuple[int, str, Mode] | None = None,
        keep: Policy | None = None,
        max_age: timedelta | None = None,
        max_bytes: int | None = None,
        async_save: bool = True,
        overlap: bool = False,
        writer: Writer = "thread",
        when_busy: WhenBusy = "wait",
        on_failure: OnFailure = "raise",
        on_full: OnFull = "raise",
        save_at_end: bool = True,
        verify_before_delete: bool = False,
        dry_run: bool = False,
        signals: Iterable[str | int] = USUAL_SIGNALS,
        grace_seconds: float | None = 30.0,
        parts: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        save_options: Mapping[str, Any] | None = None,
        run: str | None = None,
        take_over: bool = False,
        on_event: Callable[[Event], object] | None = None,
        trace: str | os.PathLike[str] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Nothing is touched before the ``with`` block, or the first call.

        Args:
            root: the folder of the run: a path, ``memory://name``, or a ``Root`` of one's own.
            every_steps: save when a multiple of this is reached.
            every_minutes: save when so much time has passed since the last save, by the clock of the first rank.
            keep_last: keep the newest ones. Without any ``keep`` argument all checkpoints are kept.
            keep_every: keep those whose step is a multiple of this.
            keep_best: keep the best by a metric: ``(2, "loss")`` the two with the lowest, ``(1, "accuracy", "max")``.
            keep: other policies of ``holdfast.keep``, joined by ``|``. All ``keep`` arguments count together.
            max_age: delete what is older, except the newest and pinned ones.
            max_bytes: delete the oldest as long as there is more in all, except the newest and pinned ones.
            async_save: save in the background. ``save(..., wait=True)`` and the last save do not.
            overlap: copy the state during forward and backward as well, which the optimizers in the state wait for. Not
                for programs that change parameters without an optimizer (see ``async_save``).
            writer: as for ``async_save``.
            when_busy: as for ``async_save``.
            on_failure: a background save that failed is raised by the next save, ``wait`` and the end of the block;
                ``"warn"`` warns and goes on.
            on_full: if the disk is full: ``"raise"``, ``"prune"`` (delete the oldest that may go, and try again), or
                ``"wait"`` until there is room.
            save_at_end: save the last step at the end of the ``with`` block, if it was not and there was no exception.
            verify_before_delete: read all of a new checkpoint before an older one is deleted for it.
            dry_run: delete nothing by the policy; only tell what would be deleted.
            signals: those that ask the program to stop. All ranks agree on it, the state is saved, and ``should_stop``
                becomes true. Handlers that were there are called too. None with ``()``.
            grace_seconds: how long the program will live after such a signal, as far as known.
            parts: the names that every state to be saved must have, no more and no fewer: a checkpoint of a set is the
                whole set.
            metadata: to be found in every checkpoint of this manager.
            save_options: other arguments of ``save``, such as ``{"exclude": "model.frozen.*", "cast": ...}``.
            run: the id that the run must have, or gets if it is new.
            take_over: take the run from a job that is still alive on this machine. That one can save no more.
            on_event: called with every event of saves, loads and deletions (see ``holdfast.subscribe``).
            trace: write a trace for Perfetto or Chrome to this file.
            process_group: the ranks of the run; all by default.

        Example:
            >>> import tempfile, torch
            >>> import holdfast as hf
            >>> root, state = tempfile.mkdtemp(), {"weights": torch.zeros(2)}
            >>> with hf.CheckpointManager(root, every_steps=10, keep_last=2) as manager:
            ...     for step in range(1, 36):
            ...         state["weights"] += 1
            ...         saved = manager.maybe_save(step, state, metrics={"loss": 1 / step})
            >>> with hf.CheckpointManager(root) as manager:
            ...     restored = manager.restore(state)
            ...     [info.step for info in manager.steps()], restored.step
            ([30, 35], 35)
        """
        _check_choice("on_failure", on_failure, ("raise", "warn"))
        self.root = root_at(root)
        self._group = process_group
        self._every = (every_steps, every_minutes)
        self._run = Run(
            self.root,
            Retention(
                _policy(keep_last, keep_every, keep_best, keep).within(max_age=max_age, max_bytes=max_bytes),
                verify_before_delete,
                dry_run,
            ),
        )
        self._most_kept = _most_kept(keep_last, keep_best, unlimited=keep is not None or keep_every is not None)
        self._in_background = async_save
        self._overlaps = overlap
        self._how = How(writer=writer, when_busy=when_busy)
        self._on_failure: OnFailure = on_failure
        self._on_full: OnFull = on_full
        self._saves_at_end = save_at_end
        self._preemption = Preemption(signals, grace_seconds=grace_seconds)
        self._parts = None if parts is None else frozenset(parts)
        self._metadata = dict(metadata or {})
        self._save_options = {**_NOTHING_SPECIAL, **(save_options or {})}
        SaveOptions.of(**self._save_options, metadata=self._metadata, overwrite=True)  # raises for what is wrong
        self._claims = (run, take_over)
        self._watchers = (on_event, trace)
        self.run_id = ""
        """The id of the run, once it is open."""
        self._open = ExitStack()
        self._is_open = self._is_closed = False
        self._pulse = Pulse()
        self._pending: list[tuple[int, PendingSave]] = []
        self._unsaved: tuple[int, Any, Mapping[str, Any] | None] | None = None
        self._last_saved: int | None = None

    # Opening and closing

    def __enter__(self) -> CheckpointManager:
        self._opened()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close_after(error)

    def close(self) -> None:
        """Save the last step if it was not saved, wait for pending saves, and let other jobs have the run.

        Raises what a pending save raised. Does nothing the second time.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._unsaved is not None and self._saves_at_end:
                step, state, metrics = self._unsaved
                self._save(step, state, metrics, None, "end", wait=True)
            self._wait_for_pending()
        finally:
            self._open.close()

    def _close_after(self, error: BaseException) -> None:
        """After an exception nothing more is saved, for nobody knows what the state is worth; what is pending is."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._open:
            futures = [pending.committed for _, pending in self._pending]
            unfinished = concurrent.futures.wait(futures, timeout=settings.current().drain_seconds).not_done
            for step, pending in self._pending:
                if pending.committed in unfinished:
                    logger.error("the save of step %d was not finished when the program failed", step)
                elif pending.committed.exception() is not None:
                    logger.error("the save of step %d failed: %s", step, pending.committed.exception())

    def _opened(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"the manager of {self.root.location} was closed; make a new one")
        if self._is_open:
            return
        run, take_over = self._claims
        self.run_id = self._decided("open the run", lambda: self._run.claim(run, take_over=take_over))
        self._is_open = True
        if self._is_coordinator():
            self._open.callback(self._run.release)
        on_event, trace = self._watchers
        if on_event is not None:
            self._open.enter_context(subscribe(on_event))
        if trace is not None:
            self._open.enter_context(trace_to(trace))
        self._open.enter_context(self._preemption)
        steps, minutes = self._every
        self._pulse = Pulse(
            every_steps=steps,
            every_minutes=minutes,
            preemption=self._preemption,
            exchange=self._exchange if _there_are_ranks() else None,
        )

    # Saving

    @property
    def should_stop(self) -> bool:
        """Whether all ranks have agreed to stop, because one of them got a signal. The state is saved by then."""
        return self._pulse.should_stop

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
        self._opened()
        if self._last_saved is None or step > self._last_saved:
            self._unsaved = (step, state, metrics)
        decision = self._pulse.at_step(step)
        if decision.save is None:
            return None
        if decision.save == "preemption":
            logger.warning("%s: step %d is saved and the training should stop", decision.cause, step)
        return self._save(step, state, metrics, metadata, decision.save, wait=decision.save == "preemption")

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
        self._opened()
        self._pulse.restart_minutes()
        wait = not self._in_background if wait is None else wait
        return self._save(step, state, metrics, metadata, "asked for", wait=wait)

    def _save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None,
        reason: str,
        *,
        wait: bool,
    ) -> PendingSave | SaveReport:
        wait = wait or not self._in_background
        if wait:
            self._wait_for_pending()
        else:
            self._raise_failures()
        noted = {"run": self.run_id, "step": step, "metrics": _numbers(metrics), "reason": reason}
        self._refuse_other_parts(state)
        store = self.root.child(folder_of(step))
        make_options = functools.partial(
            SaveOptions.of,
            **self._save_options,
            metadata={**self._metadata, **(metadata or {}), "holdfast": noted},
            overwrite=True,
        )
        with about(step=step, reason=reason):
            if wait:
                saved: PendingSave | SaveReport = self._save_now(step, state, store, make_options)
            else:
                attempts = functools.partial(self._attempts, step)
                optimizers = _optimizers_in(state) if self._overlaps else ()
                how = replace(self._how, attempts=attempts, optimizers=optimizers)
                saved = begin_save(state, store, make_options, how, self._group)
                self._pending.append((step, saved))
                ProgressLine(saved, f"step {step}", rank=_rank(self._group))
        self._last_saved, self._unsaved = step, None
        return saved

    def _save_now(self, step: int, state: Any, store: Any, make_options: Callable[[], SaveOptions]) -> SaveReport:
        wait_for_conflicting_saves(Claim(store.location))
        call = f"holdfast.CheckpointManager.save of step {step} to {store.location}"
        with Call("save", store.location) as told, meeting(call, self._group) as ranks:
            return self._attempts(step, ranks, lambda: save_together(ranks, state, store, make_options, told))

    def _attempts(self, step: int, ranks: Collectives, save: Callable[[], SaveReport]) -> SaveReport:
        """A save, around which the coordinator keeps the run in order."""
        ranks.broadcast("begin", lambda: self._run.begin(step))
        when_full = WhenFull(
            self._on_full,
            prune=self._run.prune,
            free_bytes=self.root.free_bytes,
            clean_up=lambda: self._run.clean_up(step),
        )
        path, committed = self.root.child(folder_of(step)).location, False
        try:
            report = save_despite_full_disk(save, path, when_full, ranks=ranks)
            committed = True
        finally:
            if ranks.is_coordinator:
                self._run.end(step, is_committed=committed)
        return report

    def _refuse_other_parts(self, state: Any) -> None:
        if self._parts is not None and frozenset(state) != self._parts:
            missing, more = sorted(self._parts - set(state)), sorted(set(state) - self._parts)
            raise ValueError(
                f"a checkpoint of this run has the parts {sorted(self._parts)}. Of the state, {missing or 'none'} are "
                f"missing and {more or 'none'} are too many. Nothing was saved."
            )

    # Failures

    def wait(self) -> None:
        """Return when all saves are committed and older checkpoints are deleted. Raises what a save raised."""
        self._wait_for_pending()
        if self._is_coordinator():
            self._run.wait_for_deletions()

    def _wait_for_pending(self) -> None:
        concurrent.futures.wait([pending.committed for _, pending in self._pending])
        self._raise_failures()

    def _raise_failures(self) -> None:
        ended = [(step, pending) for step, pending in self._pending if pending.done()]
        self._pending = [(step, pending) for step, pending in self._pending if not pending.done()]
        failed = [(step, pending.committed.exception()) for step, pending in ended]
        for step, error in failed:
            if error is None:
                continue
            if self._on_failure == "raise":
                raise error
            warn_caller(f"step {step} was not saved: {type(error).__name__}: {error}", RuntimeWarning)

    # Restoring

    def restore(
        self, state: Any, *, step: int | None = None, parts: Sequence[str] | None = None, **options: Any
    ) -> RestoredStep | None:
        """Load the newest checkpoint that is whole, or that of a ``step``. None if there is none: a fresh start.

        Damaged ones are set aside with a note of the reason, and what is lost by that is told. If there are checkpoints
        and all are damaged, that is an error.

        Args:
            state: what to load into, in place, as for ``load``.
            step: one step and no other. Damage is an error then.
            parts: names at the top of the state; only these are loaded, and only their bytes are read.
            options: other arguments of ``load``, such as ``cast=True``.
        """
        self._opened()
        wanted = state if parts is None else {name: state[name] for name in parts}
        candidates = self._decided("list the steps", lambda: self._candidates(step))

        def load_step(info: StepInfo) -> Any:
            with about(step=info.step):
                return load(wanted, self.root.child(info.name), process_group=self._group, **options)

        def set_aside(info: StepInfo, reason: str) -> None:
            self._decided("set aside", lambda: self._run.set_aside(info, reason))

        if step is not None:
            info = candidates[0]
            restored: RestoredStep | None = RestoredStep(
                info.step, info.path, load_step(info), info.metrics, info.metadata
            )
        else:
            restored = restore_newest(candidates, load_step, set_aside, place=self.root.location)
        if restored is not None:
            self._pulse.resume_after(restored.step)
            self._last_saved = restored.step
        return restored

    def _candidates(self, step: int | None) -> list[StepInfo]:
        """What may be restored, newest first."""
        found = [info for info in self._run.steps() if info.set_aside is None]
        if step is None:
            return found[::-1]
        chosen = [info for info in found if info.step == step]
        if not chosen:
            there = ", ".join(str(info.step) for info in found) or "none"
            raise CheckpointNotFoundError(
                f"there is no checkpoint of step {step} in {self.root.location}. There are: {there}.",
                path=self.root.location,
            )
        newer = [str(info.step) for info in found if info.step > step]
        if newer:
            logger.warning(
                "step %d is restored, and newer ones of %s stay: %s. Until the training is past them, a restart "
                "restores the newest of these; delete them if they are not wanted",
                step,
                self.root.location,
                ", ".join(newer),
            )
        return chosen

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
        """Keep a checkpoint whatever the policy says. All ranks call this, or none but the first."""
        if self._is_coordinator():
            self._run.pin(step, pinned=True)

    def unpin(self, step: int) -> None:
        """Let the policy decide about a checkpoint again."""
        if self._is_coordinator():
            self._run.pin(step, pinned=False)

    def delete(self, step: int) -> None:
        """Delete a checkpoint of this run, pinned or not."""
        self._opened()
        if self._is_coordinator():
            self._run.delete(step)

    def would_delete(self) -> list[StepInfo]:
        """What the policy would have deleted now."""
        return self._run.plan_deletions()

    def preflight(self, state: Any) -> PreflightReport:
        """Find out before the first step whether saves will go well: permissions, space, memory, speed.

        All ranks call this. Raises ``PreflightError`` with all problems; prints what to expect otherwise.
        """
        self._opened()
        report = run_preflight(
            state,
            self.root,
            kept=self._most_kept,
            stored_bytes=sum(info.nbytes for info in self.steps() if info.is_ours),
            async_save=self._in_background,
            writer=self._how.writer,
            copies=2 if self._how.when_busy == "copy" else 1,
            options=SaveOptions.of(**self._save_options, metadata=self._metadata, overwrite=True),
            process_group=self._group,
        )
        if self._is_coordinator():
            print(report)  # noqa: T201 - that is what it is for
        return report

    # Ranks

    def _decided(self, what: str, decide: Callable[[], T]) -> T:
        """What the coordinator finds, on all ranks; its error, if it fails."""
        with meeting(f"holdfast.CheckpointManager of {self.root.location}: {what}", self._group) as ranks:
            return ranks.broadcast(what, decide)

    def _exchange(self, step: int, beat: Beat) -> Sequence[Beat]:
        with meeting(f"holdfast.CheckpointManager.maybe_save at step {step}", self._group) as ranks:
            return ranks.all_gather_object(beat)

    def _is_coordinator(self) -> bool:
        return _rank(self._group) == 0


_NOTHING_SPECIAL: Mapping[str, Any] = {
    "include": None,
    "exclude": None,
    "cast": None,
    "check_replicas": True,
    "allow_pickle": False,
    "max_file_size": None,
    "memory_budget": None,
}


def _there_are_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if _there_are_ranks() else 0


def _policy(
    keep_last: int | None,
    keep_every: int | None,
    keep_best: tuple[int, str] | tuple[int, str, Mode] | None,
    keep: Policy | None,
) -> Policy:
    given = [keep] if keep is not None else []
    if keep_last is not None:
        given.append(last(keep_last))
    if keep_every is not None:
        given.append(every(keep_every))
    if keep_best is not None:
        given.append(best(*keep_best))
    return functools.reduce(lambda one, other: one | other, given) if given else everything()


def _most_kept(
    keep_last: int | None, keep_best: tuple[int, str] | tuple[int, str, Mode] | None, *, unlimited: bool
) -> int | None:
    """How many checkpoints there can be, pinned ones aside; None if nobody knows."""
    counts = [0 if keep_last is None else keep_last, 0 if keep_best is None else keep_best[0]]
    return None if unlimited or not any(counts) else sum(counts)


def _numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as plain numbers, which JSON can hold."""
    found: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        try:
            found[str(name)] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"the metric {name!r} must be a number, not {value!r}") from error
    return found


def _optimizers_in(state: Any) -> list[torch.optim.Optimizer]:
    if isinstance(state, torch.optim.Optimizer):
        return [state]
    if isinstance(state, Mapping):
        return [found for value in state.values() for found in _optimizers_in(value)]
    if isinstance(state, (list, tuple)):
        return [found for value in state for found in _optimizers_in(value)]
    return []


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
