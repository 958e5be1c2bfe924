"""Stores that note which bytes are read from them, for tests and for the benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from holdfast._stores.local_store import LocalStore
from holdfast._stores.memory_store import MemoryStore
from holdfast._stores.store import Buffer, Reader
from tests.native_files import table_begin


class Read(NamedTuple):
    """A range of a file that was read."""

    name: str
    begin: int
    end: int
    """The first byte after it."""
    shared: bool = False
    """Whether it was read for other processes as well."""

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class Counting:
    """Makes a store note what is read. For a class that is a store too, and named after this one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reads: list[Read] = []
        self._table_begins: dict[str, int] = {}

    @contextmanager
    def reader(self, name: str) -> Iterator[Reader]:
        with super().reader(name) as inner:  # type: ignore[misc]
            kind = _CountingReader if hasattr(inner, "read_cached") else _CountingReaderWithoutCache
            yield kind(inner, name, self.reads)

    def data_reads(self) -> list[Read]:
        """What was read of the data in data files. Records, indexes and tables are read once, whatever is read with
        their help."""
        return [
            read for read in self.reads if read.name.startswith("data-") and read.begin < self.table_begin(read.name)
        ]

    def table_reads(self) -> list[Read]:
        """What was read of the tables of data files."""
        return [
            read for read in self.reads if read.name.startswith("data-") and read.begin >= self.table_begin(read.name)
        ]

    def table_begin(self, name: str) -> int:
        """Where the table of a data file begins."""
        if name not in self._table_begins:
            with super().reader(name) as reader:  # type: ignore[misc]
                content = bytearray(8)
                reader.read_into(0, content)
                content = bytearray(8 + int.from_bytes(content, "little"))
                reader.read_into(0, content)
            has_table = b'"holdfast.table"' in content  # files of version 1 have none
            self._table_begins[name] = table_begin(bytes(content)) if has_table else 1 << 62
        return self._table_begins[name]


class CountingMemoryStore(Counting, MemoryStore):
    pass


class CountingLocalStore(Counting, LocalStore):
    pass


class _CountingReaderWithoutCache:
    """Has the methods of readers and hands nothing else on: a way to read that is new would not be counted."""

    def __init__(self, reader: Any, name: str, reads: list[Read]) -> None:
        self._reader = reader
        self._name = name
        self._reads = reads
        self.size = reader.size

    def read_into(self, begin: int, buffer: Buffer) -> None:
        self._note(begin, buffer)
        self._reader.read_into(begin, buffer)

    def read_shared(self, begin: int, buffer: Buffer) -> None:
        self._note(begin, buffer, shared=True)
        getattr(self._reader, "read_shared", self._reader.read_into)(begin, buffer)

    def _note(self, begin: int, buffer: Buffer, *, shared: bool = False) -> None:
        self._reads.append(Read(self._name, begin, begin + memoryview(buffer).nbytes, shared))


class _CountingReader(_CountingReaderWithoutCache):
    def read_cached(self, begin: int, buffer: Buffer) -> bool:
        found: bool = self._reader.read_cached(begin, buffer)
        if found:
            self._note(begin, buffer)
        return found

    def read_in_pieces(
        self, begin: int, memory: Buffer, step: int, *, shared: bool = False
    ) -> Iterator[tuple[int, int]]:
        self._note(begin, memory, shared=shared)
        pieces: Iterator[tuple[int, int]] = self._reader.read_in_pieces(begin, memory, step, shared=shared)
        return pieces


def bytes_in(reads: Sequence[Read]) -> int:
    """All bytes that were read, each as often as it was."""
    return sum(read.nbytes for read in reads)


def bytes_twice(reads: Sequence[Read]) -> int:
    """How many bytes were read that had been read before."""
    again = 0
    reached: dict[str, int] = {}
    for name, begin, end, _ in sorted(reads):
        before = reached.get(name, 0)
        again += max(0, min(end, before) - begin)
        reached[name] = max(before, end)
    return again


def separate_ranges(reads: Sequence[Read]) -> int:
    """How many ranges they are when those that touch are one."""
    count = 0
    reached: dict[str, int] = {}
    for name, begin, end, _ in sorted(reads):
        if begin > reached.get(name, -1):
            count += 1
        reached[name] = max(reached.get(name, 0), end)
    return count


def files_in(reads: Sequence[Read]) -> int:
    """How many files were read from. Of each, the block that its header is in is read and checked."""
    return len({read.name for read in reads})
