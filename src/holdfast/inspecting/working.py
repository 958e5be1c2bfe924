"""Long work in several threads, with one count of how far it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeAlias, TypeVar

from holdfast.processors import count_processors
from holdfast.tuning import READERS
from holdfast.waiting import some_threads, wait_for_all

OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that are done and with those there are in all, by one thread at a time."""

T = TypeVar("T")


class Tally:
    """How many bytes are done.

    >>> tally = Tally(10, lambda done, total: print(done, "of", total))
    >>> tally.add(4)
    4 of 10
    """

    def __init__(self, total: int, on_progress: OnProgress | None = None) -> None:
        self.total = total
        self.done = 0
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """That many more are done."""
        with self._lock:
            self.done += nbytes
            if self._on_progress is not None:
                self._on_progress(self.done, self.total)


def count_workers(nbytes: int, each: int) -> int:
    """How many threads are worth it for so much work, of which each thread takes ``each`` bytes at once."""
    return max(1, min(READERS, count_processors() + 1, nbytes // max(1, each)))


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
