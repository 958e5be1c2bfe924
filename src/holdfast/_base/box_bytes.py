"""From boxes of row-major arrays to bytes of a file or of memory, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from holdfast._base.boxes import Box
from holdfast._base.tuning import MERGE_GAP

# Where elements are.


def row_major_strides(sizes: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Bytes between neighbours of a dense array, per dimension.

    >>> row_major_strides((2, 3), 4)
    (12, 4)
    """
    strides = []
    step = itemsize
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def position_of(index: Sequence[int], strides: Sequence[int]) -> int:
    """Where an element is, counted from the first one.

    >>> position_of((1, 2), (12, 4))
    20
    """
    return sum(at * stride for at, stride in zip(index, strides, strict=True))


def span_of(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """From the first element of a box that is not empty to the end of its last one.

    >>> span_of((2, 2), (12, 4), 4)
    20
    """
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + itemsize


def is_one_run(sizes: Sequence[int], part: Sequence[int]) -> bool:
    """Whether the elements of a part of an array are contiguous.

    >>> is_one_run((2, 3, 4), (1, 2, 4)), is_one_run((2, 3, 4), (2, 2, 4))
    (True, False)
    """
    inner = len(sizes)
    while inner and part[inner - 1] == sizes[inner - 1]:
        inner -= 1
    return all(size == 1 for size in part[: max(0, inner - 1)])


def _largest_gap(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """The most bytes between two neighbouring runs of a part."""
    span, largest = itemsize, 0
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1:
            largest = max(largest, stride - span)
        span += (size - 1) * stride
    return largest


# A region is seldom one run of bytes: a slice of columns is a run per row. Bytes between runs are read along and
# thrown away if there are few of them, because that is cheaper than another request; more of them are skipped.


def readable_parts(
    shape: Sequence[int],
    region: Box,
    itemsize: int,
    *,
    most: int,
    gap: int = MERGE_GAP,
) -> Iterator[Box]:
    """Cut a region of a tensor of this shape into parts that are each worth one read, in the order of the file.

    From the first to the last byte that a part needs are at most ``most`` bytes, with gaps of at most ``gap`` bytes.

    >>> [part.offsets for part in readable_parts((4, 100), Box((0, 10), (4, 5)), 8, most=1 << 10, gap=1 << 10)]
    [(0, 10), (2, 10)]
    >>> [part.sizes for part in readable_parts((4, 100), Box((0, 10), (4, 5)), 8, most=1 << 20, gap=0)]
    [(1, 5), (1, 5), (1, 5), (1, 5)]
    """
    strides = row_major_strides(shape, itemsize)

    def cut(dim: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[Box]:
        while dim < len(sizes) and sizes[dim] == 1:
            dim += 1
        if dim == len(sizes) or (
            span_of(sizes, strides, itemsize) <= most and _largest_gap(sizes, strides, itemsize) <= gap
        ):
            yield Box(offsets, sizes)
            return
        one = (*sizes[:dim], 1, *sizes[dim + 1 :])
        span = span_of(one, strides, itemsize)
        count = 1
        if max(strides[dim] - span, _largest_gap(one, strides, itemsize)) <= gap:
            count = max(1, (most - span) // strides[dim] + 1)
        for first in range(0, sizes[dim], count):
            length = min(count, sizes[dim] - first)
            yield from cut(
                dim,
                (*offsets[:dim], offsets[dim] + first, *offsets[dim + 1 :]),
                (*sizes[:dim], length, *sizes[dim + 1 :]),
            )

    if 0 not in region.sizes:
        yield from cut(0, tuple(region.offsets), tuple(region.sizes))


def boxes_of_run(sizes: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """The boxes that a run of elements of a row-major array consists of: about two for every dimension at most.

    >>> [(box.offsets, box.sizes) for box in boxes_of_run((3, 4), 2, 9)]
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """

    def cut(outer: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
        dim = len(outer)
        ones = (1,) * dim
        if dim == len(sizes):
            yield Box(outer, ones)
            return
        behind = tuple(sizes[dim + 1 :])
        inner = prod(behind)
        first, skipped = divmod(begin, inner)
        last, rest = divmod(end, inner)
        if skipped:
            yield from cut((*outer, first), skipped, min(end - first * inner, inner))
            first += 1
        if last > first:
            yield Box((*outer, first, *(0 for _ in behind)), (*ones, last - first, *behind))
        if rest and last >= first:
            yield from cut((*outer, last), 0, rest)

    if end > begin:
        yield from cut((), begin, end)
