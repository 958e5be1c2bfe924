"""How and when a snapshot is taken: at once or in the background, into kept memory or fresh."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from holdfast import _settings as settings
from holdfast._background.arenas import ArenaPool, Memory, is_common, recycled
from holdfast._background.snapshots import Snapshot
from holdfast._base.notices import warn_caller
from holdfast._base.threads import ProcessFuture
from holdfast._ranks.interrupts import interrupts_wait

State = dict[str, Any]


class SnapshotTaker:
    """Takes snapshots into memory that it keeps. Memory of a snapshot that is still in use is left alone."""

    def __init__(self, pool: ArenaPool, *, exact: bool = False) -> None:
        self._pool: ArenaPool | None = pool
        self._exact = exact

    def take(self, state: State, *, non_blocking: bool = False) -> State:
        """A private copy of ``state``, complete when this returns."""
        return self.begin(state).fill(non_blocking=non_blocking)

    def begin(self, state: State) -> Snapshot:
        """A private copy whose tensors have no elements yet."""
        if self._pool is None:
            raise RuntimeError("the stager was closed and takes no more snapshots; make a new one")
        return Snapshot(state, self._pool, exact=self._exact)

    def close(self) -> None:
        """Let go of the memory. Snapshots that are in use stay as they are."""
        if self._pool is not None and not is_common(self._pool):
            self._pool.drop()
        self._pool = None


class AsyncSnapshotTaker(SnapshotTaker):
    """Takes snapshots in a thread, one after the other. The program may change nothing until they are complete."""

    def __init__(self, pool: ArenaPool) -> None:
        super().__init__(pool)
        self._last: ProcessFuture[State] | None = None
        self._make_a_thread()

    def take_later(self, state: State, *, non_blocking: bool = False) -> Future[State]:
        """Copy everything but the elements of tensors now, and these in the background."""
        snapshot = self.begin(state)
        if self._owner != os.getpid():  # this process was forked, and has no such thread
            self._make_a_thread()
        staged: ProcessFuture[State] = ProcessFuture("the copy of a state for a background save")
        fill = functools.partial(_complete, staged, functools.partial(snapshot.fill, non_blocking=non_blocking))
        try:
            self._thread.submit(fill)
        except RuntimeError:  # there are no more threads to be had
            # It was queued nevertheless. A thread that can be started later must not copy what is there by then.
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._make_a_thread()
            with interrupts_wait():
                fill()
        self._last = staged
        return staged

    def wait(self) -> None:
        """Return when no snapshot is being taken. A failure is for the one who has its future."""
        if self._last is not None and self._last.is_known_here():
            self._last.exception()

    def close(self) -> None:
        """Finish what has begun, and let go of the memory."""
        if self._owner == os.getpid():
            self._thread.shutdown()
        self._last = None
        super().close()

    def _make_a_thread(self) -> None:
        self._owner = os.getpid()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="holdfast-stage")


def _complete(future: Future[State], fill: Callable[[], State]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(fill())
    except BaseException as error:
        future.set_exception(error)
    finally:
        del future, fill  # an error refers to this frame, and would keep the copy alive through it


def own_pool(memory: Memory) -> ArenaPool:
    """Memory that one stager keeps: a block that is being written and one that is being filled are enough."""
    return ArenaPool(memory, keep=2)


def common_pool(memory: Memory) -> ArenaPool:
    """Memory for stagers that keep none themselves. The process keeps a block, unless the settings say otherwise."""
    return recycled(memory) if settings.current().keep_staging_memory else ArenaPool(memory)


def host_memory(*, pinned: bool, shared: bool, non_blocking: bool) -> tuple[Memory, bool]:
    """The memory to use for these wishes, and whether copies can be non-blocking. Warns of what cannot be had."""
    has_device = torch.accelerator.is_available()
    if (pinned or non_blocking) and not has_device:
        wishes = [name for name, wish in (("pinned memory", pinned), ("non-blocking copies", non_blocking)) if wish]
        warn_caller(
            f"{' and '.join(wishes)} need an accelerator, and there is none here: snapshots are taken by plain copies "
            "into ordinary memory"
        )
    if pinned and has_device:
        return Memory.PINNED, non_blocking
    return (Memory.SHARED if shared else Memory.PAGEABLE), non_blocking and has_device
