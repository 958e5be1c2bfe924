"""Where the chunks of tensors are, and the digests of files: from the columns of version 1, or from tables of files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from holdfast._base.boxes import Box, BoxLike, first_overlap, overlaps, volume
from holdfast._base.threads import map_in_threads
from holdfast._base.tuning import READERS
from holdfast._formats.native.blocks import Digests, refuse
from holdfast._formats.native.columns import ChunkTable, Columns, StoredChunk, decode_columns, first_blocks, header_ends
from holdfast._formats.native.names import RECORD
from holdfast._formats.native.part_index import PartIndex
from holdfast._formats.native.record import Record
from holdfast._formats.native.shapes import Numbers, TensorShapes, numbers_of, starts_of
from holdfast._formats.native.tables import FileTable, decode_table

_SEVERAL = 8
"""So many tables are read by several threads."""

OnlyChunks = tuple[npt.NDArray[np.bool_], Numbers, Numbers]
"""Which tensors are stored as one chunk, and for those the file and where in it they begin."""


@dataclass(frozen=True)
class IndexBytes:
    """How the parts of files are read that say where chunks are."""

    table: Callable[[int, str | None], bytearray]
    """The table of the file of that number. The other argument is the key that it is needed for."""
    index: Callable[[], bytearray]
    path_of: Callable[[str], str]


class ChunkIndex(Protocol):
    """Where the chunks of a checkpoint are."""

    @property
    def columns(self) -> Columns:
        """All chunks, and all digests."""

    def find(self, wanted: Sequence[tuple[int, BoxLike | None]]) -> Sequence[Sequence[StoredChunk]]:
        """For tensors and boxes of them: the chunks with something of that, and perhaps more of the same tensor."""

    def only_chunks(self, tensors: Numbers) -> OnlyChunks:
        """Which of these tensors are stored as one chunk, and where."""

    def digests(self, file: int) -> Digests:
        """Of the blocks of a file that some chunk was found in."""

    def header_end(self, file: int) -> int:
        """Where the header of such a file ends."""


class ColumnIndex:
    """The columns of version 1, which are read at once."""

    def __init__(self, record: Record, stored: IndexBytes) -> None:
        self._record = record
        self._stored = stored

    @cached_property
    def columns(self) -> Columns:
        """All chunks, and all digests."""
        return decode_columns(bytes(self._stored.index()), self._record, self._path)

    def find(self, wanted: Sequence[tuple[int, BoxLike | None]]) -> Sequence[Sequence[StoredChunk]]:
        """All chunks of the tensors."""
        return [self._table.of(tensor) for tensor, _ in wanted]

    def only_chunks(self, tensors: Numbers) -> OnlyChunks:
        """Which of these tensors are stored as one chunk, and where."""
        return self._table.only_chunks(tensors)

    def digests(self, file: int) -> Digests:
        """Of the blocks of a file."""
        return self.columns.digests[self._starts[file] : self._starts[file + 1]]

    def header_end(self, file: int) -> int:
        """Where the header of a file ends."""
        return self._header_ends[file]

    @property
    def _path(self) -> str:
        assert self._record.index is not None
        return self._stored.path_of(self._record.index.name)

    @cached_property
    def _table(self) -> ChunkTable:
        return ChunkTable(self.columns, self._record, self._path)

    @cached_property
    def _starts(self) -> list[int]:
        return first_blocks(self._record.files, self._record.block_bytes)

    @cached_property
    def _header_ends(self) -> list[int]:
        return header_ends(self.columns, self._record.files)


class _Parts(NamedTuple):
    """Parts of a tensor, a row for each."""

    offsets: list[list[int]]
    sizes: list[list[int]]
    ranks: list[int]


class TableIndex:
    """The tables of data files, each of which is read when something in its file is wanted, and kept."""

    def __init__(self, record: Record, stored: IndexBytes) -> None:
        self._record = record
        self._stored = stored
        self._tables: dict[int, FileTable] = {}
        self._division_of = np.asarray(record.places.division_of, np.int64)
        self._first_of = np.asarray(record.places.first_of, np.int64)
        self._known_parts: dict[tuple[int, int, tuple[int, ...], Box], _Parts] = {}
        """Found for tensors of the same shape before, of which models have many."""

    def find(self, wanted: Sequence[tuple[int, BoxLike | None]]) -> Sequence[Sequence[StoredChunk]]:
        """The chunks of the parts that share cells with boxes. They are proven to tile these parts."""
        parts = [self._parts(tensor, box) for tensor, box in wanted]
        needed: dict[int, int] = {}
        for (tensor, _), (_, _, ranks) in zip(wanted, parts, strict=True):
            for rank in ranks:
                for file in self._files_with(tensor, rank):
                    needed.setdefault(file, tensor)
        self.read_tables(needed)
        return [self._chunks(tensor, found) for (tensor, _), found in zip(wanted, parts, strict=True)]

    def only_chunks(self, tensors: Numbers) -> OnlyChunks:
        """Which of these tensors are stored as one chunk, and where."""
        division = self._division_of[tensors]
        uncut = np.array([not rule.cuts for rule in self._record.places.divisions] + [False], np.bool_)[division]
        uncut &= self.shapes.elements[tensors] > 0
        rows = np.flatnonzero(uncut)
        ranks = np.zeros(len(rows), np.int64)
        for number in np.unique(division[rows]).tolist():
            of_rule = division[rows] == number
            ranks[of_rule] = self._counted(number, self._first_of[tensors[rows[of_rule]]])
        places = self._places_on_ranks(tensors[rows], ranks)
        needed: dict[int, int] = {}
        for file, of_file in places:
            needed.setdefault(file, int(tensors[rows[of_file[0]]]))
        self.read_tables(needed)
        count = np.zeros(len(rows), np.int64)
        file_of, row_begin, elements = np.zeros_like(count), np.zeros_like(count), np.zeros_like(count)
        for file, of_file in places:
            table, numbers = self._tables[file], tensors[rows[of_file]]
            first = table.chunk_tensor.searchsorted(numbers)
            there = table.chunk_tensor.searchsorted(numbers, "right") - first
            count[of_file] += there
            found, first = of_file[there > 0], first[there > 0]
            file_of[found], row_begin[found], elements[found] = file, table.chunk_begin[first], table.volumes[first]
        right = (count == 1) & (elements == self.shapes.elements[tensors[rows]])
        alone = np.zeros(len(tensors), np.bool_)
        alone[rows[right]] = True
        return alone, file_of[right], row_begin[right]

    def digests(self, file: int) -> Digests:
        """Of the blocks of a file whose table was read."""
        return self._tables[file].digests

    def header_end(self, file: int) -> int:
        """Where the header of such a file ends."""
        end = self._tables[file].header_end
        return self._record.files[file].data_end if end is None else end

    def parts_of(self, tensor: int, box: BoxLike | None = None) -> list[tuple[Box, int]]:
        """The parts of a tensor that share cells with a box, and the ranks that have stored them."""
        offsets, sizes, ranks = self._parts(tensor, box)
        boxes = map(Box, map(tuple, offsets), map(tuple, sizes))
        return list(zip(boxes, ranks, strict=True))

    def files_of(self, tensor: int) -> list[int]:
        """The files that may have something of a tensor, by what the record says."""
        ranks = dict.fromkeys(self._parts(tensor, None).ranks)
        return [file for rank in ranks for file in self._files_with(tensor, rank)]

    def table(self, file: int) -> FileTable:
        """The table of a file."""
        self.read_tables({file: self._a_tensor_in(file)})
        return self._tables[file]

    def read_tables(self, needed: Mapping[int, int | None]) -> None:
        """Read tables that were not read before, each for a tensor that it is needed for."""
        lacking = [file for file in needed if file not in self._tables]
        if not lacking:
            return

        def read(file: int) -> FileTable:
            stored, tensor = self._record.files[file], needed[file]
            assert stored.table is not None
            key = None if tensor is None else self._record.tensors[tensor].key
            listed = stored.table.tensor_list
            return decode_table(
                self._stored.table(file, key),
                stored,
                self.shapes,
                None if listed is None else self._record.tensor_lists[listed],
                self._record.block_bytes,
                self._stored.path_of(stored.name),
                key,
            )

        threads = READERS if len(lacking) >= _SEVERAL else 1
        found = map_in_threads(read, lacking, threads, "holdfast-tables")
        self._tables.update(zip(lacking, found, strict=True))

    @cached_property
    def columns(self) -> Columns:
        """All chunks that count, and all digests. Reads all tables."""
        self.read_tables({number: self._a_tensor_in(number) for number in range(len(self._record.files))})
        tables = [self._tables[file] for file in range(len(self._record.files))]
        return self._merged(tables)

    def columns_of(self, files: Iterable[int]) -> Columns:
        """The chunks of files whose tables were read. Of other files there are no digests."""
        known = set(files)
        empty = np.zeros(0, np.int64)
        nothing = FileTable(empty, empty, empty, empty, np.zeros(1, np.int64), empty, np.zeros(0, np.uint32), {})
        tables = [self._tables[file] if file in known else nothing for file in range(len(self._record.files))]
        return self._merged(tables, prove=False)

    @cached_property
    def shapes(self) -> TensorShapes:
        """Of all tensors."""
        return TensorShapes(self._record.tensors)

    def _merged(self, tables: Sequence[FileTable], *, prove: bool = True) -> Columns:
        def joined(columns: Iterable[Any], dtype: Any = np.int64) -> Any:
            return np.concatenate([np.zeros(0, dtype), *columns])

        tensor = joined(table.chunk_tensor for table in tables)
        file = np.repeat(np.arange(len(tables)), [len(table.chunk_tensor) for table in tables])
        begin = joined(table.chunk_begin for table in tables)
        order = np.argsort(tensor, kind="stable")
        stored = np.zeros(len(self.shapes), np.int64)
        np.add.at(stored, tensor, joined(table.volumes for table in tables))
        wrong = np.flatnonzero(stored != self.shapes.elements) if prove else np.zeros(0, np.int64)
        if wrong.size:  # of some chunks another rank's copy counts; or something is missing, which is found here
            found = self.find([(number, None) for number in wrong.tolist()])
            right = {(chunk.file, chunk.begin) for chunks in found for chunk in chunks}
            doubtful = np.isin(tensor[order], wrong).tolist()
            pairs = zip(file[order].tolist(), begin[order].tolist(), strict=True)
            order = order[[not doubt or pair in right for doubt, pair in zip(doubtful, pairs, strict=True)]]
        counts = self.shapes.dimensions[tensor]
        numbers = numbers_of(starts_of(counts), counts, order)
        return Columns(
            tensor[order],
            file[order],
            begin[order],
            joined(table.chunk_offsets for table in tables)[numbers],
            joined(table.chunk_sizes for table in tables)[numbers],
            joined((table.digests for table in tables), np.uint32),
        )

    def _a_tensor_in(self, file: int) -> int | None:
        """One of the tensors that a file has, by what the record says."""
        table = self._record.files[file].table
        assert table is not None
        return table.first if 0 <= table.first <= table.last and table.first < len(self._record.tensors) else None

    @cached_property
    def _index(self) -> PartIndex:
        assert self._record.index is not None
        path = self._stored.path_of(self._record.index.name)
        return PartIndex(self._stored.index(), self._record, self.shapes, path)

    @cached_property
    def _files_of_rank(self) -> dict[int, list[tuple[int, int, int]]]:
        """Of each rank its files: the smallest and the largest tensor number, and the number of the file."""
        found: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for number, file in enumerate(self._record.files):
            assert file.table is not None
            found[file.rank].append((file.table.first, file.table.last, number))
        return found

    def _files_with(self, tensor: int, rank: int) -> list[int]:
        files = self._files_of_rank.get(rank, ())
        return [number for first, last, number in files if first <= tensor <= last]

    def _places_on_ranks(self, tensors: Numbers, ranks: Numbers) -> list[tuple[int, Numbers]]:
        """The files that may have tensors, each stored by one rank, and which of the tensors these are."""
        places = []
        for rank in np.unique(ranks).tolist():
            own = np.flatnonzero(ranks == rank)
            for first, last, file in self._files_of_rank.get(rank, ()):
                inside = own[(tensors[own] >= first) & (tensors[own] <= last)]
                if len(inside):
                    places.append((file, inside))
        return places

    def _counted(self, division: int, positions: Numbers) -> Numbers:
        """The ranks at positions among those that a division counts."""
        ranks = self._rank_lists[division]
        return positions % self._record.world_size if ranks is None else ranks[positions % len(ranks)]

    @cached_property
    def _rank_lists(self) -> list[Numbers | None]:
        known: dict[int, Numbers] = {}
        return [
            None if rule.ranks is None else known.setdefault(id(rule.ranks), np.asarray(rule.ranks, np.int64))
            for rule in self._record.places.divisions
        ]

    def _parts(self, tensor: int, box: BoxLike | None) -> _Parts:
        """The parts of a tensor that have elements and share cells with a box, if one is given."""
        shape, number = self._record.tensors[tensor].shape, self._record.places.division_of[tensor]
        if 0 in shape:
            return _Parts([], [], [])
        whole = Box((0,) * len(shape), shape)
        if number < 0:
            offsets, sizes, ranks = self._index.of(tensor)
            if box is not None:
                low, high = np.asarray(box.offsets, np.int64), np.asarray(box.sizes, np.int64)
                inside = ((offsets < low + high) & (low < offsets + sizes)).all(axis=1)
                offsets, sizes, ranks = offsets[inside], sizes[inside], ranks[inside]
            return _Parts(offsets.tolist(), sizes.tolist(), ranks.tolist())
        division, first = self._record.places.divisions[number], self._record.places.first_of[tensor]
        if not division.cuts:
            return _Parts([[0] * len(shape)], [list(shape)], self._counted(number, np.array([first])).tolist())
        asked = number, first, shape, whole if box is None else Box(tuple(box.offsets), tuple(box.sizes))
        known = self._known_parts.get(asked)
        if known is None:
            numbers = division.overlapping(shape, asked[-1])
            offsets, sizes = division.boxes(shape, numbers)
            # With a circle that is large enough these are positions, and not ranks.
            positions = division._replace(ranks=None).ranks_with(numbers, first=first, world_size=1 << 62)[:, 0]
            known = _Parts(offsets.tolist(), sizes.tolist(), self._counted(number, positions).tolist())
            self._known_parts[asked] = known
        return known

    def _chunks(self, tensor: int, parts: _Parts) -> list[StoredChunk]:
        """The chunks that parts are stored as."""
        by_rank: dict[int, list[Box]] = defaultdict(list)
        for offsets, sizes, rank in zip(*parts, strict=True):
            by_rank[rank].append(Box(tuple(offsets), tuple(sizes)))
        found: list[StoredChunk] = []
        for rank, boxes in by_rank.items():
            rows = self._rows(tensor, rank)
            if len(boxes) == len(rows) == 1 and rows[0][:2] == boxes[0]:  # as is most often so
                found += rows
            else:
                found += self._tiling(tensor, rank, boxes, rows)
        return found

    def _rows(self, tensor: int, rank: int) -> list[StoredChunk]:
        """All chunks of a tensor in the files of a rank."""
        ndim = len(self._record.tensors[tensor].shape)
        rows: list[StoredChunk] = []
        for file in self._files_with(tensor, rank):
            table = self._tables[file]
            first, last = table.rows_of(tensor)
            if first < last:
                offsets, sizes = table.boxes(first, last, ndim)
                begins = table.chunk_begin[first:last].tolist()
                rows += map(StoredChunk, map(tuple, offsets), map(tuple, sizes), repeat(file), begins)
        return rows

    def _tiling(self, tensor: int, rank: int, boxes: list[Box], rows: list[StoredChunk]) -> list[StoredChunk]:
        """The chunks of a rank that are in some parts of it, which they must tile."""
        key = self._record.tensors[tensor].key
        filled = [0] * len(boxes)
        inside = []
        for box, row, _, lengths in overlaps(boxes, rows):
            if lengths != rows[row].sizes:
                path = self._stored.path_of(self._record.files[rows[row].file].name)
                refuse(path, f"has a chunk of {key!r} that reaches out of its part", boxes[box], rows[row][:2], key)
            filled[box] += volume(lengths)
            inside.append(rows[row])
        for part, count in zip(boxes, filled, strict=True):
            if count != volume(part.sizes):
                what = f"does not have all elements once that rank {rank} has stored of {key!r}"
                refuse(self._file_of(tensor, rank), what, volume(part.sizes), count, key)
        if len(inside) > 1 and first_overlap(inside) is not None:
            refuse(self._file_of(tensor, rank), f"has chunks of {key!r} that overlap", "none", "some", key)
        return inside

    def _file_of(self, tensor: int, rank: int) -> str:
        """What an error about the chunks of a rank names: its file, or the record if there is none or several."""
        files = self._files_with(tensor, rank)
        return self._stored.path_of(self._record.files[files[0]].name if len(files) == 1 else RECORD)
