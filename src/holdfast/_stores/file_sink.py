"""A new file of the local disk that is being written."""

from __future__ import annotations

import os

from holdfast._base.tuning import DIRECT_FROM
from holdfast._stores.large_files import LargeFile
from holdfast._stores.os_errors import naming, some
from holdfast._stores.store import Buffer, InPlaceSink


class FileSink(InPlaceSink):
    """A small file is written as it comes. A large one is collected in buffers."""

    def __init__(self, descriptor: int, path: str, size: int | None, memory: int | None = None) -> None:
        self.descriptor = descriptor
        self.path = path
        self.size = 0
        self._expected = size or 0
        self._memory = memory
        self._large: LargeFile | None = None

    def write(self, buffer: Buffer) -> None:
        """Write all of it, in as many calls as the system wants."""
        view = memoryview(buffer)
        if view.nbytes == 0:  # a shape with a zero in it cannot be cast
            return
        view = view.cast("B")
        self.size += view.nbytes
        with naming(self.path):
            if self._expected >= DIRECT_FROM:
                self._large_file().write(view)
            else:
                self._write_all(view)

    def buffer(self) -> memoryview | None:
        """Memory to be filled with the next bytes; None if ``write`` serves as well."""
        if self._expected < DIRECT_FROM:
            return None
        with naming(self.path):
            return self._large_file().buffer()

    def advance(self, count: int) -> None:
        """So many bytes of the buffer are filled."""
        assert self._large is not None
        self._large.advance(count)
        self.size += count

    def write_in_place(self, view: memoryview) -> bool:
        """Have the next bytes written from where they are, where that can be."""
        if self._expected < DIRECT_FROM:
            return False
        with naming(self.path):
            taken = self._large_file().write_in_place(view)
        if taken:
            self.size += view.nbytes
        return taken

    def finish(self) -> None:
        """Make everything durable."""
        if self._large is None:
            os.fsync(self.descriptor)
            return
        self._large.finish()
        self._large.make_durable()

    def close(self) -> None:
        """No write is under way any more, and none can follow."""
        try:
            if self._large is not None:
                self._large.close()
        finally:
            descriptor, self.descriptor = self.descriptor, -1  # the number will soon mean another file
            os.close(descriptor)

    def _write_all(self, view: memoryview) -> None:
        written = some(os.write(self.descriptor, view))
        while written < view.nbytes:
            written += some(os.write(self.descriptor, view[written:]))

    def _large_file(self) -> LargeFile:
        if self._large is None:
            self._large = LargeFile(self.descriptor, self.path, self._expected, self._memory)
        return self._large
