"""``holdfast.async_save``: capture and copy, then save in the background what was copied."""

from __future__ import annotations

import functools
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist

from holdfast import _settings as settings
from holdfast._background.arenas import ArenaPool, Memory
from holdfast._background.async_saves import Attempts, BackgroundSave, give_up_in_background, once, save_in_background
from holdfast._background.futures import warn_of_unseen_failures
from holdfast._background.queues import Claim, Lane
from holdfast._background.step_hooks import changed_only_by, checked_optimizers, hold_steps_back, watch_steps
from holdfast._base.arguments import Size, check_choice, checked_size
from holdfast._base.garbage import no_garbage_collection
from holdfast._base.tuning import MEMORY_BUDGET, SMALLEST_BUDGET
from holdfast._ranks.meeting import causes_instead_of_steps, own_place, refuse_outsider
from holdfast._save.capture import Capture, Captured
from holdfast._save.captured_copies import CapturedCopy, WhenBusy, note_memory, wait_for_memory, with_digests
from holdfast._save.options import CheckedOptions, SaveOptions, refuse_unknown_options, shows_save_options
from holdfast._save.pending import PendingSave
from holdfast._save.report import SaveReport
from holdfast._save.save import SaveRun
from holdfast._stores.memory_store import MemoryStore
from holdfast._stores.places import in_messages, store_at
from holdfast._stores.store import Store
from holdfast._watching.calls import Call

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from holdfast._ranks.shared_steps import Collectives

Writer = Literal["thread", "process"]


@shows_save_options
def async_save(
    state: Any,
    path: str | os.PathLike[str] | Store,
    *,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    writer: Writer = "thread",
    when_busy: WhenBusy = "wait",
    check_tearing: bool = False,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
    **options: Unpack[SaveOptions],
) -> PendingSave:
    """Take a private copy of a state, and save it in the background while the program goes on.

    With a process group all its ranks call this, in the same order. They do not wait for each other in the call. What
    is saved is the state of the moment of the call, whatever happens to it later. The program waits for pending saves
    when it ends, but not if a signal such as SIGTERM ends it: ``CheckpointManager`` handles those.

    Args:
        state: what to save, and where, as for ``save``.
        path: as for ``save``.
        optimizers: those that change the state. If they are given, the call returns before their parameters and states
            are copied: that goes on during forward and backward, and their next step waits for what is left of it.
            Whatever else is in the state is copied in the call. If anything but a step of these optimizers changes
            parameters (a moving average of weights into them, a sync of a client), call ``pending.staged.result()``
            before it does.
        writer: a thread of this process, or a ``"process"`` of its own, which never competes with the program for
            Python's lock.
        when_busy: if an earlier save is still being written, ``"wait"`` for its memory, take a second ``"copy"`` within
            ``memory_budget``, or raise ``SaveInProgressError`` (``"error"``). Saves are carried out in the order of
            the calls.
        check_tearing: compare digests of the state at the call and of the copy, to find out whether something changed
            the state while it was copied. Takes time in the call; what torch itself counts as a change is found anyway.
        overwrite: as for ``save``.
        process_group: as for ``save``. It needs no backend for the CPU.
        options: all others are those of ``save``. Only ``memory_budget`` counts the copy as well: by default it is one
            copy of this rank's part of the state, two with ``when_busy="copy"``, and 64 MiB.

    Example:
        >>> import tempfile, torch
        >>> import holdfast
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> state = {"weights": torch.ones(4)}
        >>> pending = holdfast.async_save(state, path)
        >>> _ = state["weights"].zero_()                  # training goes on
        >>> pending.result().tensor_count                 # before it matters
        1
        >>> holdfast.open(path)["weights"][:]
        tensor([1., 1., 1., 1.])
    """
    refuse_unknown_options("holdfast.async_save()", options)
    how = How(optimizers, writer, when_busy, check_tearing, options.pop("memory_budget", None))
    return begin_save(
        state, path, functools.partial(CheckedOptions.of, options, overwrite=overwrite), how, process_group
    )


@dataclass(frozen=True)
class How:
    """How a background save is carried out, as the user wants it."""

    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = ()
    writer: Writer = "thread"
    when_busy: WhenBusy = "wait"
    check_tearing: bool = False
    memory_budget: Size | None = None
    """For copies and buffers together."""
    attempts: Attempts = once
    """What to do if it fails."""

    def check(self) -> None:
        """Raise for what is not understood."""
        check_choice("writer", self.writer, get_args(Writer))
        check_choice("when_busy", self.when_busy, get_args(WhenBusy))


def begin_save(
    state: Any,
    path: str | os.PathLike[str] | Store,
    make_options: Callable[[], CheckedOptions],
    how: How,
    process_group: dist.ProcessGroup | None,
) -> PendingSave:
    """Copy a state as far as that cannot wait, and queue the rest."""
    alone = not (dist.is_available() and dist.is_initialized())
    if not alone:
        refuse_outsider(process_group)
    lane, claim = Lane.of(process_group, alone=alone), Claim(in_messages(path))
    rank, world_size = own_place(process_group)
    call = Call("save", claim, rank=rank, world_size=world_size)
    try:
        warn_of_unseen_failures()  # which raises, if the program has warnings do so
        with _stalling(call):
            begun = _begin(state, path, make_options(), how, lane, call)
    except BaseException as error:
        # Or else the other ranks would wait for this one.
        give_up_in_background(error, lane, claim, coordinator_rank=0)
        call.finish(error=error)
        raise
    options = begun.options
    same = (
        f"holdfast.async_save to {claim}, overwrite={options.overwrite!r}, "
        f"replica_mismatch={options.replica_mismatch!r}"
    )
    committed = save_in_background(
        BackgroundSave(
            work=functools.partial(save_copy, store=begun.store, options=options),
            take_copy=begun.take_copy,
            claim=claim,
            in_process=how.writer == "process",
            call=call,
            same_on_all_ranks=same,
            attempts=functools.partial(_attempt, call, how.attempts),
            around=functools.partial(_reporting, call, alone=alone),
        ),
        lane,
    )
    note_memory(lane, committed, begun.nbytes)
    return PendingSave(str(claim), begun.staged, committed, call)


