"""A file of the local disk that is open for reading.

What the page cache has is taken from there. What it has not is read past it where the file system allows that: twice as
fast, and nothing else is driven out of memory. Files are never mapped: on network disks a mapped page can turn into a
killed process.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from collections.abc import Iterator

import numpy as np

from holdfast._base.tuning import DIRECT_ALIGNMENT, DIRECT_FROM, READ_BYTES
from holdfast._stores.direct_files import (
    CANNOT_BE_DIRECT,
    aligned_memory,
    count_cached_pages,
    open_directly,
    rounded_up,
)
from holdfast._stores.os_errors import naming
from holdfast._stores.store import Buffer, CachedReader, PiecewiseReader, SharedReader, too_short

_LOOKED_AT = 16 * mmap.PAGESIZE


class FileReader(CachedReader, SharedReader, PiecewiseReader):
    """Reads at any place, without a position that threads would share."""

    def __init__(self, descriptor: int, path: str, size: int) -> None:
        self.size = size
        self.descriptor = descriptor
        self._path = path
        self._direct: int | None = None
        self._may_be_direct = True
        self._takes_any_memory = True
        """Whether its disk may write to where a tensor is. Many want memory that is aligned. That a process which is
        forked meanwhile gets what was meant for us cannot happen: systems that know what is cached pin the memory."""
        self._opening = threading.Lock()

    def read_into(self, begin: int, buffer: Buffer) -> None:
        """Fill the buffer, from the page cache or past it."""
        for _ in self.read_in_pieces(begin, buffer, READ_BYTES):
            pass

    def read_in_pieces(
        self, begin: int, memory: Buffer, step: int, *, shared: bool = False
    ) -> Iterator[tuple[int, int]]:
        """Fill memory, from the page cache in steps or past it. Yields from where to where it has just been filled."""
        view = self._checked(begin, memory)
        at_once = max(READ_BYTES // step, 1) * step
        with naming(self._path):
            for at in range(0, view.nbytes, at_once):
                end = min(at + at_once, view.nbytes)
                if not shared and end - at >= DIRECT_FROM and self._seems_cached(begin + at, end - at) is False:
                    self._read_past_cache(begin + at, view[at:end])
                    yield at, end
                    continue
                for low in range(at, end, step):
                    high = min(low + step, end)
                    part = view[low:high]
                    count = os.preadv(self.descriptor, (part,), begin + low)
                    if count < high - low:
                        self._read_through_cache(begin + low, part, count)
                    yield low, high

    def read_cached(self, begin: int, buffer: Buffer) -> bool:
        """Fill the buffer from the page cache. False if not all of it is there, or nobody knows."""
        view = self._checked(begin, buffer)
        with naming(self._path):
            if not self.is_cached(begin, view.nbytes):
                return False
            self._read_through_cache(begin, view)
        return True

    def read_shared(self, begin: int, buffer: Buffer) -> None:
        """Fill the buffer and the page cache: for what other processes of this machine want as well."""
        view = self._checked(begin, buffer)
        with naming(self._path):
            self._read_through_cache(begin, view)

    def close(self) -> None:
        """Nothing can be read any more."""
        descriptor, self.descriptor = self.descriptor, -1  # the number will soon mean another file
        direct, self._direct, self._may_be_direct = self._direct, None, False
        os.close(descriptor)
        if direct is not None:
            os.close(direct)

    def _checked(self, begin: int, buffer: Buffer) -> memoryview:
        view = memoryview(buffer)
        if begin < 0:
            raise ValueError(f"{self._path} has no byte {begin}")
        if begin + view.nbytes > self.size:
            raise too_short(self._path, begin + view.nbytes, self.size)
        return view.cast("B") if view.nbytes else memoryview(b"")

    def _read_through_cache(self, begin: int, view: memoryview, done: int = 0) -> None:
        while done < view.nbytes:
            count = os.preadv(self.descriptor, [view[done:]], begin + done)
            if count == 0:
                raise too_short(self._path, self.size, begin + done)  # it was longer when it was opened
            done += count

    def is_cached(self, begin: int, size: int) -> bool | None:
        """Whether a part of the file is in the page cache; None if nobody knows."""
        found = count_cached_pages(self.descriptor, begin, size)
        return None if found is None else found >= (begin + size - 1) // mmap.PAGESIZE - begin // mmap.PAGESIZE + 1

    def _seems_cached(self, begin: int, size: int) -> bool | None:
        """Whether both ends of a part of the file are in the page cache: to look at all of it takes a tenth of the time
        that reading it does."""
        first = self.is_cached(begin, min(size, _LOOKED_AT))
        return self.is_cached(begin + size - _LOOKED_AT, _LOOKED_AT) if first and size > _LOOKED_AT else first

    def _read_past_cache(self, begin: int, view: memoryview) -> None:
        for at in range(0, view.nbytes, READ_BYTES):
            part = view[at : at + READ_BYTES]
            self._read_through_cache(begin + at, part, self._read_directly(begin + at, part))

    def _read_directly(self, begin: int, view: memoryview) -> int:
        """Read past the page cache. Returns how many bytes came before something did not suit."""
        direct = self._direct_descriptor()
        if direct is None:
            return 0
        if self._takes_any_memory and begin % DIRECT_ALIGNMENT == view.nbytes % DIRECT_ALIGNMENT == 0:
            try:
                return os.preadv(direct, (view,), begin)
            except OSError as error:
                if error.errno not in CANNOT_BE_DIRECT:
                    raise
                self._takes_any_memory = False
        return self._read_through_buffer(direct, begin, view)

    def _read_through_buffer(self, direct: int, begin: int, view: memoryview) -> int:
        start = begin // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
        ahead = begin - start
        buffer = _aligned_buffer(rounded_up(ahead + view.nbytes))
        try:
            count = os.preadv(direct, [memoryview(buffer)[: rounded_up(ahead + view.nbytes)]], start)
        except OSError as error:
            if error.errno not in CANNOT_BE_DIRECT:
                raise
            self._may_be_direct = False
            return 0
        count = max(0, min(count - ahead, view.nbytes))
        # numpy lets other threads run while it copies.
        np.frombuffer(view, np.uint8)[:count] = np.frombuffer(buffer, np.uint8)[ahead : ahead + count]
        return count

    def _direct_descriptor(self) -> int | None:
        with self._opening:
            if self._direct is None and self._may_be_direct:
                self._direct = open_directly(self._path, self.descriptor, os.O_RDONLY | os.O_NONBLOCK)
                self._may_be_direct = self._direct is not None
            return self._direct if self._may_be_direct else None


_of_this_thread = threading.local()


def _aligned_buffer(size: int) -> mmap.mmap:
    """Memory that this thread reads into. It is kept for the thread's next read, and goes with the thread."""
    buffer: mmap.mmap | None = getattr(_of_this_thread, "buffer", None)
    if buffer is None or len(buffer) < size:
        buffer = _of_this_thread.buffer = aligned_memory(size)
    return buffer


def open_file(path: str) -> FileReader:
    """Open a plain file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in the folder shall not keep us waiting
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is not a plain file", path)
    except BaseException:
        os.close(descriptor)
        raise
    return FileReader(descriptor, path, found.st_size)
