"""Saves that go on while the program does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from holdfast import _settings as settings
from holdfast._background import exit as _waits_for_saves_at_exit  # noqa: F401 - imported for what it registers
from holdfast._background import messages as progress
from holdfast._background.futures import SaveFuture
from holdfast._background.messages import Request, Work
from holdfast._background.queues import Claim, Lane
from holdfast._background.writer_process import PackedRequest, find_main_script, idle_writer, pack_request
from holdfast._formats.dcp.metadata import Metadata
from holdfast._ranks.collectives import Collectives
from holdfast._ranks.meeting import LinkedCollectives, causes_instead_of_steps, refuse_different_calls
from holdfast._watching.calls import Call

State = dict[str, Any]


def save_in_background(
    work: Work, staged: State | Future[State], lane: Lane, claim: Claim, *, coordinator_rank: int, in_process: bool
) -> SaveFuture[Metadata]:
    """Queue a save of ``staged``, which must be private by now or when its future is done.

    Every rank of the lane must do so, in the same order. ``work`` saves; with ``in_process`` in a process of its own.
    """
    chosen = asdict(settings.current())
    main_script = find_main_script() if in_process else {}
    # Taken out when it is needed: what is left of this call in the traceback of an error must not keep the copy alive.
    box = [staged]

    def get_state() -> State:
        taken = box.pop()
        return taken.result() if isinstance(taken, Future) else taken

    def save_here(ranks: Collectives) -> Any:
        return work(ranks, ranks.own_error_first("plan", get_state))

    def save_in_writer(ranks: Collectives) -> Any:
        members = None if lane.link is None else lane.link.members

        def prepare() -> PackedRequest:
            request = Request(work, get_state(), ranks.rank, members, coordinator_rank, chosen)
            return pack_request(request, main_script)

        request = ranks.own_error_first("plan", prepare)
        with idle_writer() as writer:
            return writer.save(request, lane.link, str(claim))

    return _queue(lane, save_in_writer if in_process else save_here, claim, coordinator_rank)


Attempts = Callable[[Collectives, Callable[[], Any]], Any]
"""Calls a save, and once more if it likes. On all ranks alike: all of them must do the same."""


def once(ranks: Collectives, save: Callable[[], Any]) -> Any:
    """Whatever comes of it."""
    return save()


def save_copy_in_background(
    work: Work,
    get_copy: Callable[[], State],
    lane: Lane,
    claim: Claim,
    *,
    call: str,
    attempts: Attempts,
    in_process: bool,
    told: Call,
    watcher: progress.Watcher,
    stalled: Callable[[], float],
) -> SaveFuture[Any]:
    """Queue a save of what ``get_copy`` returns, which may wait for it. As for ``save_in_background`` otherwise.

    ``call`` says what is called, with all that must be the same on all ranks. ``told`` tells of the end, ``watcher`` is
    told how far the save is, and ``stalled`` says for how long the program has waited. The error is that of the rank
    that failed.
    """
    chosen = asdict(settings.current())
    main_script = find_main_script() if in_process else {}

    def save_here(ranks: Collectives) -> Any:
        state = ranks.own_error_first("copy", get_copy)
        refuse_different_calls(ranks.all_gather_object(call))
        with _watched_by(watcher):
            return attempts(ranks, lambda: work(ranks, state))

    def save_in_writer(ranks: Collectives) -> Any:
        members = None if lane.link is None else lane.link.members

        def prepare() -> PackedRequest:
            return pack_request(Request(work, get_copy(), ranks.rank, members, 0, chosen), main_script)

        request = ranks.own_error_first("copy", prepare)
        refuse_different_calls(ranks.all_gather_object(call))
        with idle_writer() as writer:
            return attempts(ranks, lambda: writer.save(request, lane.link, str(claim), watcher, told.tell))

    def save(ranks: Collectives) -> Any:
        told.rank, told.world_size = ranks.rank, ranks.world_size
        with told, causes_instead_of_steps(alone=lane.link is None):
            report = (save_in_writer if in_process else save_here)(ranks)
            told.finish(nbytes=report.bytes_written, slowest_rank=report.slowest_rank, stalled=stalled())
            return report

    return _queue(lane, save, claim, 0)


@contextmanager
def _watched_by(watcher: progress.Watcher) -> Iterator[None]:
    token = progress.watcher.set(watcher)
    try:
        yield
    finally:
        progress.watcher.reset(token)


def give_up_in_background(error: BaseException, lane: Lane, claim: Claim, *, coordinator_rank: int) -> None:
    """Take part in a save only to tell the other ranks that this one cannot, and why."""

    def fail() -> Metadata:
        raise error

    future = _queue(lane, lambda ranks: ranks.own_error_first("plan", fail), claim, coordinator_rank)
    future.tell_nobody()


def _queue(lane: Lane, save: Callable[[Collectives], Any], claim: Claim, coordinator_rank: int) -> SaveFuture[Any]:
    def job() -> Any:
        if lane.link is None:
            return save(Collectives(None, False, 0))
        with lane.link.round() as link:
            return save(LinkedCollectives(link, coordinator_rank))

    return lane.queue.submit(job, claim)
