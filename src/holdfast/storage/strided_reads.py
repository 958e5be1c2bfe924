"""Regions of an array in a file whose elements lie there in another order than that of its dimensions, or with gaps.

Such an array is seen as a part of a row-major one: its dimensions in the order of their strides, with as many elements
in each as the stride of the one before has room for. Tensors that were turned, sliced or stepped over are like that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from holdfast.boxes import Box
from holdfast.storage.byte_ranges import Ranges
from holdfast.storage.chunk_reads import ChunkRead, Wanted
from holdfast.storage.tensor_places import TensorPlace


class Arrangement(NamedTuple):
    """How an array is a part of a row-major one."""

    order: tuple[int, ...]
    """Its dimensions as they come in the row-major array."""
    sizes: tuple[int, ...]
    """Of the row-major array, which may have one more dimension for the gaps between neighbours."""

    @property
    def has_steps(self) -> bool:
        """Whether there are gaps between neighbours."""
        return len(self.sizes) > len(self.order)

    def is_row_major(self, sizes: Sequence[int]) -> bool:
        """Whether an array of these sizes is all of the row-major array, and no different."""
        return self.order == tuple(range(len(sizes))) and self.sizes == tuple(sizes)


def arrangement_of(sizes: Sequence[int], strides: Sequence[int]) -> Arrangement | None:
    """How an array with elements so far apart lies; None if it is no part of a row-major one.

    That is so if some of its elements are in several places of it, or if the steps in one dimension do not fit between
    those in another.

    >>> arrangement_of((3, 4), (4, 1))
    Arrangement(order=(0, 1), sizes=(3, 4))
    >>> arrangement_of((3, 4), (1, 3))
    Arrangement(order=(1, 0), sizes=(4, 3))
    >>> arrangement_of((3, 4), (20, 2))
    Arrangement(order=(0, 1), sizes=(3, 10, 2))
    >>> arrangement_of((3, 4), (0, 1))
    """
    long = [dim for dim in range(len(sizes)) if sizes[dim] != 1]  # the strides of others say nothing
    long.sort(key=lambda dim: -strides[dim])
    if any(strides[dim] < 1 for dim in long):
        return None
    room = dict.fromkeys(range(len(sizes)), 1)
    for before, dim in pairwise([None, *long]):
        assert dim is not None
        room[dim] = sizes[dim] if before is None else strides[before] // strides[dim]
        if room[dim] < sizes[dim] or (before is not None and strides[before] % strides[dim]):
            return None
    order = sorted(room) if long == sorted(long) else [*(dim for dim in sorted(room) if dim not in long), *long]
    steps = [strides[dim] for dim in long[-1:] if strides[dim] > 1]
    return Arrangement(tuple(order), (*(room[dim] for dim in order), *steps))


class StridedArray(NamedTuple):
    """An array in a file."""

    file: Ranges
    position: int
    """Of the first element."""
    dtype: torch.dtype
    arrangement: Arrangement

    def read(self, region: Box, target: torch.Tensor, key: str, *, summed: bool = False, crc: int = 0) -> int:
        """Fill ``target`` with a region. With ``summed`` all that is read is added to a CRC."""
        order, sizes = self.arrangement
        offsets, lengths = [region.offsets[dim] for dim in order], [region.sizes[dim] for dim in order]
        place = target.permute(order)
        if self.arrangement.has_steps:
            offsets, lengths, place = [*offsets, 0], [*lengths, 1], place.unsqueeze(-1)
        wanted = Wanted(Box(tuple(offsets), tuple(lengths)), TensorPlace(place, self.dtype, key))
        reading = ChunkRead(self.file, self.position, sizes, self.dtype.itemsize, [wanted])
        for run in reading.stretches():
            crc = reading.read(run, summed=summed, crc=crc)
        return crc
