"""Reads a region of a row-major tensor in a file, in parts of bounded size.

A region is seldom one run of bytes: a slice of columns is a run per row. Bytes between runs are read along and thrown
away if there are few of them, because that is cheaper than another request; more of them are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch

from holdfast.boxes import Box
from holdfast.errors import DamagedCheckpointError
from holdfast.storage.filling import fill, narrowed

BUFFER_BYTES = 8 << 20
"""As much as is read, and held in memory, at a time."""
WORTH_SKIPPING = 64 << 10
"""A gap of more bytes than this is skipped."""


def readable_parts(
    shape: Sequence[int],
    region: Box,
    itemsize: int,
    *,
    most: int = BUFFER_BYTES,
    gap: int = WORTH_SKIPPING,
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


def read_region(
    stream: Any,
    position: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    region: Box,
    target: torch.Tensor,
    *,
    source: str,
    key: str,
) -> None:
    """Fill ``target`` with a region of the tensor of this shape and dtype that begins at ``position`` of the stream."""
    strides = byte_strides(shape, dtype.itemsize)
    buffer = torch.empty(0, dtype=torch.uint8, device="cpu")  # the default may be the meta device
    for part in readable_parts(shape, region, dtype.itemsize, most=BUFFER_BYTES, gap=WORTH_SKIPPING):
        place = narrowed(
            target, [at - start for at, start in zip(part.offsets, region.offsets, strict=True)], part.sizes
        )
        start = position + sum(at * stride for at, stride in zip(part.offsets, strides, strict=True))
        span = _span(part.sizes, strides, dtype.itemsize)
        if _is_run_in_memory(place, dtype) and span == place.numel() * dtype.itemsize:
            read_exactly(stream, start, as_byte_view(place), source=source, key=key)
            continue
        if buffer.numel() < span:
            buffer = torch.empty(span, dtype=torch.uint8, device="cpu")
        read_exactly(stream, start, buffer[:span].numpy().data, source=source, key=key)
        steps = [stride // dtype.itemsize for stride in strides]
        fill(place, buffer[:span].view(dtype).as_strided(part.sizes, steps), key)


def read_exactly(stream: Any, start: int, into: memoryview, *, source: str, key: str) -> None:
    """Fill ``into`` with the bytes from ``start`` on; raises if the file ends before."""
    stream.seek(start)
    filled = 0
    while filled < into.nbytes:
        count = stream.readinto(into[filled:])
        if not count:
            raise DamagedCheckpointError(
                f"{source} ends too early: '{key}' needs {into.nbytes} bytes at {start}, and there are {filled}. The "
                "file was cut off or replaced meanwhile; copy it again, or load another one.",
                file=source,
                key=key,
                expected=into.nbytes,
                found=filled,
            )
        filled += count


def as_byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _is_run_in_memory(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype == dtype
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


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
