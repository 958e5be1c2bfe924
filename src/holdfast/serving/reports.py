"""Reports of checkpoints, made when somebody asks for one and kept for the next who does."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeAlias

from holdfast.progress import OnProgress

Key: TypeAlias = tuple[str, ...]
"""By what a report is known: the names and identities of its checkpoints."""


class _Closed(Exception):
    """Nobody waits for the report any more."""


@dataclass
class Job:
    """A report that is being made, or is done."""

    future: Future[str] = field(default_factory=Future)
    done: int = 0
    total: int = 0

    def ready_within(self, seconds: float) -> bool:
        """Wait for it, but not longer. Whether it is done, or has failed."""
        wait([self.future], timeout=seconds)
        return self.future.done()


class Reports:
    """Makes one report at a time, since each takes what the disk gives, and keeps the last few.

    >>> with Reports() as reports:
    ...     job = reports.job(("step-1", "00ff"), lambda on_progress: "<p>a report</p>")
    ...     job.future.result()
    '<p>a report</p>'
    """

    def __init__(self, keep: int = 8) -> None:
        self._keep = keep
        self._jobs: OrderedDict[Key, Job] = OrderedDict()
        self._lock = threading.Lock()
        self._is_closing = False
        self._pool = ThreadPoolExecutor(1, "holdfast-report")

    def job(self, key: Key, make: Callable[[OnProgress], str]) -> Job:
        """The report of this key: begun now, if there is none yet."""
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = Job()
                job.future = self._pool.submit(self._make, job, make)
            self._jobs.move_to_end(key)
            self._drop_oldest()
            return job

    def known(self, key: Key) -> Job | None:
        """The report of this key, if it was begun."""
        with self._lock:
            return self._jobs.get(key)

    def forget(self, key: Key) -> None:
        """Make this report anew for the next who asks, such as one that failed."""
        with self._lock:
            self._jobs.pop(key, None)

    def close(self) -> None:
        """Give up what is being made, and wait for that."""
        self._is_closing = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Reports:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make(self, job: Job, make: Callable[[OnProgress], str]) -> str:
        def on_progress(done: int, total: int) -> None:
            job.done, job.total = done, total
            if self._is_closing:
                raise _Closed

        on_progress(0, 0)
        return make(on_progress)

    def _drop_oldest(self) -> None:
        finished = [key for key, job in self._jobs.items() if job.future.done()]
        for key in finished[: max(0, len(self._jobs) - self._keep)]:
            del self._jobs[key]
