"""Errors of a disk, one at a time: every call of the system that looks at or reads something below a folder can fail.

Calls are counted in the order in which they happen, by all threads of this process.
"""

from __future__ import annotations

import builtins
import io
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import fsspec.implementations.memory

_BY_PATH = ("open", "stat", "lstat", "scandir", "listdir", "readlink")
_BY_DESCRIPTOR = ("fstat", "read", "pread", "preadv")
_OF_FSSPEC = ("info", "ls", "cat_file", "_open", "isfile", "isdir")


class IoFaults:
    """Counts calls below ``place``. The one with the number ``fail_at`` raises ``OSError(number_of_error)``.

    With ``names`` only calls for which it is true of the call and the name of the file are counted.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        fail_at: int | None = None,
        number_of_error: int = 5,
        *,
        names: Callable[[str, str], bool] = lambda call, name: True,
        always: bool = False,
    ) -> None:
        self.place = os.fspath(place)
        self.fail_at = fail_at
        self.number_of_error = number_of_error
        self.calls: list[str] = []
        self.failed: str | None = None
        self._names = names
        self._always = always
        self._lock = threading.Lock()

    def look(self, call: str, path: Any) -> None:
        """One call is about to happen."""
        if isinstance(path, int):
            try:
                path = _readlink(f"/proc/self/fd/{path}")
            except OSError:
                return
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        text = os.fsdecode(path)
        if text != self.place and not text.startswith(f"{self.place}/"):
            return
        relative = text[len(self.place) :].lstrip("/") or "."
        with self._lock:
            if not self._names(call, relative):
                return
            self.calls.append(f"{call} {relative}")
            if len(self.calls) - 1 == self.fail_at or self._always:
                self.failed = self.calls[-1]
                raise OSError(self.number_of_error, os.strerror(self.number_of_error), text)

    @contextmanager
    def on_disk(self) -> Iterator[IoFaults]:
        """While calls of this process on local files are watched."""
        with ExitStack() as patches:
            for name in (*_BY_PATH, *_BY_DESCRIPTOR):
                real = getattr(os, name)
                patches.enter_context(mock.patch(f"os.{name}", self._watched(name, real)))
            for module in (builtins, io):
                patches.enter_context(mock.patch.object(module, "open", self._watched("open", io.open)))
            accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 has looked up its functions already
            for name in (*_BY_PATH, *_BY_DESCRIPTOR):
                if accessor is not None and hasattr(accessor, name):
                    watched = staticmethod(self._watched(name, getattr(accessor, name)))
                    patches.enter_context(mock.patch.object(accessor, name, watched))
            yield self

    @contextmanager
    def in_fsspec_memory(self) -> Iterator[IoFaults]:
        """The same of ``memory://`` as fsspec has it; ``place`` is the path there."""
        kind = fsspec.implementations.memory.MemoryFileSystem
        with ExitStack() as patches:
            for name in _OF_FSSPEC:
                patches.enter_context(mock.patch.object(kind, name, self._method(name, getattr(kind, name))))
            yield self

    def _watched(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(path: Any = ".", *args: Any, **options: Any) -> Any:
            self.look(call, path)
            found = real(path, *args, **options)
            return _Entries(found, self) if call == "scandir" else found

        return watched

    def _method(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(fs: Any, path: Any, *args: Any, **options: Any) -> Any:
            self.look(call, fs._strip_protocol(path))
            return real(fs, path, *args, **options)

        return watched


class _Entries:
    """What ``os.scandir`` gives, with entries whose status can fail too."""

    def __init__(self, entries: Any, faults: IoFaults) -> None:
        self._entries, self._faults = entries, faults

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *error: object) -> None:
        self._entries.close()

    def close(self) -> None:
        self._entries.close()

    def __iter__(self) -> Iterator[Any]:
        for entry in self._entries:
            yield _Entry(entry, self._faults)


class _Entry:
    def __init__(self, entry: os.DirEntry[str], faults: IoFaults) -> None:
        self._entry, self._faults = entry, faults
        self.name, self.path = entry.name, entry.path

    def __fspath__(self) -> str:
        return self.path

    def stat(self, **options: Any) -> os.stat_result:
        self._faults.look("stat", self.path)
        return self._entry.stat(**options)

    def is_dir(self, **options: Any) -> bool:
        return self._entry.is_dir(**options)

    def is_file(self, **options: Any) -> bool:
        return self._entry.is_file(**options)

    def is_symlink(self) -> bool:
        return self._entry.is_symlink()


_readlink = os.readlink
