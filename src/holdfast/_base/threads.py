"""Threads that do not outlive the call that starts them, and waits that end.

All work that is spread over threads is one of these: ``work_through`` does tasks in any order, ``share_work`` likewise
with workers that keep something between tasks, ``map_in_threads`` returns results, and ``in_order`` hands them over one
by one while those that follow are under way. The first failure stops the rest, and is raised when no thread works any
more; so is what interrupts the calling thread. Context variables are those of the calling thread. Where no thread can
be started, that one does all the work.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, TypeVar

from holdfast.errors import OtherProcessError

R = TypeVar("R")
T = TypeVar("T")

SIGNALS_WITHIN = 1.0
"""Seconds. Python runs handlers of signals between its own instructions: one that arrives just before the main thread
waits for a lock, or in another thread, is handled when that wait has ended. So no wait for work is longer than this."""


class ProcessFuture(Future[T]):
    """A future that threads of this process complete. Forked processes have a copy of it, and no such threads.

    There it returns what was known when they were forked, and raises ``OtherProcessError`` where it would have to wait.

    >>> copied = ProcessFuture("a copy")
    >>> copied.set_result(5)
    >>> copied.result()
    5
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.owner = os.getpid()
        self._what = what
        # Apart from the base class, whose lock another thread may have held when the process was forked.
        self._end: tuple[Any, BaseException | None] | None = None

    def set_result(self, result: T) -> None:
        """It has ended well."""
        super().set_result(result)
        self._end = result, None

    def set_exception(self, exception: BaseException | None) -> None:
        """It has failed."""
        super().set_exception(exception)
        self._end = None, exception

    def result(self, timeout: float | None = None) -> T:
        """Its result, when there is one; raises what it failed with."""
        if self.owner == os.getpid():
            return super().result(timeout)
        result, error = self._end_before_the_fork()
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What it failed with, or None, when it has ended."""
        return super().exception(timeout) if self.owner == os.getpid() else self._end_before_the_fork()[1]

    def done(self) -> bool:
        """Whether it has ended. Who asks again and again waits too, so this raises in a process that never learns."""
        return super().done() if self.owner == os.getpid() else self._end_before_the_fork() is not None

    def is_known_here(self) -> bool:
        """Whether this process has seen the end of it, or will."""
        return self.owner == os.getpid() or self._end is not None

    def _end_before_the_fork(self) -> tuple[Any, BaseException | None]:
        if self._end is None:
            raise OtherProcessError(
                f"{self._what} belongs to process {self.owner}, from which this one, {os.getpid()}, was forked before "
                "it had ended. It goes on there, and this process does not learn how it ends: wait for it in process "
                f"{self.owner}.",
                owner=self.owner,
                process=os.getpid(),
            )
        return self._end


def work_through(tasks: Iterable[T], work: Callable[[T], object], threads: int, name: str) -> None:
    """Do all tasks, each in one of some threads.

    >>> done = []
    >>> work_through("abc", done.append, 2, "example")
    >>> sorted(done)
    ['a', 'b', 'c']
    """

    def work_on(shared: Iterator[T]) -> None:
        for task in shared:
            work(task)

    share_work(tasks, [work_on] * max(1, threads), name)


def map_in_threads(function: Callable[[T], R], items: Iterable[T], threads: int, name: str) -> list[R]:
    """What a function returns for all items, called in some threads.

    >>> map_in_threads(len, ["a", "bcd"], 2, "example")
    [1, 3]
    """
    items = list(items)
    results: dict[int, R] = {}

    def call(number: int) -> None:
        results[number] = function(items[number])

    work_through(range(len(items)), call, min(threads, len(items)), name)
    return [results[number] for number in range(len(items))]


def share_work(tasks: Iterable[T], workers: Sequence[Callable[[Iterator[T]], R]], name: str) -> list[R]:
    """Call each worker in a thread of its own, the first one in this thread, and return what they returned.

    All are given the same tasks: each takes the next one when it has done one, so that all are busy to the end. After
    a failure there are no more.

    >>> sum(share_work(range(1000), [sum] * 3, "example"))
    499500
    """
    shared = _SharedTasks(tasks)
    pool = some_threads(len(workers) - 1, name) if len(workers) > 1 else None
    if pool is None:
        return [workers[0](shared)]
    jobs: list[Future[R]] = []
    with pool:
        try:
            for worker in workers[1:]:
                work = partial(shared.until_one_fails, worker)
                jobs.append(pool.submit(copy_context().run, work))  # an interrupt finds all jobs
            first = shared.until_one_fails(workers[0])
            while wait(jobs, SIGNALS_WITHIN).not_done:
                pass
        except BaseException as error:
            shared.stop(error)  # a signal is nothing that the other threads notice
        finally:
            wait_for_all(jobs)
    if shared.error is not None:
        raise shared.error
    return [first, *(job.result() for job in jobs)]


class _SharedTasks(Generic[T]):
    """Tasks that several threads take from."""

    def __init__(self, tasks: Iterable[T]) -> None:
        self._tasks = iter(tasks)
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        """The first failure. There is nothing more to do then."""

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._lock:
            return next(self._tasks)

    def until_one_fails(self, worker: Callable[[Iterator[T]], R]) -> R:
        try:
            return worker(self)
        except BaseException as error:
            self.stop(error)
            raise

    def stop(self, error: BaseException) -> None:
        with self._lock:
            self._tasks = iter(())
            if self.error is None or not isinstance(error, Exception):  # Ctrl-C is raised as that, whatever failed
                self.error = error


def in_order(
    function: Callable[[T], R], items: Iterable[T], *, threads: int, ahead: int, name: str
) -> Generator[tuple[T, R], None, None]:
    """All items, each with what a function returned for it, which some threads call.

    ``ahead`` of them at most are under way or wait to be taken. The items are asked for by the thread that takes the
    results. They are begun in their order and given up from the last one on: a call may wait for those before it.
    Close this when you stop before the end; that returns when no thread works any more.

    >>> [length for _, length in in_order(len, ["a", "bcd"], threads=2, ahead=4, name="example")]
    [1, 3]
    """
    pool = some_threads(threads, name) if threads > 1 else None
    if pool is None:
        for item in items:
            yield item, function(item)
        return
    jobs: deque[tuple[T, Future[R]]] = deque()
    with pool:
        try:
            for item in items:
                jobs.append((item, pool.submit(copy_context().run, partial(function, item))))
                if len(jobs) >= ahead:
                    yield jobs[0][0], jobs[0][1].result()
                    jobs.popleft()
            while jobs:
                yield jobs[0][0], jobs[0][1].result()
                jobs.popleft()
        finally:
            wait_for_all([job for _, job in reversed(jobs) if not job.cancel()])


def some_threads(count: int, name: str) -> ThreadPoolExecutor | None:
    """Threads to give work to, all of them started; fewer if there are no more to be had.

    None if there are none at all: what runs when Python ends has to do without.

    >>> with some_threads(2, "reader") as pool:
    ...     pool.submit(sum, [1, 2]).result()
    3
    """
    while count:
        pool, started = ThreadPoolExecutor(count, name), 0
        all_started = threading.Event()  # until then each is busy, so that the next one is started
        try:
            for started in range(count):  # noqa: B007
                pool.submit(all_started.wait)
        except RuntimeError:
            count = started
        else:
            return pool
        finally:
            all_started.set()
        pool.shutdown(wait=True)
    return None


def wait_for_all(jobs: Iterable[Future[Any]]) -> None:
    """Return when none of the jobs is running. Whatever interrupts this is raised then, and not before.

    They use memory and descriptors that the caller is about to give back. It would not do to join their threads:
    after an interrupt, some versions of Python take a thread that they were waiting for to be at its end.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> pool = ThreadPoolExecutor(2)
    >>> jobs = [pool.submit(sum, [1, 2]), pool.submit(int, "not a number")]
    >>> wait_for_all(jobs)
    >>> [job.done() for job in jobs]
    [True, True]
    >>> pool.shutdown()
    """
    jobs = list(jobs)
    interrupt: BaseException | None = None
    while not all(job.done() for job in jobs):
        try:
            wait(jobs, SIGNALS_WITHIN)
        except BaseException as error:  # a handler of signals can raise anything
            interrupt = error
    if interrupt is not None:
        raise interrupt


# How many processors there are for us.


def count_processors() -> int:
    """How many this process may use: containers and schedulers often give it fewer than the machine has.

    >>> count_processors() >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
