"""The background saves of a manager, and what becomes of them. All ranks learn of a failure at the same call."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist

from holdfast._background.futures import SaveFuture
from holdfast._base.notices import warn_caller
from holdfast._manager.options import OnFailure
from holdfast._ranks.meeting import meeting
from holdfast._save.pending import PendingSave
from holdfast._save.report import SaveReport
from holdfast.errors import RemoteError

logger = logging.getLogger(__name__)


class _View(NamedTuple):
    """What one rank knows of the saves, each of which has a number."""

    ended: frozenset[int]
    failed: Mapping[int, str]
    """Why, of those that were not reported to its program yet."""
    damaged: Sequence[tuple[int, str]] = ()
    """Steps that were committed and turned out to be damaged, and how."""


class _Begun(NamedTuple):
    """A save as this rank sees it."""

    step: int
    committed: SaveFuture[SaveReport] | None
    error: BaseException | None = None
    """Why it has not begun here, without a future."""

    def has_ended(self) -> bool:
        return self.committed is None or self.committed.done()

    def has_failed(self) -> bool:
        return self.committed is None or self.committed.has_failed()

    def failure(self) -> BaseException | None:
        """Why it failed, once it has ended."""
        return self.error if self.committed is None else self.committed.exception()


class PendingSaves:
    """Saves that have begun, in the order in which they did."""

    def __init__(
        self,
        place: str,
        on_failure: OnFailure,
        process_group: dist.ProcessGroup | None,
        *,
        may_be_damaged: bool = False,
        timeout: float | None = None,
    ) -> None:
        """With ``may_be_damaged`` some rank may ``note_damage``, and so they ask each other at every save."""
        self._place = place
        self._on_failure: OnFailure = on_failure
        self._group = process_group
        self._timeout = timeout
        self._count = 0
        # The same ones on all ranks: they are taken out only in exchanges, whoever has looked at one before.
        self._begun: dict[int, _Begun] = {}
        self._newest: _Begun | None = None
        self._saved_again: int | None = None
        self._reported: set[int] = set()
        self._may_be_damaged = may_be_damaged
        self._damaged: list[tuple[int, Exception]] = []

    def add(self, step: int, begin: Callable[[], PendingSave]) -> PendingSave:
        """Begin a save, on all ranks."""
        number, self._count = self._count, self._count + 1
        try:
            pending = begin()
        except BaseException as error:
            # On other ranks it may have begun, to fail because of this one.
            self._begun[number] = self._newest = _Begun(step, None, error)
            self._reported.add(number)
            raise
        self._begun[number] = self._newest = _Begun(step, pending.committed)
        return pending

    def forget_newest(self) -> None:
        """What was saved last is of no account any more: the step was saved now, or the training has gone back."""
        self._newest = None

    def is_newest(self, step: int) -> bool:
        """Whether the save that began last is one of this step."""
        return self._newest is not None and self._newest.step == step

    def newest_report(self) -> SaveReport | None:
        """What the save that began last did, when it has ended well. None if it failed on any rank. All ranks ask."""
        self.wait()
        newest = self._newest
        assert newest is not None
        has_failed = newest.has_failed()
        try:
            with meeting(
                f"holdfast.CheckpointManager of {self._place}: whether step {newest.step} is saved",
                self._group,
                timeout=self._timeout,
            ) as ranks:
                has_failed = any(ranks.all_gather_object(has_failed))
        except Exception as error:
            if has_failed:
                raise
            # A rank has left, and here is what counts: a save that ended well on any rank is committed.
            logger.warning("step %d is saved, but not all ranks were there to learn that: %s", newest.step, error)
        return None if has_failed or newest.committed is None else newest.committed.result()

    def note_saved_again(self, step: int) -> None:
        """A step whose save failed is saved by now."""
        self._saved_again = step

    def wait(self, timeout: float | None = None) -> list[int]:
        """Return when all have ended, well or not. The steps of those that have not, after the timeout."""
        futures = [begun.committed for begun in self._begun.values() if begun.committed is not None]
        for future in futures:
            future.done()  # raises in a forked process, which would wait for ever
        unfinished = concurrent.futures.wait(futures, timeout).not_done
        return [begun.step for begun in self._begun.values() if begun.committed in unfinished]

    def raise_failures(self) -> None:
        """Raise, or warn of, what any rank knows to have failed. All ranks call this, and all raise the same.

        They do not notice the end of a save at the same moment; if only some raised, the others would wait for them in
        the next save.
        """
        if not self._begun and not self._may_be_damaged:
            return
        with meeting(
            f"holdfast.CheckpointManager of {self._place}: what became of earlier saves",
            self._group,
            timeout=self._timeout,
        ) as ranks:
            own = self._view()
            views = ranks.all_gather_object(own)
        failed = {number: why for view in views for number, why in view.failed.items()}
        errors = [self._error(number, failed[number]) for number in sorted(failed)]
        errors += self._take_damaged(len(own.damaged))
        errors += [
            (step, _error_of_another_rank(step, why)) for view in views if view != own for step, why in view.damaged
        ]
        over = failed.keys() | frozenset.intersection(*(view.ended for view in views))
        self._begun = {number: begun for number, begun in self._begun.items() if number not in over}
        self._reported -= over
        self._raise_unreported(errors)

    def raise_own_failures(self) -> None:
        """Raise, or warn of, what this rank knows to have failed."""
        own = self._view()
        self._reported.update(own.failed)
        errors = [self._error(number, why) for number, why in own.failed.items()]
        self._raise_unreported(errors + self._take_damaged(len(own.damaged)))

    def note_damage(self, step: int, error: Exception) -> None:
        """A step turned out to be damaged after it was committed, which is as bad as a save that failed."""
        self._damaged.append((step, error))

    def _view(self) -> _View:
        ended = {number: begun for number, begun in self._begun.items() if begun.has_ended()}
        failed = {number: begun for number, begun in ended.items() if begun.has_failed()}
        unreported = {number: repr(begun.failure()) for number, begun in failed.items() if number not in self._reported}
        damaged = [(step, repr(error)) for step, error in tuple(self._damaged)]
        return _View(frozenset(ended), unreported, damaged)

    def _error(self, number: int, why: str) -> tuple[int, BaseException]:
        begun = self._begun[number]
        return begun.step, begun.failure() or _error_of_another_rank(begun.step, why)

    def _take_damaged(self, count: int) -> list[tuple[int, BaseException]]:
        """Those that were in a view. Another thread may have noted more since."""
        taken, self._damaged[:count] = self._damaged[:count], []
        return list(taken)

    def _raise_unreported(self, errors: list[tuple[int, BaseException]]) -> None:
        if self._on_failure == "warn":
            for step, error in errors:
                warn_caller(f"step {step} {self._fate(step)}: {type(error).__name__}: {error}", RuntimeWarning)
            return
        for step, error in errors[1:]:
            logger.error("step %d %s: %s: %s", step, self._fate(step, " either"), type(error).__name__, error)
        if errors:
            raise errors[0][1]

    def _fate(self, step: int, either: str = "") -> str:
        return "was saved at the second attempt only" if step == self._saved_again else f"was not saved{either}"


def _error_of_another_rank(step: int, why: str) -> BaseException:
    message = f"the save of step {step} failed on another rank: {why}"
    return RemoteError(message, type_name=why.partition("(")[0], text=why)
