"""Runs at URLs: a prefix of object names with one sub-prefix per checkpoint, or a folder of a remote disk."""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from holdfast.stores.fsspec_folder import FsspecFolder
from holdfast.stores.fsspec_store import FsspecStore
from holdfast.stores.remote_errors import only_os_errors
from holdfast.stores.roots import Root
from holdfast.stores.store import Store, checked_name

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
