"""Data files with tables whose record is lost: what the tables say without it, and what a record can be made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast._formats.native.array_files import decode_arrays
from holdfast._formats.native.blocks import Digests
from holdfast._formats.native.layout import ChunkToWrite
from holdfast._formats.native.names import rank_of
from holdfast._formats.native.record import BLOCK_BYTES, DIGESTS_COMPUTED
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.stored_files import StoredFile, TablePlace
from holdfast._formats.native.stored_parts import WHOLE, PartsByRule, StoredParts, listed_parts
from holdfast._formats.native.tables import CHECK_BYTES, TABLE_ARRAYS, TABLE_NAME, check_table
from holdfast._formats.safetensors.header import Header
from holdfast._stores.store import Store
from holdfast._tools.repairing.data_files import FoundChunk, Parts, chunks_in
from holdfast._tools.repairing.rewriting import REPLACES, Rewriting
from holdfast.errors import DamagedCheckpointError


def has_table(header: Header) -> bool:
    """Whether a data file is of a version of the format in which it ends with a table."""
    return list(header.tensors)[-1:] == [TABLE_NAME]


@dataclass(frozen=True)
class UnrecordedTable:
    """The table of a data file. What tensors its numbers stand for, and how many dimensions they have, it does not
    say."""

    numbers: Sequence[int]
    """The tensor numbers of its chunks."""
    begins: Sequence[int]
    offsets: Sequence[int]
    sizes: Sequence[int]
    digests: Digests
    notes: Mapping[str, str]
    digest: str

    @classmethod
    def read(cls, store: Store, file: StoredFile, header: Header) -> UnrecordedTable | None:
        """The table of a file; None if it is damaged."""
        path, begin = store.path_of(file.name), header.position(TABLE_NAME)
        data = bytearray(file.nbytes - begin)
        with store.reader(file.name) as reader:
            reader.read_into(begin, data)
        try:
            digest = bytes(data[-CHECK_BYTES:]).hex()
            check_table(data, digest, path)
            arrays, notes = decode_arrays(data, TABLE_ARRAYS, path)
        except DamagedCheckpointError:
            return None
        there = sorted(header.position(name) for name, stored in chunks_in(header).items() if stored.nbytes)
        lists = [arrays[name].tolist() for name in ("chunk_tensor", "chunk_begin", "chunk_offsets", "chunk_sizes")]
        if sorted(lists[1]) != there or len(arrays["digests"]) != -(-begin // BLOCK_BYTES):
            return None
        tensors, begins, offsets, sizes = lists
        return cls(tensors, begins, offsets, sizes, arrays["digests"], notes, digest)


class UnrecordedTables:
    """The tables of all data files of a save."""

    def __init__(self, store: Store, files: Sequence[StoredFile], headers: Sequence[Header]) -> None:
        self.files = [StoredFile(file.name, file.nbytes, rank=rank_of(file.name) or 0) for file in files]
        self._headers = headers
        self.tables = [
            UnrecordedTable.read(store, file, header) for file, header in zip(self.files, headers, strict=True)
        ]

    @property
    def are_intact(self) -> bool:
        """Whether no table is damaged."""
        return None not in self.tables

    @property
    def computed(self) -> str:
        """When a repair has computed digests; empty if all are those of the save."""
        return max((table.notes.get(DIGESTS_COMPUTED, "") for table in self.tables if table is not None), default="")

    def replaced(self) -> set[str]:
        """The files that others count instead of."""
        return {table.notes[REPLACES] for table in self.tables if table is not None and REPLACES in table.notes}

    def prove_all_files(self) -> bool:
        """Whether it is sure that these are all files of the save."""
        counts: dict[int, int] = {}
        for file in self.files:
            counts[file.rank] = counts.get(file.rank, 0) + 1
        expected = {table.notes.get("ranks") for table in self.tables if table is not None}
        right = all(
            table is not None and table.notes.get("files") == str(counts[file.rank])
            for file, table in zip(self.files, self.tables, strict=True)
        )
        return right and expected == {str(len(counts))}

    def data_files(self) -> list[StoredFile]:
        """The files, with the places of their tables."""
        return [
            StoredFile(
                file.name,
                file.nbytes,
                rank=file.rank,
                table=TablePlace(header.position(TABLE_NAME), file.nbytes - header.position(TABLE_NAME), ""),
            )
            for file, header in zip(self.files, self._headers, strict=True)
        ]

    def digests(self) -> Digests | None:
        """Of all blocks of all files; None if not all tables are intact."""
        known = [table.digests for table in self.tables if table is not None]
        return np.concatenate([np.zeros(0, np.uint32), *known]) if len(known) == len(self.tables) else None

    def unclear(self, parts: Parts) -> str:
        """Why names do not say which tensors chunks are of; empty if they do."""
        for file, (table, chunks) in enumerate(zip(self.tables, self._by_file(parts), strict=True)):
            if table is not None:
                keys = [chunks[begin].key for begin in table.begins]
                pairs = set(zip(table.numbers, keys, strict=True))
                if not len(pairs) == len(set(keys)) == len(set(table.numbers)):
                    return f"the names in {self.files[file].name} do not say which tensors its chunks are of"
        return ""

    def rewritings(self, parts: Parts, notes: Mapping[str, str]) -> dict[int, Rewriting]:
        """The files that have to be written again: their tables are damaged, or have tensors of other dimensions."""
        refs = {ref.key: (number, ref) for number, ref in enumerate(parts.tensors)}
        found = {}
        for file, (table, chunks) in enumerate(zip(self.tables, self._by_file(parts), strict=True)):
            if table is None or not _agrees(table, chunks):
                to_write = [(_chunk(chunk, *refs[chunk.key]), chunk.begin) for chunk in chunks.values()]
                own = notes if table is None else {name: table.notes[name] for name in _KEPT if name in table.notes}
                found[file] = Rewriting(self.files[file], sorted(to_write, key=lambda row: row[0][0]), own)
        return found

    def recorded(self, parts: Parts) -> tuple[list[StoredFile], list[list[int]]]:
        """The files as a record lists them, and what the tensor numbers in their tables stand for."""
        numbers = {ref.key: number for number, ref in enumerate(parts.tensors)}
        files, lists = [], dict[tuple[int, ...], int]()
        for file, table, chunks in zip(self.data_files(), self.tables, self._by_file(parts), strict=True):
            if table is None or file.table is None:
                files.append(file)
                continue
            listed = [-1] * (max(table.numbers, default=-1) + 1)
            for number, begin in zip(table.numbers, table.begins, strict=True):
                listed[number] = numbers[chunks[begin].key]
            known = [number for number in listed if number >= 0]
            place = TablePlace(
                file.table.begin,
                file.table.nbytes,
                table.digest,
                min(known, default=0),
                max(known, default=-1),
                lists.setdefault(tuple(listed), len(lists)),
            )
            files.append(StoredFile(file.name, file.nbytes, rank=file.rank, table=place))
        return files, [list(listed) for listed in lists]

    def stored_parts(self, parts: Parts) -> list[StoredParts]:
        """Who has stored what of the tensors."""
        found: list[StoredParts] = []
        for ref in parts.tensors:
            rows = [
                (part.offsets, part.sizes, self.files[part.file].rank)
                for part in parts.parts.get(ref.key, ())
                if 0 not in part.sizes
            ]
            if len(rows) <= 1:
                found.append(PartsByRule(WHOLE, rows[0][2] if rows else 0))
            else:
                found.append(listed_parts(rows))
        return found

    def _by_file(self, parts: Parts) -> list[dict[int, FoundChunk]]:
        """The chunks of each file by their places."""
        found: list[dict[int, FoundChunk]] = [{} for _ in self.files]
        for chunks in parts.parts.values():
            for chunk in chunks:
                if 0 not in chunk.sizes:
                    found[chunk.file][chunk.begin] = chunk
        return found


_KEPT = ("files", "ranks", DIGESTS_COMPUTED)


def _agrees(table: UnrecordedTable, chunks: Mapping[int, FoundChunk]) -> bool:
    """Whether a table can be read with what names say. Types that safetensors files do not have are bytes there, in
    one more dimension."""
    rows = [chunks[begin] for begin in table.begins]
    return [at for row in rows for at in row.offsets] == list(table.offsets) and [
        size for row in rows for size in row.sizes
    ] == list(table.sizes)


def _chunk(found: FoundChunk, number: int, ref: TensorRef) -> ChunkToWrite:
    return ChunkToWrite(number, ref.key, ref.dtype, ref.shape, found.offsets, found.sizes)
