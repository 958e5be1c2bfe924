"""Checkpoints in the memory of this process: for tests, and for notebooks that need not outlive it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from holdfast._stores.store import Buffer, Listed, Listing, Store, checked_name, conflict, too_short, wrong_size


@dataclass
class _Folder:
    objects: dict[str, bytes | bytearray] = field(default_factory=dict)
    being_written: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


_folders: dict[str, _Folder] = {}


def folders_in_memory() -> list[str]:
    """The names of all stores that hold an object, or will hold one that is being written."""
    return [name for name, folder in _folders.copy().items() if folder.objects or folder.being_written]


class MemoryStore(Store):
    """A store of this process. All stores with the same name are one; it lasts until its objects are deleted.

    Example:
        >>> MemoryStore("run/step-1").put("data", b"0123456789")
        >>> MemoryStore("run/step-1").read("data", 2, 5)
        b'234'
    """

    def __init__(self, name: str) -> None:
        name = name.strip("/")
        if not name:
            raise ValueError("a store in memory needs a name, as in memory://run/step-1")
        self.location = f"memory://{name}"
        self._folder = _folders.setdefault(name, _Folder())  # one step, so threads get the same one

    @contextmanager
    def create(self, name: str, size: int | None = None, memory: int | None = None) -> Iterator[_MemorySink]:
        """Collect the bytes of a new object."""
        folder = self._folder
        with folder.lock:
            if checked_name(name) in folder.objects or name in folder.being_written:
                raise FileExistsError(errno.EEXIST, "exists already", self.path_of(name))
            folder.being_written.add(name)
        sink = _MemorySink()
        try:
            yield sink
            if size is not None and len(sink.content) != size:
                raise wrong_size(self.path_of(name), size, len(sink.content))
            with folder.lock:
                if name in folder.objects:  # committed meanwhile
                    raise FileExistsError(errno.EEXIST, "exists already", self.path_of(name))
                folder.objects[name] = sink.taken()
        finally:
            with folder.lock:
                folder.being_written.discard(name)

    @contextmanager
    def reader(self, name: str) -> Iterator[_MemoryReader]:
        """Objects never change, so holding on to one is enough."""
        content = self._folder.objects.get(checked_name(name))
        if content is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", self.path_of(name))
        yield _MemoryReader(content, self.path_of(name))

    def size(self, name: str) -> int | None:
        """The size of an object, or None."""
        content = self._folder.objects.get(checked_name(name))
        return None if content is None else len(content)

    def list(self) -> Listing:
        """All objects."""
        with self._folder.lock:
            return [Listed(name, len(content)) for name, content in self._folder.objects.items()]

    def delete(self, names: Iterable[str]) -> None:
        """Forget objects."""
        checked = [checked_name(name) for name in names]
        with self._folder.lock:
            for name in checked:
                self._folder.objects.pop(name, None)

    def commit(self, name: str, content: bytes, *, replaces: bytes | None) -> None:
        """Compare and replace under the lock of the folder."""
        with self._folder.lock:
            if self._folder.objects.get(checked_name(name)) != replaces:
                raise conflict(self.path_of(name))
            self._folder.objects[name] = bytes(content)


class _MemorySink:
    def __init__(self) -> None:
        self.content = bytearray()

    def write(self, buffer: Buffer) -> None:
        view = memoryview(buffer)
        if view.nbytes:  # a shape with a zero in it cannot be cast
            self.content += view.cast("B")

    def taken(self) -> bytearray:
        """The content, which later writes do not change any more."""
        content, self.content = self.content, bytearray()
        return content


class _MemoryReader:
    def __init__(self, content: bytes | bytearray, path: str) -> None:
        self.size = len(content)
        self._content = memoryview(content)
        self._path = path

    def read_into(self, begin: int, buffer: Buffer) -> None:
        view = memoryview(buffer)
        if begin < 0:
            raise ValueError(f"{self._path} has no byte {begin}")
        if begin + view.nbytes > self.size:
            raise too_short(self._path, begin + view.nbytes, self.size)
        if view.nbytes:
            view.cast("B")[:] = self._content[begin : begin + view.nbytes]
