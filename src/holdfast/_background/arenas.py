"""Host memory for snapshots: one block for all tensors of a state, given back when the last of them is gone.

One block means one allocation, one mapping and one file descriptor, however many tensors there are. A block is lent
out through a Python buffer that every tensor in it keeps alive, so it is known without any bookkeeping by the
borrower when nobody uses it any more: only then it is reused, and what is still being written is never overwritten.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from enum import Enum
from typing import Any

import torch

ALIGNMENT = 64
"""Tensors start at multiples of this many bytes: a cache line, and enough for every dtype."""


class Memory(Enum):
    """What a block is made of."""

    PAGEABLE = "pageable"
    PINNED = "pinned"
    """Locked in place, so that an accelerator can copy into it by itself."""
    SHARED = "shared"
    """Visible to a process that gets its file descriptor."""


class Arena:
    """One block of host memory."""

    def __init__(self, size: int, memory: Memory) -> None:
        self.size = size
        self.memory = memory
        self.owner = os.getpid()
        self.descriptor: int | None = None
        self.buffer: Any
        if memory is Memory.PINNED:
            self.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu").numpy()
        elif memory is Memory.SHARED:
            self.descriptor = _anonymous_file(size)
            weakref.finalize(self, os.close, self.descriptor).atexit = False
            self.buffer = mmap.mmap(self.descriptor, size)
        else:
            self.buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = torch.frombuffer(self.buffer, dtype=torch.uint8).data_ptr()
        if memory is Memory.SHARED:
            _shared_arenas.add(self)


class Lease:
    """The right to put tensors into a block. Each of them holds on to the block, and none on to another."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer

    def tensor(self, start: int, size: int) -> torch.Tensor:
        """Some of the bytes, as a tensor with a storage of its own: whoever saves it whole saves nothing else."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self._buffer, dtype=torch.uint8, count=size, offset=start)


class ArenaPool:
    """Lends blocks. Up to ``keep`` blocks that came back are lent again, which saves the cost of fresh memory."""

    def __init__(self, memory: Memory = Memory.PAGEABLE, *, keep: int = 0) -> None:
        self.memory = memory
        self._keep = keep
        # Blocks come back whenever a tensor dies, maybe in the middle of `lend`: an append needs no lock.
        self._free: deque[Arena] = deque()
        self._lock = threading.Lock()

    def lend(self, size: int) -> Lease:
        """Memory for a snapshot. It is ours again when all tensors in it are gone."""
        arena = self._take(size) or Arena(max(size, 1), self.memory)
        buffer = memoryview(arena.buffer)
        weakref.finalize(buffer, self._give_back, arena).atexit = False
        return Lease(buffer)

    def drop(self) -> None:
        """Forget the blocks that are not in use, and those in use when they come back."""
        self._keep = 0
        self._free.clear()

    def _take(self, size: int) -> Arena | None:
        with self._lock:
            found = None
            for _ in range(len(self._free)):
                arena = self._free.popleft()
                if arena.owner != os.getpid():
                    continue  # of a parent that forked this process, and that may use it at the same time
                if found is None and size <= arena.size:
                    found = arena
                elif size <= arena.size:
                    self._free.append(arena)
                # One that is too small now is given up: the state has grown, and will not shrink back.
            return found

    def _give_back(self, arena: Arena) -> None:
        if len(self._free) < self._keep:
            self._free.append(arena)


_RECYCLED = {memory: ArenaPool(memory, keep=1) for memory in (Memory.PAGEABLE, Memory.SHARED)}


def recycled(memory: Memory) -> ArenaPool:
    """The pool of the whole process, for those who have none of their own. It keeps one block."""
    return _RECYCLED[memory]


def is_common(pool: ArenaPool) -> bool:
    """Whether this is a pool of the whole process, which no single user may drop."""
    return pool in _RECYCLED.values()


_shared_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def shared_arena_of(tensor: torch.Tensor) -> Arena | None:
    """The shared block that a tensor is in, if any."""
    address = tensor.data_ptr()
    found = (arena for arena in list(_shared_arenas) if arena.address <= address < arena.address + arena.size)
    return next(found, None)


def aligned(size: int) -> int:
    """``size`` rounded up to where the next tensor may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _anonymous_file(size: int) -> int:
    """A file in memory that has no name, so that nothing is left behind whatever happens to this process."""
    try:
        descriptor = os.memfd_create("holdfast-snapshot", os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # not Linux, or forbidden
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
