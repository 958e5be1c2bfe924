"""The tensors that a load fills, as places for what is read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.planning.local_bytes import bytes_in_place
from holdfast.storage.chunk_reads import Buffer
from holdfast.storage.filling import fill, narrowed


class TensorPlace:
    """A tensor, of the stored dtype or another, on any device."""

    def __init__(self, target: torch.Tensor, stored: torch.dtype, key: str) -> None:
        self._target = target
        self._stored = stored
        self._key = key
        self.memory: memoryview | None = None
        if _lies_as_stored(target, stored):
            self.memory = bytes_in_place(target).data

    def put(self, start: Sequence[int], sizes: Sequence[int], read: Buffer, at: int, strides: Sequence[int]) -> None:
        """Copy, converting if the dtypes differ."""
        itemsize = self._stored.itemsize
        elements = torch.from_numpy(read).view(self._stored)
        part = elements.as_strided(tuple(sizes), [step // itemsize for step in strides], at // itemsize)
        fill(narrowed(self._target, start, sizes), part, self._key)

    def clear(self) -> None:
        """Leave zeros where there would be something that is not what was saved."""
        if self.memory is not None:
            torch.frombuffer(self.memory, dtype=torch.uint8).zero_()
        else:
            zero = torch.zeros(self._stored.itemsize, dtype=torch.uint8).view(self._stored)
            fill(self._target, zero.as_strided(self._target.size(), [0] * self._target.dim()), self._key)


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
