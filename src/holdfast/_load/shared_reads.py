"""Who reads what for whom, where several ranks want the same stored bytes.

Every rank computes the same plan from what all of them want. Stored chunks that several ranks want are read by one of
those ranks, or in parts by several of them, so that all have about the same number of bytes to read, and go from there
to the others in batches of bounded size. What nobody else wants is left to the rank that wants it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import xxhash

from holdfast._base.boxes import Box, cut, volume
from holdfast._base.tuning import SHARED_PART_BYTES, SMALLEST_CUT, SMALLEST_SHARED_READ
from holdfast._formats.source import Source
from holdfast._load.shared_units import Piece, Unit, UnitTable
from holdfast._load.shared_wants import RankSets

ALIGNMENT = 16
"""Where the elements of a part of a batch may begin, so that every library takes them as they are."""


class Span(NamedTuple):
    """A box of a unit in a message, and the pieces that are taken from it."""

    unit: int
    """Its position in the batch."""
    tensor: int
    box: Box
    begin: int
    end: int
    pieces: Sequence[Piece]


class Row(NamedTuple):
    """A unit, or a box of it."""

    unit: int
    box: Box | None = None


@dataclass(frozen=True)
class SharedBatch:
    """Units that one rank reads together, and sends from there. They are made when they are needed."""

    table: UnitTable
    rows: Sequence[Row]
    receivers: Sequence[int]
    """The ranks that want something of it."""
    is_part: bool = False
    """Whether it is a part of a unit that its reader reads at once, to where it wants it."""
    is_first: bool = True
    """Whether it is the first such part, before which that is read."""

    @cached_property
    def units(self) -> Sequence[Unit]:
        """What it has."""
        return [self.table.unit(*row) for row in self.rows]

    @cached_property
    def whole(self) -> Unit | None:
        """What it is a part of, if that was read at once to where its reader wants it."""
        return self.table.unit(self.rows[0].unit) if self.is_part else None

    @property
    def reads(self) -> Sequence[Unit]:
        """What is read before: mostly the same."""
        if self.whole is None:
            return self.units
        return [self.whole] if self.is_first else []

    def message_for(self, rank: int) -> list[Span]:
        """What a rank gets of it, one after the other. It is not more than all of it."""
        found: list[Span] = []
        at = 0
        for number, unit in enumerate(self.units):
            by_box: dict[Box, list[Piece]] = defaultdict(list)
            for piece in unit.wanted_by(rank):
                by_box[piece.box].append(piece)
            if len(by_box) > 1 and sum(volume(box.sizes) for box in by_box) > volume(unit.box.sizes):
                by_box = {unit.box: [piece for same in by_box.values() for piece in same]}
            for box, pieces in by_box.items():
                end = at + volume(box.sizes) * unit.itemsize
                found.append(Span(number, unit.tensor, box, at, end, pieces))
                at = aligned(end)
        return found

    @cached_property
    def places(self) -> Sequence[tuple[int, int]]:
        """Where the units are, if they are all in one buffer."""
        found, at = [], 0
        for unit in self.units:
            found.append((at, at + unit.nbytes))
            at = aligned(at + unit.nbytes)
        return found

    @property
    def nbytes(self) -> int:
        """What it takes in one buffer."""
        return self.places[-1][1]


def aligned(position: int) -> int:
    """The first place from here on where elements may begin.

    >>> aligned(16), aligned(17)
    (16, 32)
    """
    return -(-position // ALIGNMENT) * ALIGNMENT


@dataclass
class SharedReads:
    """What the ranks of a cell read for each other."""

    batches: dict[int, list[SharedBatch]]
    """By the rank that reads."""
    alone: dict[tuple[int, Box], list[Box]] = field(default_factory=dict)
    """What is left to this rank, of those of its wants of which not all is left to it: tensor and box, and parts."""
    units: bytes = b""
    """A digest of what is read for several."""

    @property
    def is_empty(self) -> bool:
        """Whether nobody reads anything for another one."""
        return not self.batches

    def digest(self, terms: str) -> bytes:
        """16 bytes that are the same for ranks with the same plan and the same terms."""
        hashed = xxhash.xxh3_128(terms.encode() + self.units)
        for reader, batches in self.batches.items():
            rows = [(batch.rows, batch.receivers, batch.is_part, batch.is_first) for batch in batches]
            hashed.update(repr((reader, rows)).encode())
        return hashed.digest()


def plan_shared_reads(
    source: Source, messages: Mapping[tuple[int, ...], bytes], rank: int, part: int = SHARED_PART_BYTES
) -> SharedReads:
    """The plan of all ranks, which each of them computes alike, with what is left to this ``rank``.

    ``messages`` are the wants of ranks, by the ranks that want just that. ``part`` is the most that a batch has.
    """
    table = UnitTable(source, messages, rank, part)
    runs = _assigned(table)
    batches = {reader: _batches(table, runs[reader], part) for reader in sorted(runs)}
    return SharedReads(batches, table.alone, table.digest())


# Who reads what: neighbours in the files stay together, and all ranks read about as much, what they read for themselves
# alone included. Units are numbers here, in the order of the files.


def _assigned(table: UnitTable) -> dict[int, list[Row]]:
    """What each rank reads for several."""
    loads, sizes, sets = table.loads, table.nbytes.tolist(), table.sets
    runs: dict[int, list[Row]] = defaultdict(list)
    for unit in np.flatnonzero(table.is_whole).tolist():
        reader = _least_loaded(sets.ranks[table.readers[unit]], loads)
        runs[reader].append(Row(unit))
        loads[reader] += sizes[unit]
    divided = np.flatnonzero(~table.is_whole)
    totals = np.zeros(len(sets.ranks), np.int64)
    np.add.at(totals, table.readers[divided], table.nbytes[divided])
    is_small = totals[table.readers[divided]] < SMALLEST_SHARED_READ
    for readers, units in _joined_groups(table, divided[is_small].tolist(), sets):
        reader = _least_loaded(readers, loads)
        runs[reader] += map(Row, units)
        loads[reader] += sum(sizes[unit] for unit in units)
    large = [number for number in np.unique(table.readers[divided]).tolist() if totals[number] >= SMALLEST_SHARED_READ]
    for number in sorted(large, key=lambda number: (len(sets.ranks[number]), sets.ranks[number])):
        quotas = _quotas(int(totals[number]), {rank: loads[rank] for rank in sets.ranks[number]})
        for reader, row, nbytes in _dealt_out(table, divided[table.readers[divided] == number].tolist(), quotas):
            runs[reader].append(row)
            loads[reader] += nbytes
    return {reader: sorted(run, key=lambda row: (row.unit, row.box or ())) for reader, run in runs.items()}


def _least_loaded(readers: Sequence[int], loads: Mapping[int, int]) -> int:
    return min(readers, key=lambda rank: (loads[rank], rank))


def _joined_groups(table: UnitTable, units: Sequence[int], sets: RankSets) -> Iterator[tuple[Sequence[int], list[int]]]:
    """Small units that ranks in common may read, together: each rank would read a digest block more than it needs."""
    readers: frozenset[int] = frozenset()
    last, size = -1, 0
    together: list[int] = []
    for unit in units:
        number = int(table.readers[unit])
        common = readers if number == last else readers.intersection(sets.ranks[number])
        if together and (not common or size >= SMALLEST_SHARED_READ):
            yield sorted(readers), together
            common, together, size = frozenset(), [], 0
        readers, last = common or frozenset(sets.ranks[number]), number
        together.append(unit)
        size += int(table.nbytes[unit])
    if together:
        yield sorted(readers), together


def _quotas(total: int, loads: Mapping[int, int]) -> list[tuple[int, int]]:
    """How many bytes each rank gets, so that they all come to the same level; few bytes go to few ranks.

    >>> _quotas(40 << 20, {0: 0, 1: 20 << 20, 2: 90 << 20})
    [(0, 31457280), (1, 10485760)]
    >>> _quotas(100, {0: 5, 1: 0})
    [(1, 100)]
    """
    order = sorted(loads, key=lambda rank: (loads[rank], rank))[: max(1, total // SMALLEST_SHARED_READ)]
    level = 0
    for count in range(len(order), 0, -1):
        level = (total + sum(loads[rank] for rank in order[:count])) // count
        order = order[:count]
        if level > loads[order[-1]]:
            break
    quotas = [(rank, level - loads[rank]) for rank in sorted(order)]
    last, quota = quotas[-1]
    quotas[-1] = last, quota + total - sum(each for _, each in quotas)
    return quotas


def _dealt_out(
    table: UnitTable, units: Sequence[int], quotas: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, Row, int]]:
    """Give each rank as many bytes as are its quota, in the order of the units, cutting large ones along their rows."""
    ranks = iter(quotas)
    reader, left = next(ranks)
    for unit, nbytes in zip(units, table.nbytes[units].tolist(), strict=True):
        if left <= 0:
            reader, left = next(ranks, (reader, nbytes))
        if nbytes < 2 * SMALLEST_CUT or left >= nbytes - SMALLEST_CUT:  # as most are
            left -= nbytes
            yield reader, Row(unit), nbytes
            continue
        rest: Box | None = table.box(unit)
        element = nbytes // volume(table.box(unit).sizes)
        while rest is not None:
            if left <= 0:
                reader, left = next(ranks, (reader, nbytes))
            head, rest = _cut_off(rest, left, element)
            taken = volume(head.sizes) * element
            left = 0 if rest is not None else left - taken
            yield reader, Row(unit, head if taken < nbytes else None), taken


def _cut_off(box: Box, nbytes: int, itemsize: int) -> tuple[Box, Box | None]:
    """About so many bytes of a box, and the rest, unless one of the two would not be worth a read of its own."""
    offsets, sizes = box
    size = volume(sizes) * itemsize
    dim = next((dim for dim, count in enumerate(sizes) if count > 1), None)
    if size < 2 * SMALLEST_CUT or dim is None or nbytes >= size - SMALLEST_CUT:
        return box, None
    rows = max(nbytes, SMALLEST_CUT) // (size // sizes[dim])
    if not 0 < rows < sizes[dim]:
        return box, None
    head = Box(offsets, (*sizes[:dim], rows, *sizes[dim + 1 :]))
    tail = Box(
        (*offsets[:dim], offsets[dim] + rows, *offsets[dim + 1 :]), (*sizes[:dim], sizes[dim] - rows, *sizes[dim + 1 :])
    )
    return head, tail


def _batches(table: UnitTable, run: Sequence[Row], part: int) -> list[SharedBatch]:
    """What a rank reads for others, put together and cut so that no batch has more than ``part`` bytes."""
    found: list[SharedBatch] = []
    together: list[Row] = []
    wanted: list[int] = []
    size = 0

    def close() -> None:
        nonlocal size
        if together:
            receivers = table.sets.ranks[table.sets.union(np.array(sorted(set(wanted)), np.int64))]
            found.append(SharedBatch(table, tuple(together), receivers))
            together.clear()
            wanted.clear()
            size = 0

    def add(row: Row, nbytes: int) -> None:
        nonlocal size
        receivers = table.receivers(*row)
        if receivers is not None:
            if size + nbytes > part:
                close()
            together.append(row)
            wanted.append(receivers)
            size = aligned(size + nbytes)

    for row in run:
        nbytes = int(table.nbytes[row.unit])
        if row.box is None and nbytes <= part:
            add(row, nbytes)
            continue
        whole = table.box(row.unit)
        itemsize = nbytes // volume(whole.sizes)
        if table.is_whole[row.unit]:
            close()
            for number, box in enumerate(cut(whole, max(1, part // itemsize))):
                receivers = table.receivers(row.unit, box)
                assert receivers is not None
                of_part = [Row(row.unit, box)]
                found.append(
                    SharedBatch(table, of_part, table.sets.ranks[receivers], is_part=True, is_first=not number)
                )
            continue
        for box in cut(row.box or whole, max(1, part // itemsize)):
            add(Row(row.unit, box), volume(box.sizes) * itemsize)
    close()
    return found
