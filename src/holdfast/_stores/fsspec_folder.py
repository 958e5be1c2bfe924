"""A folder of any file system of fsspec, and what the kinds of remote storage do each in their own way."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple

from holdfast._base.tuning import READ_BYTES, REMOTE_START_BYTES, STREAM_BYTES
from holdfast._stores.durable_files import flush_to_disk, temporaries_of, temporary_name
from holdfast._stores.fsspec_filesystem import (
    FsspecFileSystem,
    name_is_taken,
    only_os_errors,
    other_length,
    was_replaced,
)
from holdfast._stores.store import Buffer, Listed, Listing, Sink, wrong_size

# What the kinds of remote storage do each in their own way: one folder of objects, or prefix of their names.


class FoundObject(NamedTuple):
    """An object, as it was when it was looked at."""

    size: int
    version: object
    """Equal for the same content, and another one after it was replaced, as far as its storage shows that."""


class RemoteFolder(ABC):
    """The objects of one folder, by their names, which have been checked.

    All methods may be called by several threads. They may fail with anything, of which ``FsspecStore`` makes errors
    that say where; ``create`` has the caller's errors to keep apart, and so makes them itself.
    """

    read_bytes: int = READ_BYTES
    """As that of stores."""

    @abstractmethod
    def find(self, name: str) -> FoundObject | None:
        """What there is now; None if there is nothing."""

    @abstractmethod
    def open(self, name: str) -> tuple[FoundObject, bytes] | None:
        """What there is now and its beginning: all of a small object, in one step; None if there is nothing."""

    @abstractmethod
    def read_into(self, name: str, found: FoundObject, begin: int, memory: memoryview) -> None:
        """Fill the memory, which is within the object. Raises ``was_replaced`` if it is not that object any more."""

    @abstractmethod
    def create(self, name: str, size: int | None, memory: int | None = None) -> AbstractContextManager[Sink]:
        """Write a new object, as ``Store.create`` does. A name that is taken is a ``FileExistsError``."""

    @abstractmethod
    def compare_and_put(self, name: str, content: bytes, replaces: bytes | None) -> bool:
        """Put an object in place of another one, or of none; False if something else is there."""

    @abstractmethod
    def list(self) -> Listing:
        """All objects."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete an object; a ``FileNotFoundError`` may say that there is none."""

    def sync(self) -> None:  # noqa: B027 - an answer to a request means that it is done
        """Make names durable, where that is a separate act."""


# A folder of any file system of fsspec, with what all of them have.


_MARKS = ("ETag", "etag", "generation", "version_id", "ino", "mtime", "created", "last_modified", "updated")
"""Fields by which file systems distinguish one content of a name from the next; each has some of them."""

_ATTEMPTS = 5
"""How often an object is read whose storage gives another number of bytes than it has announced."""
_PAUSE = 0.025
"""Seconds before the second of these attempts; twice as long before each one after it."""
_MOST_LOOKS = 1000
"""How often an object is looked at again that others replace all the time."""

_locks = [threading.Lock() for _ in range(64)]
"""Between threads of this process, which is all there is in ``memory://``."""


