"""Writes checkpoints of our own format: data files, then their columns, then the record that makes them a checkpoint.

Files of a save have names that nobody used before, and count for nothing until the record names them. So everything
before the commit is undone by deleting them, and whatever a kill leaves behind is ignored. Whoever saves, converts or
gives torch a storage brings the bytes of the chunks; who writes which of them has been decided before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast._base.commits import Commit
from holdfast._base.garbage import no_garbage_collection
from holdfast._base.tuning import MEMORY_BUDGET, SHARE_OF_WRITE_BUFFERS, WRITE_BUFFER_BYTES
from holdfast._formats.native.blocks import Digests, digest_blocks
from holdfast._formats.native.columns import Columns, digest_of, encode_columns
from holdfast._formats.native.layout import ChunkToWrite, FileLayout, lay_out
from holdfast._formats.native.names import RECORD, data_file, files_in, generation_of, index_file
from holdfast._formats.native.record import BLOCK_BYTES, Record, StoredFile, decode_record, encode_record
from holdfast._formats.native.refs import TensorRef
from holdfast._stores.store import BufferedSink, Sink, Store, is_unanswered
from holdfast.errors import CheckpointExistsError, IncompleteSaveError, NotAFolderError

logger = logging.getLogger(__name__)

# What is at a destination before.


@dataclass(frozen=True)
class Existing:
    """What was in the store when a save began."""

    record: bytes | None
    names: frozenset[str]
    """Of its files. Data of saves that the new checkpoint does not need is removed once it is committed."""


def inspect_destination(store: Store, *, overwrite: bool) -> Existing:
    """Look at what is in the store. Raises if a checkpoint is in the way, of ours or of another kind."""
    # In this order: if another save commits in between, ours will notice that the record is not the one it saw.
    try:
        record = _content(store, RECORD)
    except NotADirectoryError as error:
        raise _not_a_folder(store) from error
    names = {listed.name for listed in store.list()}
    if record is not None and not overwrite:
        raise CheckpointExistsError(
            f"there is a checkpoint at {store.location}{_about(record, store)}. Save to another place, or pass "
            "overwrite=True to replace it in one step.",
            path=store.location,
        )
    foreign = _foreign_checkpoint(names)
    if foreign is not None:
        raise CheckpointExistsError(
            f"{store.location} holds a checkpoint of another kind ({foreign}). Save to a place of its own: two "
            "checkpoints in one folder cannot be told apart.",
            path=store.location,
        )
    return Existing(record, frozenset(names))


def _not_a_folder(store: Store) -> NotAFolderError:
    place = Path(store.location)
    file = next((str(path) for path in (place, *place.parents) if path.is_file()), store.location)
    return NotAFolderError(
        f"a checkpoint is a folder, and {file} is a file. Save to another place, or move the file away.", path=file
    )


def _foreign_checkpoint(names: set[str]) -> str | None:
    """A file by which a checkpoint of another format is known."""
    for name in sorted(names):
        if name.endswith((".metadata", ".distcp", ".safetensors.index.json")):
            return name
        if name.endswith(".safetensors") and generation_of(name) is None:
            return name
    return None


def _about(record: bytes, store: Store) -> str:
    try:
        written = decode_record(record, store.path_of(RECORD)).written
    except Exception:
        return " (which is damaged)"
    return f", saved at {written['time']}" if "time" in written else ""


# Data files, written from front to back, with the digests of their blocks taken from the very bytes that are written.


Bytes = npt.NDArray[np.uint8]
Pieces = Callable[[ChunkToWrite], Iterable[Bytes]]
"""The bytes of a chunk, in order, in as many pieces as is convenient."""

Gather = Callable[[int, Bytes], tuple[int, int]]
"""Puts whole chunks, beginning with the one of that number, into a buffer: as many as can be had without effort and
fit, perhaps none. Returns how many, and how many bytes they took."""


class ChunkBytes(NamedTuple):
    """Where the bytes of the chunks of a file come from. They are asked for in the order of the layout."""

    pieces: Pieces
    gather: Gather | None = None


OpenChunks = Callable[[FileLayout], AbstractContextManager[ChunkBytes]]
"""Gives the bytes of the chunks of a file, for as long as the file is written."""


@dataclass(frozen=True)
class WrittenFile:
    """A data file that was written, with its chunks as rows: tensor number, position, offsets, sizes."""

    name: str
    nbytes: int
    chunks: Sequence[tuple[int, int, tuple[int, ...], tuple[int, ...]]]
    digests: Digests


def write_chunks(
    store: Store,
    chunks: Sequence[ChunkToWrite],
    open_chunks: OpenChunks,
    *,
    generation: str,
    rank: int = 0,
    max_file_size: int | None = None,
    memory_budget: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[WrittenFile]:
    """Write chunks to as many files as they need, which are named after a rank.

    Everything is durable when it returns; if it raises, nothing is left. ``advance`` is called with the bytes of every
    part that is written.
    """
    # Half of the memory is for what is being written, and half for whoever makes the bytes.
    memory = (MEMORY_BUDGET if memory_budget is None else memory_budget) // SHARE_OF_WRITE_BUFFERS
    written: list[WrittenFile] = []
    try:
        with no_garbage_collection():
            layouts = lay_out(chunks, generation, max_file_size)
            rows_of = [_rows(layout) for layout in layouts]
        for number, (layout, rows) in enumerate(zip(layouts, rows_of, strict=True)):
            name = data_file(generation, rank, number)
            with open_chunks(layout) as given, store.create(name, layout.nbytes, memory) as sink:
                digests = write_data_file(sink, layout, given, BLOCK_BYTES, memory, advance)
            written.append(WrittenFile(name, layout.nbytes, rows, digests))
        store.sync()
    except BaseException:
        remove_unfinished(store, [file.name for file in written])
        raise
    return written


def _rows(layout: FileLayout) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """Which chunks are where: tensor number, position, offsets, sizes."""
    return [(tensor, position, offsets, sizes) for (tensor, _, _, _, offsets, sizes), position in layout.chunks]


def write_data_file(
    sink: Sink,
    layout: FileLayout,
    given: ChunkBytes,
    block_bytes: int,
    memory: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> Digests:
    """Write a file as it was laid out. Returns the digests of its blocks.

    Bytes are collected in buffers of a few megabytes, so that thousands of small chunks cost few writes, and what is
    digested cannot change before it is written. ``advance`` is called with the bytes of each of them.
    """
    buffers = _WriteBuffers(sink, block_bytes, memory, advance)
    buffers.take(np.frombuffer(layout.header, np.uint8))
    number, count = 0, len(layout.chunks)
    while number < count:
        if given.gather is not None:
            gathered, filled = given.gather(number, buffers.rest())
            buffers.filled(filled)
            number += gathered
        if number < count:  # the next one does not fit whole, or has to be converted
            _write_chunk(buffers, layout.chunks[number][0], given.pieces)
            number += 1
    return buffers.finish()


def _write_chunk(buffers: _WriteBuffers, chunk: ChunkToWrite, pieces: Pieces) -> None:
    given = 0
    for piece in pieces(chunk):
        buffers.take(piece)
        given += piece.nbytes
        del piece  # the next one is made while this name is still in use otherwise, and takes memory besides it
    if given != chunk.nbytes:
        raise AssertionError(f"{chunk.key!r} was planned with {chunk.nbytes} bytes and came with {given}")


class _WriteBuffers:
    """Memory that is filled, digested block by block, and handed on: the sink's, or one buffer if it lends none."""

    def __init__(self, sink: Sink, block_bytes: int, memory: int | None, advance: Callable[[int], None] | None) -> None:
        self._sink = sink
        self._lending = sink if isinstance(sink, BufferedSink) else None
        self._advance = advance
        self._block_bytes = block_bytes
        self._memory = memory
        self._own: Bytes | None = None
        self._digests: list[Digests] = []
        self._begin()

    def take(self, data: Bytes) -> None:
        """The next bytes of the file."""
        filled, count = self._filled, data.nbytes
        if filled + count < self._buffer.nbytes:
            self._buffer[filled : filled + count] = data
            self._filled += count
            return
        taken = 0
        while taken < count:
            part = min(count - taken, self._buffer.nbytes - self._filled)
            self._buffer[self._filled : self._filled + part] = data[taken : taken + part]
            self._filled += part
            taken += part
            if self._filled == self._buffer.nbytes:
                self._hand_on()
                self._begin()

    def rest(self) -> Bytes:
        """What is free of the buffer, for bytes to be put there."""
        return self._buffer[self._filled :]

    def filled(self, count: int) -> None:
        """The next bytes of the file have been put into the rest of the buffer."""
        self._filled += count
        if self._filled == self._buffer.nbytes:
            self._hand_on()
            self._begin()

    def finish(self) -> Digests:
        """Hand on the rest. Returns all digests."""
        if self._filled:
            self._hand_on()
        return np.concatenate([np.empty(0, np.uint32), *self._digests])

    def _begin(self) -> None:
        lent = None if self._lending is None else self._lending.buffer()
        buffer = np.empty(0, np.uint8) if lent is None else np.frombuffer(lent, np.uint8)
        # Digests are of whole blocks, so that a buffer which ends within a block is used up to its beginning.
        self._buffer = buffer[: self._whole_blocks(buffer.nbytes)]
        if not self._buffer.nbytes:
            if self._own is None:
                size = WRITE_BUFFER_BYTES if self._memory is None else min(WRITE_BUFFER_BYTES, self._memory)
                self._own = np.empty(max(self._block_bytes, self._whole_blocks(size)), np.uint8)
            self._buffer = self._own
        self._filled = 0

    def _whole_blocks(self, nbytes: int) -> int:
        return nbytes // self._block_bytes * self._block_bytes

    def _hand_on(self) -> None:
        part = self._buffer[: self._filled]
        self._digests.append(digest_blocks(part, self._block_bytes))
        if self._lending is None or self._buffer is self._own:
            self._sink.write(part.data)
        else:
            self._lending.advance(self._filled)
        if self._advance is not None:
            self._advance(self._filled)


