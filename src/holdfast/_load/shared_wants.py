"""What ranks want of a checkpoint, as messages and as columns: nothing here is an object for each box of each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast._base.boxes import Box
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.source import Source

Numbers: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]


class Want(NamedTuple):
    """A box of a stored tensor that a rank has memory for."""

    tensor: int
    """The number of the tensor in the checkpoint."""
    box: Box
    is_dense: bool
    """Whether there is just one place for it, which takes the stored bytes as they are and is contiguous."""


def numbered(source: Source) -> list[TensorRef]:
    """All tensors of a checkpoint, in an order that is the same on all ranks."""
    return [source.tensors[key] for key in sorted(source.tensors)]


class BoxColumns(NamedTuple):
    """Boxes, a column for each: where they begin and end, with a row for each dimension.

    Those of tensors with fewer dimensions reach from 0 to 1 in the others.
    """

    low: Numbers
    high: Numbers

    @classmethod
    def of(cls, offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]], ndim: int) -> BoxColumns:
        """Those of boxes with at most ``ndim`` dimensions.

        >>> BoxColumns.of([(3,), (1, 2)], [(4,), (5, 6)], 2).high.tolist()
        [[7, 6], [1, 8]]
        """
        count = len(offsets)
        low, size = np.zeros((count, ndim), np.int64), np.ones((count, ndim), np.int64)
        dims = np.fromiter(map(len, offsets), np.int64, count)
        for number in np.unique(dims[dims > 0]).tolist():
            rows = np.flatnonzero(dims == number)
            low[rows, :number] = [offsets[row] for row in rows.tolist()]
            size[rows, :number] = [sizes[row] for row in rows.tolist()]
        return cls(np.ascontiguousarray(low.T), np.ascontiguousarray((low + size).T))

    @property
    def volumes(self) -> Numbers:
        """How many cells each has."""
        found: Numbers = np.prod(self.high - self.low, axis=0, dtype=np.int64)
        return found

    def chosen(self, columns: npt.NDArray[np.intp] | Flags) -> BoxColumns:
        """Some of them."""
        return BoxColumns(self.low[:, columns], self.high[:, columns])

    def box(self, column: int, ndim: int) -> Box:
        """One of them, with so many dimensions."""
        low, high = self.low[:ndim, column].tolist(), self.high[:ndim, column].tolist()
        return Box(tuple(low), tuple(end - begin for begin, end in zip(low, high, strict=True)))


def encode_wants(wants: Sequence[Want]) -> bytes:
    """What a rank wants, as a message: the numbers of wants and of dimensions, then columns.

    >>> np.frombuffer(encode_wants([Want(1, Box((7,), (3,)), True)]), "<i8").tolist()
    [1, 1, 1, 1, 7, 10]
    """
    ndim = max((len(want.box.offsets) for want in wants), default=0)
    boxes = BoxColumns.of([want.box.offsets for want in wants], [want.box.sizes for want in wants], ndim)
    columns = [[len(wants), ndim], [want.tensor for want in wants], [want.is_dense for want in wants]]
    flat = [np.array(column, "<i8") for column in columns]
    return b"".join(column.astype("<i8").tobytes() for column in (*flat, boxes.low, boxes.high))


@dataclass
class RankSets:
    """Sets of ranks by numbers, the same set always by the same number."""

    ranks: list[tuple[int, ...]]

    def __post_init__(self) -> None:
        self._known = {ranks: number for number, ranks in enumerate(self.ranks)}
        self._unions: dict[bytes, int] = {}

    def number(self, ranks: tuple[int, ...]) -> int:
        """The number of a set, which is in order."""
        if ranks not in self._known:
            self._known[ranks] = len(self.ranks)
            self.ranks.append(ranks)
        return self._known[ranks]

    def union(self, numbers: Numbers) -> int:
        """The number of the union of sets.

        >>> sets = RankSets([(0, 2), (1,)])
        >>> sets.union(np.array([1, 0, 1])), sets.ranks[2], sets.union(np.array([1]))
        (2, (0, 1, 2), 1)
        """
        key = numbers.tobytes()
        if key not in self._unions:
            found = {rank for number in np.unique(numbers).tolist() for rank in self.ranks[number]}
            self._unions[key] = self.number(tuple(sorted(found)))
        return self._unions[key]

    def sizes(self) -> Numbers:
        """How many ranks each has."""
        return np.array([len(ranks) for ranks in self.ranks], np.int64)


@dataclass(frozen=True)
class WantTable:
    """The different boxes that are wanted by any rank, in the order of tensors and places."""

    tensor: Numbers
    boxes: BoxColumns
    holders: Numbers
    """Which set of ranks wants each."""
    _dense: Callable[[int], set[int]]

    @classmethod
    def joined(cls, messages: Mapping[tuple[int, ...], bytes], sets: RankSets, ndim: int) -> WantTable:
        """The wants of all messages. The first sets are the ranks of these, in their order."""
        parts = [_decoded(message, ndim) for message in messages.values()]
        of = np.repeat(np.arange(len(parts)), [len(tensor) for tensor, _, _ in parts])
        tensor = np.concatenate([tensor for tensor, _, _ in parts])
        dense = np.concatenate([dense for _, dense, _ in parts])
        boxes = BoxColumns(*(np.concatenate(each, axis=1) for each in zip(*(part[2] for part in parts), strict=True)))
        order = np.lexsort((of, *boxes.high[::-1], *boxes.low[::-1], tensor))
        of, tensor, dense, boxes = of[order], tensor[order], dense[order], boxes.chosen(order)
        starts = np.flatnonzero(is_new(tensor, *boxes.low, *boxes.high))
        ends = np.append(starts, len(of))[1:]
        holders = of[starts]
        for group in np.flatnonzero(ends - starts > 1).tolist():
            holders[group] = sets.union(of[starts[group] : ends[group]])

        def dense_ranks(want: int) -> set[int]:
            rows = slice(starts[want], ends[want])
            return {rank for number in of[rows][dense[rows]].tolist() for rank in sets.ranks[number]}

        return cls(tensor[starts], boxes.chosen(starts), holders, dense_ranks)

    def dense_ranks(self, want: int) -> set[int]:
        """The ranks that have just one place for a want, which takes the stored bytes as they are."""
        return self._dense(want)


def _decoded(message: bytes, ndim: int) -> tuple[Numbers, Flags, BoxColumns]:
    numbers = np.frombuffer(message, "<i8").astype(np.int64)
    count, own = (0, 0) if not len(numbers) else numbers[:2].tolist()
    tensor, dense = numbers[2 : 2 + count], numbers[2 + count : 2 + 2 * count] != 0
    low, high = np.zeros((ndim, count), np.int64), np.ones((ndim, count), np.int64)
    low[:own], high[:own] = numbers[2 + 2 * count :].reshape(2, own, count)
    return tensor, dense, BoxColumns(low, high)


def is_new(*columns: Numbers) -> Flags:
    """Where a row is another one than that before it.

    >>> is_new(np.array([1, 1, 2]), np.array([5, 5, 5])).tolist()
    [True, False, True]
    """
    found = np.ones(len(columns[0]), np.bool_)
    if len(found):
        found[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return found
