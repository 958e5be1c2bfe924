"""Futures that know whether anybody looked, so that a failed save cannot go unnoticed."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import TypeVar

from holdfast._base.notices import warn_caller
from holdfast._base.threads import ProcessFuture

T = TypeVar("T")

logger = logging.getLogger(__name__)


class _Outcome:
    """What is kept of a failed save: enough to report it when its future is gone."""

    def __init__(self, destination: str) -> None:
        self.destination = destination
        self.error: BaseException | None = None
        self.is_reported = False

    def __str__(self) -> str:
        return f"the background save to {self.destination} failed: {type(self.error).__name__}: {self.error}"


_unseen: dict[int, _Outcome] = {}
"""The failed saves that nobody has looked at."""

_lock = threading.RLock()  # a future may die, and take it, wherever Python collects garbage


class SaveFuture(ProcessFuture[T]):
    """The end of a background save. Its result is what the save returned.

    It cannot be cancelled: the other ranks count on this one.
    """

    def __init__(self, destination: str) -> None:
        super().__init__(f"the background save to {destination}")
        self._outcome = _Outcome(destination)
        self.set_running_or_notify_cancel()
        weakref.finalize(self, _log_if_unseen, self._outcome).atexit = False

    def result(self, timeout: float | None = None) -> T:
        """What the save returned, when the checkpoint is committed; raises what the save raised."""
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

    def has_failed(self) -> bool:
        """Whether the save has ended with an error. To ask this is not to look at the error."""
        return self._outcome.error is not None

    def set_exception(self, exception: BaseException | None) -> None:
        """The save failed."""
        self._outcome.error = exception
        with _lock:
            if not self._outcome.is_reported:
                _unseen[id(self._outcome)] = self._outcome
        super().set_exception(exception)

    def mark_reported(self) -> None:
        """The caller gets the error of this save in another way."""
        with _lock:
            self._outcome.is_reported = True
            _unseen.pop(id(self._outcome), None)

    def _was_looked_at(self) -> None:
        with _lock:
            _unseen.pop(id(self._outcome), None)


def take_unreported_failures() -> list[str]:
    """What is to be said of saves that failed and that nobody looked at. Each is given once."""
    with _lock:
        unreported = [outcome for outcome in _unseen.values() if not outcome.is_reported]
        for outcome in unreported:
            outcome.is_reported = True
    return [str(outcome) for outcome in unreported]


def has_unseen_failures() -> bool:
    """Whether a save failed and nobody ever looked at it, reported or not."""
    with _lock:
        return bool(_unseen)


def warn_of_unseen_failures() -> None:
    """Warn the caller of saves that failed since the last time, if nobody has looked at their futures."""
    for failure in take_unreported_failures():
        warn_caller(f"{failure}. Its future was never checked.", RuntimeWarning)


def _log_if_unseen(outcome: _Outcome) -> None:
    """The future is gone. If it failed and nobody looked, nobody ever will."""
    with _lock:
        if outcome.is_reported or id(outcome) not in _unseen:
            return
        outcome.is_reported = True
    logger.error("%s", outcome)


def forget_failures() -> None:
    """In a forked child, where the failures are the parent's and somebody may hold the lock; and between tests."""
    global _lock
    _lock = threading.RLock()
    _unseen.clear()


os.register_at_fork(after_in_child=forget_failures)
