"""A save that goes on while the program does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from typing import NamedTuple

from holdfast._background.futures import SaveFuture
from holdfast._save.report import SaveReport
from holdfast._watching.calls import Call


class SaveProgress(NamedTuple):
    """How far a save is, on this rank."""

    phase: str
    """``copying``, ``waiting``, ``planning``, ``writing``, ``committing``, ``committed`` or ``failed``."""
    done_bytes: int
    total_bytes: int
    """Of what this rank holds; it writes less if others hold the same."""


class PendingSave:
    """What ``async_save`` returns. Nothing has to be done with it: the program waits for pending saves when it ends.

    It is asked as the futures of ``concurrent.futures`` are: ``result``, ``exception``, ``done``. If nobody asks for a
    failure, the next call to the library warns of it, and the program ends with exit code 1.
    """

    path: str
    staged: Future[None]
    """Done when the program may change its state. Without ``optimizers`` that is so when ``async_save`` returns."""
    committed: SaveFuture[SaveReport]
    """Done when the checkpoint is durable and complete: the future itself, for callbacks, ``asyncio.wrap_future`` and
    ``concurrent.futures.wait``. It cannot be cancelled: the other ranks count on this one."""

    def __init__(self, path: str, staged: Future[None], committed: SaveFuture[SaveReport], call: Call) -> None:
        self.path = path
        self.staged = staged
        self.committed = committed
        self._call = call

    @property
    def stalled(self) -> float:
        """For how many seconds the program has waited so far: in the call, and before a step of an optimizer."""
        return self._call.stalled

    def result(self, timeout: float | None = None) -> SaveReport:
        """What was saved, when it is committed. Raises what the save raised, or ``TimeoutError``: then it goes on.

        In a process that was forked meanwhile, this and the other questions raise ``OtherProcessError``: a save goes on
        in the process that began it.
        """
        with self._explained_timeout(timeout):
            return self.committed.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the save raised, or None, when it has ended. Raises ``TimeoutError`` if that takes longer."""
        with self._explained_timeout(timeout):
            return self.committed.exception(timeout)

    @contextmanager
    def _explained_timeout(self, timeout: float | None) -> Iterator[None]:
        """A ``TimeoutError`` that says how far the save is, in the place of that of the future."""
        try:
            yield
        except FutureTimeoutError:
            if self.done():
                raise  # it is the error of the save itself
            raise TimeoutError(f"after {timeout:g} s the save has not ended: {self!r}. It goes on.") from None

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self.committed.done()

    def progress(self) -> SaveProgress:
        """How far it is. Asks nobody and waits for nothing."""
        phase, total = self._phase(), self._call.total_bytes
        return SaveProgress(phase, total if phase == "committed" else min(self._call.done_bytes, total), total)

    def _phase(self) -> str:
        if self.committed.done():
            return "failed" if self.committed.has_failed() else "committed"
        return _PHASES.get(self._call.current_phase, "waiting") if self.staged.done() else "copying"

    def __repr__(self) -> str:
        if not self.committed.is_known_here():
            return f"<PendingSave to {self.path}: of process {self.committed.owner}>"
        phase, done, total = self.progress()
        return f"<PendingSave to {self.path}: {phase}, {done:,} of {total:,} bytes>"


_PHASES = {"compare": "planning", "plan": "planning", "write": "writing", "commit": "committing"}
"""Before the first of them it waits for saves before this one, or for other ranks."""
