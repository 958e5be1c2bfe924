"""Writes checkpoints of our own format: data files with their tables, then the record that makes them a checkpoint.

Files of a save have names that nobody used before, and count for nothing until the record names them. So everything
before the commit is undone by deleting them, and whatever a kill leaves behind is ignored. Whoever saves, converts or
gives torch a storage brings the bytes of the chunks; who writes which of them has been decided before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast._base.commits import Commit
from holdfast._base.garbage import no_garbage_collection
from holdfast._base.tuning import DIRECT_FROM, MEMORY_BUDGET, SHARE_OF_WRITE_BUFFERS, WRITE_BUFFER_BYTES
from holdfast._formats.native.blocks import Digests, digest_blocks
from holdfast._formats.native.columns import digest_of
from holdfast._formats.native.layout import ChunkToWrite, FileLayout, lay_out
from holdfast._formats.native.names import RECORD, data_file, files_in, generation_of, index_file
from holdfast._formats.native.part_index import encode_index
from holdfast._formats.native.record import Record, decode_record, encode_record
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.stored_files import StoredFile, TablePlace
from holdfast._formats.native.stored_parts import StoredParts, places_of
from holdfast._formats.native.tables import CHECK_BYTES
from holdfast._stores.store import BufferedSink, InPlaceSink, Sink, Store, is_unanswered
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


Run = Callable[[int], tuple[int, Bytes] | None]
"""Whole chunks, beginning with the one of that number, whose bytes are one behind the other in memory that nobody
changes before the file is written: how many, and that memory. None if that one is elsewhere."""


class ChunkBytes(NamedTuple):
    """Where the bytes of the chunks of a file come from. They are asked for in the order of the layout."""

    pieces: Pieces
    gather: Gather | None = None
    run: Run | None = None


OpenChunks = Callable[[FileLayout], AbstractContextManager[ChunkBytes]]
"""Gives the bytes of the chunks of a file, for as long as the file is written."""


def write_chunks(
    store: Store,
    chunks: Sequence[ChunkToWrite],
    open_chunks: OpenChunks,
    *,
    generation: str,
    rank: int = 0,
    max_file_size: int | None = None,
    memory_budget: int | None = None,
    writers: int | None = None,
    notes: Mapping[str, str] | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[StoredFile]:
    """Write chunks to as many files as they need, which are named after a rank.

    Everything is durable when it returns; if it raises, nothing is left. ``advance`` is called with the bytes of every
    part that is written. ``writers`` is how many ranks write something, if that is known: files note it, so that those
    of a save whose record is lost can be known to be complete. ``notes`` are put into the tables as well.
    """
    # Half of the memory is for what is being written, and half for whoever makes the bytes.
    memory = (MEMORY_BUDGET if memory_budget is None else memory_budget) // SHARE_OF_WRITE_BUFFERS
    written: list[StoredFile] = []
    try:
        with no_garbage_collection():
            layouts = lay_out(chunks, generation, max_file_size, writers=writers, notes=notes)
        for number, layout in enumerate(layouts):
            name = data_file(generation, rank, number)
            with open_chunks(layout) as given, store.create(name, layout.nbytes, memory) as sink:
                table = write_data_file(sink, layout, given, memory, advance)
            written.append(StoredFile(name, layout.nbytes, rank=rank, table=table))
        store.sync()
    except BaseException:
        remove_unfinished(store, [file.name for file in written])
        raise
    return written


def write_data_file(
    sink: Sink,
    layout: FileLayout,
    given: ChunkBytes,
    memory: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> TablePlace:
    """Write a file as it was laid out, and behind it its table, with the digests of its blocks. Returns where that is.

    Bytes are collected in buffers of a few megabytes, so that thousands of small chunks cost few writes, and what is
    digested cannot change before it is written. ``advance`` is called with the bytes of each of them.
    """
    buffers = _WriteBuffers(sink, layout.block_bytes, memory, advance)
    buffers.take(np.frombuffer(layout.header, np.uint8))
    number, count = 0, len(layout.columns)
    while number < count:
        run = None if given.run is None else given.run(number)
        if run is not None and buffers.take_in_place(run[1]):
            number += run[0]
            continue
        if given.gather is not None:
            gathered, filled = given.gather(number, buffers.rest())
            buffers.filled(filled)
            number += gathered
        if number < count:  # the next one does not fit whole, or has to be converted
            _write_chunk(buffers, layout.columns[number], given.pieces)
            number += 1
    with no_garbage_collection():
        table = layout.table(buffers.end_of_blocks())
        buffers.take(np.frombuffer(table, np.uint8))
    buffers.finish()
    tensors = layout.columns.tensors
    first, last = (int(tensors.min()), int(tensors.max())) if len(tensors) else (0, -1)
    return TablePlace(layout.table_begin, len(table), table[-CHECK_BYTES:].hex(), first, last)


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
        self._in_place = sink if isinstance(sink, InPlaceSink) else None
        self._advance = advance
        self._block_bytes = block_bytes
        self._memory = memory
        self._own: Bytes | None = None
        self._digests: list[Digests] = []
        self._is_digesting = True
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

    def take_in_place(self, data: Bytes) -> bool:
        """The next bytes of the file, which nobody changes any more: whole blocks are written from where they are.

        False, and nothing is taken, if they are too few for that, or the sink has no such method or has refused before.
        What it refuses now is copied.
        """
        if self._in_place is None or data.nbytes < DIRECT_FROM:
            return False
        first = -self._filled % self._block_bytes
        last = first + self._whole_blocks(data.nbytes - first)
        if first:
            self.take(data[:first])
        if self._filled:
            self._hand_on()
        for begin in range(first, last, WRITE_BUFFER_BYTES):
            part = data[begin : min(begin + WRITE_BUFFER_BYTES, last)]
            digests = digest_blocks(part, self._block_bytes)
            if not self._in_place.write_in_place(part.data):
                self._in_place = None  # if it is not on whole pages here, then nowhere in the file, as a rule
                last = begin
                break
            self._digests.append(digests)
            if self._advance is not None:
                self._advance(part.nbytes)
        self._begin()
        self.take(data[last:])
        return True

    def rest(self) -> Bytes:
        """What is free of the buffer, for bytes to be put there."""
        return self._buffer[self._filled :]

    def filled(self, count: int) -> None:
        """The next bytes of the file have been put into the rest of the buffer."""
        self._filled += count
        if self._filled == self._buffer.nbytes:
            self._hand_on()
            self._begin()

    def end_of_blocks(self) -> Digests:
        """All digests. What follows has none."""
        self._digests.append(digest_blocks(self._buffer[: self._filled], self._block_bytes))
        self._is_digesting = False
        return np.concatenate(self._digests)

    def finish(self) -> None:
        """Hand on the rest."""
        if self._filled:
            self._hand_on()

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
        if self._is_digesting:
            self._digests.append(digest_blocks(part, self._block_bytes))
        if self._lending is None or self._buffer is self._own:
            self._sink.write(part.data)
        else:
            self._lending.advance(self._filled)
        if self._advance is not None:
            self._advance(self._filled)


# The index, if there must be one, and the record.


@dataclass(frozen=True)
class CheckpointContents:
    """What a record holds besides its files."""

    tensors: Sequence[TensorRef]
    tree: Any
    metadata: Any
    written: Mapping[str, Any]
    parts: Sequence[StoredParts]
    """Of each tensor: which rank has stored which part of it."""
    world_size: int = 1
    tensor_lists: Sequence[Sequence[int]] = ()
    """What tensor numbers in tables of files stand for, where ranks did not know those of the checkpoint."""


def commit_checkpoint(
    store: Store,
    existing: Existing,
    files: Sequence[StoredFile],
    contents: CheckpointContents,
    generation: str,
    *,
    commit: Commit | None = None,
    prove: Callable[[Record], None] | None = None,
) -> Record:
    """Put the record in place, with an index if it needs one, and remove what only the old checkpoint needed.

    If it raises, ``commit`` says whether the record may be in place, or may get there yet: then it needs the files.
    ``prove`` is called when all is there but the record, which it gets. If it raises, nothing is committed.
    """
    commit = commit or Commit()
    _refuse_missing_files(store, files)
    data = encode_index(contents.parts)
    index = None if data is None else StoredFile(index_file(generation), len(data), digest_of(data))
    record = Record(
        generation=generation,
        files=files,
        index=index,
        tensors=contents.tensors,
        tree=contents.tree,
        metadata=contents.metadata,
        written=contents.written,
        world_size=contents.world_size,
        places=places_of(contents.parts),
        tensor_lists=contents.tensor_lists,
    )
    encoded = encode_record(record)
    try:
        if index is not None and data is not None:
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
        if index is not None and not commit.may_have_happened:
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
        store.delete(files_in(existing.names, set(record.file_names())).of_any_save())
    except Exception as error:
        # The new checkpoint is complete. What could not be removed takes space and does no other harm.
        logger.warning("old files in %s could not be removed: %s", store.location, error)


def _refuse_missing_files(store: Store, files: Sequence[StoredFile]) -> None:
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
