"""The objects of a store as files that can only be read: for formats whose readers know file systems and no stores."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from holdfast._base.tuning import REMOTE_START_BYTES
from holdfast._stores.filesystem import AnyPath, FileSystemBase
from holdfast._stores.local_filesystem import FileSystem
from holdfast._stores.store import Reader, Store


class StoreFiles(FileSystemBase):
    """Paths are those that the store itself has for its objects.

    Example:
        >>> from holdfast.stores import MemoryStore
        >>> store = MemoryStore("run/seen-as-files")
        >>> store.put("notes", b"all well")
        >>> files = StoreFiles(store)
        >>> files.ls(store.location)
        ['memory://run/seen-as-files/notes']
        >>> with files.create_stream("memory://run/seen-as-files/notes", "rb") as stream:
        ...     stream.read()
        b'all well'
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    @contextmanager
    def create_stream(self, path: AnyPath, mode: str) -> Iterator[io.IOBase]:
        """Open an object for reading. What is read in small steps is fetched in larger ones."""
        if mode != "rb":
            self._refuse(path)
        with self.opened(path) as reader, io.BufferedReader(_ReaderStream(reader), REMOTE_START_BYTES) as stream:
            yield stream

    @contextmanager
    def opened(self, path: AnyPath) -> Iterator[Reader]:
        """Open an object for reading at any place, by several threads at once."""
        with self.store.reader(self._name(path)) as reader:
            yield reader

    def init_path(self, path: AnyPath) -> AnyPath:
        """Paths are as they are."""
        return path

    def concat_path(self, path: AnyPath, suffix: str) -> str:
        """The path of an object."""
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Only whoever has a store knows that."""
        return True

    def exists(self, path: AnyPath) -> bool:
        """Whether there is such an object, or anything at all in the store."""
        if os.fspath(path) == self.store.location:
            return bool(self.store.list())
        name = self._name(path)
        return "/" not in name and self.store.size(name) is not None

    def ls(self, path: AnyPath) -> list[str]:
        """The paths of all objects."""
        return [self.concat_path(path, listed.name) for listed in self.store.list()]

    def rename(self, path: AnyPath, new_path: AnyPath) -> NoReturn:
        """Not here."""
        self._refuse(path)

    def mkdir(self, path: AnyPath) -> NoReturn:
        """Not here."""
        self._refuse(path)

    def rm_file(self, path: AnyPath) -> NoReturn:
        """Not here."""
        self._refuse(path)

    def _name(self, path: AnyPath) -> str:
        return os.fspath(path).removeprefix(f"{self.store.location}/")

    def _refuse(self, path: AnyPath) -> NoReturn:
        raise io.UnsupportedOperation(f"{path} is only read here, and neither written nor changed")


def files_of(place: str | os.PathLike[str] | Store) -> FileSystemBase:
    """What to read files with: those of a store, or of the local disk."""
    return StoreFiles(place) if isinstance(place, Store) else FileSystem()


class _ReaderStream(io.RawIOBase):
    """A reader with a position."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._reader.size}[whence]
        if origin + offset < 0:
            raise ValueError(f"there is nothing at {origin + offset}")
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        memory = memoryview(buffer).cast("B")
        count = max(0, min(memory.nbytes, self._reader.size - self._position))
        if count:
            self._reader.read_into(self._position, memory[:count])
        self._position += count
        return count

    def readall(self) -> bytes:
        memory = bytearray(max(0, self._reader.size - self._position))
        self.readinto(memory)
        return bytes(memory)
