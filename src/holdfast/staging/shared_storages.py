"""Copies of memory that several tensors are views of, so that they are views of one memory in the copy too.

What is copied of a storage is the stretch from the first to the last byte that one of the tensors uses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

_ALIGNMENT = 16
"""Of the largest element. A stretch starts at a multiple of it, so that the elements in it are aligned."""


class Stretch(NamedTuple):
    """Bytes of a storage, the last one excluded."""

    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """How many they are."""
        return self.last - self.first


Storage = tuple[torch.device, int]
"""What tells storages of live tensors apart."""


def storage_of(tensor: torch.Tensor) -> Storage | None:
    """The memory that a tensor is a view of. None if its elements are not simply what lies there."""
    if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
        return None
    try:
        address = tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a tensor without memory of its own
        return None
    inside = _used(tensor).last <= tensor.untyped_storage().nbytes()
    return (tensor.device, address) if address and inside else None


def stretches(parts: Iterable[torch.Tensor]) -> dict[Storage, Stretch]:
    """What of each storage is used by any of these tensors."""
    found: dict[Storage, Stretch] = {}
    for part in parts:
        storage = storage_of(part)
        if storage is not None:
            used = _used(part)
            known = found.get(storage, used)
            first = min(known.first, used.first)
            found[storage] = Stretch(first - first % _ALIGNMENT, max(known.last, used.last))
    return found


def bytes_in(tensor: torch.Tensor, stretch: Stretch) -> torch.Tensor:
    """A stretch of the storage that ``tensor`` is a view of."""
    elements = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return elements.set_(tensor.untyped_storage(), stretch.first, (stretch.nbytes,), (1,))


def view_like(tensor: torch.Tensor, copied: torch.Tensor, stretch: Stretch) -> torch.Tensor:
    """The view of the ``copied`` stretch that ``tensor`` is of the original one, strides included."""
    used = _used(tensor)
    elements: Any = copied[used.first - stretch.first : used.last - stretch.first].view(tensor.dtype)
    view: torch.Tensor = elements.as_strided(tensor.size(), tensor.stride())
    return view


def _used(tensor: torch.Tensor) -> Stretch:
    first = int(tensor.storage_offset()) * tensor.itemsize
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return Stretch(first, first + (1 + sum((int(size) - 1) * int(stride) for size, stride in steps)) * tensor.itemsize)
