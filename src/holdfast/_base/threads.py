"""Threads that must not outlive the call that began them, and waits that end."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from holdfast.errors import OtherProcessError

# Threads that must not outlive the call that began them, waiting for them, and for nothing that will never come.


T = TypeVar("T")


class ProcessFuture(Future[T]):
    """A future that threads of this process complete. Forked processes have a copy of it, and no such threads.

    There it tells what was known when they were forked, and raises ``OtherProcessError`` where it would have to wait.

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


def some_threads(count: int, name: str) -> ThreadPoolExecutor | None:
    """Threads to give work to; None if there are none to be had: what runs when Python ends has to do without.

    >>> with some_threads(2, "reader") as pool:
    ...     pool.submit(sum, [1, 2]).result()
    3
    """
    pool = ThreadPoolExecutor(count, name)
    try:
        pool.submit(int)
    except RuntimeError:
        return None
    return pool


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
            wait(jobs)
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
