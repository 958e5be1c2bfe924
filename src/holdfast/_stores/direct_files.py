"""Files that are read and written past the page cache."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import queue
import sys
from concurrent.futures import Future
from typing import Any

import numpy as np

from holdfast._base.threads import some_threads, wait_for_all
from holdfast._base.tuning import DIRECT_ALIGNMENT, SMALLEST_BUFFER, WRITE_BUFFER_BYTES, WRITERS
from holdfast._stores.os_errors import some

# Descriptors that go past the page cache, and the aligned memory that they want.


CANNOT_BE_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
"""How file systems say that they do not do this, or not with such memory or positions."""

_O_DIRECT = getattr(os, "O_DIRECT", 0)


def open_directly(path: str, descriptor: int, flags: int) -> int | None:
    """Another descriptor of an open file, for direct access; None if its file system has none.

    The path may lead to another file by now. Then there is none either.
    """
    if not _O_DIRECT:
        return None
    try:
        direct = os.open(path, flags | _O_DIRECT)
    except OSError:
        return None
    if os.path.samestat(os.fstat(direct), os.fstat(descriptor)):
        return direct
    os.close(direct)
    return None


def aligned_memory(size: int) -> mmap.mmap:
    """Memory that begins with a page."""
    return mmap.mmap(-1, size)


def rounded_up(size: int, step: int = DIRECT_ALIGNMENT) -> int:
    """The next multiple.

    >>> rounded_up(5000), rounded_up(8192)
    (8192, 8192)
    """
    return -(-size // step) * step


# Calls of Linux that Python has no function for. Where a system lacks them, nothing happens: they only save time.


_HAS_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SYNC_FILE_RANGE_WRITE = 2
_CACHESTAT = 451
"""Its number is the same on all processors. Linux has it from version 6.5 on."""


def reserve(descriptor: int, size: int) -> None:
    """Make sure that there is space for a file, where the file system can say.

    ``os.posix_fallocate`` would write zeros all over the file where it cannot.
    """
    if _fallocate is not None and _fallocate(descriptor, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number in _HAS_NO_SPACE:
            raise OSError(number, os.strerror(number))


def begin_to_write_back(descriptor: int, begin: int, size: int) -> None:
    """Let the system write a part of the page cache to the disk now, rather than all of it when the file is flushed."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, begin, size, _SYNC_FILE_RANGE_WRITE)


def count_cached_pages(descriptor: int, begin: int, size: int) -> int | None:
    """How many pages of a part of a file are in the page cache; None if the system does not say."""
    if _syscall is None:
        return None
    part, counts = (ctypes.c_uint64 * 2)(begin, size), (ctypes.c_uint64 * 5)()
    failed = _syscall(_CACHESTAT, descriptor, part, counts, 0)
    return None if failed else int(counts[0])


def _function(name: str, *arguments: Any) -> Any:
    if os.name != "posix":
        return None
    found = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if found is not None:
        found.argtypes = arguments
    return found


_fallocate = _function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_sync_file_range = _function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_syscall = (
    _function("syscall", ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    if sys.platform == "linux"
    else None
)


# A large new file, written past the page cache while its next bytes are being prepared.
#
# The page cache would copy everything once more and take memory from programs that need it; on many disks it also
# makes a durable write several times slower. File systems that do not take direct writes get ordinary ones.


class DirectFile:
    """Takes the bytes of a file from front to back, in buffers that are written while the next one is filled."""

    def __init__(self, descriptor: int, path: str, size: int, memory: int | None = None) -> None:
        self._descriptor = descriptor
        reserve(descriptor, size)
        count = WRITERS + 1
        limit = WRITE_BUFFER_BYTES if memory is None else max(SMALLEST_BUFFER, min(WRITE_BUFFER_BYTES, memory // count))
        self.buffer_bytes = rounded_up(min(limit - limit % SMALLEST_BUFFER, size), SMALLEST_BUFFER)
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        for _ in range(min(count, -(-size // self.buffer_bytes))):
            self._free.put(aligned_memory(self.buffer_bytes))
        self._buffer: mmap.mmap | None = None
        self._filled = 0
        self._position = 0
        self._error: BaseException | None = None
        self._pool = some_threads(WRITERS, "holdfast-write")
        self._writes: list[Future[None]] = []
        """Those that may be under way: as many as there are buffers at most."""
        self._direct = open_directly(path, descriptor, os.O_WRONLY)

    def buffer(self) -> memoryview:
        """Memory for the next bytes: what is free of the buffer that is being filled. Waits until there is some."""
        if self._buffer is None:
            self._raise_error()
            self._buffer = self._free.get()
            self._filled = 0
            self._raise_error()
        return memoryview(self._buffer)[self._filled :]

    def advance(self, count: int) -> None:
        """So many bytes of the buffer are filled, and are the next ones of the file."""
        assert self._buffer is not None
        self._filled += count
        if self._filled == len(self._buffer):
            self._send()

    def write(self, view: memoryview) -> None:
        """Take all of it: it may be changed afterwards."""
        taken = 0
        while taken < view.nbytes:
            buffer = self.buffer()
            count = min(buffer.nbytes, view.nbytes - taken)
            # numpy lets other threads run while it copies.
            np.frombuffer(buffer, np.uint8)[:count] = np.frombuffer(view, np.uint8)[taken : taken + count]
            self.advance(count)
            taken += count

    def finish(self) -> None:
        """Wait until everything is written, and give the file its size."""
        if self._buffer is not None and self._filled:
            self._send()
        self.close()
        self._raise_error()
        os.ftruncate(self._descriptor, self._position)

    def close(self) -> None:
        """Wait until no write is under way."""
        try:
            wait_for_all(self._writes)
        finally:
            if self._pool is not None:
                self._pool.shutdown(wait=True)
            if self._direct is not None:
                os.close(self._direct)
                self._direct = None

    def _send(self) -> None:
        """Have the buffer written, and the next one taken. Only the last one of a file is not full."""
        buffer, count = self._buffer, self._filled
        assert buffer is not None
        self._buffer = None
        if self._pool is None:
            self._write(buffer, count, self._position)
        else:
            self._writes = [write for write in self._writes if not write.done()]
            self._writes.append(self._pool.submit(self._write, buffer, count, self._position))
        self._position += count

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self, buffer: mmap.mmap, count: int, position: int) -> None:
        try:
            if self._error is None:
                self._write_all(buffer, count, position)
        except BaseException as error:  # raised for whoever asks for the next buffer
            self._error = error
        finally:
            self._free.put(buffer)

    def _write_all(self, buffer: mmap.mmap, count: int, position: int) -> None:
        padded = rounded_up(count)
        if padded > count:
            buffer[count:padded] = bytes(padded - count)
        view = memoryview(buffer)
        written = self._write_directly(view[:padded], position)
        if written < count:
            begin = written
            while written < count:
                written += some(os.pwrite(self._descriptor, view[written:count], position + written))
            begin_to_write_back(self._descriptor, position + begin, count - begin)

    def _write_directly(self, view: memoryview, position: int) -> int:
        """Write as much as can be written directly."""
        written = 0
        while self._direct is not None and written < view.nbytes and written % DIRECT_ALIGNMENT == 0:
            try:
                written += some(os.pwrite(self._direct, view[written:], position + written))
            except OSError as error:
                if error.errno not in CANNOT_BE_DIRECT:
                    raise
                break
        return written
