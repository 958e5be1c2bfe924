"""The data files of a checkpoint, open while something is to be read from them and no longer.

A checkpoint of many ranks has more files than a process may have open.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from holdfast._base.tuning import READ_BYTES
from holdfast._formats.native.blocks import Digests
from holdfast._stores.store import Reader


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


class OpenFiles:
    """Gives out readers of files. A file is opened when it is first needed, and closed when that was the last time.

    At first each of them is opened once, so that one which is missing is found before anything is read. Those that are
    far away stay open: they take no descriptors, and opening them is a request.
    """

    def __init__(self, files: Sequence[ReadableFile], uses: Iterable[int]) -> None:
        self._files = files
        self._uses_left = Counter(uses)
        """How often the file of that number will still be asked for."""
        self._lock = threading.Lock()
        self._opened: dict[int, tuple[Reader, ExitStack]] = {}
        try:
            for number in sorted(self._uses_left):
                self._try_to_open(number)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def using(self, number: int) -> Iterator[Reader]:
        """A reader of a file, for one of its uses."""
        reader = self._reader(number)
        try:
            yield reader
        finally:
            self._used(number)

    def close(self) -> None:
        """Close what is open. Nothing is being read any more."""
        with ExitStack() as all_of_them:
            for _, opened in self._opened.values():
                all_of_them.push(opened)
            self._opened.clear()

    def _try_to_open(self, number: int) -> None:
        if self._files[number].is_far:
            self._reader(number)
        else:
            with self._files[number].open():
                pass

    def _reader(self, number: int) -> Reader:
        with self._lock:
            if number not in self._opened:
                with ExitStack() as stack:
                    reader = stack.enter_context(self._files[number].open())
                    self._opened[number] = reader, stack.pop_all()
            return self._opened[number][0]

    def _used(self, number: int) -> None:
        with self._lock:
            self._uses_left[number] -= 1
            if self._uses_left[number]:
                return
            _, opened = self._opened.pop(number)
        opened.close()
