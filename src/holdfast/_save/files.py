"""Writes the files of a checkpoint of our own format, and commits them.

Files of a save have names that nobody used before, and count for nothing until the record names them. So everything
before the commit is undone by deleting them, and whatever a kill leaves behind is ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast._base.boxes import Box
from holdfast._base.commits import Commit
from holdfast._base.garbage import no_garbage_collection
from holdfast._base.tuning import MEMORY_BUDGET, PIECE_BYTES, SHARE_OF_A_PIECE, SHARE_OF_ROOMS
from holdfast._formats.native.blocks import Digests
from holdfast._formats.native.columns import Columns, digest_of, encode_columns
from holdfast._formats.native.layout import ChunkToWrite, FileLayout, lay_out
from holdfast._formats.native.names import RECORD, data_file, files_in, generation_of, index_file
from holdfast._formats.native.record import BLOCK_BYTES, Record, StoredFile, decode_record, encode_record
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.writing import Gather, write_data_file
from holdfast._stores.store import Store, is_unanswered
from holdfast.errors import CheckpointExistsError, IncompleteSaveError, NotAFolderError

if TYPE_CHECKING:
    from holdfast._layout.descriptions import HeldTensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Before:
    """What was in the store when a save began."""

    record: bytes | None
    names: frozenset[str]
    """Of its files. Data of saves that the new checkpoint does not need is removed once it is committed."""


@dataclass(frozen=True)
class WrittenFile:
    """A data file that was written, with its chunks as rows: tensor number, position, offsets, sizes."""

    name: str
    nbytes: int
    chunks: Sequence[tuple[int, int, tuple[int, ...], tuple[int, ...]]]
    digests: Digests


@dataclass(frozen=True)
class Contents:
    """What a record tells besides its files."""

    tensors: Sequence[TensorRef]
    tree: Any
    metadata: Any
    written: Mapping[str, Any]


def look_before(store: Store, *, overwrite: bool) -> Before:
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
    return Before(record, frozenset(names))


def write_chunks(
    store: Store,
    chunks: Sequence[ChunkToWrite],
    local: Mapping[str, HeldTensor],
    *,
    generation: str,
    rank: int,
    max_file_size: int | None = None,
    memory_budget: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[WrittenFile]:
    """Write this rank's chunks. Everything is durable when it returns; if it raises, nothing is left.

    ``advance`` is told of every part that is written, in bytes.
    """
    budget = MEMORY_BUDGET if memory_budget is None else memory_budget
    # Half of it is for what is being written. To fetch from a device, reorder and convert takes several copies.
    for_rooms, converted = budget // SHARE_OF_ROOMS, min(PIECE_BYTES, budget // SHARE_OF_A_PIECE)

    def pieces(chunk: ChunkToWrite) -> Any:
        return local[chunk.key].pieces(Box(chunk.offsets, chunk.sizes), converted)

    written: list[WrittenFile] = []
    try:
        with no_garbage_collection():
            layouts = lay_out(chunks, generation, max_file_size)
            gatherings = [_gathering(layout, local) for layout in layouts]
            rows_of = [_rows(layout) for layout in layouts]
        for number, (layout, gathering, rows) in enumerate(zip(layouts, gatherings, rows_of, strict=True)):
            name = data_file(generation, rank, number)
            with store.create(name, layout.nbytes) as sink:
                digests = write_data_file(sink, layout, pieces, BLOCK_BYTES, for_rooms, gathering, advance)
            written.append(WrittenFile(name, layout.nbytes, rows, digests))
        store.sync()
    except BaseException:
        remove_unfinished(store, [file.name for file in written])
        raise
    return written


def _rows(layout: FileLayout) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """Which chunks are where: tensor number, position, offsets, sizes."""
    return [(tensor, position, offsets, sizes) for (tensor, _, _, _, offsets, sizes), position in layout.chunks]


def _gathering(layout: FileLayout, local: Mapping[str, HeldTensor]) -> Gather:
    """Collects the small tensors of a file."""
    from holdfast._formats.tensor_bytes import gather  # needs torch, which a conversion does not

    ends = [*(position for _, position in layout.chunks), layout.nbytes][1:]
    tensors = [
        (_stored_as_it_is(local[chunk.key]), end - position)
        for (chunk, position), end in zip(layout.chunks, ends, strict=True)
    ]
    return lambda number, room: gather(tensors, number, room)


def _stored_as_it_is(held: HeldTensor) -> Any:
    return held.value if held.stored_dtype is None else None


def commit_checkpoint(
    store: Store,
    before: Before,
    files: Sequence[WrittenFile],
    contents: Contents,
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
    columns = _columns(files)
    data = encode_columns(columns)
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
            store.commit(RECORD, encoded, replaces=before.record)
        except BaseException as error:
            commit.may_have_happened = is_unanswered(error) or _is_committed(store, generation)
            raise
    except BaseException:
        if not commit.may_have_happened:
            remove_unfinished(store, [index.name])
        raise
    _remove_old_files(store, before, record)
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


def _remove_old_files(store: Store, before: Before, record: Record) -> None:
    try:
        store.delete(files_in(before.names, record.file_names()).of_any_save())
    except Exception as error:
        # The new checkpoint is whole. What could not be removed takes room and does no other harm.
        logger.warning("old files in %s could not be removed: %s", store.location, error)


_Row = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]
"""Of the columns: tensor, file, position, offsets, sizes."""


def _in_order(rows: list[_Row]) -> list[_Row]:
    """By tensors and offsets. To sort all at once would keep other threads waiting."""
    of_tensor: dict[int, list[_Row]] = {}
    for row in rows:
        of_tensor.setdefault(row[0], []).append(row)
    for part in of_tensor.values():
        if len(part) > 1:
            part.sort(key=itemgetter(3))
    return [row for tensor in sorted(of_tensor) for row in of_tensor[tensor]]


def _columns(files: Sequence[WrittenFile]) -> Columns:
    rows = [
        (tensor, number, position, offsets, sizes)
        for number, file in enumerate(files)
        for tensor, position, offsets, sizes in file.chunks
    ]
    rows = _in_order(rows)

    def column(values: Any) -> Any:
        return np.array(list(values), dtype=np.int64)

    return Columns(
        chunk_tensor=column(row[0] for row in rows),
        chunk_file=column(row[1] for row in rows),
        chunk_begin=column(row[2] for row in rows),
        chunk_offsets=column(number for row in rows for number in row[3]),
        chunk_sizes=column(number for row in rows for number in row[4]),
        digests=np.concatenate([np.empty(0, np.uint32), *(file.digests for file in files)]),
    )


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
