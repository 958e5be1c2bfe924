"""Jobs that are done one after the other, by a thread that keeps no program from ending."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from holdfast import _settings as settings

T = TypeVar("T")

_known: weakref.WeakSet[BackgroundJobs] = weakref.WeakSet()


class BackgroundJobs:
    """One thread, which is there as long as there is something to do.

    When the program ends, it waits for the jobs as long as for saves (``HOLDFAST_DRAIN_SECONDS``), and leaves without
    what is not done by then. So this is only for what a kill may interrupt.

    Example:
        >>> jobs = BackgroundJobs("doctest")
        >>> job = jobs.submit(lambda: 6 * 7)
        >>> jobs.wait(60), job.result()
        (True, 42)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._is_given_up = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do this when what was submitted before is done. The future has what it returns or raises."""
        job: Future[T] = Future()

        def run() -> None:
            try:
                job.set_result(work())
            except BaseException as error:
                job.set_exception(error)

        if not self._is_taken_by_a_thread(run):
            run()
        return job

    def wait(self, seconds: float) -> bool:
        """Wait until all is done, but not longer. Whether it is."""
        with self._lock:
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(max(0.0, seconds))
        return not thread.is_alive()

    def give_up(self) -> None:
        """Nobody will wait for these jobs any more, nor will the end of the program."""
        self._is_given_up = True

    def _is_taken_by_a_thread(self, run: Callable[[], None]) -> bool:
        with self._lock:
            if self._thread is None:
                if _end.is_set():
                    return False
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # Python ends, and gives no new threads
                    return False
                self._thread = thread
                _wait_at_the_end_for(self)
            self._waiting.append(run)
            return True

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                run = self._waiting.popleft()
            run()


_end = threading.Event()
"""Set when the program has waited for all jobs, and would wait for no other."""
_is_registered = False


def _wait_at_the_end_for(jobs: BackgroundJobs) -> None:
    global _is_registered
    _known.add(jobs)
    if not _is_registered:  # with the first job, and so it comes before what leaves the program for good
        _is_registered = True
        atexit.register(_finish)


def _finish() -> None:
    _end.set()
    end = time.monotonic() + settings.current().drain_seconds
    for jobs in list(_known):
        if not jobs._is_given_up:
            jobs.wait(end - time.monotonic())
