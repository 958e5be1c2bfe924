"""A store that notes which bytes are read from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.stores.local_store import LocalStore

Range = tuple[str, int, int]
"""The name of a file, and the first byte of it that was read and the first that was not."""

DIGEST_BLOCK = 1 << 16
"""Of the native format: a part of a block cannot be checked without the rest of it."""


class CountingStore(LocalStore):
    """A folder, as Holdfast takes it."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.ranges: list[Range] = []

    @contextmanager
    def reader(self, name: str) -> Iterator[Any]:
        """Open a file."""
        with super().reader(name) as reader:
            yield _CountingReader(reader, name, self.ranges)

    def data_ranges(self) -> list[Range]:
        """What was read of data files. Record and index are read once, whatever is read with their help."""
        return [found for found in self.ranges if found[0].startswith("data-")]


class _CountingReader:
    def __init__(self, reader: Any, name: str, ranges: list[Range]) -> None:
        self._reader = reader
        self._name = name
        self._ranges = ranges
        if hasattr(reader, "read_cached"):
            self.read_cached = self._read_cached

    def read_into(self, begin: int, buffer: Any) -> None:
        self._reader.read_into(begin, buffer)
        self._note(begin, buffer)

    def _read_cached(self, begin: int, buffer: Any) -> bool:
        found: bool = self._reader.read_cached(begin, buffer)
        if found:
            self._note(begin, buffer)
        return found

    def _note(self, begin: int, buffer: Any) -> None:
        self._ranges.append((self._name, begin, begin + memoryview(buffer).nbytes))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


def bytes_in(ranges: list[Range]) -> int:
    """All bytes that were read, each as often as it was."""
    return sum(end - begin for _, begin, end in ranges)


def bytes_twice(ranges: list[Range]) -> int:
    """How many bytes were read that had been read before."""
    again = 0
    reached: dict[str, int] = {}
    for name, begin, end in sorted(ranges):
        before = reached.get(name, 0)
        again += max(0, min(end, before) - begin)
        reached[name] = max(before, end)
    return again


def separate_ranges(ranges: list[Range]) -> int:
    """How many ranges they are when those that touch are one."""
    count = 0
    reached: dict[str, int] = {}
    for name, begin, end in sorted(ranges):
        if begin > reached.get(name, -1):
            count += 1
        reached[name] = max(reached.get(name, 0), end)
    return count


def files_in(ranges: list[Range]) -> int:
    """How many files were read from. Of each, the block that its header is in is read and checked."""
    return len({name for name, _, _ in ranges})


def bytes_read_by_this_process() -> int:
    """By all calls that read, as the kernel counts them."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "rchar":
            return int(value)
    return 0
