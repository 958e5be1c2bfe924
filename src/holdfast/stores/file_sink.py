"""A new file of the local disk that is being written."""

from __future__ import annotations

import mmap
import os

from holdfast.stores.direct_file import DirectFile
from holdfast.stores.os_errors import naming
from holdfast.stores.store import Buffer
from holdfast.tuning import DIRECT_FROM


class FileSink:
    """A small file is written as it comes. A large one is collected in rooms and written past the page cache."""

    def __init__(self, descriptor: int, path: str, size: int | None) -> None:
        self.descriptor = descriptor
        self.path = path
        self.size = 0
        self._expected = size or 0
        self._direct: DirectFile | None = None
        self._room: mmap.mmap | None = None
        self._filled = 0

    def write(self, buffer: Buffer) -> None:
        """Write all of it, in as many calls as the system wants."""
        view = memoryview(buffer)
        if view.nbytes == 0:  # a shape with a zero in it cannot be cast
            return
        view = view.cast("B")
        if self._expected >= DIRECT_FROM:
            self._collect(view)
            return
        self.size += view.nbytes
        with naming(self.path):
            written = os.write(self.descriptor, view)
            while written < view.nbytes:
                written += os.write(self.descriptor, view[written:])

    def room(self, memory: int | None = None) -> memoryview | None:
        """Memory to be filled with the next bytes; None if ``write`` serves as well.

        ``memory`` is how much there may be in all. The first call decides.
        """
        if self._expected < DIRECT_FROM:
            return None
        with naming(self.path):
            if self._direct is None:
                self._direct = DirectFile(self.descriptor, self.path, self._expected, memory)
            if self._room is None:
                self._room = self._direct.room()
        return memoryview(self._room)[self._filled :]

    def advance(self, count: int) -> None:
        """So many bytes of the room are filled."""
        assert self._direct is not None
        assert self._room is not None
        self._filled += count
        self.size += count
        if self._filled == len(self._room):
            self._send()

    def finish(self) -> None:
        """Make everything durable."""
        if self._direct is not None:
            if self._filled:
                self._send()
            self._direct.finish()
        os.fsync(self.descriptor)

    def close(self) -> None:
        """No write is under way any more, and none can follow."""
        try:
            if self._direct is not None:
                self._direct.close()
        finally:
            descriptor, self.descriptor = self.descriptor, -1  # the number will soon mean another file
            os.close(descriptor)

    def _collect(self, view: memoryview) -> None:
        taken = 0
        while taken < view.nbytes:
            room = self.room()
            assert room is not None
            count = min(room.nbytes, view.nbytes - taken)
            room[:count] = view[taken : taken + count]
            self.advance(count)
            taken += count

    def _send(self) -> None:
        assert self._direct is not None
        assert self._room is not None
        self._direct.send(self._room, self._filled)
        self._room, self._filled = None, 0