class FsspecFolder(RemoteFolder):
    """Objects are put in one piece where renaming is copying, and renamed into place elsewhere.

    fsspec has no way to replace an object only if it is still the same. So between the look at it and the put there is
    a moment in which another process could commit unnoticed; a disk has a lock, and new names are mostly safe, since
    many object stores refuse to create what exists.
    """

    def __init__(self, files: FsspecFileSystem, url: str) -> None:
        self._files = files
        self._fs = files.fs
        self._url = url

    def find(self, name: str) -> FoundObject | None:
        """Ask for it, whatever fsspec remembers."""
        inner = self._inner(name)
        self._fs.invalidate_cache(self._files.inner(self._url))
        try:
            info = self._fs.info(inner)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if info.get("type") != "file" or info.get("size") is None:
            return None
        return FoundObject(info["size"], tuple((mark, str(info[mark])) for mark in _MARKS if mark in info))

    def open(self, name: str) -> tuple[FoundObject, bytes] | None:
        """Read a small object, and look whether it still was the same."""
        odd_answers = 0
        found = self.find(name)
        for _ in range(_MOST_LOOKS):
            if found is None or found.size > REMOTE_START_BYTES:
                return None if found is None else (found, b"")
            content = b""
            is_there = True
            try:
                content = self._fs.cat_file(self._inner(name))
            except FileNotFoundError:
                is_there = False
            before, found = found, self.find(name)
            if found != before:
                continue
            if is_there and len(content) == found.size:
                return found, content
            odd_answers += 1
            if odd_answers == _ATTEMPTS:
                raise other_length(self._path(name), found.size, len(content))
            time.sleep(_PAUSE * 2**odd_answers)
        raise was_replaced(self._path(name))

    def read_into(self, name: str, found: FoundObject, begin: int, memory: memoryview) -> None:
        """Read a range, and look afterwards whether it still was the same object."""
        try:
            content = self._fs.cat_file(self._inner(name), start=begin, end=begin + memory.nbytes)
        except FileNotFoundError:
            content = b""
        if self.find(name) != found:
            raise was_replaced(self._path(name))
        if len(content) != memory.nbytes:
            raise other_length(self._path(name), memory.nbytes, len(content), begin)
        memory[:] = content

    @contextmanager
    def create(self, name: str, size: int | None, memory: int | None = None) -> Iterator[Sink]:
        """Hand everything to a stream of fsspec, which completes the object when it is closed."""
        path = self._path(name)
        with only_os_errors(path):
            if self.find(name) is not None:
                raise name_is_taken(path)
            self._make_folder()
        with self._files.create_stream(path, "wb") as stream:
            sink = _StreamSink(stream, path)
            yield sink
            if size is not None and sink.size != size:
                raise wrong_size(path, size, sink.size)
            with only_os_errors(path):
                flush_to_disk(stream)
            sink.finished = True

    def compare_and_put(self, name: str, content: bytes, replaces: bytes | None) -> bool:
        """Compare, and put in place: as safe from others as the class says."""
        self._make_folder()
        with _locks[hash(self._path(name)) % len(_locks)], self._files.lock_folder(self._url):
            if self._look(name)[1] != replaces:
                return False
            if not self._files.puts_atomically:
                self._rename_into_place(name, content)
                return True
            if replaces is None:
                return self._put_new(name, content)
            self._fs.pipe_file(self._inner(name), content)
            return True

    def list(self) -> Listing:
        """What fsspec lists, if it is a file."""
        return [Listed(name, info["size"]) for name, info in self.entries() if info["type"] == "file"]

    def entries(self) -> Sequence[tuple[str, dict[str, Any]]]:
        """Names of all that is in the folder, and what fsspec says about each."""
        folder = self._files.inner(self._url)
        self._fs.invalidate_cache(folder)
        try:
            found = self._fs.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        prefix = f"{folder.rstrip('/')}/"
        inside = [(info["name"].rstrip("/"), info) for info in found]
        # Where folders are prefixes, an object may stand for the folder itself, or have the same name as it.
        return [(name[len(prefix) :], info) for name, info in inside if name.startswith(prefix)]

    def delete(self, name: str) -> None:
        """Delete a file."""
        self._fs.rm_file(self._inner(name))

    def sync(self) -> None:
        """Make names on a disk durable."""
        with suppress(FileNotFoundError):
            self._files.sync_folder(self._url)

    def _path(self, name: str) -> str:
        return self._files.concat_path(self._url, name)

    def _inner(self, name: str) -> str:
        return self._files.inner(self._path(name))

    def _make_folder(self) -> None:
        """Object stores have no folders, and would make a bucket instead."""
        if not self._files.puts_atomically:
            self._files.mkdir(self._url)

    def _look(self, name: str) -> tuple[FoundObject | None, bytes | None]:
        """What there is, and all of its content."""
        opened = self.open(name)
        if opened is None:
            return None, None
        found, content = opened
        if len(content) < found.size:
            memory = bytearray(found.size)
            self.read_into(name, found, 0, memoryview(memory))
            content = bytes(memory)
        return found, content

    def _put_new(self, name: str, content: bytes) -> bool:
        try:
            self._fs.pipe_file(self._inner(name), content, mode="create")
        except FileExistsError:
            return False
        except (NotImplementedError, TypeError, ValueError):  # this one cannot do it: the look has to be enough
            self._fs.pipe_file(self._inner(name), content)
        return True

    def _rename_into_place(self, name: str, content: bytes) -> None:
        left_over = temporaries_of(name, [other for other, _ in self.entries()])  # of commits that were killed
        temporary = temporary_name(name)
        with self.create(temporary, len(content)) as sink:
            sink.write(content)
        try:
            self._files.rename(self._path(temporary), self._path(name))
        except BaseException:
            with suppress(Exception):
                self.delete(temporary)
            raise
        self.sync()
        for other in left_over:
            with suppress(Exception):
                self.delete(other)


class _StreamSink:
    def __init__(self, stream: Any, path: str) -> None:
        self.size = 0
        self.finished = False
        self._stream = stream
        self._path = path

    def write(self, buffer: Buffer) -> None:
        if self.finished:
            raise ValueError("this object is complete")
        view = memoryview(buffer)
        if view.nbytes == 0:  # a shape with a zero in it cannot be cast
            return
        view = view.cast("B")
        with only_os_errors(self._path):
            for begin in range(0, view.nbytes, STREAM_BYTES):
                # Some streams keep what they are given, and some take nothing but bytes.
                self._stream.write(bytes(view[begin : begin + STREAM_BYTES]))
        self.size += view.nbytes