# The columns, and the record.


@dataclass(frozen=True)
class CheckpointContents:
    """What a record holds besides its files."""

    tensors: Sequence[TensorRef]
    tree: Any
    metadata: Any
    written: Mapping[str, Any]


def commit_checkpoint(
    store: Store,
    existing: Existing,
    files: Sequence[WrittenFile],
    contents: CheckpointContents,
    generation: str,
    *,
    commit: Commit | None = None,
    prove: Callable[[Record], None] | None = None,
) -> Record:
    """Write the columns, put the record in place, and remove what only the old checkpoint needed.

    If it raises, ``commit`` says whether the record may be in place, or may get there yet: then it needs the files.
    ``prove`` is called when all is there but the record, which it gets. If it raises, nothing is committed.
    """
    commit = commit or Commit()
    _refuse_missing_files(store, files)
    data = encode_columns(columns_of_files(files))
    index = StoredFile(index_file(generation), len(data), digest_of(data))
    record = Record(
        generation=generation,
        files=[StoredFile(file.name, file.nbytes) for file in files],
        index=index,
        tensors=contents.tensors,
        tree=contents.tree,
        metadata=contents.metadata,
        written=contents.written,
    )
    encoded = encode_record(record)
    try:
        store.put(index.name, data)
        store.sync()
        if prove is not None:
            prove(decode_record(encoded, store.path_of(RECORD)))
        commit.may_have_happened = True
        try:
            store.commit(RECORD, encoded, replaces=existing.record)
        except BaseException as error:
            commit.may_have_happened = is_unanswered(error) or _is_committed(store, generation)
            raise
    except BaseException:
        if not commit.may_have_happened:
            remove_unfinished(store, [index.name])
        raise
    _remove_old_files(store, existing, record)
    return record


