"""Data files whose tables are lost, written again from what is left of them, and records that name the new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from holdfast._formats.native.columns import digest_of
from holdfast._formats.native.layout import ChunkToWrite, lay_out
from holdfast._formats.native.names import RECORD, data_file, generation_of, index_file, rank_of
from holdfast._formats.native.part_index import encode_index
from holdfast._formats.native.record import Record, Repair, decode_record, encode_record, noted
from holdfast._formats.native.source import NativeSource
from holdfast._formats.native.stored_files import StoredFile
from holdfast._formats.native.stored_parts import StoredParts, places_of
from holdfast._formats.native.writing import Bytes, ChunkBytes, remove_unfinished, write_data_file
from holdfast._stores.store import Store
from holdfast._tools.repairing.report import keep_copy

REPLACES = "replaces"
"""The note in a table with the name of the file that its file was made from, and counts instead of."""

_PIECE = 1 << 17


@dataclass(frozen=True)
class Rewriting:
    """A data file that is to be written again, with its chunks, each with its place in the file that is there."""

    file: StoredFile
    chunks: Sequence[tuple[ChunkToWrite, int]]
    notes: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """The bytes of all chunks."""
        return sum(chunk.nbytes for chunk, _ in self.chunks)

    def write(
        self,
        store: Store,
        block_bytes: int,
        memory: int | None = None,
        advance: Callable[[int], None] = lambda nbytes: None,
    ) -> StoredFile:
        """Write it under a new name of the same save. ``advance`` is called with the bytes that were read."""
        generation = generation_of(self.file.name) or ""
        name = _free_name(store, generation, self.file.rank)
        places = {(chunk.tensor, chunk.offsets): begin for chunk, begin in self.chunks}
        notes = {**self.notes, REPLACES: self.file.name}
        chunks = [chunk for chunk, _ in self.chunks]
        (layout,) = lay_out(chunks, generation, notes=notes, block_bytes=block_bytes)
        try:
            with (
                self._open(store, places, advance) as given,
                store.create(name, layout.nbytes, memory or _PIECE) as sink,
            ):
                table = write_data_file(sink, layout, given, memory)
            store.sync()
        except BaseException:
            remove_unfinished(store, [name])
            raise
        return StoredFile(name, layout.nbytes, rank=self.file.rank, table=table)

    @contextmanager
    def _open(
        self, store: Store, places: Mapping[tuple[int, tuple[int, ...]], int], advance: Callable[[int], None]
    ) -> Iterator[ChunkBytes]:
        with store.reader(self.file.name) as reader:

            def pieces(chunk: ChunkToWrite) -> Iterator[Bytes]:
                begin = places[chunk.tensor, chunk.offsets]
                for at in range(0, chunk.nbytes, _PIECE):
                    part = np.empty(min(_PIECE, chunk.nbytes - at), np.uint8)
                    reader.read_into(begin + at, part.data)
                    advance(part.nbytes)
                    yield part

            yield ChunkBytes(pieces)


def _free_name(store: Store, generation: str, rank: int) -> str:
    """The next name of a data file of a rank."""
    own = [file.name for file in store.list() if generation_of(file.name) == generation and rank_of(file.name) == rank]
    return data_file(generation, rank, max((number_of(name) for name in own), default=-1) + 1)


def number_of(name: str) -> int:
    """Which of the data files of its rank it is."""
    return int(name.rpartition("-")[2].partition(".")[0])


def put_in_place(store: Store, record: Record, repair: Repair, parts: Sequence[StoredParts] | None = None) -> None:
    """Commit a record, with a note of the repair. What was there before is kept, renamed.

    ``parts`` are those of all tensors if they are new. Nothing is put in place that readers would refuse.
    """
    record = replace(record, written=noted(record.written, repair))
    index = None if parts is None else encode_index(parts)
    if parts is not None:
        record = replace(record, places=places_of(parts), index=None)
    if index is not None:
        stored = StoredFile(index_file(record.generation), len(index), digest_of(index))
        old_index = keep_copy(store, stored.name)
        record = replace(record, index=stored)
        store.commit(stored.name, index, replaces=old_index)
        store.sync()
    encoded = encode_record(record)
    with NativeSource(store, record=decode_record(encoded, store.path_of(RECORD))) as source:
        for key in source.tensors:
            source.chunks(key)
    old_record = keep_copy(store, RECORD)
    store.commit(RECORD, encoded, replaces=old_record)
