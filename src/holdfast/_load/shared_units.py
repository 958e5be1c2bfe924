"""Which parts of stored chunks are worth being read for several ranks, computed in columns for all ranks at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import xxhash

from holdfast._base.boxes import Box, meeting_pairs, volume
from holdfast._formats.native.record import BLOCK_BYTES
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.source import ChunkPlace, Source
from holdfast._load.shared_wants import BoxColumns, Flags, Numbers, RankSets, WantTable, is_new, numbered

_WORTH_IT = 1.05
"""So many times as much must be read if every rank reads for itself, before they read for each other. Each reads a
digest block more than it needs, or about as much as a request costs, so that small tensors are rather read by one."""

_GAPS = 1.05
"""So many times as many elements as are wanted may be in a box that is read for several."""


class Piece(NamedTuple):
    """A box that some ranks want, of a larger one that each of them has memory for."""

    want: Box
    box: Box
    ranks: frozenset[int]


@dataclass(frozen=True)
class Unit:
    """A stored box that several ranks want, or parts of it."""

    tensor: int
    box: Box
    itemsize: int
    pieces: Sequence[Piece]

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return volume(self.box.sizes) * self.itemsize

    def wanted_by(self, rank: int) -> list[Piece]:
        """The pieces that a rank wants."""
        return [piece for piece in self.pieces if rank in piece.ranks]


@dataclass(frozen=True)
class _Pieces:
    """What is wanted of chunks, in the order of chunks and boxes."""

    chunk: Numbers
    want: Numbers
    boxes: BoxColumns
    holders: Numbers

    @classmethod
    def of(cls, chunks: BoxColumns, chunk_tensor: Numbers, wants: WantTable, considered: Flags) -> _Pieces:
        """Where chunks and those wants that are considered overlap."""
        rows = np.flatnonzero(considered)
        wanted, tensor = wants.boxes.chosen(rows), wants.tensor[rows]
        chunk, want = meeting_pairs(
            np.vstack([chunk_tensor, chunks.low]),
            np.vstack([chunk_tensor + 1, chunks.high]),
            np.vstack([tensor, wanted.low]),
            np.vstack([tensor + 1, wanted.high]),
        )
        low = np.maximum(chunks.low[:, chunk], wanted.low[:, want])
        high = np.minimum(chunks.high[:, chunk], wanted.high[:, want])
        order = np.lexsort((want, *high[::-1], *low[::-1], chunk))
        want = rows[want[order]]
        return cls(chunk[order], want, BoxColumns(low[:, order], high[:, order]), wants.holders[want])


class UnitTable:
    """The units of a plan, in the order of the files, and what each rank reads for itself alone."""

    def __init__(self, source: Source, messages: Mapping[tuple[int, ...], bytes], rank: int, part: int) -> None:
        """``messages`` are the wants of ranks, by the ranks that want just that."""
        self._refs = numbered(source)
        self._ndim = max([1, *(len(ref.shape) for ref in self._refs)])
        self._itemsizes = np.array([ref.dtype.itemsize for ref in self._refs] or [1], np.int64)
        self.sets = RankSets(list(messages))
        self._wants = WantTable.joined(messages, self.sets, self._ndim)
        self.loads = {rank: 0 for ranks in messages for rank in ranks}
        """How many bytes each rank reads for itself alone."""
        self._frozen: dict[int, frozenset[int]] = {}
        self._find(source, rank, part)

    def __len__(self) -> int:
        return len(self.tensor)

    def digest(self) -> bytes:
        """16 bytes that are the same for the same units, wanted by the same ranks."""
        hashed = xxhash.xxh3_128(repr(self.sets.ranks).encode())
        pieces = self._pieces
        columns = (self.tensor, self.is_whole, self.readers, self.first_piece, self.last_piece, *self.boxes)
        for column in (*columns, pieces.want, pieces.holders, *pieces.boxes, *self._wants.boxes):
            hashed.update(np.ascontiguousarray(column).tobytes())
        return hashed.digest()

    def box(self, number: int) -> Box:
        """The box of a unit."""
        return self.boxes.box(number, len(self._refs[self.tensor[number]].shape))

    def unit(self, number: int, box: Box | None = None) -> Unit:
        """One of them, or what of it is in a box, to be read."""
        tensor = int(self.tensor[number])
        ndim = len(self._refs[tensor].shape)
        rows = slice(self.first_piece[number], self.last_piece[number])
        want, holders = self._pieces.want[rows], self._pieces.holders[rows]
        low, high = self._pieces.boxes.low[:ndim, rows], self._pieces.boxes.high[:ndim, rows]
        if box is not None:
            begin = np.array(box.offsets, np.int64)[:, np.newaxis]
            end = begin + np.array(box.sizes, np.int64)[:, np.newaxis]
            low, high = np.maximum(low, begin), np.minimum(high, end)
            inside = (low < high).all(axis=0)
            want, holders, low, high = want[inside], holders[inside], low[:, inside], high[:, inside]
        wanted = self._wants.boxes
        places = zip(
            (wanted.low[:ndim, want]).T.tolist(),
            (wanted.high[:ndim, want] - wanted.low[:ndim, want]).T.tolist(),
            low.T.tolist(),
            (high - low).T.tolist(),
            map(self._ranks, holders.tolist()),
            strict=True,
        )
        pieces = [
            Piece(Box(tuple(begins), tuple(whole)), Box(tuple(offsets), tuple(sizes)), ranks)
            for begins, whole, offsets, sizes, ranks in places
        ]
        return Unit(tensor, self.box(number) if box is None else box, int(self._itemsizes[tensor]), pieces)

    def receivers(self, number: int, box: Box | None = None) -> int | None:
        """Which set of ranks wants something of a unit, or of a box of it; None if nobody does."""
        rows = slice(self.first_piece[number], self.last_piece[number])
        holders = self._pieces.holders[rows]
        if box is not None:
            ndim = len(box.offsets)
            low = np.array(box.offsets, np.int64)[:, np.newaxis]
            high = low + np.array(box.sizes, np.int64)[:, np.newaxis]
            boxes = self._pieces.boxes
            inside = (boxes.low[:ndim, rows] < high) & (low < boxes.high[:ndim, rows])
            holders = holders[inside.all(axis=0)]
        return self.sets.union(holders) if len(holders) else None

    def _ranks(self, number: int) -> frozenset[int]:
        if number not in self._frozen:
            self._frozen[number] = frozenset(self.sets.ranks[number])
        return self._frozen[number]

    def _find(self, source: Source, rank: int, part: int) -> None:
        considered, places = self._chunks(source)
        chunk_tensor = np.array([tensor for tensor, _ in places], np.int64)
        chunks = BoxColumns.of([c.offsets for _, c in places], [c.sizes for _, c in places], self._ndim)
        pieces = self._pieces = _Pieces.of(chunks, chunk_tensor, self._wants, considered)
        first = np.flatnonzero(self._group_starts(pieces))
        last = np.append(first, len(pieces.chunk))[1:]
        chunk = pieces.chunk[first]
        bounds = _bounds(pieces.boxes, first)
        itemsize = self._itemsizes[chunk_tensor[chunk]]
        is_chosen = self._is_chosen(pieces, chunks, chunk_tensor, first, bounds)
        is_whole = np.zeros(len(first), np.bool_)
        if not source.checks_parts:
            is_whole = (bounds.low == chunks.low[:, chunk]).all(axis=0) & (bounds.high == chunks.high[:, chunk]).all(
                axis=0
            )
        readers = self._unions(pieces.holders, first, last)
        for group in np.flatnonzero(is_chosen & is_whole & (bounds.volumes * itemsize > part)).tolist():
            dense = self._dense_readers(pieces, first[group], last[group], bounds, group)
            is_chosen[group] = bool(dense)
            readers[group] = self.sets.number(dense)
        self._leave(pieces, np.repeat(is_chosen, last - first), considered, chunk_tensor, rank)
        names = {name: number for number, name in enumerate(sorted({place.file for _, place in places}))}
        file = np.array([names[place.file] for _, place in places], np.int64)[chunk]
        begin = np.array([place.begin or 0 for _, place in places], np.int64)[chunk]
        order = np.lexsort((*bounds.high[::-1], *bounds.low[::-1], chunk_tensor[chunk], begin, file))
        order = order[is_chosen[order]]
        self.tensor, self.boxes = chunk_tensor[chunk][order], bounds.chosen(order)
        self.readers, self.is_whole = readers[order], is_whole[order]
        """The set of ranks that may read each, and whether it must be read at once, to be compared with its digest. If
        that is more than goes into a batch, these ranks have memory for it."""
        self.first_piece, self.last_piece = first[order], last[order]
        self.nbytes = self.boxes.volumes * self._itemsizes[self.tensor] if len(order) else np.zeros(0, np.int64)

    def _chunks(self, source: Source) -> tuple[Flags, list[tuple[int, ChunkPlace]]]:
        """Which wants are of tensors that several ranks want and that are stored as chunks that add up, and those."""
        wants, sizes = self._wants, self.sets.sizes()
        places: list[tuple[int, ChunkPlace]] = []
        considered = np.zeros(len(wants.tensor), np.bool_)
        starts = np.flatnonzero(is_new(wants.tensor))
        for start, end in pairwise([*starts.tolist(), len(wants.tensor)]):
            holders = wants.holders[start:end]
            if (holders == holders[0]).all() and sizes[holders[0]] == 1:
                continue
            tensor = int(wants.tensor[start])
            ref: TensorRef = self._refs[tensor]
            found = [chunk for chunk in source.chunk_places(ref.key) if 0 not in chunk.sizes]
            if sum(volume(chunk.sizes) for chunk in found) == volume(ref.shape):
                considered[start:end] = True
                places += [(tensor, chunk) for chunk in found]
        return considered, places

    def _group_starts(self, pieces: _Pieces) -> Flags:
        """Where other pieces begin to be read together: all of a chunk, or those with one box if gaps are large."""
        of_chunk = is_new(pieces.chunk)
        of_box = is_new(pieces.chunk, *pieces.boxes.low, *pieces.boxes.high)
        starts = np.flatnonzero(of_chunk)
        if not len(starts):
            return of_chunk
        distinct = np.add.reduceat(pieces.boxes.volumes * of_box, starts)
        has_gaps = _bounds(pieces.boxes, starts).volumes > _GAPS * distinct
        return of_chunk | (of_box & np.repeat(has_gaps, np.diff(np.append(starts, len(of_chunk)))))

    def _is_chosen(
        self, pieces: _Pieces, chunks: BoxColumns, chunk_tensor: Numbers, first: Numbers, bounds: BoxColumns
    ) -> Flags:
        """Which groups of pieces are read for several ranks."""
        if not len(first):
            return np.zeros(0, np.bool_)
        sizes = self.sets.sizes()
        low, high = np.minimum.reduceat(pieces.holders, first), np.maximum.reduceat(pieces.holders, first)
        is_of_several = (low != high) | (sizes[low] > 1)
        of_group = pieces.chunk[first]
        has_gaps = np.bincount(of_group, minlength=len(chunk_tensor))[of_group] > 1
        itemsize = self._itemsizes[chunk_tensor[pieces.chunk]]
        spans = _spans(pieces.boxes, chunks.chosen(pieces.chunk))
        direct = np.add.reduceat((spans * itemsize + BLOCK_BYTES) * sizes[pieces.holders], first)
        is_worth_it = direct > _WORTH_IT * (bounds.volumes * self._itemsizes[chunk_tensor[of_group]])
        chosen: Flags = is_of_several & (has_gaps | is_worth_it)
        return chosen

    def _unions(self, holders: Numbers, first: Numbers, last: Numbers) -> Numbers:
        found = holders[first] if len(first) else np.zeros(0, np.int64)
        if len(first):
            mixed = np.flatnonzero(np.minimum.reduceat(holders, first) != np.maximum.reduceat(holders, first))
            for group in mixed.tolist():
                found[group] = self.sets.union(holders[first[group] : last[group]])
        return found

    def _dense_readers(self, pieces: _Pieces, first: int, last: int, bounds: BoxColumns, group: int) -> tuple[int, ...]:
        """The ranks that can take a box where they have memory for it, in one piece."""
        found: set[int] = set()
        box = bounds.chosen(np.array([group]))
        for row in range(first, last):
            piece, want = pieces.boxes.chosen(np.array([row])), int(pieces.want[row])
            is_all = bool((piece.low == box.low).all() and (piece.high == box.high).all())
            if is_all and _spans(box, self._wants.boxes.chosen(np.array([want])))[0] == box.volumes[0]:
                found |= self._wants.dense_ranks(want)
        return tuple(sorted(found))

    def _leave(self, pieces: _Pieces, is_shared: Flags, considered: Flags, chunk_tensor: Numbers, rank: int) -> None:
        """Note what is left to the ranks, and to this one of those wants of which not all is."""
        wants = self._wants
        alone = np.zeros(len(self.sets.ranks), np.int64)
        nbytes = pieces.boxes.volumes * self._itemsizes[chunk_tensor[pieces.chunk]]
        np.add.at(alone, pieces.holders[~is_shared], nbytes[~is_shared])
        others = wants.boxes.volumes * self._itemsizes[wants.tensor]
        np.add.at(alone, wants.holders[~considered], others[~considered])
        for number in np.flatnonzero(alone).tolist():
            for each in self.sets.ranks[number]:
                self.loads[each] += int(alone[number])
        own = np.array([rank in ranks for ranks in self.sets.ranks], np.bool_)[pieces.holders]
        self.alone: dict[tuple[int, Box], list[Box]] = {}
        """What is left to this rank, of those of its wants of which not all is: tensor and box, and parts."""
        keys: dict[int, list[Box]] = {}
        for want in np.unique(pieces.want[own & is_shared]).tolist():
            tensor = int(wants.tensor[want])
            keys[want] = self.alone[tensor, wants.boxes.box(want, len(self._refs[tensor].shape))] = []
        left = np.flatnonzero(own & ~is_shared)
        for row in left[np.isin(pieces.want[left], list(keys))].tolist():
            want = int(pieces.want[row])
            keys[want].append(pieces.boxes.box(row, len(self._refs[wants.tensor[want]].shape)))


def _bounds(boxes: BoxColumns, starts: Numbers) -> BoxColumns:
    """The smallest boxes around groups of boxes.

    >>> boxes = BoxColumns.of([(0, 2), (1, 3)], [(1, 2), (1, 2)], 2)
    >>> _bounds(boxes, np.array([0])).box(0, 2)
    Box(offsets=(0, 2), sizes=(2, 3))
    """
    if not len(starts):
        return boxes.chosen(starts)
    return BoxColumns(np.minimum.reduceat(boxes.low, starts, axis=1), np.maximum.reduceat(boxes.high, starts, axis=1))


def _spans(boxes: BoxColumns, around: BoxColumns) -> Numbers:
    """How many elements there are from the first to the last one of boxes, in larger ones: about what is read for them.

    >>> chunk = BoxColumns.of([(0, 0)], [(2, 10)], 2)
    >>> _spans(BoxColumns.of([(0, 1)], [(2, 2)], 2), chunk).tolist()
    [12]
    """
    first = np.zeros(boxes.low.shape[1], np.int64)
    last = np.zeros_like(first)
    for low, high, origin, end in zip(*boxes, *around, strict=True):
        first = first * (end - origin) + low - origin
        last = last * (end - origin) + high - 1 - origin
    found: Numbers = last - first + 1
    return found
