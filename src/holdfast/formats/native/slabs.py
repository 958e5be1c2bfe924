"""Boxes of chunks whose elements do not lie side by side, cut into slabs that are small enough to be read at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.formats.native.runs import Numbers
from holdfast.tuning import STRAIGHT_FROM

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


def row_major_strides(sizes: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Bytes between neighbours of a dense array.

    >>> row_major_strides((2, 3), 4)
    (12, 4)
    """
    strides = []
    step = itemsize
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


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


def span_of(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the first to the end of the last element of a box that is not empty."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + itemsize


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
    begin = chunk_begin + sum(at * stride for at, stride in zip(start, strides, strict=True))
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
