"""Regions of a stored chunk, read in ranges of its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from holdfast._base.box_bytes import boxes_of_run, is_one_run, position_of, readable_parts, row_major_strides, span_of
from holdfast._base.boxes import Box, overlap, place_of
from holdfast._base.byte_counts import count_bytes
from holdfast._base.tuning import MERGE_GAP, READ_BYTES
from holdfast._formats.ranged_files import Ranges, read_with_crc

# A chunk is a row-major array at some place of a file. Of several regions that are wanted of it no byte is read
# twice, and bytes between them are read along only where another request would cost more. What is in memory as it
# does in the file is read straight into that memory, all else through small buffers.


_ANY_LENGTH = 1 << 62

Buffer = npt.NDArray[np.uint8]


class Place(Protocol):
    """The memory that a region goes into."""

    @property
    def memory(self) -> memoryview | None:
        """The region's bytes as they are in a file; None if they are not like that."""

    def put(self, start: Sequence[int], sizes: Sequence[int], read: Buffer, at: int, strides: Sequence[int]) -> None:
        """Take a part of the region: its first element is at byte ``at`` of ``read``, its neighbours by ``strides``."""


class WantedRegion(NamedTuple):
    """A region of a chunk, and where it goes."""

    region: Box
    place: Place


class ByteRange(NamedTuple):
    """Bytes of a chunk that are read together, and the memory that they are read into if they need no buffer."""

    begin: int
    end: int
    memory: memoryview | None = None


class ChunkRead:
    """What is wanted of one chunk. Its runs may be read by several threads at once, each in parts of ``most`` bytes."""

    def __init__(
        self,
        file: Ranges,
        position: int,
        sizes: Sequence[int],
        itemsize: int,
        wanted: Sequence[WantedRegion],
        *,
        most: int = READ_BYTES,
    ) -> None:
        self._file = file
        self._most = most
        self._position = position
        self._sizes = tuple(sizes)
        self._itemsize = itemsize
        self._strides = row_major_strides(self._sizes, itemsize)
        self._wanted = wanted
        self.nbytes = prod(self._sizes) * itemsize
        spans = _straight_spans(self._sizes, itemsize, wanted)
        self._runs = spans if spans is not None else self._merged_runs()

    @property
    def is_whole(self) -> bool:
        """Whether all bytes of the chunk are read, so that they can be compared with their CRC."""
        reached = 0
        for run in self._runs:
            if run.begin > reached:
                return False
            reached = run.end
        return reached == self.nbytes

    @property
    def bytes_read(self) -> int:
        """How many bytes reading all of it takes."""
        return sum(run.end - run.begin for run in self._runs)

    def reads(self) -> Iterator[ByteRange]:
        """The runs in parts that are each worth a read, in the order of the file."""
        for begin, end, memory in self._runs:
            for first in range(begin, end, self._most):
                last = min(end, first + self._most)
                yield ByteRange(first, last, None if memory is None else memory[first - begin : last - begin])

    def read(self, run: ByteRange, *, summed: bool, crc: int = 0) -> int:
        """Read a range and put it where it is wanted. With ``summed`` its bytes are added to a CRC."""
        buffer: Buffer | None = None
        memory = run.memory
        if memory is None:
            buffer = np.empty(run.end - run.begin, np.uint8)
            memory = buffer.data
        if summed:
            crc = read_with_crc(self._file, self._position + run.begin, memory, crc)
        else:
            self._file.read_into(self._position + run.begin, memory)
            count_bytes(memory.nbytes)
        if buffer is not None:
            self._hand_out(run, buffer)
        return crc

    def _hand_out(self, run: ByteRange, buffer: Buffer) -> None:
        first, end = run.begin // self._itemsize, run.end // self._itemsize
        for box in boxes_of_run(self._sizes, first, end):
            for region, place in self._wanted:
                shared = overlap(box.offsets, box.sizes, region.offsets, region.sizes)
                if shared is not None:
                    start, sizes = shared
                    at = position_of(start, self._strides) - run.begin
                    inside = [index - base for index, base in zip(start, region.offsets, strict=True)]
                    place.put(inside, sizes, buffer, at, self._strides)

    def _merged_runs(self) -> list[ByteRange]:
        """What the regions reach over, in as few runs as are worth it."""
        spans = sorted(
            _range_of(part, self._strides, self._itemsize)
            for region, _ in self._wanted
            for part in readable_parts(self._sizes, region, self._itemsize, most=_ANY_LENGTH, gap=MERGE_GAP)
        )
        runs: list[ByteRange] = []
        for begin, end in spans:
            if runs and begin - runs[-1].end <= MERGE_GAP:
                runs[-1] = ByteRange(runs[-1].begin, max(end, runs[-1].end))
            else:
                runs.append(ByteRange(begin, end))
        return runs


def _straight_spans(sizes: Sequence[int], itemsize: int, wanted: Sequence[WantedRegion]) -> list[ByteRange] | None:
    """A run for every region, if all of them can be read straight into their memory and that is worth it."""
    runs: list[ByteRange] = []
    for region, place in wanted:
        if 0 in region.sizes:
            continue
        if place.memory is None or not is_one_run(sizes, region.sizes):
            return None
        strides = row_major_strides(sizes, itemsize)
        runs.append(ByteRange(*_range_of(region, strides, itemsize), place.memory))
    runs.sort(key=lambda run: run[:2])
    for before, run in pairwise(runs):
        is_short = min(before.end - before.begin, run.end - run.begin) < MERGE_GAP
        if run.begin < before.end or (is_short and run.begin - before.end <= MERGE_GAP):
            return None
    return runs


def _range_of(box: Box, strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """From the first byte of a part to behind its last one."""
    begin = position_of(box.offsets, strides)
    return begin, begin + span_of(box.sizes, strides, itemsize)


class ArrayPlace:
    """An array of the stored elements, or what has a dtype and takes parts of them as an array does."""

    def __init__(self, into: Any) -> None:
        self._into = into
        self.memory: memoryview | None = None
        if isinstance(into, np.ndarray) and into.flags.c_contiguous and into.size:
            self.memory = into.reshape(-1).view(np.uint8).data

    def put(self, start: Sequence[int], sizes: Sequence[int], read: Buffer, at: int, strides: Sequence[int]) -> None:
        """Copy."""
        stored = np.ndarray(tuple(sizes), self._into.dtype, read.data, at, tuple(strides))
        self._into[place_of(start, sizes)] = stored
