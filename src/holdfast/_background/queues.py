"""Background saves, one after the other in the order of the calls, and which of them wait for which."""

from __future__ import annotations

import contextvars
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from holdfast._background.futures import SaveFuture
from holdfast._ranks.private_group import PrivateGroup, forget_private_group, private_group_of
from holdfast.errors import CheckpointException

# Background saves, one after the other in the order of the calls.


Job = Callable[[], Any]


@dataclass(frozen=True)
class Claim:
    """What a save uses. Another one that uses some of it too has to wait."""

    destination: str | None
    writer: object = None
    planner: object = None

    def conflicts_with(self, other: Claim) -> bool:
        """Whether the two saves must not run at the same time."""
        return (
            (self.destination is not None and self.destination == other.destination)
            or (self.writer is not None and self.writer is other.writer)
            or (self.planner is not None and self.planner is other.planner)
        )

    def __str__(self) -> str:
        return self.destination or f"a {type(self.writer).__name__}"


@dataclass
class _Entry:
    job: Job
    future: SaveFuture[Any]
    context: contextvars.Context


class SaveQueue:
    """Saves that wait for each other. A thread works on them, and ends when there are none."""

    def __init__(self) -> None:
        self._waiting: deque[_Entry] = deque()
        self._claims: deque[Claim] = deque()
        self._changed = threading.Condition()
        self._is_working = False
        self._worker: int | None = None

    def submit(self, job: Job, claim: Claim) -> SaveFuture[Any]:
        """Run ``job`` after all that were submitted before: in a thread, or here and now if the program is ending."""
        future: SaveFuture[Any] = SaveFuture(str(claim))
        with self._changed:
            self._waiting.append(_Entry(job, future, contextvars.copy_context()))
            self._claims.append(claim)
            if self._is_working:
                return future
            self._is_working = True
        if not (_threads_live_on and self._start_a_thread()):
            self._work()
        return future

    def _start_a_thread(self) -> bool:
        try:
            threading.Thread(target=self._work, name="holdfast-save", daemon=True).start()
        except RuntimeError:  # there are no more to be had
            return False
        return True

    def is_worked_on_here(self) -> bool:
        """Whether this is the thread of the save that runs, as it is in callbacks. It must not wait for that save."""
        return self._worker == threading.get_ident()

    def claims(self) -> list[Claim]:
        """What the saves use that are running or waiting."""
        with self._changed:
            return list(self._claims)

    def is_idle(self) -> bool:
        """Whether nothing is running or waiting."""
        with self._changed:
            return not self._is_working

    def wait_until_idle(self, timeout: float | None = None) -> bool:
        """Return when nothing is running or waiting, or after ``timeout`` seconds. Whether nothing is."""
        patience = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_working, patience)

    def wait_for(self, claim: Claim) -> None:
        """Return when no save that conflicts with ``claim`` is running or waiting."""
        if self.is_worked_on_here():
            return
        with self._changed:
            self._changed.wait_for(lambda: not any(claim.conflicts_with(other) for other in self._claims))

    def _work(self) -> None:
        self._worker = threading.get_ident()
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_working = False
                    self._worker = None
                    self._changed.notify_all()
                    return
                entry = self._waiting.popleft()
            _run(entry)
            del entry  # nothing of this save may stay alive while the next one runs
            with self._changed:
                self._claims.popleft()
                self._changed.notify_all()


_threads_live_on = True


def use_no_more_threads() -> None:
    """The program is ending: nobody will wait for a thread that is started from now on."""
    global _threads_live_on
    _threads_live_on = False


def _run(entry: _Entry) -> None:
    try:
        result = entry.context.run(entry.job)
    except BaseException as error:  # whatever it is, it belongs to the caller
        _let_go_of_locals(error)
        entry.future.set_exception(error)
    else:
        entry.future.set_result(result)


def _let_go_of_locals(error: BaseException) -> None:
    """A future may be kept for long, and its error must not keep a copy of the state."""
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        waiting.extend(linked for linked in (each.__cause__, each.__context__) if linked is not None)
        if isinstance(each, CheckpointException):
            waiting.extend(failure for failure, _ in each.failures.values())


# Which background saves wait for which.
#
# Each process group has a lane of its own, and all its ranks put their saves into it in the same order; so the saves
# of a group never get in each other's way, and groups never wait for each other.


@dataclass(eq=False)
class Lane:
    """What the background saves of one group of ranks share. ``link`` is None for a process that saves alone."""

    link: PrivateGroup | None
    queue: SaveQueue = field(default_factory=SaveQueue)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, *, alone: bool) -> Lane:
        """The lane of a process group, or of this process alone. The same one each time."""
        link = None if alone else private_group_of(group)
        with _lock:
            if link not in _lanes:
                _close_lanes_of_destroyed_groups()
                _lanes[link] = cls(link)
            return _lanes[link]


_lanes: dict[PrivateGroup | None, Lane] = {}
_lock = threading.Lock()


def all_lanes() -> list[Lane]:
    """The lanes that are in use, or were."""
    with _lock:
        return list(_lanes.values())


def wait_for_conflicting_saves(claim: Claim) -> None:
    """Return when no background save of this process uses what ``claim`` names."""
    for lane in all_lanes():
        lane.queue.wait_for(claim)


def _close_lanes_of_destroyed_groups() -> None:
    for link, lane in list(_lanes.items()):
        if link is not None and link.is_orphaned() and lane.queue.is_idle():
            del _lanes[link]
            forget_private_group(link)


def _start_anew_in_forked_child() -> None:
    """A forked child has copies of the lanes, without the threads that work on them. Somebody may hold the lock."""
    global _lock
    _lock = threading.Lock()
    _lanes.clear()


os.register_at_fork(after_in_child=_start_anew_in_forked_child)
