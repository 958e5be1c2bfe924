"""From boxes of chunks to what is read at once: straight to memory, or through buffers that small things share."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast._base.box_bytes import position_of, span_of
from holdfast._base.tuning import LARGEST_BUFFERED_READS, MERGE_GAP, STRAIGHT_FROM

# Runs of bytes that are contiguous in a file as well as in memory.
#
# They are columns and not objects, since a checkpoint may have very many small tensors.


Numbers = npt.NDArray[np.int64]


class ByteRanges(NamedTuple):
    """Columns of the same length, with a row for each range of bytes."""

    file: Numbers
    begin: Numbers
    nbytes: Numbers
    address: Numbers
    """Where in memory the bytes go; 0 if nobody wants them, but they are to be checked."""
    key: Numbers
    """Which of the names that whoever made this has a list of."""

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int, int]]) -> ByteRanges:
        """Columns of these rows: file, begin, nbytes, address, key."""
        return cls(*np.array(rows, np.int64).reshape(-1, 5).T)

    @classmethod
    def joined(cls, parts: Sequence[ByteRanges]) -> ByteRanges:
        """All of these."""
        filled = [part for part in parts if len(part.file)] or list(parts[:1])
        return filled[0] if len(filled) == 1 else cls(*map(np.concatenate, zip(*filled, strict=True)))

    def chosen(self, rows: npt.NDArray[np.bool_] | Numbers) -> ByteRanges:
        """Some of the rows."""
        return ByteRanges(*(column[rows] for column in self))

    def part(self, begin: Numbers, end: Numbers) -> ByteRanges:
        """What is from ``begin`` to ``end`` of each."""
        address = np.where(self.address == 0, 0, self.address + (begin - self.begin))
        return ByteRanges(self.file, begin, end - begin, address, self.key)


def memory_at(address: int, nbytes: int) -> memoryview:
    """Memory that somebody else keeps alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """The same as an array."""
    return np.frombuffer(memory_at(address, nbytes), np.uint8)


