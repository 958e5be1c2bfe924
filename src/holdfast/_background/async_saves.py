"""Saves that go on while the program does: handed to the lane of their ranks, and carried out there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from holdfast import _settings as settings
from holdfast._background import exit as _waits_for_saves_at_exit  # noqa: F401 - imported for what it registers
from holdfast._background.futures import SaveFuture
from holdfast._background.messages import SaveRequest, Work
from holdfast._background.queues import Claim, Lane
from holdfast._background.writer_process import PackedRequest, find_main_script, idle_writer, pack_request
from holdfast._ranks.meeting import LinkedCollectives, refuse_different_calls
from holdfast._ranks.shared_steps import Collectives
from holdfast._watching.calls import Call

Attempts = Callable[[Collectives, Callable[[], Any]], Any]
"""Calls a save, and once more if it likes. On all ranks alike: all of them must do the same."""


def once(ranks: Collectives, save: Callable[[], Any]) -> Any:
    """Whatever comes of it."""
    return save()


@dataclass(frozen=True, kw_only=True)
class BackgroundSave:
    """A save as it is handed to the background."""

    work: Work
    take_copy: Callable[[], Any]
    """Gives the private copy that ``work`` saves, once, and waits until it is complete. It must not keep it alive."""
    claim: Claim
    in_process: bool
    """Whether a writer process does it, and not a thread."""
    coordinator_rank: int = 0
    call: Call | None = None
    """Whose phases, bytes and events these are."""
    same_on_all_ranks: str | None = None
    """What is called, with all that the ranks must agree about. They compare it."""
    attempts: Attempts = once
    around: Callable[[Collectives], AbstractContextManager[Any]] | None = None
    """Entered around all of it: the errors of the save go through it."""


def save_in_background(save: BackgroundSave, lane: Lane) -> SaveFuture[Any]:
    """Queue a save. Every rank of the lane must do so, in the same order."""
    chosen = asdict(settings.current())
    main_script = find_main_script() if save.in_process else {}

    def packed(ranks: Collectives) -> PackedRequest:
        members = None if lane.link is None else lane.link.members
        return pack_request(
            SaveRequest(save.work, save.take_copy(), save.call, ranks.rank, members, save.coordinator_rank, chosen),
            main_script,
        )

    def carry_out(ranks: Collectives) -> Any:
        # What this rank has to say of its own state comes before what it learns of the others.
        ready = ranks.own_error_first("plan", lambda: packed(ranks) if save.in_process else save.take_copy())
        if save.same_on_all_ranks is not None:
            refuse_different_calls(ranks, save.same_on_all_ranks)
        # No functions of their own: those in the traceback of an error would keep the copy alive.
        if not save.in_process:
            return save.attempts(ranks, partial(save.work, ranks, ready, save.call))
        with idle_writer() as writer:
            return save.attempts(ranks, partial(writer.save, ready, lane.link, str(save.claim), save.call))

    def job(ranks: Collectives) -> Any:
        with ExitStack() as stack:
            if save.around is not None:
                stack.enter_context(save.around(ranks))
            return carry_out(ranks)

    return _queue(lane, job, save.claim, save.coordinator_rank)


def give_up_in_background(error: BaseException, lane: Lane, claim: Claim, *, coordinator_rank: int) -> None:
    """Take part in a save only to report to the other ranks that this one cannot, and why."""

    def fail() -> None:
        raise error

    future = _queue(lane, lambda ranks: ranks.own_error_first("plan", fail), claim, coordinator_rank)
    future.mark_reported()


def _queue(lane: Lane, save: Callable[[Collectives], Any], claim: Claim, coordinator_rank: int) -> SaveFuture[Any]:
    def job() -> Any:
        if lane.link is None:
            return save(Collectives(None, False, 0))
        with lane.link.round() as link:
            return save(LinkedCollectives(link, coordinator_rank))

    return lane.queue.submit(job, claim)
