"""What happens when the disk is full: the last good checkpoint stays, and the save is given up, or tried again.

A save that fails removes what it wrote by itself. Here it is decided whether it is tried again, by one rank for all.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch.distributed as dist

from holdfast._manager.options import FullDiskAction
from holdfast._ranks.meeting import meeting
from holdfast._watching.progress import size
from holdfast.errors import CheckpointException, StorageFullError

if TYPE_CHECKING:
    from holdfast._ranks.shared_steps import Collectives

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_ADVICE: dict[FullDiskAction, str] = {
    "error": "Make space, keep fewer checkpoints, or choose OnFullDisk(action='prune') or 'wait'.",
    "prune": "Make space, or keep and pin fewer checkpoints.",
    "wait": "Make space, keep fewer checkpoints, or choose OnFullDisk(action='prune').",
}
_LONGEST_PAUSE = 10.0
"""The other ranks wait for the coordinator meanwhile, and must not take it for dead."""


def is_full(error: BaseException) -> bool:
    """Whether a save failed because there was no space left, or no quota, and for no other reason on any rank.

    >>> is_full(OSError(28, "No space left on device"))
    True
    >>> is_full(PermissionError(13, "Permission denied"))
    False
    """
    return bool(_full_ranks(error))


def _full_ranks(error: BaseException) -> dict[int, OSError]:
    """The ranks that found the disk full, and how; nothing if some rank failed for another reason."""
    together = _failure_of_all(error)
    failures = {0: error} if together is None else {rank: cause for rank, (cause, _) in together.failures.items()}
    found = {rank: _full_cause(cause) for rank, cause in failures.items()}
    full = {rank: cause for rank, cause in found.items() if cause is not None}
    return full if len(full) == len(found) else {}


def _failure_of_all(error: BaseException) -> CheckpointException | None:
    """The error that all ranks got, behind the one that is raised for people."""
    for each in (error, error.__cause__):
        if isinstance(each, CheckpointException):
            return each
    return None


def _all_know_of(error: BaseException) -> bool:
    """Whether all ranks have this error now. If only this rank does, the others are elsewhere and cannot be asked."""
    alone = not (dist.is_available() and dist.is_initialized())
    return alone or _failure_of_all(error) is not None


def _full_cause(error: BaseException) -> OSError | None:
    """The full disk among the causes of an error."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if isinstance(each, OSError) and each.errno in _FULL:
            return each
        if not isinstance(each, Exception):
            return None  # Ctrl-C on a full disk is Ctrl-C
        seen.add(id(each))
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return None


class _Step(Protocol):
    """What of ``StepInfo`` matters here."""

    @property
    def step(self) -> int: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def set_aside(self) -> str | None: ...
    @property
    def is_ours(self) -> bool: ...


S = TypeVar("S", bound=_Step)


def next_to_go(steps: Iterable[S], spare: Collection[int] = (), saved_last: int | None = None) -> S | None:
    """The checkpoint to delete first on a full disk: the oldest that may go, those of ``spare`` only after all others.

    The newest that can be restored stays whatever happens, and so does the one that was ``saved_last``: after a return
    to an earlier step it has not the highest number. So do pinned ones, those that were set aside, and what others put
    there.
    """
    good = sorted((step for step in steps if step.is_ours and step.set_aside is None), key=lambda step: step.step)
    may_go = [step for step in good[:-1] if not step.pinned and step.step != saved_last]
    return min(may_go, key=lambda step: (step.step in spare, step.step), default=None)


