"""A large new file, written past the page cache while its next bytes are being prepared.

The page cache would copy everything once more and keep it from programs that need the memory; on many disks it also
makes a durable write several times slower. File systems that do not take direct writes get ordinary ones.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import queue
from concurrent.futures import ThreadPoolExecutor

ALIGNMENT = 4096
"""Of memory, positions and lengths. Disks with larger sectors than that refuse, and get ordinary writes."""

ROOM_BYTES = 8 << 20
SMALLEST_ROOM = 1 << 16
WRITERS = 2
"""Writes under way at once. One leaves the disk idle between two writes; more than two gain nothing."""

_CANNOT_BE_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
_HAS_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_O_DIRECT = getattr(os, "O_DIRECT", 0)

_libc = ctypes.CDLL(None, use_errno=True)


class DirectFile:
    """Takes the bytes of a file from front to back, in rooms: memory that is written while the next room is filled."""

    def __init__(self, descriptor: int, path: str, size: int, memory: int | None = None) -> None:
        self._descriptor = descriptor
        self._direct = _open_directly(path)
        reserve(descriptor, size)
        rooms = WRITERS + 1
        limit = ROOM_BYTES if memory is None else max(SMALLEST_ROOM, min(ROOM_BYTES, memory // rooms))
        self.room_bytes = _rounded_up(min(limit, _rounded_up(size)), SMALLEST_ROOM)
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        for _ in range(min(rooms, -(-size // self.room_bytes))):
            self._free.put(mmap.mmap(-1, self.room_bytes))
        self._position = 0
        self._error: BaseException | None = None
        self._pool = ThreadPoolExecutor(WRITERS, "holdfast-write")

    def room(self) -> mmap.mmap:
        """Memory for the next bytes. Waits until some is free."""
        room = self._free.get()
        self._raise_error()
        return room

    def send(self, room: mmap.mmap, count: int) -> None:
        """The first ``count`` bytes of a room are the next bytes of the file; only the last room is not full."""
        self._pool.submit(self._write, room, count, self._position)
        self._position += count

    def finish(self) -> None:
        """Wait until everything is written, and give the file its size."""
        self.close()
        self._raise_error()
        if self._position % ALIGNMENT:
            os.ftruncate(self._descriptor, self._position)

    def close(self) -> None:
        """Wait until no write is under way."""
        self._pool.shutdown(wait=True)
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self, room: mmap.mmap, count: int, position: int) -> None:
        try:
            if self._error is None:
                self._write_all(room, count, position)
        except BaseException as error:  # told to whoever asks for the next room
            self._error = error
        finally:
            self._free.put(room)

    def _write_all(self, room: mmap.mmap, count: int, position: int) -> None:
        padded = _rounded_up(count)
        if padded > count:
            room[count:padded] = bytes(padded - count)
        view = memoryview(room)
        written = self._write_directly(view[:padded], position)
        while written < count:
            written += os.pwrite(self._descriptor, view[written:count], position + written)

    def _write_directly(self, view: memoryview, position: int) -> int:
        """Write as much as can be written directly."""
        written = 0
        while self._direct is not None and written < view.nbytes and written % ALIGNMENT == 0:
            try:
                written += os.pwrite(self._direct, view[written:], position + written)
            except OSError as error:
                if error.errno not in _CANNOT_BE_DIRECT:
                    raise
                break
        return written


def reserve(descriptor: int, size: int) -> None:
    """Make sure that there is space for a file, where the file system can tell."""
    if not hasattr(_libc, "fallocate"):
        return
    allocate = _libc.fallocate
    allocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if allocate(descriptor, 0, 0, size) != 0 and ctypes.get_errno() in _HAS_NO_SPACE:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _rounded_up(size: int, step: int = ALIGNMENT) -> int:
    return -(-size // step) * step


def _open_directly(path: str) -> int | None:
    if not _O_DIRECT:
        return None
    try:
        return os.open(path, os.O_WRONLY | _O_DIRECT)
    except OSError as error:
        if error.errno not in _CANNOT_BE_DIRECT:
            raise
        return None
