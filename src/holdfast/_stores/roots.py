"""Where the checkpoints of one run live: a folder of folders, each of which is the store of one checkpoint."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

from holdfast._stores.durable_files import sync_folder
from holdfast._stores.local_store import LocalStore
from holdfast._stores.memory_store import MemoryStore, folders_in_memory
from holdfast._stores.places import local_path, url_of_fsspec
from holdfast._stores.store import Store, checked_name

_SUPPORTED = (
    "paths, file:///folder, memory://name, URLs that fsspec knows such as s3://bucket/folder, and objects of classes "
    "that extend holdfast.stores.Root"
)
_NOT_EMPTY = {errno.ENOTEMPTY, errno.EEXIST}


class Root(ABC):
    """A folder with one sub-folder per checkpoint, or what is like it: a prefix of object names, a database.

    All methods may be called by several threads and processes. Names are those of stores: they have no slashes.
    ``holdfast.testing.RootConformance`` tests whether a root of one's own keeps this contract.
    """

    location: str
    """Where this is, for messages."""
    is_shared: bool = True
    """Whether several processes can see the same folder under this location."""

    @property
    @abstractmethod
    def store(self) -> Store:
        """The store of the objects directly in this folder."""

    @abstractmethod
    def child(self, name: str) -> Store:
        """The store of a sub-folder, which need not exist: it does once something is written to it."""

    @abstractmethod
    def children(self) -> list[str]:
        """The names of all sub-folders that hold something, in no particular order. Empty ones may be among them."""

    @abstractmethod
    def remove(self, name: str) -> bool:
        """Remove a sub-folder that is empty. One that holds anything stays as it is.

        Returns whether there is no such sub-folder now.
        """

    def is_linked(self, name: str) -> bool:
        """Whether a sub-folder is a link to another place. What is there is read, and never deleted."""
        return False

    def marks(self) -> tuple[str, ...]:
        """What distinguishes this place from a copy of it, which has none of these in common with it."""
        return (self.location,)

    def free_bytes(self) -> int | None:
        """How many bytes can still be written; None if nobody knows."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location!r})"


class LocalRoot(Root):
    """A folder of the local disk, or of what is mounted like one. It is made when something is written to it.

    Example:
        >>> import tempfile
        >>> root = LocalRoot(tempfile.mkdtemp())
        >>> root.child("step-1").put("data", b"0123456789")
        >>> root.children(), root.remove("step-1")
        (['step-1'], False)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._store = LocalStore(path)
        self.folder = self._store.folder
        self.location = self._store.location

    @property
    def store(self) -> Store:
        """The files of the folder itself."""
        return self._store

    def child(self, name: str) -> Store:
        """A folder in it."""
        return LocalStore(self.folder / checked_name(name))

    def children(self) -> list[str]:
        """The folders in it, and what links to one."""
        found = []
        try:
            entries = os.scandir(self.folder)
        except FileNotFoundError:
            return []
        with entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # removed since, or a link to nothing
                    if stat.S_ISDIR(entry.stat().st_mode):
                        found.append(entry.name)
        return found

    def remove(self, name: str) -> bool:
        """Remove an empty folder. A link to a folder stays, since somebody else put it there."""
        folder = self.folder / checked_name(name)
        if folder.is_symlink():
            return False
        try:
            folder.rmdir()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError as error:
            if error.errno in _NOT_EMPTY:
                return False
            raise
        sync_folder(self.folder)
        return True

    def is_linked(self, name: str) -> bool:
        """Whether it is a symbolic link."""
        return (self.folder / checked_name(name)).is_symlink()

    def marks(self) -> tuple[str, ...]:
        """The path, and the number of the folder: one folder may be mounted under several paths."""
        path = os.path.realpath(self.folder)
        try:
            return path, f"inode {os.stat(path).st_ino}"
        except (FileNotFoundError, NotADirectoryError):  # what fails otherwise may be the folder of another job
            return (path,)

    def free_bytes(self) -> int | None:
        """What the file system has left for users."""
        existing = next((path for path in (self.folder, *self.folder.parents) if path.is_dir()), Path("/"))
        try:
            return shutil.disk_usage(existing).free
        except OSError:
            return None


class MemoryRoot(Root):
    """Checkpoints in the memory of this process. All roots with the same name are one.

    Example:
        >>> MemoryRoot("some-run").child("step-1").put("data", b"0123456789")
        >>> MemoryRoot("some-run").children()
        ['step-1']
    """

    is_shared = False

    def __init__(self, name: str) -> None:
        self._store = MemoryStore(name)
        self.location = self._store.location
        self._name = name.strip("/")

    @property
    def store(self) -> Store:
        """The objects of the root itself."""
        return self._store

    def child(self, name: str) -> Store:
        """A store below it."""
        return MemoryStore(f"{self._name}/{checked_name(name)}")

    def children(self) -> list[str]:
        """The first part of the name of every store below it that has an object."""
        prefix = f"{self._name}/"
        return sorted({name[len(prefix) :].split("/")[0] for name in folders_in_memory() if name.startswith(prefix)})

    def remove(self, name: str) -> bool:
        """An empty store is as good as none."""
        return checked_name(name) not in self.children()


def root_at(place: str | os.PathLike[str] | Root) -> Root:
    """The root at a path or URL. A relative path is that of now, even if the program changes its folder later.

    >>> root_at("memory://run"), root_at("/checkpoints/run/")
    (MemoryRoot('memory://run'), LocalRoot('/checkpoints/run'))
    >>> root_at("carrier-pigeon://loft")
    Traceback (most recent call last):
    ValueError: there is no root for carrier-pigeon://loft. Supported are paths, ...
    """
    if isinstance(place, Root):
        return place
    if isinstance(place, Store):
        raise TypeError(
            f"{place!r} is the place of one checkpoint, and those of a run need several; give a path, a URL, or an "
            "object of a class that extends holdfast.stores.Root"
        )
    path = local_path(place)
    if path is not None:
        return LocalRoot(path)
    url = os.fsdecode(place)
    if url.lower().startswith("memory://"):
        return MemoryRoot(url[len("memory://") :])
    url = url_of_fsspec(url, f"there is no root for {url}. Supported are {_SUPPORTED}")
    from holdfast._stores.fsspec_store import FsspecRoot

    return FsspecRoot(url)
