"""The data files of a checkpoint, open while something is to be read from them and no longer.

A checkpoint of many ranks has more files than a process may have open.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast._base.tuning import READ_BYTES
from holdfast._formats.native.blocks import Digests
from holdfast._stores.store import CachedReader, FillInPieces, Reader, filling_from

_KEPT_OPEN = 4


@dataclass(frozen=True)
class ReadableFile:
    """A data file: how it is called, how large it is, how to open it, and the digests of its blocks."""

    name: str
    nbytes: int
    open: Callable[[], Any]
    """Gives a context manager for a ``Reader``."""
    digests: Digests | None
    """None if nobody knows them, or nobody asks for them."""
    read_bytes: int = READ_BYTES
    """What its store wants to be asked for at once."""

    @property
    def is_far(self) -> bool:
        """Whether every request for some of it is a long way."""
        return self.read_bytes > READ_BYTES


class FileInUse(NamedTuple):
    """A file that is open, with what there is to know of its reader. To find that out takes longer than to read."""

    reader: Reader
    fill: FillInPieces
    cached: CachedReader | None
    """The reader, if it knows which bytes can be had without waiting."""
    opened: ExitStack
    """What closes it."""


class OpenFiles:
    """Gives out readers of files. A file is opened when it is first needed, and closed when that was the last time.

    At first each of them is opened once, so that one which is missing is found before anything is read. A few stay
    open from then on, and those that are far away: they take no descriptors, and opening them is a request.
    """

    def __init__(self, files: Sequence[ReadableFile], uses: Iterable[int]) -> None:
        self._files = files
        self._uses_left = Counter(uses)
        """How often the file of that number will still be asked for."""
        self._lock = threading.Lock()
        self._opened: dict[int, FileInUse] = {}
        try:
            for number in sorted(self._uses_left):
                if files[number].is_far or len(self._opened) < _KEPT_OPEN:
                    self.look_at(number)
                else:
                    with files[number].open():
                        pass
        except BaseException:
            self.close()
            raise

    @contextmanager
    def using(self, number: int) -> Iterator[Reader]:
        """A reader of a file, for one of its uses."""
        try:
            yield self.look_at(number).reader
        finally:
            self.used(number)

    def look_at(self, number: int) -> FileInUse:
        """A file that will still be used, or is about to be. Whoever uses it says so when that is done."""
        found = self._opened.get(number)
        if found is not None:
            return found
        with self._lock:
            if number not in self._opened:
                with ExitStack() as stack:
                    reader = stack.enter_context(self._files[number].open())
                    cached = reader if isinstance(reader, CachedReader) else None
                    self._opened[number] = FileInUse(reader, filling_from(reader), cached, stack.pop_all())
            return self._opened[number]

    def used(self, number: int) -> None:
        """One of its uses is over. Nobody looks at it after the last one."""
        with self._lock:
            self._uses_left[number] -= 1
            found = None if self._uses_left[number] else self._opened.pop(number, None)
        if found is not None:
            found.opened.close()

    def close(self) -> None:
        """Close what is open. Nothing is being read any more."""
        with ExitStack() as all_of_them:
            for file in self._opened.values():
                all_of_them.push(file.opened)
            self._opened.clear()
