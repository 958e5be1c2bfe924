"""From boxes of chunks to what is read at once: straight to memory, or through buffers that small things share."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast._base.box_bytes import position_of, span_of
from holdfast._base.tuning import LARGEST_WINDOWS, MERGE_GAP, STRAIGHT_FROM

# Runs of bytes that lie side by side in a file as well as in memory.
#
# They are columns and not objects, since a checkpoint may have very many small tensors.


Numbers = npt.NDArray[np.int64]


class Runs(NamedTuple):
    """Columns of the same length, with a row for each run of bytes."""

    file: Numbers
    begin: Numbers
    nbytes: Numbers
    address: Numbers
    """Where in memory the bytes go; 0 if nobody wants them, but they are to be checked."""
    key: Numbers
    """Which of the names that whoever made this has a list of."""

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int, int]]) -> Runs:
        """Columns of these rows: file, begin, nbytes, address, key."""
        return cls(*np.array(rows, np.int64).reshape(-1, 5).T)

    @classmethod
    def joined(cls, parts: Sequence[Runs]) -> Runs:
        """All of these."""
        filled = [part for part in parts if len(part.file)] or list(parts[:1])
        return filled[0] if len(filled) == 1 else cls(*map(np.concatenate, zip(*filled, strict=True)))

    def chosen(self, rows: npt.NDArray[np.bool_] | Numbers) -> Runs:
        """Some of the rows."""
        return Runs(*(column[rows] for column in self))

    def part(self, begin: Numbers, end: Numbers) -> Runs:
        """What lies from ``begin`` to ``end`` of each."""
        address = np.where(self.address == 0, 0, self.address + (begin - self.begin))
        return Runs(self.file, begin, end - begin, address, self.key)


def bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory that somebody else keeps alive."""
    return np.frombuffer(memoryview((ctypes.c_ubyte * nbytes).from_address(address)), np.uint8)


