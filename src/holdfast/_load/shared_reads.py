"""Who reads what for whom, where several ranks want the same stored bytes.

Every rank computes the same plan from what all of them want. Stored chunks that several ranks want are read by one of
those ranks, or in parts by several of them, so that all have about the same number of bytes to read, and go from there
to the others in batches of bounded size. What nobody else wants is left to the rank that wants it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import xxhash

from holdfast._base.boxes import Box, cut, overlap, overlaps, volume
from holdfast._base.tuning import SHARED_PART_BYTES, SMALLEST_CUT, SMALLEST_SHARED_READ
from holdfast._formats.native.record import BLOCK_BYTES
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.source import ChunkPlace, Source

_WORTH_IT = 1.05
"""So many times as much must be read if every rank reads for itself, before they read for each other. Each reads a
digest block more than it needs, or about as much as a request costs, so that small tensors are rather read by one."""

_GAPS = 1.05
"""So many times as many elements as are wanted may be in a box that is read for several."""

ALIGNMENT = 16
"""Where the elements of a part of a batch may begin, so that every library takes them as they are."""


class Want(NamedTuple):
    """A box of a stored tensor that a rank has memory for."""

    tensor: int
    """The number of the tensor in the checkpoint."""
    box: Box
    is_dense: bool
    """Whether there is just one place for it, which takes the stored bytes as they are and is contiguous."""


def encode_wants(wants: Sequence[Want]) -> bytes:
    """What a rank wants, as a message.

    >>> encode_wants([Want(1, Box((7,), (3,)), True)]) == np.array([1, 1, 7, 3], "<i8").tobytes()
    True
    """
    numbers = [number for want in wants for number in (want.tensor, want.is_dense, *want.box.offsets, *want.box.sizes)]
    return np.array(numbers, "<i8").tobytes()


def decode_wants(message: bytes, source: Source) -> list[Want]:
    """The wants of a message, given the tensors that they are of."""
    dimensions = [len(ref.shape) for ref in numbered(source)]
    numbers: list[int] = np.frombuffer(message, "<i8").tolist()
    found, at = [], 0
    while at < len(numbers):
        tensor, is_dense = numbers[at : at + 2]
        ndim = dimensions[tensor]
        middle, end = at + 2 + ndim, at + 2 + 2 * ndim
        found.append(Want(tensor, Box(tuple(numbers[at + 2 : middle]), tuple(numbers[middle:end])), bool(is_dense)))
        at = end
    return found


def numbered(source: Source) -> list[TensorRef]:
    """All tensors of a checkpoint, in an order that is the same on all ranks."""
    return [source.tensors[key] for key in sorted(source.tensors)]


class Piece(NamedTuple):
    """A box that some ranks want, of a larger one that each of them has memory for."""

    want: Box
    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """A stored box that several ranks want, or parts of it."""

    tensor: int
    box: Box
    itemsize: int
    pieces: tuple[Piece, ...]
    place: tuple[str, int]
    """The file, and about where in it."""
    readers: tuple[int, ...]
    """Who may read it."""
    is_whole: bool = False
    """Whether it must be read at once, to be compared with its digest. If it is more than goes into a batch, the reader
    has memory for it."""

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return volume(self.box.sizes) * self.itemsize

    def part(self, box: Box) -> Unit:
        """What of it is in a box."""
        pieces = []
        for piece in self.pieces:
            common = overlap(*box, *piece.box)
            if common is not None:
                pieces.append(Piece(piece.want, Box(*common), piece.ranks))
        return Unit(self.tensor, box, self.itemsize, tuple(pieces), self.place, self.readers)

    def wanted_by(self, rank: int) -> Iterator[Piece]:
        """The pieces that a rank wants."""
        return (piece for piece in self.pieces if rank in piece.ranks)


class Span(NamedTuple):
    """A box of a unit in a message, and the pieces that are taken from it."""

    unit: int
    """Its position in the batch."""
    tensor: int
    box: Box
    begin: int
    end: int
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class SharedBatch:
    """Units that one rank reads together, and sends from there."""

    units: tuple[Unit, ...]
    reads: tuple[Unit, ...]
    """What is read before: mostly the same."""
    whole: Unit | None = None
    """What it is a part of, if that was read at once to where its reader wants it."""

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
    def receivers(self) -> Sequence[int]:
        """The ranks that want something of it."""
        return sorted({rank for unit in self.units for piece in unit.pieces for rank in piece.ranks})

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

    @property
    def is_empty(self) -> bool:
        """Whether nobody reads anything for another one."""
        return not self.batches

    def digest(self, terms: str) -> bytes:
        """16 bytes that are the same for ranks with the same plan and the same terms."""
        hashed = xxhash.xxh3_128(terms.encode())
        for reader, batches in self.batches.items():
            for batch in batches:
                hashed.update(repr((reader, batch.units, batch.reads == batch.units)).encode())
        return hashed.digest()


def plan_shared_reads(
    source: Source, wants: Mapping[tuple[int, ...], Sequence[Want]], rank: int, part: int = SHARED_PART_BYTES
) -> SharedReads:
    """The plan of all ranks, which each of them computes alike, with what is left to this ``rank``.

    ``wants`` has what ranks want, by the ranks that want just that. ``part`` is the most that a batch has.
    """
    finder = _UnitFinder(source, wants, rank, part)
    runs = _assigned(finder.units, finder.loads)
    batches = {reader: _batches(runs[reader], part) for reader in sorted(runs) if runs[reader]}
    return SharedReads(batches, finder.alone)


class _Holders(NamedTuple):
    ranks: tuple[int, ...]
    dense: frozenset[int]
    """Those of them for which it is a single contiguous place."""


class _UnitFinder:
    """Finds out what is worth being read for others."""

    def __init__(self, source: Source, wants: Mapping[tuple[int, ...], Sequence[Want]], rank: int, part: int) -> None:
        self._source = source
        self._rank = rank
        self._part = part
        self.units: list[Unit] = []
        self.loads: dict[int, int] = {rank: 0 for ranks in wants for rank in ranks}
        """How many bytes each rank reads for itself alone."""
        self.alone: dict[tuple[int, Box], list[Box]] = {}
        refs = numbered(source)
        for tensor, boxes in sorted(_holders(wants).items()):
            ref = refs[tensor]
            self._find(tensor, ref.key, ref.dtype.itemsize, ref.shape, boxes)

    def _find(
        self, tensor: int, key: str, itemsize: int, shape: Sequence[int], holders: Mapping[Box, _Holders]
    ) -> None:
        boxes = sorted(holders)
        everyone = {rank for box in boxes for rank in holders[box].ranks}
        chunks = [] if len(everyone) == 1 else [*self._source.chunk_places(key)]
        if sum(volume(chunk.sizes) for chunk in chunks) != volume(shape):  # nothing to share, or stored in odd ways
            for box in boxes:
                self._leave(holders[box].ranks, volume(box.sizes) * itemsize)
            return
        met: dict[int, list[tuple[Box, Box]]] = defaultdict(list)
        for found in overlaps(chunks, boxes):
            met[found.target].append((boxes[found.source], Box(found.start, found.lengths)))
        own = {box: list[Box]() for box in boxes if self._rank in holders[box].ranks}
        is_shared = set[Box]()
        for number in sorted(met):
            chunk = chunks[number]
            pieces = [Piece(want, box, holders[want].ranks) for want, box in met[number]]
            units = self._units_of(tensor, itemsize, chunk, pieces, holders)
            shared = {(piece.want, piece.box) for unit in units for piece in unit.pieces}
            self.units += units
            for piece in pieces:
                if (piece.want, piece.box) in shared:
                    is_shared.add(piece.want)
                else:
                    self._leave(piece.ranks, volume(piece.box.sizes) * itemsize)
                    if piece.want in own:
                        own[piece.want].append(piece.box)
        self.alone.update({(tensor, box): left for box, left in own.items() if box in is_shared})

    def _leave(self, ranks: Iterable[int], nbytes: int) -> None:
        for rank in ranks:
            self.loads[rank] += nbytes

    def _units_of(
        self,
        tensor: int,
        itemsize: int,
        chunk: ChunkPlace,
        pieces: Sequence[Piece],
        holders: Mapping[Box, _Holders],
    ) -> list[Unit]:
        """The parts of a chunk that are read for several ranks; none if each reads what it needs."""
        ranks = tuple(sorted({rank for piece in pieces for rank in piece.ranks}))
        if len(ranks) == 1:
            return []
        distinct = sum(volume(box.sizes) for box in {piece.box for piece in pieces})
        bounds = _bounds([piece.box for piece in pieces])
        if volume(bounds.sizes) > _GAPS * distinct:
            by_box: dict[Box, list[Piece]] = defaultdict(list)
            for piece in pieces:
                by_box[piece.box].append(piece)
            groups = [
                (box, same) for box, same in by_box.items() if len({r for piece in same for r in piece.ranks}) > 1
            ]
        else:
            direct = sum((_span(piece.box, chunk) * itemsize + BLOCK_BYTES) * len(piece.ranks) for piece in pieces)
            is_worth_it = direct > _WORTH_IT * volume(bounds.sizes) * itemsize
            groups = [(bounds, list(pieces))] if is_worth_it else []
        found = []
        for box, group in groups:
            readers = tuple(sorted({rank for piece in group for rank in piece.ranks}))
            is_whole = not self._source.checks_parts and tuple(box) == (chunk.offsets, chunk.sizes)
            if is_whole and volume(box.sizes) * itemsize > self._part:
                readers = _dense_readers(box, group, holders)
                if not readers:
                    continue
            place = chunk.file, chunk.begin or 0
            found.append(Unit(tensor, box, itemsize, tuple(group), place, readers, is_whole))
        return found


def _holders(wants: Mapping[tuple[int, ...], Sequence[Want]]) -> dict[int, dict[Box, _Holders]]:
    """For every tensor, the boxes that are wanted of it, and who wants them."""
    found: dict[int, dict[Box, _Holders]] = defaultdict(dict)
    for ranks, wanted in wants.items():
        for tensor, box, is_dense in wanted:
            dense = frozenset(ranks) if is_dense else frozenset()
            before = found[tensor].get(box)
            if before is not None:
                dense |= before.dense
            found[tensor][box] = _Holders(ranks if before is None else tuple(sorted({*before.ranks, *ranks})), dense)
    return found


def _bounds(boxes: Sequence[Box]) -> Box:
    """The smallest box around some boxes.

    >>> _bounds([Box((0, 2), (1, 2)), Box((1, 3), (1, 2))])
    Box(offsets=(0, 2), sizes=(2, 3))
    """
    if len(boxes) == 1:
        return boxes[0]
    low = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
    high = map(max, zip(*([a + n for a, n in zip(*box, strict=True)] for box in boxes), strict=True))
    return Box(low, tuple(end - begin for begin, end in zip(low, high, strict=True)))


def _span(box: Box, chunk: ChunkPlace) -> int:
    """How many elements of a chunk there are from the first to the last one of a box: about what is read for it.

    >>> _span(Box((0, 1), (2, 2)), ChunkPlace((0, 0), (2, 10), "file", 0, 20, None))
    12
    """
    first = last = 0
    for at, size, origin, whole in zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True):
        first = first * whole + at - origin
        last = last * whole + at - origin + size - 1
    return last - first + 1


def _dense_readers(box: Box, pieces: Iterable[Piece], holders: Mapping[Box, _Holders]) -> tuple[int, ...]:
    """The ranks that can take a box where they have memory for it, in one piece."""
    return tuple(
        sorted(
            {
                rank
                for piece in pieces
                if piece.box == box and _span(box, ChunkPlace(*piece.want, "", 0, 0, None)) == volume(box.sizes)
                for rank in holders[piece.want].dense
            }
        )
    )


# Who reads what: neighbours in the files stay together, and all ranks read about as much, what they read for themselves
# alone included.


def _assigned(units: Sequence[Unit], loads: dict[int, int]) -> dict[int, list[Unit]]:
    """What each rank reads for several."""
    runs: dict[int, list[Unit]] = defaultdict(list)
    by_readers: dict[tuple[int, ...], list[Unit]] = defaultdict(list)
    for unit in sorted(units, key=lambda unit: (unit.place, unit.tensor, unit.box)):
        if unit.is_whole:
            reader = min(unit.readers, key=lambda rank: (loads[rank], rank))
            runs[reader].append(unit)
            loads[reader] += unit.nbytes
        else:
            by_readers[unit.readers].append(unit)
    few = [readers for readers, group in by_readers.items() if sum(u.nbytes for u in group) < SMALLEST_SHARED_READ]
    for readers, group in _joined_groups({readers: by_readers.pop(readers) for readers in few}):
        reader = min(readers, key=lambda rank: (loads[rank], rank))
        runs[reader] += group
        loads[reader] += sum(unit.nbytes for unit in group)
    for readers, group in sorted(by_readers.items(), key=lambda item: (len(item[0]), item[0])):
        quotas = _quotas(sum(unit.nbytes for unit in group), {rank: loads[rank] for rank in readers})
        for reader, part in _dealt_out(group, quotas):
            runs[reader].append(part)
            loads[reader] += part.nbytes
    return {reader: sorted(run, key=lambda unit: (unit.place, unit.tensor, unit.box)) for reader, run in runs.items()}


def _joined_groups(groups: Mapping[tuple[int, ...], Sequence[Unit]]) -> Iterator[tuple[tuple[int, ...], list[Unit]]]:
    """Small units that ranks in common may read, together: each rank would read a digest block more than it needs."""
    readers: set[int] = set()
    together: list[Unit] = []
    for unit in sorted(chain(*groups.values()), key=lambda unit: (unit.place, unit.tensor, unit.box)):
        common = readers.intersection(unit.readers)
        if together and (not common or sum(each.nbytes for each in together) >= SMALLEST_SHARED_READ):
            yield tuple(sorted(readers)), together
            common, together = set(), []
        readers = common or set(unit.readers)
        together.append(unit)
    if together:
        yield tuple(sorted(readers)), together


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


def _dealt_out(units: Iterable[Unit], quotas: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Unit]]:
    """Give each rank as many bytes as are its quota, in the order of the units, cutting large ones along their rows."""
    ranks = iter(quotas)
    reader, left = next(ranks)
    for unit in units:
        rest: Unit | None = unit
        while rest is not None:
            if left <= 0:
                reader, left = next(ranks, (reader, rest.nbytes))
            head, rest = _cut_off(rest, left)
            left -= head.nbytes
            yield reader, head
            if rest is not None:
                left = 0


def _cut_off(unit: Unit, nbytes: int) -> tuple[Unit, Unit | None]:
    """About so many bytes of a unit, and the rest, unless one of the two would not be worth a read of its own."""
    dim = next((dim for dim, size in enumerate(unit.box.sizes) if size > 1), None)
    if unit.nbytes < 2 * SMALLEST_CUT or dim is None or nbytes >= unit.nbytes - SMALLEST_CUT:
        return unit, None
    offsets, sizes = unit.box
    row = unit.nbytes // sizes[dim]
    rows = max(nbytes, SMALLEST_CUT) // row
    if not 0 < rows < sizes[dim]:
        return unit, None
    head = Box(offsets, (*sizes[:dim], rows, *sizes[dim + 1 :]))
    tail = Box(
        (*offsets[:dim], offsets[dim] + rows, *offsets[dim + 1 :]), (*sizes[:dim], sizes[dim] - rows, *sizes[dim + 1 :])
    )
    return unit.part(head), unit.part(tail)


def _batches(run: Sequence[Unit], part: int) -> list[SharedBatch]:
    """What a rank reads for others, put together and cut so that no batch has more than ``part`` bytes."""
    found: list[SharedBatch] = []
    together: list[Unit] = []
    size = 0

    def close() -> None:
        nonlocal size
        if together:
            found.append(SharedBatch(tuple(together), tuple(together)))
            together.clear()
            size = 0

    for unit in run:
        if unit.is_whole and unit.nbytes > part:
            close()
            parts = [unit.part(box) for box in cut(unit.box, max(1, part // unit.itemsize))]
            found += [SharedBatch((each,), () if number else (unit,), unit) for number, each in enumerate(parts)]
            continue
        for box in cut(unit.box, max(1, part // unit.itemsize)):
            piece = unit if box == unit.box else unit.part(box)
            if not piece.pieces:
                continue
            if size + piece.nbytes > part:
                close()
            together.append(piece)
            size = aligned(size + piece.nbytes)
    close()
    return found
