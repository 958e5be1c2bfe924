"""Integer geometry: which boxes meet, which collide, which leave a tensor, and what they leave uncovered.

Pure functions over offsets and sizes that know no tensors, ranks or files. Whatever has ``offsets`` and ``sizes``
is a box here. A box holds the cells with ``offset <= x < offset + size`` in every dimension: one of size zero in
some dimension holds nothing, and a 0-d box holds exactly one cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

_Ints: TypeAlias = npt.NDArray[np.int64]

# Up to this many pairs it takes less time to look at each of them than to set up arrays.
_FEW_PAIRS = 300
_FAN_OUT = 8
# Bounds the memory of a search among many boxes: rows looked at together, and pairs they may lead to.
_BATCH_ROWS = 1 << 14
_BATCH_PAIRS = 1 << 22


class BoxLike(Protocol):
    """Anything that occupies a box: a ``Box``, a piece of a layout, a chunk of a checkpoint."""

    @property
    def offsets(self) -> Sequence[int]: ...

    @property
    def sizes(self) -> Sequence[int]: ...


class Box(NamedTuple):
    """An axis-aligned box of cells."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Overlap(NamedTuple):
    """The cells that a target and a source share, with the positions of the two in their lists."""

    target: int
    source: int
    start: tuple[int, ...]
    lengths: tuple[int, ...]


def volume(sizes: Sequence[int]) -> int:
    """The number of cells of a box with these sizes."""
    return math.prod(sizes)


def place_of(offsets: Sequence[int], sizes: Sequence[int], origin: Sequence[int] | None = None) -> tuple[Any, ...]:
    """The index of a box in an array or tensor whose first cell is at ``origin``.

    >>> np.arange(12).reshape(3, 4)[place_of((1, 2), (2, 1))].tolist()
    [[6], [10]]
    >>> place_of((11,), (2,), origin=(10,))
    (slice(1, 3, None), Ellipsis)
    """
    starts = offsets if origin is None else [at - first for at, first in zip(offsets, origin, strict=True)]
    # Without the ellipsis an array without dimensions would become a number.
    return *(slice(at, at + size) for at, size in zip(starts, sizes, strict=True)), ...


def cut(box: BoxLike, most: int) -> Iterator[Box]:
    """Parts of up to ``most`` cells (but at least one), in row-major order, cut along the first dimensions.

    >>> list(cut(Box((4, 0), (3, 2)), 4))
    [Box(offsets=(4, 0), sizes=(2, 2)), Box(offsets=(6, 0), sizes=(1, 2))]
    """
    offsets, sizes = tuple(box.offsets), tuple(box.sizes)
    count = volume(sizes)
    if count <= max(1, most):
        yield Box(offsets, sizes)
        return
    dim = next(dim for dim, size in enumerate(sizes) if size > 1)
    step = max(1, most // (count // sizes[dim]))
    for start in range(0, sizes[dim], step):
        length = min(step, sizes[dim] - start)
        part = Box(
            (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]), (*sizes[:dim], length, *sizes[dim + 1 :])
        )
        yield from cut(part, most)


