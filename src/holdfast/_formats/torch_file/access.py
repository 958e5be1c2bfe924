"""How a file of ``torch.save`` is read again and again, and never another one that has taken its place."""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from holdfast._base.tuning import READ_BYTES, REMOTE_START_BYTES
from holdfast._formats.ranged_files import Ranges
from holdfast._stores.file_reader import open_file
from holdfast._stores.store import Buffer, Reader, Store
from holdfast.errors import DamagedCheckpointError, HoldfastError

_MOST_WINDOWS = 64


class LocalFile:
    """A file of the local disk. It is only open while it is read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._version: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return os.stat(self.path).st_size

    @contextmanager
    def opened(self) -> Iterator[Ranges]:
        """The file that was opened first; an error if it was changed since then, or if there is another one."""
        try:
            file = open_file(self.path)
        except FileNotFoundError as error:
            if self._version is None:
                raise
            raise self._changed() from error
        try:
            status = os.fstat(file.descriptor)
            version = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
            if self._version not in (None, version):
                raise self._changed()
            self._version = version
            yield file
        finally:
            file.close()

    @contextmanager
    def on_disk(self) -> Iterator[str]:
        """It is there already."""
        yield self.path

    def close(self) -> None:
        """Nothing is open."""

    def _changed(self) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"{self.path} is no longer the file that was opened: something has replaced or changed it. Open it again.",
            file=self.path,
            key=None,
            expected=self._version,
            found=None,
        )


class StoreObject:
    """An object of a store. Its reader stays open, and gives bytes of no other object."""

    def __init__(self, store: Store, name: str) -> None:
        self.path = store.path_of(name)
        self._open = ExitStack()
        self._reader = _SmallReads(self._open.enter_context(store.reader(name)))
        self.size = self._reader.size

    @contextmanager
    def opened(self) -> Iterator[Ranges]:
        """The reader."""
        yield self._reader

    @contextmanager
    def on_disk(self) -> Iterator[str]:
        """A copy, for what only torch can read. It needs as much space on the disk for temporary files."""
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            copy = Path(folder) / "copy"
            memory = memoryview(bytearray(min(READ_BYTES, self.size)))
            with copy.open("wb") as stream:
                for begin in range(0, self.size, READ_BYTES):
                    piece = memory[: self.size - begin]
                    self._reader.read_into(begin, piece)
                    stream.write(piece)
            try:
                yield str(copy)
            except HoldfastError as error:
                error.message = error.message.replace(str(copy), self.path)
                raise

    def close(self) -> None:
        """Let go of the object."""
        self._open.close()


class _SmallReads:
    """A reader whose small reads bring their surroundings along, since an archive has many small things side by side,
    and each is looked at more than once. Several threads may read at once."""

    def __init__(self, reader: Reader) -> None:
        self.size = reader.size
        self._reader = reader
        self._windows: OrderedDict[int, bytes] = OrderedDict()

    def read_into(self, begin: int, buffer: Buffer, /) -> None:
        view = memoryview(buffer)
        window, at = divmod(begin, REMOTE_START_BYTES)
        if not 0 < view.nbytes <= REMOTE_START_BYTES - at or begin + view.nbytes > self.size:
            self._reader.read_into(begin, buffer)
        else:
            view.cast("B")[:] = self._window(window)[at : at + view.nbytes]

    def _window(self, number: int) -> bytes:
        content = self._windows.pop(number, None)
        if content is None:
            begin = number * REMOTE_START_BYTES
            memory = bytearray(min(REMOTE_START_BYTES, self.size - begin))
            self._reader.read_into(begin, memory)
            content = bytes(memory)
        self._windows[number] = content
        while len(self._windows) > _MOST_WINDOWS:
            with suppress(KeyError):  # another thread was faster
                self._windows.popitem(last=False)
        return content
