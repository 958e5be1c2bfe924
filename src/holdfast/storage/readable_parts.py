"""Cuts a region of a row-major tensor in a file into parts that are each worth one read.

A region is seldom one run of bytes: a slice of columns is a run per row. Bytes between runs are read along and thrown
away if there are few of them, because that is cheaper than another request; more of them are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from holdfast.boxes import Box
from holdfast.tuning import MERGE_GAP


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
    strides = byte_strides(shape, itemsize)

    def cut(dim: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[Box]:
        while dim < len(sizes) and sizes[dim] == 1:
            dim += 1
        if dim == len(sizes) or (
            _span(sizes, strides, itemsize) <= most and _largest_gap(sizes, strides, itemsize) <= gap
        ):
            yield Box(offsets, sizes)
            return
        one = (*sizes[:dim], 1, *sizes[dim + 1 :])
        span = _span(one, strides, itemsize)
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


def byte_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """How many bytes apart the neighbours in each dimension are."""
    return tuple(itemsize * prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _span(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """From the first to the last byte of a part."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + itemsize


def _largest_gap(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """The most bytes that lie between two neighbouring runs of a part."""
    span, largest = itemsize, 0
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1:
            largest = max(largest, stride - span)
        span += (size - 1) * stride
    return largest
