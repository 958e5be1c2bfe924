"""A large new file of the local disk: through the page cache, or past it while its next bytes are being prepared.

Through the page cache, the system is told early to write to the disk what it has got, so that little is left to be
flushed in the end; and what is on the disk is let go, so that its memory is used again for what comes next. Which of
both ways is taken is decided anew for each file (``holdfast._stores.write_ways``). Memory that nobody changes any more,
such as that of a snapshot, is written from where it is, past the page cache: that takes half the processor time.
"""

from __future__ import annotations

import mmap
import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait

import numpy as np

from holdfast._base.threads import some_threads, wait_for_all
from holdfast._base.tuning import (
    CACHED_WRITE_BYTES,
    DIRECT_ALIGNMENT,
    LEFT_IN_PAGE_CACHE,
    SMALLEST_BUFFER,
    WRITE_BACK_BYTES,
    WRITE_BUFFER_BYTES,
    WRITERS,
)
from holdfast._stores.direct_files import (
    CANNOT_BE_DIRECT,
    aligned_memory,
    begin_to_write_back,
    let_go,
    open_directly,
    reserve,
    rounded_up,
    write_back_and_let_go,
)
from holdfast._stores.os_errors import some
from holdfast._stores.write_ways import WriteWay, choose_way, note_speed, stays_in_page_cache


class LargeFile:
    """Takes the bytes of a file from front to back, in buffers. Direct writes go on while the next one is filled."""

    def __init__(self, descriptor: int, path: str, size: int, memory: int | None = None) -> None:
        self._descriptor = descriptor
        self._path = path
        self._began = time.monotonic()
        reserve(descriptor, size)
        self._direct: int | None = None
        if choose_way(descriptor) is WriteWay.DIRECT:
            self._direct = open_directly(path, descriptor, os.O_WRONLY)
        self.way = WriteWay.CACHED if self._direct is None else WriteWay.DIRECT
        # A write to the page cache is done when the call returns: there is nothing to do beside it.
        count, limit = (1, CACHED_WRITE_BYTES) if self._direct is None else (WRITERS + 1, WRITE_BUFFER_BYTES)
        if memory is not None:
            limit = max(SMALLEST_BUFFER, min(limit, memory // count))
        self.buffer_bytes = rounded_up(min(limit - limit % SMALLEST_BUFFER, size), SMALLEST_BUFFER)
        self.buffer_count = min(count, -(-size // self.buffer_bytes))
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        for _ in range(self.buffer_count):
            self._free.put(aligned_memory(self.buffer_bytes))
        self._buffer: mmap.mmap | None = None
        self._filled = 0
        self._position = 0
        self._written_back = 0
        """Up to where the system was told to write to the disk what is in the page cache."""
        self._let_go = 0
        """Up to where that is no longer in the page cache."""
        self._stays = stays_in_page_cache()
        self._is_in_place = False
        self._error: BaseException | None = None
        self._pool = None if self._direct is None else some_threads(WRITERS, "holdfast-write")
        self._writes: list[Future[None]] = []
        """Those that may be under way: as many as there are buffers at most."""

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

    def write_in_place(self, view: memoryview) -> bool:
        """Have the next bytes written from where they are. Nobody may change them before ``finish`` or ``close``.

        False if that cannot be, and then nothing is taken: they have to be on whole pages, in memory and in the file.
        """
        begin = self._position + (self._filled if self._buffer is not None else 0)
        address = np.frombuffer(view, np.uint8).ctypes.data
        if any(number % DIRECT_ALIGNMENT for number in (begin, address, view.nbytes)) or not self._goes_direct():
            return False
        if self._buffer is not None and self._filled:
            self._send()
        for at in range(0, view.nbytes, WRITE_BUFFER_BYTES):
            self._raise_error()
            part = view[at : at + WRITE_BUFFER_BYTES]
            self._submit(self._write_part, part, part.nbytes, self._position)
            self._position += part.nbytes
        return True

    def finish(self) -> None:
        """Wait until everything is written, and give the file its size."""
        if self._buffer is not None and self._filled:
            self._send()
        self.close()
        self._raise_error()
        os.ftruncate(self._descriptor, self._position)

    def make_durable(self) -> None:
        """Wait until all of it is on the disk, after ``finish``."""
        os.fsync(self._descriptor)
        if self._let_go:
            let_go(self._descriptor)
        if not self._is_in_place:
            note_speed(self._descriptor, self.way, self._position, time.monotonic() - self._began)

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
        self._submit(self._write, buffer, count, self._position)
        self._position += count

    def _submit(self, write: Callable[..., None], memory: mmap.mmap | memoryview, count: int, position: int) -> None:
        """Have one more write carried out, when there are not too many under way."""
        if self._pool is None:
            write(memory, count, position)
            return
        self._writes = [other for other in self._writes if not other.done()]
        if len(self._writes) > WRITERS:
            wait(self._writes, return_when=FIRST_COMPLETED)
        self._writes.append(self._pool.submit(write, memory, count, position))

    def _goes_direct(self) -> bool:
        """Whether it can be written past the page cache, beginning now if it was not so far."""
        if self._direct is None and not self._stays:
            self._direct = open_directly(self._path, self._descriptor, os.O_WRONLY)
        if self._direct is None:
            return False
        self._pool = self._pool or some_threads(WRITERS, "holdfast-write")
        self._is_in_place = True
        return True

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self, buffer: mmap.mmap, count: int, position: int) -> None:
        padded = rounded_up(count)
        if self._direct is not None and padded > count:
            buffer[count:padded] = bytes(padded - count)
        self._write_part(memoryview(buffer)[:padded], count, position)
        self._free.put(buffer)

    def _write_part(self, view: memoryview, count: int, position: int) -> None:
        try:
            if self._error is None:
                self._write_all(view, count, position)
        except BaseException as error:  # raised for whoever asks for the next buffer
            self._error = error

    def _write_all(self, view: memoryview, count: int, position: int) -> None:
        written = 0
        if self._direct is not None:
            written = self._write_directly(self._direct, view, position)
        if written >= count:
            return
        begin = written
        while written < count:
            written += some(os.pwrite(self._descriptor, view[written:count], position + written))
        if self._pool is not None:
            begin_to_write_back(self._descriptor, position + begin, count - begin)
        elif position + count - self._written_back >= WRITE_BACK_BYTES:
            begin_to_write_back(self._descriptor, self._written_back, position + count - self._written_back)
            self._written_back = position + count
            while not self._stays and self._written_back - self._let_go > LEFT_IN_PAGE_CACHE:
                write_back_and_let_go(self._descriptor, self._let_go, WRITE_BACK_BYTES)
                self._let_go += WRITE_BACK_BYTES

    def _write_directly(self, descriptor: int, view: memoryview, position: int) -> int:
        """Write as much as can be written directly."""
        written = 0
        while written < view.nbytes and written % DIRECT_ALIGNMENT == 0:
            try:
                written += some(os.pwrite(descriptor, view[written:], position + written))
            except OSError as error:
                if error.errno not in CANNOT_BE_DIRECT:
                    raise
                break
        return written
