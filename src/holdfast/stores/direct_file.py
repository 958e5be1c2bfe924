"""A large new file, written past the page cache while its next bytes are being prepared.

The page cache would copy everything once more and take memory from programs that need it; on many disks it also makes a
durable write several times slower. File systems that do not take direct writes get ordinary ones.
"""

from __future__ import annotations

import mmap
import os
import queue
from concurrent.futures import Future

import numpy as np

from holdfast.stores.direct_access import CANNOT_BE_DIRECT, aligned_memory, open_directly, rounded_up
from holdfast.stores.libc import begin_to_write_back, reserve
from holdfast.stores.os_errors import some
from holdfast.tuning import DIRECT_ALIGNMENT, ROOM_BYTES, SMALLEST_ROOM, WRITERS
from holdfast.waiting import some_threads, wait_for_all


class DirectFile:
    """Takes the bytes of a file from front to back, in rooms: memory that is written while the next room is filled."""

    def __init__(self, descriptor: int, path: str, size: int, memory: int | None = None) -> None:
        self._descriptor = descriptor
        reserve(descriptor, size)
        rooms = WRITERS + 1
        limit = ROOM_BYTES if memory is None else max(SMALLEST_ROOM, min(ROOM_BYTES, memory // rooms))
        self.room_bytes = rounded_up(min(limit - limit % SMALLEST_ROOM, size), SMALLEST_ROOM)
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        for _ in range(min(rooms, -(-size // self.room_bytes))):
            self._free.put(aligned_memory(self.room_bytes))
        self._room: mmap.mmap | None = None
        self._filled = 0
        self._position = 0
        self._error: BaseException | None = None
        self._pool = some_threads(WRITERS, "holdfast-write")
        self._writes: list[Future[None]] = []
        """Those that may be under way: as many as there are rooms at most."""
        self._direct = open_directly(path, descriptor, os.O_WRONLY)

    def room(self) -> memoryview:
        """Memory for the next bytes: what is free of the room that is being filled. Waits until there is some."""
        if self._room is None:
            self._raise_error()
            self._room = self._free.get()
            self._filled = 0
            self._raise_error()
        return memoryview(self._room)[self._filled :]

    def advance(self, count: int) -> None:
        """So many bytes of the room are filled, and are the next ones of the file."""
        assert self._room is not None
        self._filled += count
        if self._filled == len(self._room):
            self._send()

    def write(self, view: memoryview) -> None:
        """Take all of it: it may be changed afterwards."""
        taken = 0
        while taken < view.nbytes:
            room = self.room()
            count = min(room.nbytes, view.nbytes - taken)
            # numpy lets other threads run while it copies.
            np.frombuffer(room, np.uint8)[:count] = np.frombuffer(view, np.uint8)[taken : taken + count]
            self.advance(count)
            taken += count

    def finish(self) -> None:
        """Wait until everything is written, and give the file its size."""
        if self._room is not None and self._filled:
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
        """Have the room written, and the next one taken. Only the last one of a file is not full."""
        room, count = self._room, self._filled
        assert room is not None
        self._room = None
        if self._pool is None:
            self._write(room, count, self._position)
        else:
            self._writes = [write for write in self._writes if not write.done()]
            self._writes.append(self._pool.submit(self._write, room, count, self._position))
        self._position += count

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
        padded = rounded_up(count)
        if padded > count:
            room[count:padded] = bytes(padded - count)
        view = memoryview(room)
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
