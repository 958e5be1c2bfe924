"""How and when a snapshot is taken: at once or in the background, into kept memory or fresh."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch

from holdfast import _settings as settings
from holdfast._background.arenas import ArenaPool, Memory, is_common, recycled
from holdfast._background.snapshots import Snapshot
from holdfast._base.notices import warn_caller
from holdfast._base.threads import ProcessFuture

State = dict[str, Any]


class SnapshotTaker:
    """Takes snapshots into memory that it keeps. Memory of a snapshot that is still in use is left alone."""

    def __init__(self, pool: ArenaPool, *, exact: bool = False) -> None:
        self._pool: ArenaPool | None = pool
        self._exact = exact
        self._last: ProcessFuture[State] | None = None

    def take(self, state: State) -> State:
        """A private copy of ``state``, complete when this returns."""
        return self._begin(state).fill()

    def take_later(self, state: State) -> Future[State]:
        """Copy everything but the elements of tensors now, and these in a thread. Nothing may change until then."""
        self._last = self._begin(state).fill_later()
        return self._last

    def wait(self) -> None:
        """Return when the last snapshot is taken. A failure is for the one who has its future."""
        if self._last is not None and self._last.is_known_here():
            self._last.exception()

    def close(self) -> None:
        """Finish what has begun, and let go of the memory. Snapshots that are in use stay as they are."""
        self.wait()
        self._last = None
        if self._pool is not None and not is_common(self._pool):
            self._pool.drop()
        self._pool = None

    def _begin(self, state: State) -> Snapshot:
        if self._pool is None:
            raise RuntimeError("the stager was closed and takes no more snapshots; make a new one")
        return Snapshot(state, self._pool, exact=self._exact)


def own_pool(memory: Memory) -> ArenaPool:
    """Memory that one stager keeps: a block that is being written and one that is being filled are enough."""
    return ArenaPool(memory, keep=2)


def common_pool(memory: Memory) -> ArenaPool:
    """Memory for stagers that keep none themselves. The process keeps a block, unless the settings say otherwise."""
    return recycled(memory) if settings.current().keep_staging_memory else ArenaPool(memory)


def host_memory(*, pinned: bool, shared: bool, non_blocking: bool = False) -> Memory:
    """The memory to use for these options. Warns of what cannot be had."""
    has_device = torch.accelerator.is_available()
    if (pinned or non_blocking) and not has_device:
        options = [name for name, wish in (("pinned memory", pinned), ("non-blocking copies", non_blocking)) if wish]
        warn_caller(
            f"{' and '.join(options)} need an accelerator, and there is none here: snapshots are taken by plain copies "
            "into ordinary memory"
        )
    if pinned and has_device:
        return Memory.PINNED
    return Memory.SHARED if shared else Memory.PAGEABLE
