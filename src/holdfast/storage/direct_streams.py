"""A stream into a large new file of the local disk, which is written past the page cache while it is being filled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.stores.direct_file import DirectFile
from holdfast.stores.filesystem import AnyPath
from holdfast.stores.os_errors import naming


@contextmanager
def direct_stream(path: AnyPath, expected: int, memory: int) -> Iterator[DirectStream]:
    """Make or replace a file of about the ``expected`` size, with at most so much memory for what is on its way."""
    name = os.fspath(path)
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        stream = DirectStream(descriptor, name, expected, memory)
        try:
            yield stream
            stream.complete()
        finally:
            stream.close()
    finally:
        os.close(descriptor)


class DirectStream:
    """Takes bytes from front to back."""

    def __init__(self, descriptor: int, path: str, expected: int, memory: int) -> None:
        self._descriptor = descriptor
        self._path = path
        with naming(path):
            self._file = DirectFile(descriptor, path, expected, memory)
        self._is_complete = False

    def write(self, data: Any, /) -> int:
        """Take all of it: it may be changed afterwards."""
        if not len(data):
            return 0
        view = memoryview(data).cast("B")
        with naming(self._path):  # errors of earlier writes are told here
            if self._is_complete:
                raise ValueError(f"{self._path} is complete, and {view.nbytes} more bytes were written to it")
            self._file.write(view)
        return view.nbytes

    def complete(self) -> None:
        """There is no more to come. Wait until all of it is written, and give the file its size."""
        if not self._is_complete:
            self._is_complete = True
            with naming(self._path):
                self._file.finish()

    def fileno(self) -> int:
        """The file, for those who want to have it durable."""
        return self._descriptor

    def close(self) -> None:
        """Wait until no write is under way."""
        self._file.close()
