"""The columns of a checkpoint: where every chunk is stored, and the digests of all blocks.

Chunks are rows of arrays and not objects, since there may be millions of them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast._base.boxes import first_overlap
from holdfast._formats.native.blocks import Digests, count_blocks, refuse
from holdfast._formats.native.record import Record, StoredFile
from holdfast._formats.safetensors.header import plan_header, read_header

Numbers = npt.NDArray[np.int64]

_STORED: dict[str, tuple[str, np.dtype[Any]]] = {
    "chunk_tensor": ("U32", np.dtype("<u4")),
    "chunk_file": ("U32", np.dtype("<u4")),
    "chunk_begin": ("U64", np.dtype("<u8")),
    "chunk_offsets": ("U64", np.dtype("<u8")),
    "chunk_sizes": ("U64", np.dtype("<u8")),
    "digests": ("U32", np.dtype("<u4")),
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
    """The bytes of the columns file, with notes in its header if there are any."""
    arrays = {name: np.ascontiguousarray(getattr(columns, name), dtype) for name, (_, dtype) in _STORED.items()}
    entries = [(name, _STORED[name][0], array.shape) for name, array in arrays.items()]
    header, start = plan_header(entries, notes or {})
    return b"".join([start, *(arrays[name].tobytes() for name in header.tensors)])


def digest_of(data: bytes) -> str:
    """The digest of a whole columns file."""
    return xxhash.xxh3_128_hexdigest(data)


def decode_columns(data: bytes, record: Record, source: str) -> Columns:
    """Check the columns file ``data`` against the record that it belongs to."""
    if len(data) != record.index.nbytes or digest_of(data) != record.index.digest:
        refuse(source, "is not as it was written: its digest differs", record.index.digest, digest_of(data))
    header = read_header(io.BytesIO(data), source)
    arrays: dict[str, Any] = {}
    for name, (stored_as, dtype) in _STORED.items():
        tensor = header.tensors.get(name)
        if tensor is None or tensor.dtype != stored_as or len(tensor.shape) != 1:
            refuse(source, f"lacks the column {name!r}", f"{stored_as} in one dimension", tensor)
        found = np.frombuffer(data, dtype, count=tensor.shape[0], offset=header.position(name))
        if name != "digests":
            if found.size and int(found.max()) >= 1 << 62:
                refuse(source, f"has impossible numbers in {name!r}", "less than 2**62", int(found.max()))
            found = found.astype(np.int64)
        arrays[name] = found
    columns = Columns(**arrays)
    _check(columns, record, source)
    return columns


class ChunkTable:
    """The chunks of a checkpoint by tensor number."""

    def __init__(self, columns: Columns, record: Record, source: str) -> None:
        self._columns = columns
        self._record = record
        self._source = source
        dimensions = np.array([len(tensor.shape) for tensor in record.tensors], dtype=np.int64)
        self._first = np.searchsorted(columns.chunk_tensor, np.arange(len(record.tensors) + 1))
        self._first_number = _starts(dimensions[columns.chunk_tensor])

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
    ends = np.array([file.nbytes for file in files], dtype=np.int64)
    np.minimum.at(ends, columns.chunk_file, columns.chunk_begin)
    found: list[int] = ends.tolist()
    return found


def first_blocks(files: Sequence[StoredFile], block_bytes: int) -> list[int]:
    """The position of each file's first digest, and the number of all digests."""
    return [0, *np.cumsum([count_blocks(file.nbytes, block_bytes) for file in files], dtype=np.int64).tolist()]


def chunk_volumes(columns: Columns, record: Record) -> Numbers:
    """The number of elements of each chunk."""
    return _volumes(columns, record, record.index.name)


def _starts(counts: Numbers) -> Numbers:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


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
    volumes = _volumes(columns, record, source)
    sizes = np.array([tensor.dtype.itemsize for tensor in tensors], dtype=np.int64)
    ends = columns.chunk_begin + volumes * sizes[columns.chunk_tensor]
    if np.any(ends > np.array([file.nbytes for file in files], dtype=np.int64)[columns.chunk_file]):
        refuse(source, "has chunks past the end of their file", "inside", "outside")
    stored = np.zeros(len(tensors), np.int64)
    np.add.at(stored, columns.chunk_tensor, volumes)
    elements = {shape: prod(shape) for shape in {tensor.shape for tensor in tensors}}
    expected = np.array([elements[tensor.shape] for tensor in tensors], dtype=np.int64)
    wrong = np.flatnonzero(stored != expected)
    if wrong.size:
        first = int(wrong[0])
        what = f"does not have all elements of {tensors[first].key!r}"
        refuse(source, what, int(expected[first]), int(stored[first]))


def _volumes(columns: Columns, record: Record, source: str) -> Numbers:
    """The number of elements of each chunk, all of which are inside of their tensors."""
    dimensions = np.array([len(tensor.shape) for tensor in record.tensors], dtype=np.int64)
    shapes = np.array([size for tensor in record.tensors for size in tensor.shape], dtype=np.int64)
    first_of_tensor = _starts(dimensions)
    per_chunk = dimensions[columns.chunk_tensor]
    first_of_chunk = _starts(per_chunk)
    if not len(columns.chunk_offsets) == len(columns.chunk_sizes) == int(first_of_chunk[-1]):
        refuse(source, "has the wrong number of offsets or sizes", int(first_of_chunk[-1]), len(columns.chunk_sizes))
    volumes = np.ones(len(per_chunk), np.int64)
    for ndim in np.unique(per_chunk).tolist():
        rows = np.flatnonzero(per_chunk == ndim)
        steps = np.arange(ndim)
        numbers = first_of_chunk[rows, None] + steps
        offsets, sizes = columns.chunk_offsets[numbers], columns.chunk_sizes[numbers]
        shape = shapes[first_of_tensor[columns.chunk_tensor[rows], None] + steps]
        if np.any(sizes < 1) or np.any(offsets + sizes > shape):
            refuse(source, "has chunks that are empty or outside of their tensor", "inside", "outside")
        volumes[rows] = sizes.prod(axis=1)
    return volumes
