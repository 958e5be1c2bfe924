"""A part of a stream, seen as a stream of its own."""

from __future__ import annotations

import io
import os
from typing import Any


class ReaderView(io.IOBase):
    """A read-only window of ``len`` bytes at ``offset`` of a seekable stream. Nothing outside of it can be read."""

    def __init__(self, base_stream: Any, offset: int, len: int) -> None:
        super().__init__()
        self.base_stream = base_stream
        self.offset = offset
        self.len = len
        self._position = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move inside the window, by the rules of ``io``; returns the position in the window."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.len}
        if whence not in origin:
            raise ValueError(f"whence must be 0, 1 or 2, not {whence}")
        target = origin[whence] + offset
        if target < 0:
            raise ValueError(f"cannot seek to {target}, which is before the start of the window")
        self._position = target
        return target

    def tell(self) -> int:
        """The position in the window."""
        return self._position

    def readable(self) -> bool:
        """As the stream below."""
        return bool(self.base_stream.readable())

    def seekable(self) -> bool:
        """As the stream below."""
        return bool(self.base_stream.seekable())

    def read(self, size: int | None = -1) -> bytes:
        """Read up to ``size`` bytes, all of the rest for None or a negative number."""
        left = self._left()
        wanted = left if size is None or size < 0 else min(size, left)
        self._place_base()
        data: bytes = self.base_stream.read(wanted) if wanted else b""
        self._position += len(data)
        return data

    def readinto(self, b: Any) -> int:
        """Fill the buffer ``b`` with as much as the window still has."""
        view = memoryview(b).cast("B")
        room = min(view.nbytes, self._left())
        if room == 0:
            return 0
        self._place_base()
        count: int = self.base_stream.readinto(view[:room])
        self._position += count
        return count

    def _left(self) -> int:
        return max(0, self.len - self._position)

    def _place_base(self) -> None:
        # Others may have moved the shared stream since the last read.
        self.base_stream.seek(self.offset + self._position)
