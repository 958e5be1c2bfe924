"""Waiting for threads that must not outlive the call that began them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import Any


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
