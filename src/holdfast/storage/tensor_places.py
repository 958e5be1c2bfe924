"""Where what is read goes: the tensors that a load fills."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from holdfast.planning.local_bytes import bytes_in_place
from holdfast.storage.chunk_reads import Buffer
from holdfast.storage.filling import fill, narrowed


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
