"""Reads a region of a row-major tensor in a file into an array, in parts of bounded size."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.boxes import Box
from holdfast.sources.source import part_of
from holdfast.storage.region_reads import byte_strides, read_exactly, readable_parts


def read_into_array(
    stream: Any,
    position: int,
    shape: tuple[int, ...],
    region: Box,
    into: npt.NDArray[Any],
    *,
    source: str,
    key: str,
) -> int:
    """Fill ``into`` with a region of the tensor of this shape that begins at ``position``. Returns the bytes read.

    >>> import io
    >>> column = np.empty((2, 1), "u1")
    >>> read_into_array(io.BytesIO(bytes(range(6))), 0, (2, 3), Box((0, 1), (2, 1)), column, source="bytes", key="t")
    4
    >>> column.tolist()
    [[1], [4]]
    """
    strides = byte_strides(shape, into.itemsize)
    buffer = np.empty(0, np.uint8)
    total = 0
    for part in readable_parts(shape, region, into.itemsize):
        starts = [at - base for at, base in zip(part.offsets, region.offsets, strict=True)]
        place = part_of(into, starts, part.sizes)
        start = position + sum(at * stride for at, stride in zip(part.offsets, strides, strict=True))
        reach = sum((size - 1) * stride for size, stride in zip(part.sizes, strides, strict=True)) + into.itemsize
        total += reach
        if place.flags.c_contiguous and place.nbytes == reach:
            read_exactly(stream, start, place.reshape(-1).view(np.uint8).data, source=source, key=key)
            continue
        if buffer.nbytes < reach:
            buffer = np.empty(reach, np.uint8)
        read_exactly(stream, start, buffer[:reach].data, source=source, key=key)
        place[...] = np.ndarray(part.sizes, into.dtype, buffer.data, 0, strides)
    return total