@dataclass(frozen=True)
class WhenFull:
    """What to do on a full disk."""

    action: FullDiskAction = "error"
    prune: Callable[[], str | None] = lambda: None
    """Deletes one checkpoint that may go and returns its name; None if there is none. Called on the coordinator."""
    free_bytes: Callable[[], int | None] = lambda: None
    """How much can be written, as this rank sees it. Called on every rank."""
    clean_up: Callable[[], None] = lambda: None
    """Removes what a failed attempt left: its empty folder. Called on the coordinator when no rank writes any more."""
    wait_seconds: float = 3600.0
    """How long to wait in all, for each save."""
    give_up_at: Callable[[], float | None] = lambda: None
    """When the program will be ended, by the clock; None if nobody knows. It may turn out while a save waits."""
    poll_seconds: float = 10.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def save_despite_full_disk(
    save: Callable[[], T],
    path: str,
    when_full: WhenFull,
    *,
    needed: Callable[[Collectives], int | None] = lambda ranks: None,
    ranks: Collectives | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> T:
    """Save, and again if the disk was full and there is space now. All ranks call this together.

    Args:
        save: one attempt. It leaves nothing behind when it fails.
        path: of the checkpoint, for messages.
        when_full: what to do.
        needed: the bytes of the checkpoint, asked of all ranks together when the disk is full; None if nobody knows.
        ranks: within a call in which the ranks are together already, as those of background saves. Otherwise they come
            together when an attempt has failed.
        process_group: then these come together; all by default.

    Example:
        >>> attempts = iter([OSError(28, "No space left on device"), None])
        >>> def save():
        ...     if error := next(attempts):
        ...         raise error
        ...     return "saved"
        >>> save_despite_full_disk(save, "runs/a/step-3", WhenFull("prune", prune=lambda: "step-1"))
        'saved'
    """
    handling = _FullDiskHandling(path, when_full)
    while True:
        try:
            return save()
        except Exception as error:
            full = _full_ranks(error)
            if not full or not _all_know_of(error):
                raise
            with _together(ranks, path, process_group) as present:
                verdict = handling.decide(present, full, needed)
            if verdict is not None:
                raise verdict from error


def _together(
    ranks: Collectives | None, path: str, process_group: dist.ProcessGroup | None
) -> AbstractContextManager[Collectives]:
    return meeting(f"holdfast: no space for {path}", process_group) if ranks is None else nullcontext(ranks)


@dataclass(frozen=True)
class _View:
    """What is known when it is to be decided."""

    needed: int | None
    free: int | None

    @property
    def has_room(self) -> bool:
        """Whether another attempt is worth it. Nobody may know, so that it has to be tried."""
        return self.needed is None or self.free is None or self.free >= self.needed

    def __str__(self) -> str:
        needed = f" The checkpoint needs {_bytes(self.needed)}." if self.needed is not None else ""
        free = f" There are {_bytes(self.free)} free." if self.free is not None else ""
        return needed + free


class _FullDiskHandling:
    """One save, from its first failure on."""

    def __init__(self, path: str, when_full: WhenFull) -> None:
        self._path = path
        self._when_full = when_full
        self._deleted: list[str] = []
        self._deadline: float | None = None

    def decide(
        self, ranks: Collectives, full: dict[int, OSError], needed: Callable[[Collectives], int | None]
    ) -> StorageFullError | None:
        """The error to raise on all ranks; None if all ranks are to try again."""
        ranks.barrier()  # until now others may not have removed yet what they wrote
        how_much = _asked(needed, ranks)
        ranks.broadcast("clean up", self._clean_up)
        if self._when_full.action == "prune":
            return self._prune(ranks, full, how_much)
        if self._when_full.action == "wait":
            return self._wait(ranks, full, how_much)
        return self._error(full, self._look(ranks, how_much))

    def _prune(self, ranks: Collectives, full: dict[int, OSError], needed: int | None) -> StorageFullError | None:
        """Delete one checkpoint after the other, until there is space as far as anybody can see."""
        while True:
            name, why = ranks.broadcast("prune", self._pruned)
            view = self._look(ranks, needed)
            if name is None:
                return self._error(full, view, why)
            self._deleted.append(name)
            if view.has_room:
                return None

    def _pruned(self) -> tuple[str | None, str]:
        try:
            name = self._when_full.prune()
        except Exception as error:  # the full disk is what is reported; this is why nothing could be done about it
            return None, f" No checkpoint could be deleted to make space: {type(error).__name__}: {error}."
        if name is None:
            return None, " There is no checkpoint left that may be deleted to make space."
        logger.warning("%s does not fit on the disk, so the checkpoint %s was deleted", self._path, name)
        return name, ""

    def _wait(self, ranks: Collectives, full: dict[int, OSError], needed: int | None) -> StorageFullError | None:
        """Look for space now and then, by the coordinator's clock."""
        view = self._look(ranks, needed)
        if self._deadline is None and ranks.is_coordinator:
            self._deadline = self._when_full.clock() + self._when_full.wait_seconds
            logger.warning("%s Waiting up to %.0f s for space.", self._cause(full, view), self._when_full.wait_seconds)
        while (why := ranks.broadcast("wait", self._slept)) is None:
            view = self._look(ranks, needed)
            if view.has_room:
                return None
        return self._error(full, view, why)

    def _slept(self) -> str | None:
        """Wait some, if there is time left; or else say why there is none."""
        assert self._deadline is not None
        end = self._when_full.give_up_at()
        now = self._when_full.clock()
        if self._deadline <= now:
            return f" No space was freed within {self._when_full.wait_seconds:.0f} s."
        if end is not None and end <= now:
            return " No space was freed before the program has to end."
        until = self._deadline if end is None else min(self._deadline, end)
        self._when_full.sleep(min(until - now, self._when_full.poll_seconds, _LONGEST_PAUSE))
        return None

    def _look(self, ranks: Collectives, needed: int | None) -> _View:
        """By the rank that sees the least space: disks need not be the same for all."""
        known = [free for free in ranks.all_gather("free space", self._free) if free is not None]
        return _View(needed, min(known, default=None))

    def _free(self) -> int | None:
        try:
            return self._when_full.free_bytes()
        except OSError:
            return None

    def _clean_up(self) -> None:
        try:
            self._when_full.clean_up()
        except Exception as error:
            logger.warning("what a failed save left at %s could not be removed: %s", self._path, error)

    def _cause(self, full: dict[int, OSError], view: _View) -> str:
        rank, cause = next(iter(sorted(full.items())))
        others = sorted(set(full) - {rank})
        also = f" (and so did rank(s) {others})" if others else ""
        place = f" at {cause.filename}" if cause.filename else ""
        return f"there is no space for {self._path}: rank {rank} failed{place}{also}: {cause.strerror}.{view}"

    def _error(self, full: dict[int, OSError], view: _View, why: str = "") -> StorageFullError:
        deleted = f" Deleted to make space: {', '.join(self._deleted)}." if self._deleted else ""
        message = (
            f"{self._cause(full, view)}{deleted}{why} Nothing was committed, what was written is removed, and the "
            f"newest earlier checkpoint is untouched. {_ADVICE[self._when_full.action]}"
        )
        return StorageFullError(
            message,
            path=self._path,
            rank=min(full),
            ranks=sorted(full),
            needed=view.needed,
            free=view.free,
            deleted=list(self._deleted),
        )


def _asked(needed: Callable[[Collectives], int | None], ranks: Collectives) -> int | None:
    try:
        return needed(ranks)
    except CheckpointException:  # on all ranks alike. It is only for the message, and to try less often
        return None


def _bytes(number: int) -> str:
    return f"{size(number)} ({number:,} bytes)"
