"""The columns of a checkpoint: where every chunk is stored, and the digests of all blocks.

Chunks are rows of arrays and not objects, since there may be millions of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast._base.boxes import first_overlap
from holdfast._formats.native.array_files import U32, U64, decode_arrays, encode_arrays
from holdfast._formats.native.blocks import Digests, count_blocks, refuse
from holdfast._formats.native.record import Record
from holdfast._formats.native.shapes import Numbers, TensorShapes, starts_of
from holdfast._formats.native.stored_files import StoredFile

_STORED = {
    "chunk_tensor": U32,
    "chunk_file": U32,
    "chunk_begin": U64,
    "chunk_offsets": U64,
    "chunk_sizes": U64,
    "digests": U32,
}


class StoredChunk(NamedTuple):
    """A chunk of a tensor and where its bytes begin."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    begin: int


@dataclass(frozen=True)
class Columns:
    """All chunks of a checkpoint, ordered by tensor, and the digests of all blocks, ordered by file."""

    chunk_tensor: Numbers
    chunk_file: Numbers
    chunk_begin: Numbers
    chunk_offsets: Numbers
    chunk_sizes: Numbers
    digests: Digests


def encode_columns(columns: Columns, notes: Mapping[str, str] | None = None) -> bytes:
    """The bytes of the columns file of version 1, with notes in its header if there are any."""
    return encode_arrays({name: getattr(columns, name) for name in _STORED}, _STORED, notes)


def digest_of(data: bytes | bytearray) -> str:
    """The digest of a whole columns file, or index."""
    return xxhash.xxh3_128_hexdigest(data)


def decode_columns(data: bytes, record: Record, source: str) -> Columns:
    """Check the columns file ``data`` against the record, of version 1, that it belongs to."""
    assert record.index is not None
    if len(data) != record.index.nbytes or digest_of(data) != record.index.digest:
        refuse(source, "is not as it was written: its digest differs", record.index.digest, digest_of(data))
    arrays, _ = decode_arrays(data, _STORED, source)
    for name in ("chunk_tensor", "chunk_file"):
        arrays[name] = arrays[name].astype(np.int64)
    columns = Columns(**arrays)
    _check(columns, record, source)
    return columns


Row = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]
"""Of the columns: tensor, file, position, offsets, sizes."""


def make_columns(rows: Iterable[Row], digests: Digests) -> Columns:
    """The columns of chunks that are in files, in any order, and of the digests of all blocks of these files."""
    rows = sorted(rows, key=itemgetter(0, 3))
    return Columns(
        chunk_tensor=np.array([row[0] for row in rows], np.int64),
        chunk_file=np.array([row[1] for row in rows], np.int64),
        chunk_begin=np.array([row[2] for row in rows], np.int64),
        chunk_offsets=np.array([number for row in rows for number in row[3]], np.int64),
        chunk_sizes=np.array([number for row in rows for number in row[4]], np.int64),
        digests=digests,
    )


class ChunkTable:
    """The chunks of a checkpoint by tensor number."""

    def __init__(self, columns: Columns, record: Record, source: str) -> None:
        self._columns = columns
        self._record = record
        self._source = source
        dimensions = np.array([len(tensor.shape) for tensor in record.tensors], dtype=np.int64)
        self._first = np.searchsorted(columns.chunk_tensor, np.arange(len(record.tensors) + 1))
        self._first_number = starts_of(dimensions[columns.chunk_tensor])

    def only_chunks(self, tensors: Numbers) -> tuple[npt.NDArray[np.bool_], Numbers, Numbers]:
        """Which of these tensors are stored as one chunk, and for those the file and where in it they begin."""
        first = self._first[tensors]
        alone = self._first[tensors + 1] - first == 1
        rows = first[alone]
        return alone, self._columns.chunk_file[rows], self._columns.chunk_begin[rows]

    def of(self, tensor: int) -> list[StoredChunk]:
        """The chunks of a tensor, of which none overlap."""
        first, last = int(self._first[tensor]), int(self._first[tensor + 1])
        ndim = len(self._record.tensors[tensor].shape)
        columns = self._columns
        at = int(self._first_number[first]) if first < last else 0
        numbers = slice(at, at + (last - first) * ndim)
        offsets = columns.chunk_offsets[numbers].reshape(last - first, ndim).tolist()
        sizes = columns.chunk_sizes[numbers].reshape(last - first, ndim).tolist()
        chunks = [
            StoredChunk(tuple(offset), tuple(size), file, begin)
            for offset, size, file, begin in zip(
                offsets,
                sizes,
                columns.chunk_file[first:last].tolist(),
                columns.chunk_begin[first:last].tolist(),
                strict=True,
            )
        ]
        if len(chunks) > 1 and first_overlap(chunks) is not None:
            refuse(self._source, f"has chunks of {self._record.tensors[tensor].key!r} that overlap", "none", "some")
        return chunks


def header_ends(columns: Columns, files: Sequence[StoredFile]) -> list[int]:
    """Where the header of each data file ends: with the first chunk, or with the file if it has none."""
    ends = np.array([file.data_end for file in files], dtype=np.int64)
    np.minimum.at(ends, columns.chunk_file, columns.chunk_begin)
    found: list[int] = ends.tolist()
    return found


def first_blocks(files: Sequence[StoredFile], block_bytes: int) -> list[int]:
    """The position of each file's first digest, and the number of all digests."""
    return [0, *np.cumsum([count_blocks(file.data_end, block_bytes) for file in files], dtype=np.int64).tolist()]


def chunk_volumes(columns: Columns, record: Record) -> Numbers:
    """The number of elements of each chunk."""
    shapes = TensorShapes(record.tensors)
    return shapes.volumes(columns.chunk_tensor, columns.chunk_offsets, columns.chunk_sizes, "the columns")[0]


def _check(columns: Columns, record: Record, source: str) -> None:
    tensors, files = record.tensors, record.files
    chunks = len(columns.chunk_tensor)
    if not len(columns.chunk_file) == len(columns.chunk_begin) == chunks:
        refuse(source, "has columns of different lengths", chunks, len(columns.chunk_file))
    if chunks and (np.any(np.diff(columns.chunk_tensor) < 0) or int(columns.chunk_tensor[-1]) >= len(tensors)):
        refuse(source, "has chunks out of order, or of unknown tensors", f"below {len(tensors)}", "others")
    if chunks and int(columns.chunk_file.max()) >= len(files):
        refuse(source, "has chunks in unknown files", f"below {len(files)}", int(columns.chunk_file.max()))
    blocks = sum(count_blocks(file.nbytes, record.block_bytes) for file in files)
    if len(columns.digests) != blocks:
        refuse(source, "has the wrong number of digests", blocks, len(columns.digests))
    shapes = TensorShapes(tensors)
    volumes, _ = shapes.volumes(columns.chunk_tensor, columns.chunk_offsets, columns.chunk_sizes, source)
    ends = columns.chunk_begin + volumes * shapes.itemsizes[columns.chunk_tensor]
    if np.any(ends > np.array([file.nbytes for file in files], dtype=np.int64)[columns.chunk_file]):
        refuse(source, "has chunks past the end of their file", "inside", "outside")
    stored = np.zeros(len(tensors), np.int64)
    np.add.at(stored, columns.chunk_tensor, volumes)
    wrong = np.flatnonzero(stored != shapes.elements)
    if wrong.size:
        first = int(wrong[0])
        what = f"does not have all elements of {tensors[first].key!r}"
        refuse(source, what, int(shapes.elements[first]), int(stored[first]))
