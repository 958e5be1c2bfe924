"""Finds all damage of a checkpoint of our own format: every block of every file has a digest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast._base.threads import work_through
from holdfast._formats.native.blocks import count_blocks
from holdfast._formats.native.chunk_index import IndexBytes, TableIndex
from holdfast._formats.native.columns import Columns, chunk_volumes, first_blocks
from holdfast._formats.native.names import RECORD
from holdfast._formats.native.read_plan import runs_of
from holdfast._formats.native.readable_files import OpenFiles, ReadableFile
from holdfast._formats.native.reading import read_size, read_with_digests, reader_count
from holdfast._formats.native.record import Record
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.source import NativeSource
from holdfast._formats.native.stored_files import StoredFile
from holdfast._stores.store import filling_from
from holdfast._tools.inspecting.damage import Damage
from holdfast._watching.progress import Progress
from holdfast.errors import HoldfastError

Names = Callable[[str], Sequence[str]]
"""All keys that a stored tensor has, by its own."""


class BlockRange(NamedTuple):
    """Whole blocks of a file that are read at once."""

    file: int
    begin: int
    end: int


class NativeCheck:
    """One look at all files of a checkpoint, or at those blocks of them that some tensors have bytes in."""

    def __init__(
        self, source: NativeSource, names: Names, chosen: Callable[[str], bool] | None, memory: int | None
    ) -> None:
        self._source = source
        self._record = source.record
        self._names = names
        self._chosen = chosen
        self._memory = memory
        self.damage: list[Damage] = []
        self.doubts: list[str] = []
        self.has_digests = True
        """Whether there was something to compare blocks with."""
        self._readable: set[int] = set()
        """The files whose tables could be read."""
        self._lock = threading.Lock()
        self._own = threading.local()
        self._wrong: dict[int, npt.NDArray[np.bool_]] = {}
        """Of every file with damaged blocks: which ones."""
        self._digests: dict[tuple[int, int], tuple[int, int]] = {}

    def run(self, on_total: Callable[[int], Progress]) -> None:
        """Find all damage. ``on_total`` gets the number of bytes to read."""
        columns = self._columns_of_tables() if self._record.has_tables else self._columns()
        if columns is None:
            on_total(0)
            return
        self._where = _KeysByPosition(columns, self._record)
        starts = first_blocks(self._known_files(), self._record.block_bytes)
        files = [
            ReadableFile(
                file.name, file.data_end, self._opener(file.name), columns.digests[starts[number] : starts[number + 1]]
            )
            for number, file in enumerate(self._record.files)
        ]
        regions = list(self._regions(files, self._ends()))
        progress = on_total(sum(region.end - region.begin for region in regions))
        with closing(OpenFiles(files, (region.file for region in regions))) as opened:
            work_through(
                regions,
                lambda region: self._compare(opened, files, region, progress),
                reader_count(self._memory, read_size(self._memory, self._record.block_bytes)),
                "holdfast-inspect",
            )
        for number in sorted(self._wrong):
            self._report_blocks(number)

    def _columns(self) -> Columns | None:
        """Those of version 1, if they can be read."""
        try:
            columns = self._source.columns
        except (HoldfastError, OSError) as error:
            self._report_index(error, self._record.tensors)
            self._check_sizes_only()
            return None
        self._check_overlaps(range(len(self._record.tensors)), lambda number: self._source.chunks(self._key(number)))
        return columns

    def _columns_of_tables(self) -> Columns:
        """All that tables say which can be read; notes the others."""
        tables = TableIndex(self._record, IndexBytes(self._table, self._read_index, self._source.store.path_of))
        needed_by: dict[int, list[int]] = {}
        lost: set[int] = set()
        try:
            for number in range(len(self._record.tensors)):
                if self._is_chosen(self._record.tensors[number].key):
                    for file in tables.files_of(number):
                        needed_by.setdefault(file, []).append(number)
        except (HoldfastError, OSError) as error:
            division_of = self._record.places.division_of
            without_rule = [ref for ref, number in zip(self._record.tensors, division_of, strict=True) if number < 0]
            self._report_index(error, without_rule)
            lost.update(number for number, division in enumerate(division_of) if division < 0)
            for number in set(range(len(self._record.tensors))) - lost:
                if self._is_chosen(self._record.tensors[number].key):
                    for file in tables.files_of(number):
                        needed_by.setdefault(file, []).append(number)
        wanted = range(len(self._record.files)) if self._chosen is None else sorted(needed_by)
        for file in wanted:
            try:
                tables.table(file)
            except (HoldfastError, OSError) as error:
                self._report_table(file, needed_by.get(file, ()), error)
                lost.update(needed_by.get(file, ()))
            else:
                self._readable.add(file)
        self.has_digests = bool(self._readable) or not wanted
        if self.has_digests and len(self._readable) < len(wanted):
            unknown = len(wanted) - len(self._readable)
            self.doubts.append(f"the data of {unknown} file(s), whose tables are lost, could not be compared")
        known = [number for number in range(len(self._record.tensors)) if number not in lost]
        self._check_overlaps(known, lambda number: tables.find([(number, None)]))
        return tables.columns_of(self._readable)

    def _table(self, number: int, key: str | None) -> bytearray:
        """The table of a file that is long enough."""
        file = self._record.files[number]
        assert file.table is not None
        data = bytearray(min(file.table.nbytes, max((self._source.store.size(file.name) or 0) - file.table.begin, 0)))
        with self._source.store.reader(file.name) as reader:
            reader.read_into(file.table.begin, data)
        return data

    def _read_index(self) -> bytearray:
        assert self._record.index is not None
        return bytearray(self._source.store.read(self._record.index.name))

    def _report_table(self, number: int, tensors: Sequence[int], error: Exception) -> None:
        """Without it nobody knows where in its file something is stored, so that nothing of it can be read."""
        file = self._record.files[number]
        assert file.table is not None
        keys = tuple(
            dict.fromkeys(name for tensor in tensors for name in self._names(self._record.tensors[tensor].key))
        )
        found = self._source.store.size(file.name)
        if found is None or found < file.nbytes:
            self.damage.append(_wrong_size(file.name, file.nbytes, found, keys))
        else:
            what = f"its table (where tensors are stored, and digests) cannot be read: {error}"
            self.damage.append(Damage(file.name, what, keys, file.table.begin, file.nbytes))

    def _known_files(self) -> list[StoredFile]:
        """All files, those whose digests are not known as if they had no bytes."""
        return [
            file if not self._record.has_tables or number in self._readable else StoredFile(file.name, 0)
            for number, file in enumerate(self._record.files)
        ]

    def _opener(self, name: str) -> Callable[[], object]:
        return lambda: self._source.store.reader(name)

    def _key(self, tensor: int) -> str:
        return self._record.tensors[tensor].key

    def _check_overlaps(self, tensors: Iterable[int], find: Callable[[int], object]) -> None:
        """Look for the chunks of tensors, which ``find`` refuses if they do not tile it."""
        file = RECORD if self._record.index is None else self._record.index.name
        for key, number in ((self._key(number), number) for number in tensors):
            if self._is_chosen(key):
                try:
                    find(number)
                except HoldfastError as error:
                    self.damage.append(Damage.from_error(error, file, self._names(key)))

    def _report_index(self, error: Exception, tensors: Iterable[TensorRef]) -> None:
        """Without it nobody knows where these tensors are stored, so that none of them can be read."""
        keys = (name for ref in tensors if self._is_chosen(ref.key) for name in self._names(ref.key))
        index = self._record.index
        assert index is not None
        self.has_digests = False
        found = self._source.store.size(index.name)
        if found != index.nbytes:
            self.damage.append(_wrong_size(index.name, index.nbytes, found, tuple(keys)))
        else:
            self.damage.append(Damage(index.name, f"cannot be read: {error}", tuple(keys)))

    def _is_chosen(self, key: str) -> bool:
        return self._chosen is None or self._chosen(key)

    def _check_sizes_only(self) -> None:
        """What can be said of data files if nobody knows what is stored where in them."""
        for file in self._record.files:
            found = self._source.store.size(file.name)
            if found != file.nbytes:
                self.damage.append(_wrong_size(file.name, file.nbytes, found, ()))

    def _ends(self) -> list[int]:
        """How much of every file is there and can be compared; notes those that are missing or of another size."""
        ends = []
        for number, file in enumerate(self._record.files):
            is_known = not self._record.has_tables or number in self._readable
            if not is_known or (self._chosen is not None and not self._where.has_any(number, self._chosen)):
                ends.append(0)
                continue
            found = self._source.store.size(file.name)
            is_complete = found is not None and found >= file.nbytes
            # The last block of a file that is too short has no digest that it could be compared with.
            end = file.data_end if is_complete else (found or 0) // self._record.block_bytes * self._record.block_bytes
            ends.append(end)
            if found != file.nbytes:
                self.damage.append(_wrong_size(file.name, file.nbytes, found, self._keys_in(number, end, file.nbytes)))
        return ends

    def _regions(self, files: Sequence[ReadableFile], ends: Sequence[int]) -> Iterator[BlockRange]:
        block_bytes, most = self._record.block_bytes, read_size(self._memory, self._record.block_bytes)
        for number, end in enumerate(ends):
            needed = np.ones(count_blocks(end, block_bytes), np.bool_)
            if self._chosen is not None:
                needed = self._where.blocks_of(number, self._chosen, block_bytes)[: len(needed)]
            for first, last in runs_of(needed):
                for begin in range(first * block_bytes, last * block_bytes, most):
                    yield BlockRange(number, begin, min(begin + most, last * block_bytes, end))

    def _compare(
        self, opened: OpenFiles, files: Sequence[ReadableFile], region: BlockRange, progress: Progress
    ) -> None:
        number, begin, end = region
        block_bytes = self._record.block_bytes
        expected = files[number].digests
        assert expected is not None
        expected = expected[begin // block_bytes : count_blocks(end, block_bytes)]
        try:
            with opened.using(number) as reader:
                memory = self._buffer(end - begin).data
                found = read_with_digests(filling_from(reader), begin, memory, block_bytes)
        except (OSError, HoldfastError) as error:
            self._note_unreadable(region, error)
        else:
            wrong = np.flatnonzero(found != expected)
            if wrong.size:
                with self._lock:
                    self._wrong_blocks(number)[wrong + begin // block_bytes] = True
                    for at in wrong.tolist():
                        self._digests[number, at + begin // block_bytes] = (int(expected[at]), int(found[at]))
        progress.advance(end - begin)

    def _buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory of this thread."""
        buffer: npt.NDArray[np.uint8] | None = getattr(self._own, "buffer", None)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._own.buffer = np.empty(nbytes, np.uint8)
        return buffer[:nbytes]

    def _wrong_blocks(self, number: int) -> npt.NDArray[np.bool_]:
        blocks = count_blocks(self._record.files[number].data_end, self._record.block_bytes)
        return self._wrong.setdefault(number, np.zeros(blocks, np.bool_))

    def _note_unreadable(self, region: BlockRange, error: Exception) -> None:
        number, begin, end = region
        with self._lock:
            self.damage.append(
                Damage(
                    self._record.files[number].name,
                    f"cannot be read: {error}",
                    self._keys_in(number, begin, end),
                    begin,
                    end,
                )
            )

    def _report_blocks(self, number: int) -> None:
        """One entry for all adjacent damaged blocks."""
        file, block_bytes = self._record.files[number], self._record.block_bytes
        for first, last in runs_of(self._wrong[number]):
            begin, end = first * block_bytes, min(last * block_bytes, file.data_end)
            expected, found = self._digests[number, first]
            keys = self._keys_in(number, begin, end)
            what = "these are not the bytes that were saved"
            if begin < self._where.header_end(number):
                what += "; the header of the file is here" + (" too" if keys else "")
            elif not keys:
                what += "; no tensor has bytes here"
            self.damage.append(Damage(file.name, what, keys, begin, end, f"{expected:08x}", f"{found:08x}"))

    def _keys_in(self, number: int, begin: int, end: int) -> tuple[str, ...]:
        stored = self._where.keys_in(number, begin, end)
        return tuple(dict.fromkeys(name for key in stored for name in self._names(key)))


