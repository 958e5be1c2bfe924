"""From requests for regions of tensors to what is read of the files of a checkpoint of our own format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast._base.box_bytes import row_major_strides
from holdfast._base.boxes import overlap
from holdfast._formats.native.columns import StoredChunk
from holdfast._formats.native.read_plan import ByteRanges, StridedCopy, cut_into_strided_copies, dense_ranges
from holdfast._formats.native.reading import read_size
from holdfast._formats.source import ReadRequest, part_of


class Cutter:
    """Cuts requests into what can be read: ranges of bytes, and strided copies of what is not contiguous."""

    def __init__(self, block_bytes: int, memory: int | None) -> None:
        self._largest = read_size(memory, block_bytes)
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.ranges: list[ByteRanges] = []
        self.copies: list[StridedCopy] = []

    def cut(self, request: ReadRequest, number: int, chunks: Sequence[StoredChunk]) -> None:
        """Add what is stored of a request in these chunks."""
        itemsize = request.into.itemsize
        for chunk in chunks:
            shared = overlap(chunk.offsets, chunk.sizes, request.offsets, request.sizes)
            if shared is None:
                continue
            start, lengths = shared
            into = part_of(
                request.into, [at - origin for at, origin in zip(start, request.offsets, strict=True)], lengths
            )
            inside = [at - origin for at, origin in zip(start, chunk.offsets, strict=True)]
            self._cut_box(chunk, inside, row_major_strides(chunk.sizes, itemsize), into, number)

    def _cut_box(
        self, chunk: StoredChunk, start: Sequence[int], strides: tuple[int, ...], into: Any, number: int
    ) -> None:
        dense = dense_ranges(strides, into) if isinstance(into, np.ndarray) else None
        if dense is None:
            self.copies += cut_into_strided_copies(chunk.file, chunk.begin, strides, start, into, number, self._largest)
            return
        in_file, in_memory, nbytes = dense
        begin = chunk.begin + sum(at * stride for at, stride in zip(start, strides, strict=True))
        address = int(into.__array_interface__["data"][0])
        if len(in_file) == 1:
            self.rows.append((chunk.file, begin, nbytes, address, number))
            return
        same = np.ones_like(in_file)
        self.ranges.append(
            ByteRanges(chunk.file * same, begin + in_file, nbytes * same, address + in_memory, number * same)
        )


def first_keys(ranges: ByteRanges, copies: Sequence[StridedCopy]) -> dict[int, int]:
    """The files that are read, and what each of them is needed for first."""
    numbers, rows = np.unique(ranges.file, return_index=True)
    keys = dict(zip(numbers.tolist(), ranges.key[rows].tolist(), strict=True))
    for copy in copies:
        keys.setdefault(copy.file, copy.key)
    return keys
