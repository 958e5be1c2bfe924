"""Cuts what is to be read into slabs: boxes of chunks that are small enough to be held while they are copied out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
    into: Array | None
    """None if nobody wants the bytes, but they are to be checked."""
    key: str


class Stretch(NamedTuple):
    """Whole blocks of a file that can be read straight into the memory they go to."""

    file: int
    begin: int
    into: npt.NDArray[np.uint8]
    key: str


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


def lies_dense(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether the elements of a box lie side by side in the file.

    >>> lies_dense((1, 3), (40, 4), 4), lies_dense((2, 3), (40, 4), 4)
    (True, False)
    """
    dense = row_major_strides(sizes, itemsize)
    return all(size == 1 or found == step for size, found, step in zip(sizes, strides, dense, strict=True))


def span_of(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the first to the end of the last element of a box that is not empty."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + itemsize


def cut_into_slabs(
    file: int, begin: int, strides: tuple[int, ...], into: Array, key: str, largest: int
) -> Iterator[Slab]:
    """A box that begins at ``begin`` and is as large as ``into``, in slabs that span ``largest`` bytes at most."""
    span = span_of(into.shape, strides, into.itemsize)
    if span <= largest:
        yield Slab(file, begin, span, strides, into, key)
        return
    dim = next((dim for dim, size in enumerate(into.shape) if size > 1), None)
    if dim is None:  # one element that is larger than a slab may be
        yield Slab(file, begin, span, strides, into, key)
        return
    rest = span_of(into.shape[dim + 1 :], strides[dim + 1 :], into.itemsize)
    step = 1 if rest > largest else (largest - rest) // strides[dim] + 1
    for start in range(0, into.shape[dim], step):
        part = into[(slice(None),) * dim + (slice(start, start + step),)]
        at = begin + start * strides[dim]
        if rest > largest:
            yield from cut_into_slabs(file, at, strides, part, key, largest)
        else:
            yield Slab(file, at, span_of(part.shape, strides, into.itemsize), strides, part, key)


def cut_straight(
    file: int, begin: int, into: Array, key: str, *, block_bytes: int, largest: int, file_bytes: int
) -> Iterator[Slab | Stretch]:
    """Bytes that lie side by side in the file and in memory: whole blocks as stretches, what is left over as slabs."""
    flat = into.reshape(-1).view(np.uint8)
    end = begin + flat.nbytes
    first = -(-begin // block_bytes) * block_bytes
    last = end if end == file_bytes else end // block_bytes * block_bytes
    if last <= first:
        yield Slab(file, begin, flat.nbytes, (1,), flat, key)
        return
    if begin < first:
        yield Slab(file, begin, first - begin, (1,), flat[: first - begin], key)
    for at in range(first, last, largest):
        yield Stretch(file, at, flat[at - begin : min(at + largest, last) - begin], key)
    if last < end:
        yield Slab(file, last, end - last, (1,), flat[last - begin :], key)


def mark_blocks(needed: npt.NDArray[np.int32], slab: Slab, first_block: int, block_bytes: int) -> None:
    """Count the slab in at the blocks that it begins with, and out behind the blocks that it ends with.

    ``needed`` begins with the block ``first_block``; its running sum tells how many stretches need a block.
    """
    starts, length = _stretches(slab, block_bytes)
    np.add.at(needed, starts // block_bytes - first_block, 1)
    np.add.at(needed, (starts + length - 1) // block_bytes + 1 - first_block, -1)


def _stretches(slab: Slab, block_bytes: int) -> tuple[npt.NDArray[np.int64], int]:
    """Where the stretches begin that a slab consists of, all of one length. Gaps of less than a block do not count."""
    if slab.into is None:
        return np.array([slab.begin]), slab.span
    dims = len(slab.strides)
    length = slab.into.itemsize
    while dims and slab.strides[dims - 1] - length < block_bytes:
        dims -= 1
        length += (slab.into.shape[dims] - 1) * slab.strides[dims]
    starts = np.array([slab.begin], np.int64)
    for size, stride in zip(slab.into.shape[:dims], slab.strides[:dims], strict=True):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts, length
