"""Long work in several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

from holdfast.waiting import some_threads, wait_for_all

T = TypeVar("T")


def work_through(tasks: Iterable[T], work: Callable[[T], None], threads: int) -> None:
    """Do all tasks, each in one of some threads. The first error is raised when none of them works any more."""
    todo = _Shared(tasks)
    pool = some_threads(threads, "holdfast-inspect") if threads > 1 else None
    if pool is None:
        todo.do_all(work)
        return
    running: list[Future[None]] = []
    with pool:
        try:
            running += [pool.submit(todo.do_all, work) for _ in range(threads)]
            for thread in running:
                thread.result()
        finally:
            todo.stop()
            wait_for_all(running)


class _Shared(Generic[T]):
    """Tasks that several threads take from. When one of them fails, the others stop."""

    def __init__(self, tasks: Iterable[T]) -> None:
        self._tasks: Iterator[T] = iter(tasks)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._lock:
            return next(self._tasks)

    def do_all(self, work: Callable[[T], None]) -> None:
        try:
            for task in self:
                work(task)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        with self._lock:
            self._tasks = iter(())