@contextmanager
def _stalling(call: Call) -> Iterator[None]:
    """The program waits for what happens in the ``with`` block."""
    began = time.perf_counter()
    try:
        yield
    finally:
        call.stall(time.perf_counter() - began)


@contextmanager
def _reporting(call: Call, ranks: Collectives, *, alone: bool) -> Iterator[None]:
    """The call ends with the ``with`` block. The error is that of the rank that failed."""
    call.rank, call.world_size = ranks.rank, ranks.world_size
    with call, causes_instead_of_steps(alone=alone):
        yield


def _attempt(call: Call, attempts: Attempts, ranks: Collectives, save: Callable[[], SaveReport]) -> SaveReport:
    report: SaveReport = attempts(ranks, save)
    call.nbytes, call.slowest_rank = report.bytes_written, report.slowest_rank
    call.detail["stalled"] = call.stalled
    return report


@dataclass(frozen=True)
class _Begun:
    """A save whose state is captured, and copied as far as that could not wait."""

    store: Store
    options: CheckedOptions
    nbytes: int
    """What the copy takes."""
    staged: Future[None]
    _copy: list[Captured]

    def take_copy(self) -> Captured:
        """The copy, when it is complete. Given once, so that nothing keeps it alive longer than the save."""
        captured = self._copy.pop()
        self.staged.result()
        return captured


def _begin(
    state: Any, path: str | os.PathLike[str] | Store, options: CheckedOptions, how: How, lane: Lane, call: Call
) -> _Begun:
    """Capture and copy."""
    how.check()
    optimizers = checked_optimizers(how.optimizers)
    watch_steps(optimizers)
    store = _store_for(path, how.writer)
    with call.phase("capture"), no_garbage_collection():
        rank, members = (0, (0,)) if lane.link is None else (lane.link.rank, lane.link.members)
        captured = Capture.of(options, rank, members, compare_later=True).take(state)
        snapshot = CapturedCopy.of(captured)
    copies = snapshot.copies
    call.total_bytes = snapshot.nbytes
    for_writing, for_copies = _shares_of(how, snapshot.nbytes)
    options = replace(options, memory_budget=for_writing)
    wait_for_memory(lane, snapshot.nbytes, how.when_busy, for_copies)
    with call.phase("stage"):
        copies.begin(_pool(how.writer), check=how.check_tearing)
        copied = snapshot.captured()
        if optimizers:
            is_held_back = changed_only_by(optimizers)
            copies.copy_now(lambda tensor: not is_held_back(tensor))
            copies.copy_later()
            hold_steps_back(optimizers, copies, call.stall)
        else:
            copies.copy_now()
    return _Begun(store, options.without_patterns(), snapshot.nbytes, copies.done, [copied])


def save_copy(
    ranks: Collectives, captured: Captured, call: Call | None, *, store: Store, options: CheckedOptions
) -> SaveReport:
    """Save what was captured and copied, with the given ranks: in a thread, or in a writer process."""
    assert call is not None
    call.start_over("capture", "stage")
    with call.phase("compare"), ranks.step("compare"):
        complete = with_digests(captured)
    return SaveRun(store, ranks, options, call).save(complete)


def _store_for(path: str | os.PathLike[str] | Store, writer: Writer) -> Store:
    store = store_at(path)
    if writer == "process" and isinstance(store, MemoryStore):
        raise ValueError(f"{store.location} is in the memory of this process, where a writer process cannot save to")
    if writer == "process" and store is path:
        _refuse_if_it_cannot_be_sent(store)
    return store


def _refuse_if_it_cannot_be_sent(store: Store) -> None:
    try:
        pickle.dumps(store)
    except Exception as error:
        raise ValueError(
            f"{store!r} cannot be sent to a writer process ({type(error).__name__}: {error}). Give the class a "
            "__reduce__ or __getstate__, or save with writer='thread'."
        ) from error


def _shares_of(how: How, snapshot: int) -> tuple[int | None, int]:
    """What may be allocated for writing (None for the default), and for all copies that are in use at a time."""
    wished = 2 * snapshot if how.when_busy == "copy" else snapshot
    budget = checked_size("memory_budget", how.memory_budget)
    if budget is None:
        return None, wished
    if budget - snapshot < SMALLEST_BUDGET:
        raise ValueError(
            f"memory_budget is {budget:,} bytes, and a background save needs {snapshot:,} for a copy of this rank's "
            f"part of the state and {SMALLEST_BUDGET:,} to write it. Give it that much, or use holdfast.save, which "
            "copies nothing."
        )
    # More memory for writing makes it no faster than a second copy does, if there is enough for that.
    copies = wished if budget - wished >= SMALLEST_BUDGET else snapshot
    for_writing = min(budget - copies, MEMORY_BUDGET)
    return for_writing, budget - for_writing


_POOLS = {
    "process": ArenaPool(Memory.SHARED, keep=2),
    "thread": ArenaPool(Memory.PAGEABLE, keep=2),
    "pinned": ArenaPool(Memory.PINNED, keep=2),
}
"""The memory of earlier copies, for the next ones."""


def _pool(writer: Writer) -> ArenaPool:
    pool = _POOLS["pinned" if writer == "thread" and torch.accelerator.is_available() else writer]
    return pool if settings.current().keep_staging_memory else ArenaPool(pool.memory)
