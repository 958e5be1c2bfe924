"""Thousands of small tensors at a time: their bytes are moved by address, without a view or an array for each.

A view of a tensor costs several times what it costs to copy a kilobyte.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from holdfast.tuning import SMALL_TENSOR

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_REAL = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8})
"""Types that are neither complex nor quantized, so that there are questions that need not be asked."""

# Unlike `ctypes.memmove` this keeps Python's lock, which takes longer to give away and to get back than the copy.
move_small = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def lies_ready(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor holds its elements just so: on the CPU, in row-major order, without gaps.

    >>> lies_ready(torch.zeros(2, 3)), lies_ready(torch.zeros(2, 3).T)
    (True, False)
    """
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and (tensor.dtype in _REAL or not (tensor.is_conj() or tensor.is_quantized))
        and has_its_memory(tensor)
    )


def has_its_memory(tensor: torch.Tensor) -> bool:
    """Whether the storage of a contiguous tensor is as large as its elements are. Torch does not look when it writes.

    Whoever saves memory gives that of tensors back for a while, by making their storages smaller. Some tensors of
    torch's own making never have any.

    >>> tensor = torch.zeros(2, 3)
    >>> _ = tensor.untyped_storage().resize_(0)
    >>> has_its_memory(tensor)
    False
    """
    nbytes = tensor.nbytes
    if nbytes == 0:
        return True  # and nothing may lie anywhere
    if offset := tensor.storage_offset():
        nbytes += int(offset) * tensor.itemsize
    return tensor.untyped_storage().nbytes() >= nbytes and tensor.data_ptr() != 0


def gather(tensors: Sequence[tuple[Any, int]], first: int, room: npt.NDArray[np.uint8]) -> tuple[int, int]:
    """Put the bytes of tensors into a room, one behind the other, beginning with the ``first`` of them.

    Each comes with its number of bytes. It ends before one that is not small, does not lie ready, has another number
    of bytes, or for which there is no room. Returns how many there are, and how many bytes they take.

    >>> room = np.zeros(4, np.uint8)
    >>> gather([(torch.tensor([1, 2], dtype=torch.uint8), 2), (torch.zeros(3), 12)], 0, room), room.tolist()
    ((1, 2), [1, 2, 0, 0])
    """
    filled = 0
    address, space = room.ctypes.data, room.nbytes
    for number in range(first, len(tensors)):
        tensor, nbytes = tensors[number]
        if nbytes > SMALL_TENSOR or filled + nbytes > space or not lies_ready(tensor) or tensor.nbytes != nbytes:
            return number - first, filled
        move_small(address + filled, tensor.data_ptr(), nbytes)
        filled += nbytes
    return len(tensors) - first, filled


def digest_of_small(tensor: torch.Tensor) -> bytes | None:
    """The digest of a small tensor that lies ready; None if it is none.

    >>> digest_of_small(torch.zeros(2, dtype=torch.uint8)) == xxhash.xxh3_128_digest(bytes(2))
    True
    """
    if not lies_ready(tensor) or tensor.nbytes > SMALL_TENSOR:
        return None
    return xxhash.xxh3_128_digest(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