def overlap(
    a_offsets: Sequence[int], a_sizes: Sequence[int], b_offsets: Sequence[int], b_sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Where the common cells of two boxes start and how far they reach, or None if there are none.

    >>> overlap((0, 0), (4, 4), (2, 3), (4, 4))
    ((2, 3), (2, 1))
    """
    start, lengths = [], []
    for a, a_size, b, b_size in zip(a_offsets, a_sizes, b_offsets, b_sizes, strict=True):
        first = a if a > b else b
        length = min(a + a_size, b + b_size) - first
        if length <= 0:
            return None
        start.append(first)
        lengths.append(length)
    return tuple(start), tuple(lengths)


def contains(outer: BoxLike, inner: BoxLike) -> bool:
    """Whether all cells of a box are in another one of as many dimensions.

    >>> contains(Box((0, 2), (4, 4)), Box((1, 2), (3, 1)))
    True
    """
    sides = zip(outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True)
    return all(first <= start and start + length <= first + size for first, size, start, length in sides)


def overlaps(targets: Sequence[BoxLike], sources: Sequence[BoxLike]) -> list[Overlap]:
    """Every pair of a target and a source that share cells, by target position, then by the source's offsets.

    The time grows with the number of pairs found, not with the number of pairs there could be.

    >>> overlaps([Box((1, 1), (2, 2))], [Box((0, 0), (2, 4)), Box((2, 0), (2, 1))])
    [Overlap(target=0, source=0, start=(1, 1), lengths=(1, 2))]
    """
    if len(targets) * len(sources) <= _FEW_PAIRS:
        return _overlaps_of_few(targets, sources)
    return _overlaps_of_many(targets, sources)


def first_overlap(boxes: Sequence[BoxLike]) -> tuple[int, int] | None:
    """The first two boxes that share cells, as positions ``i < j``; None if all boxes are disjoint.

    >>> first_overlap([Box((0,), (3,)), Box((3,), (3,)), Box((5,), (1,))])
    (1, 2)
    """
    low, high, positions = _edges(boxes)
    pair = _first_collision(low, high)
    return None if pair is None else (int(positions[pair[0]]), int(positions[pair[1]]))


def out_of_bounds(boxes: Sequence[BoxLike], shape: Sequence[int]) -> list[int]:
    """Positions of the boxes that are not inside a tensor of this shape, or have another number of dimensions.

    >>> out_of_bounds([Box((0,), (3,)), Box((3,), (3,))], (5,))
    [1]
    """
    ndim = len(shape)
    if any(len(box.offsets) != ndim or len(box.sizes) != ndim for box in boxes):
        return [i for i, box in enumerate(boxes) if not _is_inside(box, shape)]
    offsets, sizes = _columns(boxes, ndim)
    limits = np.array(shape, dtype=np.int64).reshape(ndim, 1)
    outside = (offsets < 0) | (sizes < 0) | (offsets + sizes > limits)
    return [int(i) for i in np.flatnonzero(outside.any(axis=0))]


def uncovered(target: BoxLike, pieces: Sequence[BoxLike]) -> Box | None:
    """A region of the target that no piece covers, None if all of it is covered. Pieces may overlap each other.

    >>> uncovered(Box((0, 0), (4, 4)), [Box((0, 0), (4, 2)), Box((2, 2), (2, 2))])
    Box(offsets=(0, 2), sizes=(2, 2))
    """
    if volume(target.sizes) == 0 or (len(pieces) > _FEW_PAIRS and _tile_exactly(pieces, target)):
        return None
    inside = []
    for piece in pieces:
        common = overlap(target.offsets, target.sizes, piece.offsets, piece.sizes)
        if common == (target.offsets, target.sizes):
            return None
        if common is not None:
            inside.append(_Span.of(*common))
    gap = _first_gap(_Span.of(target.offsets, target.sizes), inside, 0)
    if gap is None:
        return None
    return Box(tuple(first for first, _ in gap), tuple(last - first for first, last in gap))


# --- a few boxes: plain Python ---------------------------------------------------------------------------------


def _overlaps_of_few(targets: Sequence[BoxLike], sources: Sequence[BoxLike]) -> list[Overlap]:
    found: list[Overlap] = []
    for t, target in enumerate(targets):
        of_target = []
        for s, source in enumerate(sources):
            common = overlap(target.offsets, target.sizes, source.offsets, source.sizes)
            if common is not None:
                of_target.append(Overlap(t, s, *common))
        if len(of_target) > 1:
            of_target.sort(key=lambda o: (tuple(sources[o.source].offsets), o.source))
        found += of_target
    return found


def _is_inside(box: BoxLike, shape: Sequence[int]) -> bool:
    if not len(box.offsets) == len(box.sizes) == len(shape):
        return False
    sides = zip(box.offsets, box.sizes, shape, strict=True)
    return all(offset >= 0 and size >= 0 and offset + size <= limit for offset, size, limit in sides)


class _Span(NamedTuple):
    """A box by its edges."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    @classmethod
    def of(cls, offsets: Sequence[int], sizes: Sequence[int]) -> _Span:
        return cls(tuple(offsets), tuple(o + n for o, n in zip(offsets, sizes, strict=True)))


def _first_gap(target: _Span, pieces: list[_Span], dim: int) -> list[tuple[int, int]] | None:
    """The sides, from ``dim`` on, of a part of the target that none of the pieces reaches.

    Sweeps along ``dim`` from edge to edge. Between two edges the same pieces are present all the way, so what they
    leave open there is a question about the remaining dimensions.
    """
    if dim == len(target.low):
        return None if pieces else []
    upcoming = sorted(pieces, key=lambda piece: piece.low[dim], reverse=True)
    present: list[_Span] = []
    at = target.low[dim]
    while at < target.high[dim]:
        present = [piece for piece in present if piece.high[dim] > at]
        while upcoming and upcoming[-1].low[dim] <= at:
            present.append(upcoming.pop())
        until = min([target.high[dim], *(piece.high[dim] for piece in present)])
        if upcoming:
            until = min(until, upcoming[-1].low[dim])
        gap = _first_gap(target, present, dim + 1)
        if gap is not None:
            return [(at, until), *gap]
        at = until
    return None


# --- many boxes: arrays with one row per dimension and one column per box ---------------------------------------


def _columns(boxes: Sequence[BoxLike], ndim: int) -> tuple[_Ints, _Ints]:
    """The offsets and sizes of boxes that all have ``ndim`` dimensions."""
    count = len(boxes) * ndim
    offsets = np.fromiter(chain.from_iterable(box.offsets for box in boxes), np.int64, count)
    sizes = np.fromiter(chain.from_iterable(box.sizes for box in boxes), np.int64, count)
    return _transposed(offsets, ndim, len(boxes)), _transposed(sizes, ndim, len(boxes))


def _transposed(flat: _Ints, ndim: int, count: int) -> _Ints:
    return np.ascontiguousarray(flat.reshape(count, ndim).T)


def _edges(boxes: Sequence[BoxLike]) -> tuple[_Ints, _Ints, _Ints]:
    """Low and high edges of the boxes that hold any cells, and the positions of these boxes."""
    ndim = len(boxes[0].offsets) if boxes else 0
    if any(len(box.offsets) != ndim or len(box.sizes) != ndim for box in boxes):
        raise ValueError("the boxes of one tensor must have the same number of dimensions")
    if ndim == 0:  # one cell each: the same cell for all
        offsets, sizes = np.zeros((1, len(boxes)), np.int64), np.ones((1, len(boxes)), np.int64)
    else:
        offsets, sizes = _columns(boxes, ndim)
    positions = np.flatnonzero((sizes > 0).all(axis=0))
    low = offsets[:, positions]
    return low, low + sizes[:, positions], positions


def _tile_exactly(pieces: Sequence[BoxLike], target: BoxLike) -> bool:
    """Whether the pieces fill the target without overlapping in it. If not, they may still cover it."""
    low, high, _ = _edges(pieces)
    (target_low,), (target_high,) = (edge.T for edge in _edges([target])[:2])
    low, high = np.maximum(low, target_low[:, np.newaxis]), np.minimum(high, target_high[:, np.newaxis])
    inside = (low < high).all(axis=0)
    low, high = low[:, inside], high[:, inside]
    filled = int((high - low).prod(axis=0).sum())
    return filled == volume(target.sizes) and _first_collision(low, high) is None


def _first_collision(low: _Ints, high: _Ints) -> tuple[int, int] | None:
    """The first two boxes with common cells."""
    if low.shape[1] < 2:
        return None
    cells = _grid_cells(low, high)
    return _first_meeting(low, high) if cells is None else _first_repeat(cells)


def _grid_cells(low: _Ints, high: _Ints) -> _Ints | None:
    """Per box its row, column, … if the boxes are cells of one grid, which all shards of a DTensor are.

    Then two boxes share elements exactly if they are the same cell of the grid. None if there is no such grid.
    """
    cells = np.empty_like(low)
    for dim in range(len(low)):
        starts, first, cells[dim] = np.unique(low[dim], return_index=True, return_inverse=True)
        ends = high[dim][first]
        if (ends[cells[dim]] != high[dim]).any() or (ends[:-1] > starts[1:]).any():
            return None
    return cells


def _first_repeat(cells: _Ints) -> tuple[int, int] | None:
    """The first two columns that are equal."""
    order = np.lexsort(tuple(cells))  # stable: equal columns stay in their order
    same = (cells[:, order[1:]] == cells[:, order[:-1]]).all(axis=0)
    repeats = np.flatnonzero(same)
    if len(repeats) == 0:
        return None
    first = repeats[np.argmin(order[repeats])]
    return int(order[first]), int(order[first + 1])


def _first_meeting(low: _Ints, high: _Ints) -> tuple[int, int] | None:
    """The first two boxes that meet, in any order."""
    for rows, boxes in _Tree(low, high).meetings(low, high):
        later = boxes > rows
        rows, boxes = rows[later], boxes[later]
        if len(rows):
            first = rows.min()
            return int(first), int(boxes[rows == first].min())
    return None


def meeting_pairs(t_low: _Ints, t_high: _Ints, s_low: _Ints, s_high: _Ints) -> tuple[_Ints, _Ints]:
    """Which targets and sources share cells, of boxes in columns with a row for each dimension: positions of both.

    >>> from_0, to_8 = np.array([[0, 4]]), np.array([[4, 8]])
    >>> [positions.tolist() for positions in meeting_pairs(from_0, to_8, np.array([[3]]), np.array([[5]]))]
    [[0, 1], [0, 0]]
    """
    if not t_low.shape[1] or not s_low.shape[1]:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    found = list(_Tree(s_low, s_high).meetings(t_low, t_high))
    targets, sources = (np.concatenate(column) for column in zip(*found, strict=True))
    return targets, sources


def _overlaps_of_many(targets: Sequence[BoxLike], sources: Sequence[BoxLike]) -> list[Overlap]:
    t_low, t_high, t_positions = _edges(targets)
    s_low, s_high, s_positions = _edges(sources)
    if len(t_low) != len(s_low):
        raise ValueError("targets and sources must have the same number of dimensions")
    if not len(t_positions) or not len(s_positions):
        return []
    found = list(_Tree(s_low, s_high).meetings(t_low, t_high))
    t, s = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.lexsort((s, *s_low[::-1, s], t))
    t, s = t[order], s[order]
    start = np.maximum(t_low[:, t], s_low[:, s])
    lengths = np.minimum(t_high[:, t], s_high[:, s]) - start
    ndim = len(targets[0].offsets)  # a 0-d box has a row in the arrays, but no coordinates
    columns: tuple[list[Any], ...] = (
        t_positions[t].tolist(),
        s_positions[s].tolist(),
        list(zip(*start.tolist(), strict=True)) if ndim else [()] * len(t),
        list(zip(*lengths.tolist(), strict=True)) if ndim else [()] * len(t),
    )
    return list(map(Overlap, *columns))


class _Tree:
    """Boxes in groups, groups in larger groups, each with its bounds: to find what meets a box without seeing all."""

    def __init__(self, low: _Ints, high: _Ints) -> None:
        self.order = _neighbourly_order(low)
        self.levels = [(low[:, self.order], high[:, self.order])]
        while (count := self.levels[-1][0].shape[1]) > _FAN_OUT:
            low, high = self.levels[-1]
            firsts = np.arange(0, count, _FAN_OUT)
            groups = np.minimum.reduceat(low, firsts, axis=1), np.maximum.reduceat(high, firsts, axis=1)
            self.levels.append(groups)

    def meetings(self, low: _Ints, high: _Ints) -> Iterator[tuple[_Ints, _Ints]]:
        """Which of the given rows meets which box of the tree: parallel arrays, in batches of ascending rows."""
        count = low.shape[1]
        batches = [(first, min(first + _BATCH_ROWS, count)) for first in range(0, count, _BATCH_ROWS)][::-1]
        while batches:
            first, last = batches.pop()
            found = self._descend(low, high, first, last)
            if found is None:
                middle = (first + last) // 2
                batches += [(middle, last), (first, middle)]
            else:
                yield found

    def _descend(self, low: _Ints, high: _Ints, first: int, last: int) -> tuple[_Ints, _Ints] | None:
        """Follow rows ``first`` to ``last`` from the largest groups down; None if that takes too many pairs."""
        top = self.levels[-1][0].shape[1]
        rows, nodes = np.repeat(np.arange(first, last), top), np.tile(np.arange(top), last - first)
        for level in reversed(range(len(self.levels))):
            node_low, node_high = self.levels[level]
            for dim in range(len(low)):
                meets = low[dim][rows] < node_high[dim][nodes]
                meets &= node_low[dim][nodes] < high[dim][rows]
                rows, nodes = rows[meets], nodes[meets]
            if level:
                if len(rows) * _FAN_OUT > _BATCH_PAIRS and last - first > 1:
                    return None
                rows, nodes = self._members(rows, nodes, self.levels[level - 1][0].shape[1])
        return rows, self.order[nodes]

    @staticmethod
    def _members(rows: _Ints, groups: _Ints, count: int) -> tuple[_Ints, _Ints]:
        """Pair each row with the members of the group it was paired with."""
        members = (groups[:, np.newaxis] * _FAN_OUT + np.arange(_FAN_OUT)).ravel()
        exists = members < count  # the last group may not be full
        return np.repeat(rows, _FAN_OUT)[exists], members[exists]


def _neighbourly_order(low: _Ints) -> _Ints:
    """An order in which boxes that are near each other in space come near each other in the list (Z-order)."""
    places = [np.unique(row, return_inverse=True)[1].astype(np.int64) for row in low]
    bits = [int(place.max()).bit_length() for place in places]
    interleaved = [
        (place, bit) for bit in reversed(range(max(bits))) for place, n in zip(places, bits, strict=True) if bit < n
    ]
    key = np.zeros(low.shape[1], np.int64)
    for place, bit in interleaved[:63]:  # what more bits would separate is close enough already
        key = key << 1 | place >> bit & 1
    return np.argsort(key, kind="stable")
