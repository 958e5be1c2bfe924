"""Background saves, one after the other in the order of the calls.

Each process group has a queue of its own, and all ranks put their saves into it in the same order; so the saves of a
group never get in each other's way, and groups never wait for each other.
"""

from __future__ import annotations

import contextvars
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable

from holdfast.background.futures import SaveFuture, forget_failures
from holdfast.coordination.private_group import forget_private_groups
from holdfast.errors import CheckpointException
from holdfast.metadata import Metadata

Job = Callable[[], Metadata]


class SaveQueue:
    """Saves that wait for each other. A thread works on them, and ends when there are none."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Job, SaveFuture, contextvars.Context]] = deque()
        self._changed = threading.Condition()
        self._is_working = False
        self._destinations: list[str] = []

    def submit(self, job: Job, destination: str) -> SaveFuture:
        """Run ``job`` after all that were submitted before."""
        future = SaveFuture(destination)
        with self._changed:
            self._waiting.append((job, future, contextvars.copy_context()))
            self._destinations.append(destination)
            if not self._is_working:
                self._is_working = True
                threading.Thread(target=self._work, name="holdfast-save", daemon=True).start()
        return future

    def is_idle(self) -> bool:
        """Whether nothing is running or waiting."""
        with self._changed:
            return not self._is_working

    def wait_until_idle(self) -> None:
        """Return when nothing is running or waiting."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_working)

    def wait_for(self, destination: str) -> None:
        """Return when no save to ``destination`` is running or waiting."""
        with self._changed:
            self._changed.wait_for(lambda: destination not in self._destinations)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_working = False
                    self._changed.notify_all()
                    return
                job, future, context = self._waiting.popleft()
            _run(job, future, context)
            # Nothing of this save may stay alive while the thread waits for the next one.
            del job, future, context
            with self._changed:
                self._destinations.pop(0)
                self._changed.notify_all()


def _run(job: Job, future: SaveFuture, context: contextvars.Context) -> None:
    try:
        metadata = context.run(job)
    except BaseException as error:  # whatever it is, it belongs to the caller
        _let_go_of_locals(error)
        future.set_exception(error)
    else:
        future.set_result(metadata)


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


_queues: dict[object, SaveQueue] = {}
_lock = threading.Lock()


def queue_of(group: object) -> SaveQueue:
    """The queue of a group, or of the saves without one (``None``)."""
    with _lock:
        return _queues.setdefault(group, SaveQueue())


def forget_queue(group: object) -> None:
    """Give up the queue of a group that is no more."""
    with _lock:
        _queues.pop(group, None)


def all_queues() -> list[SaveQueue]:
    """The queues that were ever used."""
    with _lock:
        return list(_queues.values())


def wait_for_saves_to(destination: str) -> None:
    """Return when no background save of this process to ``destination`` is pending."""
    for queue in all_queues():
        queue.wait_for(destination)


def _forget_all_in_child() -> None:
    """A forked child has copies of the queues without the threads that work on them."""
    global _lock
    _lock = threading.Lock()
    _queues.clear()
    forget_failures()
    forget_private_groups()


os.register_at_fork(after_in_child=_forget_all_in_child)
