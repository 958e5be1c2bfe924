"""Checkpoints and runs at URLs: object stores, remote disks, and whatever else fsspec reaches."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from holdfast._base.threads import map_in_threads
from holdfast._stores.fsspec_filesystem import FsspecFileSystem, no_such_object, only_os_errors
from holdfast._stores.fsspec_folder import FoundObject, FsspecFolder, RemoteFolder
from holdfast._stores.roots import Root
from holdfast._stores.s3_folder import S3Folder, is_s3
from holdfast._stores.store import Buffer, Listing, Sink, Store, checked_name, conflict, too_short

# Checkpoints at URLs: object stores, remote disks, and whatever else fsspec reaches.


_DELETIONS_AT_ONCE = 8
_ATTEMPTS = 5


class FsspecStore(Store):
    """Objects below a URL of fsspec. Options of its protocol (keys, endpoint) can be given; what is not given comes
    from fsspec's configuration and from the environment, as its package has it.

    Example:
        >>> store = FsspecStore("memory://run-at-a-url/step-1")
        >>> store.put("data", b"0123456789")
        >>> store.read("data", 2, 5)
        b'234'
        >>> store.commit("record", b"the data is complete", replaces=None)
        >>> sorted(found.name for found in store.list())
        ['data', 'record']
    """

    def __init__(self, url: str, **storage_options: Any) -> None:
        self.storage_options = storage_options
        self.files = FsspecFileSystem()
        self.location = self.files.init_path(url, **storage_options)
        self._folder = _folder_at(self.files, self.location)
        self.read_bytes = self._folder.read_bytes

    @contextmanager
    def create(self, name: str, size: int | None = None, memory: int | None = None) -> Iterator[Sink]:
        """Upload a new object. In an object store it exists once it is complete, and not before."""
        with self._folder.create(checked_name(name), size, memory) as sink:
            yield sink

    @contextmanager
    def reader(self, name: str) -> Iterator[_RemoteReader]:
        """Look how large it is, and take its beginning along. Every other range is a request of its own."""
        path = self.path_of(checked_name(name))
        with only_os_errors(path):
            opened = self._folder.open(name)
        if opened is None:
            raise no_such_object(path)
        yield _RemoteReader(self._folder, name, opened, path)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes of an object. If it is replaced meanwhile, they are of the next one."""
        for _ in range(_ATTEMPTS):
            try:
                return super().read(name, begin, end)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
        return super().read(name, begin, end)

    def size(self, name: str) -> int | None:
        """The size of an object, or None."""
        with only_os_errors(self.path_of(checked_name(name))):
            found = self._folder.find(name)
        return None if found is None else found.size

    def list(self) -> Listing:
        """All objects directly below the URL."""
        with only_os_errors(self.location):
            return self._folder.list()

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, some at a time."""
        checked = [checked_name(name) for name in names]
        for error in map_in_threads(self._delete, checked, _DELETIONS_AT_ONCE, "holdfast-delete"):
            if error is not None:
                raise error

    def commit(self, name: str, content: bytes, *, replaces: bytes | None) -> None:
        """One put that the server carries out only if nothing has changed; see ``docs/stores.md`` for which servers."""
        path = self.path_of(checked_name(name))
        with only_os_errors(path):
            done = self._folder.compare_and_put(name, bytes(content), replaces)
        if not done:
            raise conflict(path)

    def sync(self) -> None:
        """Make names durable, where that is a separate act."""
        with only_os_errors(self.location):
            self._folder.sync()

    def path_of(self, name: str) -> str:
        """Its URL."""
        return self.files.concat_path(self.location, name)

    def __reduce__(self) -> Any:
        return _reopened, (type(self), self.location, self.storage_options)

    def _delete(self, name: str) -> OSError | None:
        """Delete one; errors are raised when all were tried."""
        try:
            with only_os_errors(self.path_of(name)):
                self._folder.delete(name)
        except FileNotFoundError:
            pass
        except OSError as error:
            return error
        return None


class _RemoteReader:
    def __init__(self, folder: RemoteFolder, name: str, opened: tuple[FoundObject, bytes], path: str) -> None:
        self._found, self._start = opened
        self.size = self._found.size
        self._folder = folder
        self._name = name
        self._path = path

    def read_into(self, begin: int, buffer: Buffer) -> None:
        view = memoryview(buffer)
        if begin < 0:
            raise ValueError(f"{self._path} has no byte {begin}")
        if begin + view.nbytes > self.size:
            raise too_short(self._path, begin + view.nbytes, self.size)
        if view.nbytes == 0:  # a shape with a zero in it cannot be cast
            return
        if begin + view.nbytes <= len(self._start):
            view.cast("B")[:] = self._start[begin : begin + view.nbytes]
            return
        with only_os_errors(self._path):
            self._folder.read_into(self._name, self._found, begin, view.cast("B"))


def _folder_at(files: FsspecFileSystem, url: str) -> RemoteFolder:
    return S3Folder(files, url) if is_s3(files.fs) else FsspecFolder(files, url)


def _reopened(kind: type[FsspecStore], url: str, options: dict[str, Any]) -> FsspecStore:
    return kind(url, **options)


# Runs at URLs: a prefix of object names with one sub-prefix per checkpoint, or a folder of a remote disk.


_NOT_EMPTY = {errno.ENOTEMPTY, errno.EEXIST}


class FsspecRoot(Root):
    """A run below a URL of fsspec. Options are as those of ``FsspecStore``, and are handed on to its checkpoints.

    Example:
        >>> root = FsspecRoot("memory://run-with-a-root")
        >>> root.child("step-1").put("data", b"0123456789")
        >>> root.children(), root.remove("step-1")
        (['step-1'], False)
    """

    def __init__(self, url: str, **storage_options: Any) -> None:
        self._store = FsspecStore(url, **storage_options)
        self._files = self._store.files
        self.location = self._store.location
        self.is_shared = not isinstance(self._files.fs, MemoryFileSystem)

    @property
    def store(self) -> Store:
        """The objects directly below the URL."""
        return self._store

    def child(self, name: str) -> Store:
        """What is below the URL and a slash."""
        url = self._files.concat_path(self.location, checked_name(name))
        return FsspecStore(url, **self._store.storage_options)

    def children(self) -> list[str]:
        """Names that objects have in common up to a slash, or folders."""
        with only_os_errors(self.location):
            entries = FsspecFolder(self._files, self.location).entries()
        return sorted({name for name, info in entries if info["type"] == "directory"})

    def remove(self, name: str) -> bool:
        """Remove an empty folder. Where folders are prefixes, one without objects is none."""
        url = self._files.concat_path(self.location, checked_name(name))
        with only_os_errors(url):
            if FsspecFolder(self._files, url).entries():
                return False
            if name not in self.children():
                return True
            try:
                with suppress(FileNotFoundError):
                    self._files.fs.rmdir(self._files.inner(url))
            except OSError as error:
                if error.errno not in _NOT_EMPTY:
                    raise
        return name not in self.children()
