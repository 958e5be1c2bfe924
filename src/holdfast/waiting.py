"""Threads that must not outlive the call that began them, and waiting for them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any


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