def remove_unfinished(store: Store, names: Sequence[str]) -> None:
    """Remove files of a save that failed. It is no use to fail again, since nobody will look at them."""
    with suppress(Exception):
        store.delete(names)


def _is_committed(store: Store, generation: str) -> bool:
    """Whether the record in the store is of this save. Yes if nobody knows: its files must not be removed then.

    Only the process that commits may ask: to others the record may look as it was before.
    """
    try:
        record = _content(store, RECORD)
        return record is not None and decode_record(record, RECORD).generation == generation
    except Exception:
        return True  # rather leave a file too many than remove one that is needed


def _content(store: Store, name: str) -> bytes | None:
    try:
        return store.read(name)
    except FileNotFoundError:
        return None


def _remove_old_files(store: Store, existing: Existing, record: Record) -> None:
    try:
        store.delete(files_in(existing.names, record.file_names()).of_any_save())
    except Exception as error:
        # The new checkpoint is complete. What could not be removed takes space and does no other harm.
        logger.warning("old files in %s could not be removed: %s", store.location, error)


Row = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]
"""Of the columns: tensor, file, position, offsets, sizes."""


def make_columns(rows: Iterable[Row], digests: Digests) -> Columns:
    """The columns of chunks that are in files, in any order, and of the digests of all blocks of these files."""
    rows = _in_order(rows)

    def column(values: Iterable[int]) -> Any:
        return np.array(list(values), dtype=np.int64)

    return Columns(
        chunk_tensor=column(row[0] for row in rows),
        chunk_file=column(row[1] for row in rows),
        chunk_begin=column(row[2] for row in rows),
        chunk_offsets=column(number for row in rows for number in row[3]),
        chunk_sizes=column(number for row in rows for number in row[4]),
        digests=digests,
    )


def columns_of_files(files: Sequence[WrittenFile]) -> Columns:
    """The columns of all chunks of some files, which the record will list in this order."""
    rows = [
        (tensor, number, position, offsets, sizes)
        for number, file in enumerate(files)
        for tensor, position, offsets, sizes in file.chunks
    ]
    return make_columns(rows, np.concatenate([np.empty(0, np.uint32), *(file.digests for file in files)]))


def _in_order(rows: Iterable[Row]) -> list[Row]:
    """By tensors and offsets. To sort all at once would keep other threads waiting."""
    of_tensor: dict[int, list[Row]] = {}
    for row in rows:
        of_tensor.setdefault(row[0], []).append(row)
    for part in of_tensor.values():
        if len(part) > 1:
            part.sort(key=itemgetter(3))
    return [row for tensor in sorted(of_tensor) for row in of_tensor[tensor]]


def _refuse_missing_files(store: Store, files: Sequence[WrittenFile]) -> None:
    """All ranks' files must be here: a disk that is not shared, or another save, may have taken them away."""
    found = {listed.name: listed.size for listed in store.list()}
    # Some network disks list names late, so a file is missing only if it cannot be found by its name either.
    missing = [
        file.name for file in files if found.get(file.name) != file.nbytes and store.size(file.name) != file.nbytes
    ]
    if missing:
        raise IncompleteSaveError(
            f"{len(missing)} file(s) that were written are not in {store.location} or have another size, such as "
            f"{missing[0]}. Do all ranks see the same disk, and does nobody else save to this place? Nothing was "
            "committed.",
            missing=missing,
        )