def straight_and_rest(runs: Runs, file_bytes: Numbers, block_bytes: int) -> tuple[Runs, Runs]:
    """Whole blocks that are worth being read straight to where they go, and all that is left."""
    ends = runs.begin + runs.nbytes
    first = -(-runs.begin // block_bytes) * block_bytes
    last = np.where(ends == file_bytes[runs.file], ends, ends // block_bytes * block_bytes)
    straight = last - first >= STRAIGHT_FROM
    if not straight.any():
        return runs.chosen(straight), runs
    long, begin, end = runs.chosen(straight), first[straight], last[straight]
    heads, tails = long.part(long.begin, begin), long.part(end, long.begin + long.nbytes)
    rest = Runs.joined([runs.chosen(~straight), heads.chosen(heads.nbytes > 0), tails.chosen(tails.nbytes > 0)])
    return long.part(begin, end), rest


def cut_at(runs: Runs, step: int) -> Runs:
    """The same bytes, cut wherever the position in the file is a multiple of ``step``."""
    first, last = runs.begin // step, (runs.begin + runs.nbytes - 1) // step
    counts = last - first + 1
    if len(counts) == int(counts.sum()):
        return runs
    whole = runs.chosen(np.repeat(np.arange(len(counts)), counts))
    number = np.arange(len(whole.begin)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    begin = np.maximum(whole.begin, number * step)
    return whole.part(begin, np.minimum(whole.begin + whole.nbytes, (number + 1) * step))


# Boxes of chunks whose elements do not lie side by side, cut into slabs that are small enough to be read at once.


Array = npt.NDArray[Any]


class Slab(NamedTuple):
    """A box of stored elements, spread over a stretch of a file, and the memory that it goes into."""

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


def dense_runs(strides: Sequence[int], into: Array) -> tuple[Numbers, Numbers, int] | None:
    """The runs of a box that lie side by side in the file and in memory, if they are long or just one.

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


def cut_into_slabs(
    file: int, chunk_begin: int, strides: tuple[int, ...], start: Sequence[int], into: Array, key: int, largest: int
) -> Iterator[Slab]:
    """A box that begins at ``start`` in a chunk and is as large as ``into``, in slabs of up to ``largest`` bytes.

    Where the cuts lie depends on the chunk alone, so that slabs of several boxes of one chunk can be read together.
    """
    if not strides:
        yield Slab(file, chunk_begin, into.itemsize, (), into, key)
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
            yield Slab(file, at + low * strides[dim], span_of(part.shape, strides, part.itemsize), strides, part, key)


def mark_blocks(needed: npt.NDArray[np.int32], slab: Slab, first_block: int, block_bytes: int) -> None:
    """Count the slab in at the blocks that it begins with, and out behind the blocks that it ends with.

    ``needed`` begins with the block ``first_block``; its running sum tells how many stretches need a block.
    """
    starts, length = _stretches(slab, block_bytes)
    np.add.at(needed, starts // block_bytes - first_block, 1)
    np.add.at(needed, (starts + length - 1) // block_bytes + 1 - first_block, -1)


def _stretches(slab: Slab, block_bytes: int) -> tuple[Numbers, int]:
    """Where the stretches begin that a slab consists of, all of one length. Gaps of less than a block do not count."""
    dims = len(slab.strides)
    length = slab.into.itemsize
    while dims and slab.strides[dims - 1] - length < block_bytes:
        dims -= 1
        length += (slab.into.shape[dims] - 1) * slab.strides[dims]
    starts = np.array([slab.begin], np.int64)
    for size, stride in zip(slab.into.shape[:dims], slab.strides[:dims], strict=True):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts, length


# Puts together what is read at once: stretches that go straight to memory, and windows that many small things share.
#
# Every block is read once, however many things need something of it.


class Stretch(NamedTuple):
    """Whole blocks of a file that go to one place in memory, and that nothing else needs."""

    file: int
    begin: int
    nbytes: int
    address: int
    """0 if they are only to be checked."""
    key: int


class Window(NamedTuple):
    """A part of a file, of which some blocks are read into a buffer, and the things that are copied from there."""

    file: int
    first_block: int
    end: int
    """Where it ends in the file."""
    runs: Runs
    slabs: Sequence[Slab]

    def begin(self, block_bytes: int) -> int:
        """Where it begins in the file."""
        return self.first_block * block_bytes

    def needed_blocks(self, block_bytes: int) -> npt.NDArray[np.bool_]:
        """Which blocks are to be read, counted from the first. Small gaps are read too, rather than to begin anew."""
        counts = np.zeros(-(-self.end // block_bytes) - self.first_block + 1, np.int32)
        begin, end = self.runs.begin, self.runs.begin + self.runs.nbytes
        np.add.at(counts, begin // block_bytes - self.first_block, 1)
        np.add.at(counts, (end - 1) // block_bytes + 1 - self.first_block, -1)
        for slab in self.slabs:
            mark_blocks(counts, slab, self.first_block, block_bytes)
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
    runs: Runs,
    slabs: Sequence[Slab],
    file_bytes: Sequence[int],
    block_bytes: int,
    largest: int,
    straight_bytes: int | None = None,
) -> list[Stretch | Window]:
    """All that is to be read, in the order of the files. A read is of ``largest`` bytes, or little more.

    With ``straight_bytes``, requests are few rather than small: so many bytes are read at once where they go straight
    to memory, and whatever lies between is read in whole windows.
    """
    sizes = np.array(file_bytes, np.int64)
    if straight_bytes is None:
        straight, rest = straight_and_rest(runs, sizes, block_bytes)
        straight = cut_at(straight, largest)
    else:
        straight, rest = straight_and_rest(runs, sizes, largest)
        straight, rest = _cut_to_few(straight, largest, max(straight_bytes, largest)), cut_at(rest, largest)
    if len(runs.file) + len(slabs) > 1:
        straight, rest = _apart(straight, rest, slabs, sizes, block_bytes)
    reads: list[Stretch | Window] = list(map(Stretch, *(column.tolist() for column in straight)))
    reads += _windows(rest, slabs, sizes, block_bytes, largest)
    return sorted(
        reads, key=lambda read: (read.file, read.begin if isinstance(read, Stretch) else read.begin(block_bytes))
    )


def _cut_to_few(straight: Runs, largest: int, longest: int) -> Runs:
    """Cut what is read straight into long reads. What goes nowhere, and is only checked, needs a buffer."""
    nowhere = straight.address == 0
    return Runs.joined([cut_at(straight.chosen(~nowhere), longest), cut_at(straight.chosen(nowhere), largest)])


def _apart(straight: Runs, rest: Runs, slabs: Sequence[Slab], sizes: Numbers, block_bytes: int) -> tuple[Runs, Runs]:
    """The same, but with nothing that shares its blocks among what is read straight.

    Where there are several things that need a block, runs are cut into single blocks: those can be copied from any
    window.
    """
    shared, too_long = _overlapping(straight, rest, slabs, sizes, block_bytes)
    if not (shared.any() or too_long.any()):
        return straight, rest
    single = cut_at(Runs.joined([straight.chosen(shared), rest.chosen(too_long)]), block_bytes)
    return straight.chosen(~shared), Runs.joined([rest.chosen(~too_long), single])


class _Blocks(NamedTuple):
    """The first and the last block of things, numbered through all files, and the order in which they lie."""

    first: Numbers
    last: Numbers
    order: Numbers

    @classmethod
    def of(cls, file: Numbers, begin: Numbers, end: Numbers, file_bytes: Numbers, block_bytes: int) -> _Blocks:
        blocks = -(-file_bytes // block_bytes)
        starts = (np.cumsum(blocks) - blocks)[file]
        order = np.argsort(starts * block_bytes + begin, kind="stable")
        return cls(starts + begin // block_bytes, starts + (end - 1) // block_bytes, order)


def _columns(runs: Runs, slabs: Sequence[Slab]) -> tuple[Numbers, Numbers, Numbers]:
    """File, begin and end of all."""
    ends = runs.begin + runs.nbytes
    if not slabs:
        return runs.file, runs.begin, ends
    others = np.array([(slab.file, slab.begin, slab.begin + slab.span) for slab in slabs], np.int64).T
    return (
        np.concatenate([runs.file, others[0]]),
        np.concatenate([runs.begin, others[1]]),
        np.concatenate([ends, others[2]]),
    )


def _overlapping(
    straight: Runs, rest: Runs, slabs: Sequence[Slab], file_bytes: Numbers, block_bytes: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which straight runs share a block with anything, and which others share more than their first or last one."""
    count = len(straight.file)
    file, begin, end = _columns(Runs.joined([straight, rest]), slabs)
    first, last, order = _Blocks.of(file, begin, end, file_bytes, block_bytes)
    first, last = first[order], last[order]
    before = np.concatenate([[-1], np.maximum.accumulate(last)[:-1]]) if len(last) else last
    after = np.concatenate([first[1:], [np.iinfo(np.int64).max]]) if len(first) else first
    touches, overlaps = np.zeros(len(order), np.bool_), np.zeros(len(order), np.bool_)
    touches[order] = (first <= before) | (after <= last)
    overlaps[order] = (last > first) & ((first < before) | (after < last))
    return touches[:count], overlaps[count : count + len(rest.file)]


def _windows(
    runs: Runs, slabs: Sequence[Slab], file_bytes: Numbers, block_bytes: int, largest: int
) -> Iterator[Window]:
    file, begin, end = _columns(runs, slabs)
    first, last, order = _Blocks.of(file, begin, end, file_bytes, block_bytes)
    first, reach, file = first[order], np.maximum.accumulate(last[order]), file[order]
    edges = [0, *(np.flatnonzero(np.diff(file)) + 1).tolist(), len(order)] if len(order) else []
    for low, high in itertools.pairwise(edges):
        for start, stop in _cuts(first[low:high], reach[low:high], max(largest // block_bytes, 1)):
            rows = order[low + start : low + stop]
            of_runs = rows[rows < len(runs.file)]
            chosen = [slabs[row] for row in (rows[rows >= len(runs.file)] - len(runs.file)).tolist()]
            first_block = int(begin[rows[0]]) // block_bytes
            # Whole blocks are read, so a window ends with a block, or with the file.
            blocks = int(reach[low + stop - 1] - first[low + start]) + 1
            number = int(file[low])
            window_end = min((first_block + blocks) * block_bytes, int(file_bytes[number]))
            yield Window(number, first_block, window_end, runs.chosen(of_runs), chosen)


def _cuts(first: Numbers, reach: Numbers, most_blocks: int) -> Iterator[tuple[int, int]]:
    """Which rows make a window. Two windows have one block in common at most, the last of one and the first of the
    other."""
    can_end = np.concatenate([np.flatnonzero(first[1:] >= reach[:-1]) + 1, [len(first)]])
    start = 0
    while start < len(first):
        limit = int(np.searchsorted(reach, first[start] + most_blocks))
        at = int(np.searchsorted(can_end, limit, side="right"))
        stop = int(can_end[at - 1]) if at else 0
        if stop <= start:
            stop = int(can_end[at])
            furthest = int(np.searchsorted(reach, first[start] + LARGEST_WINDOWS * most_blocks))
            stop = max(start + 1, min(stop, furthest))
        yield start, stop
        start = stop
