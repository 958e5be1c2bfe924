"""The contract of file systems that DCP checkpoints live on: named byte streams, renames, nothing about tensors."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

AnyPath: TypeAlias = str | os.PathLike[str]


class FileSystemBase(ABC):
    """What a writer or reader needs of a file system. Subclass it to store checkpoints elsewhere."""

    puts_atomically: bool = False
    """Whether ``put`` is the way to make or replace a file in one step, because ``rename`` is not."""

    @contextmanager
    @abstractmethod
    def create_stream(self, path: AnyPath, mode: str) -> Iterator[io.IOBase]:
        """Open ``path`` for the length of a ``with`` block."""
        yield io.BytesIO()

    @abstractmethod
    def concat_path(self, path: AnyPath, suffix: str) -> AnyPath:
        """The path of the file ``suffix`` in the folder ``path``."""

    @abstractmethod
    def rename(self, path: AnyPath, new_path: AnyPath) -> None:
        """Give a file another name. A file that has that name already is replaced, in one step where possible."""

    def put(self, path: AnyPath, content: bytes) -> None:
        """Make a file, or replace it, so that nobody ever sees a part of it. Needed where ``puts_atomically``."""
        raise NotImplementedError

    @abstractmethod
    def init_path(self, path: AnyPath) -> AnyPath:
        """The form of ``path`` that the other methods take."""

    @abstractmethod
    def mkdir(self, path: AnyPath) -> None:
        """Make the folder and its parents, if they do not exist."""

    @classmethod
    @abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Whether checkpoints can be kept under this name."""

    @abstractmethod
    def exists(self, path: AnyPath) -> bool:
        """Whether there is something at ``path``."""

    @abstractmethod
    def rm_file(self, path: AnyPath) -> None:
        """Delete a file."""

    def ls(self, path: AnyPath) -> list[str]:
        """Paths of what is in a folder; nothing where the file system cannot list."""
        return []

    @contextmanager
    def lock_folder(self, path: AnyPath) -> Iterator[None]:
        """Keep other savers out of a folder for the length of a ``with`` block, where the file system can do that."""
        yield

    def sync_folder(self, path: AnyPath) -> None:  # noqa: B027 - many file systems need not do anything
        """Make the names in a folder durable, where that is a separate act."""


# A part of a stream, seen as a stream of its own.


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
        count_left = min(view.nbytes, self._left())
        if count_left == 0:
            return 0
        self._place_base()
        count: int = self.base_stream.readinto(view[:count_left])
        self._position += count
        return count

    def _left(self) -> int:
        return max(0, self.len - self._position)

    def _place_base(self) -> None:
        # Others may have moved the shared stream since the last read.
        self.base_stream.seek(self.offset + self._position)
