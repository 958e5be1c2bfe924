"""Tensors that stored elements are read into, from regions of chunks in whatever order they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from holdfast._base.boxes import Box
from holdfast._base.tuning import SMALL_TENSOR
from holdfast._formats.box_reads import Buffer, ChunkRead, Place, WantedRegion
from holdfast._formats.ranged_files import Ranges, StreamRanges, refuse_short_chunk
from holdfast._formats.tensor_bytes import bytes_in_place, is_plain_contiguous, move_small
from holdfast.errors import HoldfastError

# Puts stored elements into the tensors that a load fills, in the same way whatever they were read from.


def narrowed(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The part of a tensor at these offsets.

    >>> narrowed(torch.arange(6).view(2, 3), (0, 1), (2, 1)).tolist()
    [[1], [4]]
    """
    for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def fill(target: torch.Tensor, stored: torch.Tensor, key: str) -> None:
    """Copy, converting if the dtypes differ. ``key`` is how errors call the target.

    >>> target = torch.zeros(2)
    >>> fill(target, torch.tensor([1, 2]), "weight")
    >>> target
    tensor([1., 2.])
    """
    try:
        if target.is_quantized and stored.is_quantized and _scale(target) != _scale(stored):
            # Copying would bring the integers without the scale that gives them their meaning.
            raise RuntimeError(f"it was saved with {_scale(stored)}, and the tensor to load into has {_scale(target)}")
        if target.dtype == stored.dtype and stored.dtype.itemsize == 1 and not stored.is_quantized:
            # Bits, whatever they mean: torch has no copy for some of these dtypes, but views all of them as bytes.
            target, stored = target.view(torch.uint8), stored.view(torch.uint8)
        target.copy_(stored)
    except RuntimeError as error:
        raise HoldfastError(
            f"'{key}' cannot be filled: {str(error).rstrip('.')}. Load into a tensor of the kind that was saved."
        ) from error


def _scale(tensor: torch.Tensor) -> str:
    """How the integers of a quantized tensor are meant."""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"scale {tensor.q_scale()} and zero point {tensor.q_zero_point()}"
    scales, zeros = tensor.q_per_channel_scales().tolist(), tensor.q_per_channel_zero_points().tolist()
    return f"scales {scales} and zero points {zeros} along dimension {tensor.q_per_channel_axis()}"


# Where what is read goes: the tensors that a load fills.


class TensorPlace:
    """A tensor, of the stored dtype or another, on any device."""

    def __init__(self, target: torch.Tensor, stored: torch.dtype, key: str) -> None:
        self.target = target
        self._stored = stored
        self._key = key

    @cached_property
    def memory(self) -> memoryview | None:
        """The bytes of the tensor, if they are those that are stored."""
        return bytes_in_place(self.target).data if _lies_as_stored(self.target, self._stored) else None

    def put(self, start: Sequence[int], sizes: Sequence[int], read: Buffer, at: int, strides: Sequence[int]) -> None:
        """Copy, converting if the dtypes differ."""
        fill(narrowed(self.target, start, sizes), elements_at(read, at, sizes, strides, self._stored), self._key)

    def take(self, elements: torch.Tensor) -> None:
        """Copy everything."""
        fill(self.target, elements, self._key)

    def take_small(self, content: memoryview | None) -> bool:
        """Copy everything from its bytes, if the tensor is small and has them as they are stored; else do nothing."""
        target = self.target
        if content is None or content.nbytes > SMALL_TENSOR or target.dtype != self._stored:
            return False
        if target.layout is not torch.strided or target.nbytes != content.nbytes or not is_plain_contiguous(target):
            return False
        move_small(target.data_ptr(), bytes(content), content.nbytes)
        return True

    def clear(self) -> None:
        """Leave zeros where there would be something that is not what was saved."""
        if self.memory is not None:
            torch.frombuffer(self.memory, dtype=torch.uint8).zero_()
        else:
            zero = torch.zeros(self._stored.itemsize, dtype=torch.uint8, device="cpu").view(self._stored)
            fill(self.target, zero.as_strided(self.target.size(), [0] * self.target.dim()), self._key)


def elements_at(
    read: Buffer, at: int, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Elements among bytes: the first is at byte ``at``, its neighbours by ``strides``."""
    itemsize = dtype.itemsize
    elements = torch.from_numpy(read).view(dtype)
    return elements.as_strided(tuple(sizes), [step // itemsize for step in strides], at // itemsize)


def _lies_as_stored(tensor: torch.Tensor, stored: torch.dtype) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype == stored
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and tensor.numel() > 0
    )


# Places for chunks whose dimensions are in another order in the file than in the tensor.


def turned(wanted: WantedRegion, order: Sequence[int]) -> WantedRegion:
    """A region and its place, of a chunk with its dimensions in this order."""
    (offsets, sizes), place = wanted
    region = Box(tuple(offsets[dim] for dim in order), tuple(sizes[dim] for dim in order))
    return WantedRegion(region, _TurnedPlace(place, order))


class _TurnedPlace:
    """Puts the dimensions back into the order of the place."""

    def __init__(self, place: Place, order: Sequence[int]) -> None:
        self._place = place
        self._back = sorted(range(len(order)), key=order.__getitem__)
        self.memory: memoryview | None = None

    def put(self, start: Sequence[int], sizes: Sequence[int], read: Buffer, at: int, strides: Sequence[int]) -> None:
        """Hand on."""
        starts, lengths, steps = ([numbers[dim] for dim in self._back] for numbers in (start, sizes, strides))
        self._place.put(starts, lengths, read, at, steps)


# Regions of an array in a file whose elements are there in another order than that of its dimensions, or with gaps.
#
# Such an array is seen as a part of a row-major one: its dimensions in the order of their strides, with as many
# elements in each as the stride of the one before has room for. Tensors that were turned, sliced or stepped over are
# like that.


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
    """How an array with elements so far apart is arranged; None if it is not part of a row-major one.

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
    extent = dict.fromkeys(range(len(sizes)), 1)
    for before, dim in pairwise([None, *long]):
        assert dim is not None
        extent[dim] = sizes[dim] if before is None else strides[before] // strides[dim]
        if extent[dim] < sizes[dim] or (before is not None and strides[before] % strides[dim]):
            return None
    order = sorted(extent) if long == sorted(long) else [*(dim for dim in sorted(extent) if dim not in long), *long]
    steps = [strides[dim] for dim in long[-1:] if strides[dim] > 1]
    return Arrangement(tuple(order), (*(extent[dim] for dim in order), *steps))


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
        wanted = WantedRegion(Box(tuple(offsets), tuple(lengths)), TensorPlace(place, self.dtype, key))
        reading = ChunkRead(self.file, self.position, sizes, self.dtype.itemsize, [wanted])
        for run in reading.reads():
            crc = reading.read(run, summed=summed, crc=crc)
        return crc


# Reads a region of a row-major tensor in a stream into a tensor.


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
    file = StreamRanges(stream, source)
    wanted = [WantedRegion(region, TensorPlace(target, dtype, key))]
    reading = ChunkRead(file, position, shape, dtype.itemsize, wanted)
    refuse_short_chunk(file, position, reading.nbytes, source, key)
    for run in reading.reads():
        reading.read(run, summed=False)