def _wrong_size(name: str, expected: int, found: int | None, keys: tuple[str, ...]) -> Damage:
    if found is None:
        return Damage(name, "is missing", keys, None, None, f"{expected:,} bytes", "no such file")
    if found > expected:
        return Damage(
            name, "is longer than what was saved", (), expected, found, f"{expected:,} bytes", f"{found:,} bytes"
        )
    return Damage(name, "is cut off", keys, found, expected, f"{expected:,} bytes", f"{found:,} bytes")


class _KeysByPosition:
    """Which tensors have bytes in a part of a file."""

    def __init__(self, columns: Columns, record: Record) -> None:
        tensors = record.tensors
        itemsizes = np.array([ref.dtype.itemsize for ref in tensors], np.int64)
        nbytes = chunk_volumes(columns, record) * itemsizes[columns.chunk_tensor]
        order = np.lexsort((columns.chunk_begin, columns.chunk_file))
        self._begin, self._tensor = columns.chunk_begin[order], columns.chunk_tensor[order]
        self._end = self._begin + nbytes[order]
        self._first = np.searchsorted(columns.chunk_file[order], np.arange(len(record.files) + 1))
        self._tensors = tensors
        self._files = record.files

    def header_end(self, file: int) -> int:
        """Where the first tensor begins."""
        first, last = self._first[file], self._first[file + 1]
        return int(self._begin[first]) if first < last else self._files[file].data_end

    def keys_in(self, file: int, begin: int, end: int) -> list[str]:
        """The stored keys of all tensors with bytes between these places."""
        rows = slice(self._first[file], self._first[file + 1])
        inside = (self._begin[rows] < end) & (self._end[rows] > begin)
        return [self._tensors[number].key for number in self._tensor[rows][inside].tolist()]

    def has_any(self, file: int, chosen: Callable[[str], bool]) -> bool:
        """Whether a file holds something of a chosen tensor."""
        return any(chosen(key) for key in self.keys_in(file, 0, self._files[file].nbytes))

    def blocks_of(self, file: int, chosen: Callable[[str], bool], block_bytes: int) -> npt.NDArray[np.bool_]:
        """The blocks of a file that chosen tensors have bytes in."""
        needed = np.zeros(count_blocks(self._files[file].data_end, block_bytes), np.bool_)
        for row in range(int(self._first[file]), int(self._first[file + 1])):
            if chosen(self._tensors[int(self._tensor[row])].key):
                needed[int(self._begin[row]) // block_bytes : count_blocks(int(self._end[row]), block_bytes)] = True
        return needed
