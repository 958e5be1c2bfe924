"""Puts together what is read at once: stretches that go straight to memory, and windows that many small things share.

Every block is read once, however many things need something of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.formats.native.runs import Numbers, Runs, cut_at, straight_and_rest
from holdfast.formats.native.slabs import Slab, mark_blocks
from holdfast.tuning import LARGEST_WINDOWS, MERGE_GAP


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
