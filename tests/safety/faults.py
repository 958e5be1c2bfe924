"""A file system on which a chosen operation fails."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from holdfast.dcp.filesystem import FileSystem


class FaultyFileSystem(FileSystem):
    """Files of the local disk. Before each operation `hook(operation, file name)` is called, which may raise.

    The operations are those of `FileSystem`, and `write`, `flush` and `close` of the streams that it opens for writing.
    """

    def __init__(self, hook: Callable[[str, str], None]) -> None:
        self.hook = hook

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        self.hook("open", Path(path).name)
        with super().create_stream(path, mode) as stream:
            yield stream if "r" in mode else _FaultyStream(stream, self.hook, Path(path).name)
            if "r" not in mode:
                self.hook("close", Path(path).name)

    def rename(self, path: Any, new_path: Any) -> None:
        self.hook("rename", Path(new_path).name)
        super().rename(path, new_path)

    def mkdir(self, path: Any) -> None:
        self.hook("mkdir", Path(path).name)
        super().mkdir(path)

    def exists(self, path: Any) -> bool:
        self.hook("exists", Path(path).name)
        return super().exists(path)

    def rm_file(self, path: Any) -> None:
        self.hook("rm_file", Path(path).name)
        super().rm_file(path)

    def ls(self, path: Any) -> list[str]:
        self.hook("ls", Path(path).name)
        return super().ls(path)

    @contextmanager
    def lock_folder(self, path: Any) -> Iterator[None]:
        self.hook("lock", Path(path).name)
        with super().lock_folder(path):
            yield
        self.hook("unlock", Path(path).name)

    def sync_folder(self, path: Any) -> None:
        self.hook("sync_folder", Path(path).name)
        super().sync_folder(path)


class _FaultyStream(io.RawIOBase):
    def __init__(self, stream: Any, hook: Callable[[str, str], None], name: str) -> None:
        super().__init__()
        self._stream = stream
        self._hook = hook
        self._name = name

    def write(self, data: Any, /) -> int:
        self._hook("write", self._name)
        return int(self._stream.write(data))

    def flush(self) -> None:
        if not self.closed and not self._stream.closed:
            self._hook("flush", self._name)
            self._stream.flush()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._stream.tell())

    def fileno(self) -> int:
        return int(self._stream.fileno())


class Countdown:
    """A hook that fails at the n-th operation, and remembers which that was. Shared by all threads."""

    def __init__(self, fail_at: int | None, error: Callable[[], BaseException] | None = None) -> None:
        self.fail_at = fail_at
        self.error = error or no_space
        self.operations: list[str] = []
        self.failed: str | None = None
        self._lock = threading.Lock()

    def __call__(self, operation: str, name: str) -> None:
        with self._lock:
            self.operations.append(f"{operation} {name}")
            if len(self.operations) - 1 == self.fail_at:
                self.failed = self.operations[-1]
                raise self.error()

    @contextmanager
    def in_fsync(self) -> Iterator[None]:
        """Count the fsyncs of this process too, which is all that they do then."""

        def fsync(descriptor: int) -> None:
            self("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))

        with mock.patch("os.fsync", fsync):
            yield


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