def straight_and_rest(ranges: ByteRanges, file_bytes: Numbers, block_bytes: int) -> tuple[ByteRanges, ByteRanges]:
    """Whole blocks that are worth being read straight to where they go, and all that is left."""
    ends = ranges.begin + ranges.nbytes
    first = -(-ranges.begin // block_bytes) * block_bytes
    last = np.where(ends == file_bytes[ranges.file], ends, ends // block_bytes * block_bytes)
    straight = last - first >= STRAIGHT_FROM
    if not straight.any():
        return ranges.chosen(straight), ranges
    long, begin, end = ranges.chosen(straight), first[straight], last[straight]
    heads, tails = long.part(long.begin, begin), long.part(end, long.begin + long.nbytes)
    rest = ByteRanges.joined([ranges.chosen(~straight), heads.chosen(heads.nbytes > 0), tails.chosen(tails.nbytes > 0)])
    return long.part(begin, end), rest


def cut_at(ranges: ByteRanges, step: int) -> ByteRanges:
    """The same bytes, cut wherever the position in the file is a multiple of ``step``."""
    first, last = ranges.begin // step, (ranges.begin + ranges.nbytes - 1) // step
    counts = last - first + 1
    if len(counts) == int(counts.sum()):
        return ranges
    whole = ranges.chosen(np.repeat(np.arange(len(counts)), counts))
    number = np.arange(len(whole.begin)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    begin = np.maximum(whole.begin, number * step)
    return whole.part(begin, np.minimum(whole.begin + whole.nbytes, (number + 1) * step))


# Boxes of chunks whose elements are not side by side, cut into strided copies that are small enough to be read at once.


Array = npt.NDArray[Any]


class StridedCopy(NamedTuple):
    """A box of stored elements, spread over a range of a file, and the memory that it goes into."""

    file: int
    begin: int
    """Where in the file its first element begins."""
    span: int
    """Bytes from there to the end of its last element."""
    strides: tuple[int, ...]
    """Bytes between neighbours in the file, per dimension."""
    into: Array
    key: int
    """Which of the names that whoever made this has a list of."""


def dense_ranges(strides: Sequence[int], into: Array) -> tuple[Numbers, Numbers, int] | None:
    """The ranges of a box that are contiguous in the file and in memory, if they are long or just one.

    Returns where they begin in the file and in memory, counted from where the box does, and the bytes of one.
    """
    dims, length = into.ndim, into.itemsize
    while dims and (into.shape[dims - 1] == 1 or length == strides[dims - 1] == into.strides[dims - 1]):
        dims -= 1
        length *= into.shape[dims]
    outer = into.shape[:dims]
    if length < STRAIGHT_FROM and prod(outer) > 1:
        return None
    in_file, in_memory = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for size, stride, step in zip(outer, strides, into.strides, strict=False):
        numbers = np.arange(size, dtype=np.int64)
        in_file = (in_file[:, None] + numbers * stride).reshape(-1)
        in_memory = (in_memory[:, None] + numbers * step).reshape(-1)
    return in_file, in_memory, length


def cut_into_strided_copies(
    file: int, chunk_begin: int, strides: tuple[int, ...], start: Sequence[int], into: Array, key: int, largest: int
) -> Iterator[StridedCopy]:
    """A box that begins at ``start`` in a chunk and is as large as ``into``, cut to ``largest`` bytes each.

    Where the cuts are depends on the chunk alone, so that what several boxes want of one chunk can be read together.
    """
    if not strides:
        yield StridedCopy(file, chunk_begin, into.itemsize, (), into, key)
        return
    # Even a single element may be larger.
    dim = next((dim for dim, stride in enumerate(strides) if stride <= largest), len(strides) - 1)
    begin = chunk_begin + position_of(start, strides)
    step = max(1, largest // strides[dim])
    for outer in np.ndindex(*into.shape[:dim]):
        at = begin + sum(number * stride for number, stride in zip(outer, strides, strict=False))
        first, end = start[dim], start[dim] + into.shape[dim]
        for low in range(first // step * step, end, step):
            low, high = max(low, first) - first, min(low + step, end) - first
            place = (*(slice(number, number + 1) for number in outer), slice(low, high))
            part = into[place]
            yield StridedCopy(
                file, at + low * strides[dim], span_of(part.shape, strides, part.itemsize), strides, part, key
            )


def mark_blocks(needed: npt.NDArray[np.int32], copy: StridedCopy, first_block: int, block_bytes: int) -> None:
    """Count the strided copy in at the blocks that it begins with, and out behind the blocks that it ends with.

    ``needed`` begins with the block ``first_block``; its running sum is how many ranges need a block.
    """
    starts, length = _ranges_of_copy(copy, block_bytes)
    np.add.at(needed, starts // block_bytes - first_block, 1)
    np.add.at(needed, (starts + length - 1) // block_bytes + 1 - first_block, -1)


def _ranges_of_copy(copy: StridedCopy, block_bytes: int) -> tuple[Numbers, int]:
    """Where the ranges of a copy begin, all of one length. Gaps of less than a block do not count."""
    dims = len(copy.strides)
    length = copy.into.itemsize
    while dims and copy.strides[dims - 1] - length < block_bytes:
        dims -= 1
        length += (copy.into.shape[dims] - 1) * copy.strides[dims]
    starts = np.array([copy.begin], np.int64)
    for size, stride in zip(copy.into.shape[:dims], copy.strides[:dims], strict=True):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts, length


# Puts together what is read at once: direct reads into memory, and buffered reads that many small things share.
#
# Every block is read once, however many things need something of it.


class DirectRead(NamedTuple):
    """Whole blocks of a file that go to one place in memory, and that nothing else needs."""

    file: int
    begin: int
    nbytes: int
    address: int
    """0 if they are only to be checked."""
    key: int


class BufferedRead(NamedTuple):
    """A part of a file, of which some blocks are read into a buffer, and the things that are copied from there."""

    file: int
    first_block: int
    end: int
    """Where it ends in the file."""
    ranges: ByteRanges
    copies: Sequence[StridedCopy]

    def begin(self, block_bytes: int) -> int:
        """Where it begins in the file."""
        return self.first_block * block_bytes

    def needed_runs(self, block_bytes: int, without: Collection[int] = ()) -> list[tuple[int, int]]:
        """Which blocks are to be read, counted from the first: where runs of them begin, and where they have ended.

        Small gaps are read too, rather than to begin anew. All ``without`` some blocks that are had from elsewhere.
        """
        if self.end <= (self.first_block + 1) * block_bytes:
            return [] if without else [(0, 1)]
        if without or self.copies:
            needed = self._needed_blocks(block_bytes)
            needed[list(without)] = False
            return runs_of(needed)
        ends = self.ranges.begin + self.ranges.nbytes  # of ranges in the order of the file
        first = self.ranges.begin // block_bytes - self.first_block
        last = (np.maximum.accumulate(ends) - 1) // block_bytes - self.first_block
        gaps = first[1:] - last[:-1] - 1
        cuts = np.flatnonzero((gaps > 0) & (gaps * block_bytes >= MERGE_GAP))
        begins, after = [int(first[0]), *first[cuts + 1].tolist()], [*(last[cuts] + 1).tolist(), int(last[-1]) + 1]
        return list(zip(begins, after, strict=True))

    def _needed_blocks(self, block_bytes: int) -> npt.NDArray[np.bool_]:
        counts = np.zeros(-(-self.end // block_bytes) - self.first_block + 1, np.int32)
        begin, end = self.ranges.begin, self.ranges.begin + self.ranges.nbytes
        np.add.at(counts, begin // block_bytes - self.first_block, 1)
        np.add.at(counts, (end - 1) // block_bytes + 1 - self.first_block, -1)
        for copy in self.copies:
            mark_blocks(counts, copy, self.first_block, block_bytes)
        needed = np.cumsum(counts[:-1]) > 0
        for gap, after in runs_of(~needed):
            if gap > 0 and after < len(needed) and (after - gap) * block_bytes < MERGE_GAP:
                needed[gap:after] = True
        return needed


def runs_of(chosen: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where runs of what is chosen begin, and where they have ended.

    >>> runs_of(np.array([True, False, True, True]))
    [(0, 1), (2, 4)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]]).view(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def plan_reads(
    ranges: ByteRanges,
    copies: Sequence[StridedCopy],
    file_bytes: Sequence[int],
    block_bytes: int,
    largest: int,
    straight_bytes: int | None = None,
) -> list[DirectRead | BufferedRead]:
    """All that is to be read, in the order of the files. A read is of ``largest`` bytes, or little more.

    With ``straight_bytes``, requests are few rather than small: so many bytes are read at once where they go straight
    to memory, and whatever is between is read through buffers.
    """
    sizes = np.array(file_bytes, np.int64)
    if straight_bytes is None:
        straight, rest = straight_and_rest(ranges, sizes, block_bytes)
        straight = cut_at(straight, largest)
    else:
        straight, rest = straight_and_rest(ranges, sizes, largest)
        straight, rest = _cut_to_few(straight, largest, max(straight_bytes, largest)), cut_at(rest, largest)
    if len(ranges.file) + len(copies) > 1:
        straight, rest = _apart(straight, rest, copies, sizes, block_bytes)
    reads: list[DirectRead | BufferedRead] = list(map(DirectRead, *(column.tolist() for column in straight)))
    reads += _buffered_reads(rest, copies, sizes, block_bytes, largest)
    return sorted(
        reads, key=lambda read: (read.file, read.begin if isinstance(read, DirectRead) else read.begin(block_bytes))
    )


def _cut_to_few(straight: ByteRanges, largest: int, longest: int) -> ByteRanges:
    """Cut what is read straight into long reads. What goes nowhere, and is only checked, needs a buffer."""
    nowhere = straight.address == 0
    return ByteRanges.joined([cut_at(straight.chosen(~nowhere), longest), cut_at(straight.chosen(nowhere), largest)])


def _apart(
    straight: ByteRanges, rest: ByteRanges, copies: Sequence[StridedCopy], sizes: Numbers, block_bytes: int
) -> tuple[ByteRanges, ByteRanges]:
    """The same, but with nothing that shares its blocks among what is read straight.

    Where there are several things that need a block, ranges are cut into single blocks: those can be copied from any
    buffered read.
    """
    shared, too_long = _overlapping(straight, rest, copies, sizes, block_bytes)
    if not (shared.any() or too_long.any()):
        return straight, rest
    single = cut_at(ByteRanges.joined([straight.chosen(shared), rest.chosen(too_long)]), block_bytes)
    return straight.chosen(~shared), ByteRanges.joined([rest.chosen(~too_long), single])


class _Blocks(NamedTuple):
    """The first and the last block of things, numbered through all files, and the order in which they are stored."""

    first: Numbers
    last: Numbers
    order: Numbers

    @classmethod
    def of(cls, file: Numbers, begin: Numbers, end: Numbers, file_bytes: Numbers, block_bytes: int) -> _Blocks:
        blocks = -(-file_bytes // block_bytes)
        starts = (np.cumsum(blocks) - blocks)[file]
        order = np.argsort(starts * block_bytes + begin, kind="stable")
        return cls(starts + begin // block_bytes, starts + (end - 1) // block_bytes, order)


def _columns(ranges: ByteRanges, copies: Sequence[StridedCopy]) -> tuple[Numbers, Numbers, Numbers]:
    """File, begin and end of all."""
    ends = ranges.begin + ranges.nbytes
    if not copies:
        return ranges.file, ranges.begin, ends
    others = np.array([(copy.file, copy.begin, copy.begin + copy.span) for copy in copies], np.int64).T
    return (
        np.concatenate([ranges.file, others[0]]),
        np.concatenate([ranges.begin, others[1]]),
        np.concatenate([ends, others[2]]),
    )


def _overlapping(
    straight: ByteRanges, rest: ByteRanges, copies: Sequence[StridedCopy], file_bytes: Numbers, block_bytes: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which direct ranges share a block with anything, and which others share more than their first or last one."""
    count = len(straight.file)
    file, begin, end = _columns(ByteRanges.joined([straight, rest]), copies)
    first, last, order = _Blocks.of(file, begin, end, file_bytes, block_bytes)
    first, last = first[order], last[order]
    before = np.concatenate([[-1], np.maximum.accumulate(last)[:-1]]) if len(last) else last
    after = np.concatenate([first[1:], [np.iinfo(np.int64).max]]) if len(first) else first
    touches, overlaps = np.zeros(len(order), np.bool_), np.zeros(len(order), np.bool_)
    touches[order] = (first <= before) | (after <= last)
    overlaps[order] = (last > first) & ((first < before) | (after < last))
    return touches[:count], overlaps[count : count + len(rest.file)]


def _buffered_reads(
    ranges: ByteRanges, copies: Sequence[StridedCopy], file_bytes: Numbers, block_bytes: int, largest: int
) -> Iterator[BufferedRead]:
    file, begin, end = _columns(ranges, copies)
    first, last, order = _Blocks.of(file, begin, end, file_bytes, block_bytes)
    first, reach, file = first[order], np.maximum.accumulate(last[order]), file[order]
    edges = [0, *(np.flatnonzero(np.diff(file)) + 1).tolist(), len(order)] if len(order) else []
    for low, high in itertools.pairwise(edges):
        for start, stop in _cuts(first[low:high], reach[low:high], max(largest // block_bytes, 1)):
            rows = order[low + start : low + stop]
            of_ranges = rows[rows < len(ranges.file)]
            chosen = [copies[row] for row in (rows[rows >= len(ranges.file)] - len(ranges.file)).tolist()]
            first_block = int(begin[rows[0]]) // block_bytes
            # Whole blocks are read, so a buffered read ends with a block, or with the file.
            blocks = int(reach[low + stop - 1] - first[low + start]) + 1
            number = int(file[low])
            read_end = min((first_block + blocks) * block_bytes, int(file_bytes[number]))
            yield BufferedRead(number, first_block, read_end, ranges.chosen(of_ranges), chosen)


def _cuts(first: Numbers, reach: Numbers, most_blocks: int) -> Iterator[tuple[int, int]]:
    """Which rows make a buffered read. Two of them share one block at most, the last of one and the first of the
    other."""
    can_end = np.concatenate([np.flatnonzero(first[1:] >= reach[:-1]) + 1, [len(first)]])
    start = 0
    while start < len(first):
        limit = int(np.searchsorted(reach, first[start] + most_blocks))
        at = int(np.searchsorted(can_end, limit, side="right"))
        stop = int(can_end[at - 1]) if at else 0
        if stop <= start:
            stop = int(can_end[at])
            furthest = int(np.searchsorted(reach, first[start] + LARGEST_BUFFERED_READS * most_blocks))
            stop = max(start + 1, min(stop, furthest))
        yield start, stop
        start = stop
