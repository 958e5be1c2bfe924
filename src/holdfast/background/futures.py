"""Futures that know whether anybody looked, so that a failed save cannot go unnoticed."""

from __future__ import annotations

import logging
import threading
import weakref
from concurrent.futures import Future
from typing import Any

from holdfast.metadata import Metadata
from holdfast.notices import warn_caller

logger = logging.getLogger(__name__)


class _Outcome:
    """What is kept of a failed save: enough to tell of it when its future is gone."""

    def __init__(self, destination: str) -> None:
        self.destination = destination
        self.error: BaseException | None = None
        self.reported = False

    def __str__(self) -> str:
        return f"the background save to {self.destination} failed: {type(self.error).__name__}: {self.error}"


_unseen: dict[int, _Outcome] = {}
_lock = threading.RLock()  # a future may die, and take it, wherever Python collects garbage


class SaveFuture(Future[Metadata]):
    """The end of a background save. Its result is the checkpoint's index.

    It cannot be cancelled: the other ranks count on this one.
    """

    def __init__(self, destination: str) -> None:
        super().__init__()
        self._outcome = _Outcome(destination)
        self.set_running_or_notify_cancel()
        weakref.finalize(self, _report_if_unseen, self._outcome).atexit = False

    def result(self, timeout: float | None = None) -> Metadata:
        """The index, when the checkpoint is committed; raises what the save raised."""
        try:
            return super().result(timeout)
        finally:
            self._was_looked_at()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the save raised, or None, when it has ended."""
        try:
            return super().exception(timeout)
        finally:
            self._was_looked_at()

    def set_exception(self, exception: BaseException | None) -> None:
        """The save failed."""
        self._outcome.error = exception
        with _lock:
            if not self._outcome.reported:
                _unseen[id(self._outcome)] = self._outcome
        super().set_exception(exception)

    def is_reported_otherwise(self) -> None:
        """The caller gets the error of this save in another way."""
        with _lock:
            self._outcome.reported = True
            _unseen.pop(id(self._outcome), None)

    def _was_looked_at(self) -> None:
        with _lock:
            _unseen.pop(id(self._outcome), None)


def _report_if_unseen(outcome: _Outcome) -> None:
    """The future is gone. If it failed and nobody looked, nobody ever will."""
    with _lock:
        if outcome.reported or id(outcome) not in _unseen:
            return
        outcome.reported = True
    logger.error("%s", outcome)


def warn_of_unseen_failures() -> None:
    """Tell the caller of saves that failed since the last time, if nobody has looked at their futures."""
    for outcome in unseen_failures():
        if not outcome.reported:
            outcome.reported = True
            warn_caller(f"{outcome}. Nobody has looked at its future.", RuntimeWarning)


def unseen_failures() -> list[Any]:
    """The failed saves that nobody has looked at, in the order in which they failed."""
    with _lock:
        return list(_unseen.values())


def forget_failures() -> None:
    """In a forked child: these are the parent's."""
    with _lock:
        _unseen.clear()
