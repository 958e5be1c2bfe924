"""The table of a data file: where in it the chunks are, and the digests of its blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import xxhash

from holdfast._formats.native.array_files import U8, U32, U64, count_bytes, decode_arrays, encode_arrays
from holdfast._formats.native.blocks import Digests, count_blocks, refuse
from holdfast._formats.native.shapes import Numbers, TensorShapes, numbers_of, starts_of
from holdfast._formats.native.stored_files import StoredFile

TABLE_NAME = "holdfast.table"
CHECK_BYTES = 16

TABLE_ARRAYS = {
    "chunk_tensor": U32,
    "chunk_begin": U64,
    "chunk_offsets": U64,
    "chunk_sizes": U64,
    "digests": U32,
    "check": U8,
}


class Boxes(NamedTuple):
    """Offsets and sizes of boxes, those of one behind those of the other, however many dimensions each has."""

    offsets: Numbers
    sizes: Numbers
    dimensions: Numbers

    @classmethod
    def of(cls, offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> Boxes:
        """Boxes, given one by one."""
        return cls(
            np.fromiter(chain.from_iterable(offsets), np.int64),
            np.fromiter(chain.from_iterable(sizes), np.int64),
            np.fromiter(map(len, sizes), np.int64, len(sizes)),
        )

    def chosen(self, rows: Numbers) -> Boxes:
        """Some of them, in that order, perhaps several times.

        >>> Boxes.of([(0,), (1, 2)], [(4,), (5, 6)]).chosen(np.array([1, 0, 1])).sizes.tolist()
        [5, 6, 4, 5, 6]
        """
        numbers = numbers_of(starts_of(self.dimensions), self.dimensions, rows)
        return Boxes(self.offsets[numbers], self.sizes[numbers], self.dimensions[rows])


def table_bytes(chunks: int, dimensions: int, blocks: int, notes: Mapping[str, str]) -> int:
    """How long the table of so many chunks, with so many dimensions in all, and of so many blocks is."""
    lengths = {
        "chunk_tensor": chunks,
        "chunk_begin": chunks,
        "chunk_offsets": dimensions,
        "chunk_sizes": dimensions,
        "digests": blocks,
        "check": CHECK_BYTES,
    }
    return count_bytes(lengths, TABLE_ARRAYS, notes)


def encode_table(tensors: Numbers, begins: Numbers, boxes: Boxes, digests: Digests, notes: Mapping[str, str]) -> bytes:
    """The bytes of a table of chunks, which are given in the order of their tensors."""
    arrays: dict[str, Any] = {
        "chunk_tensor": tensors,
        "chunk_begin": begins,
        "chunk_offsets": boxes.offsets,
        "chunk_sizes": boxes.sizes,
        "digests": digests,
        "check": np.zeros(CHECK_BYTES, np.uint8),
    }
    data = encode_arrays(arrays, TABLE_ARRAYS, notes)[:-CHECK_BYTES]
    return data + xxhash.xxh3_128_digest(data)


@dataclass(frozen=True)
class FileTable:
    """The chunks of a data file, ordered by tensor, and the digests of its blocks."""

    chunk_tensor: Numbers
    chunk_begin: Numbers
    chunk_offsets: Numbers
    chunk_sizes: Numbers
    first_number: Numbers
    """Where in the offsets and sizes those of each chunk are."""
    volumes: Numbers
    """The number of elements of each chunk."""
    digests: Digests
    notes: Mapping[str, str]

    @property
    def header_end(self) -> int | None:
        """Where the header of the data file ends: with the first chunk; None if there is none."""
        return int(self.chunk_begin.min()) if len(self.chunk_begin) else None

    def rows_of(self, tensor: int) -> tuple[int, int]:
        """The rows of a tensor, from the first to behind the last."""
        first, last = self.chunk_tensor.searchsorted((tensor, tensor + 1)).tolist()
        return first, last

    def boxes(self, first: int, last: int, ndim: int) -> tuple[list[list[int]], list[list[int]]]:
        """The offsets and the sizes of some rows, all of the same tensor."""
        at = int(self.first_number[first]) if first < last else 0
        numbers = slice(at, at + (last - first) * ndim)
        offsets: list[list[int]] = self.chunk_offsets[numbers].reshape(last - first, ndim).tolist()
        sizes: list[list[int]] = self.chunk_sizes[numbers].reshape(last - first, ndim).tolist()
        return offsets, sizes


def check_table(data: bytes | bytearray, digest: str, source: str, key: str | None = None) -> None:
    """Raise if a table is not as it was written. ``key`` is what it is needed for."""
    found = xxhash.xxh3_128_hexdigest(memoryview(data)[:-CHECK_BYTES])
    if found == digest:
        found = bytes(data[-CHECK_BYTES:]).hex()
    if found != digest:
        refuse(source, "is damaged: its table is not as it was written, the digest differs", digest, found, key)


def decode_table(
    data: bytes | bytearray,
    file: StoredFile,
    shapes: TensorShapes,
    tensor_list: Sequence[int] | None,
    block_bytes: int,
    source: str,
    key: str | None = None,
) -> FileTable:
    """Check the table ``data`` of a data file against the record that lists the file."""
    assert file.table is not None
    check_table(data, file.table.digest, source, key)
    arrays, notes = decode_arrays(data, TABLE_ARRAYS, source)
    tensor, begin = arrays["chunk_tensor"].astype(np.int64), arrays["chunk_begin"]
    offsets, sizes, digests = arrays["chunk_offsets"], arrays["chunk_sizes"], arrays["digests"]
    blocks = count_blocks(file.table.begin, block_bytes)
    if len(digests) != blocks:
        refuse(source, "has the wrong number of digests", blocks, len(digests), key)
    if len(begin) != len(tensor):
        refuse(source, "has columns of different lengths", len(tensor), len(begin), key)
    if len(tensor) and np.any(np.diff(tensor) < 0):
        refuse(source, "has chunks out of order", "tensor numbers that never decrease", "others", key)
    if tensor_list is not None:
        tensor, offsets, sizes, chosen = _renumbered(tensor, offsets, sizes, tensor_list, shapes, source)
        begin = begin[chosen]
    if len(tensor) and (int(tensor[-1]) >= len(shapes) or not _in_range(tensor, file)):
        refuse(source, "has chunks of other tensors than the record says", _range(file), "others", key)
    volumes, first_number = shapes.volumes(tensor, offsets, sizes, source)
    if np.any(begin + volumes * shapes.itemsizes[tensor] > file.table.begin):
        refuse(source, "has chunks past the end of their file", "before the table", "behind it", key)
    return FileTable(tensor, begin, offsets, sizes, first_number, volumes, digests, notes)


def _in_range(tensor: Numbers, file: StoredFile) -> bool:
    assert file.table is not None
    return bool(file.table.first <= int(tensor[0]) and int(tensor[-1]) <= file.table.last)


def _range(file: StoredFile) -> str:
    assert file.table is not None
    return f"{file.table.first} to {file.table.last}"


def _renumbered(
    tensor: Numbers,
    offsets: Numbers,
    sizes: Numbers,
    tensor_list: Sequence[int],
    shapes: TensorShapes,
    source: str,
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """The chunks that count with the numbers that the record has for their tensors, in that order, and which ones."""
    if len(tensor) and int(tensor[-1]) >= len(tensor_list):
        refuse(source, "has chunks of unknown tensors", f"below {len(tensor_list)}", int(tensor[-1]))
    numbers = np.array(tensor_list, np.int64)[tensor]
    dimensions = np.where(numbers < 0, -1 - numbers, shapes.dimensions[np.maximum(numbers, 0)] if len(shapes) else 0)
    first = starts_of(dimensions)
    if not len(offsets) == len(sizes) == int(first[-1]):
        refuse(source, "has the wrong number of offsets or sizes", int(first[-1]), len(sizes))
    order = np.argsort(numbers, kind="stable")
    order = order[numbers[order] >= 0]
    at = numbers_of(first, dimensions, order)
    return numbers[order], offsets[at], sizes[at], order
