"""The elements of a tensor as bytes in row-major order, whatever it looks like in memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from holdfast.compat.tensors import LESS_THAN_A_BYTE, PACKED

_ONLY_AS_BYTES = LESS_THAN_A_BYTE | PACKED


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or its bytes if some torch has no copy for its dtype (numbers of fewer than 8 bits)."""
    return tensor.view(torch.uint8) if tensor.dtype in _ONLY_AS_BYTES else tensor


def as_plain_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a contiguous, ordinary CPU tensor; the very same memory where they already are one."""
    plain = tensor.detach()
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    if plain.is_quantized:
        plain = plain.int_repr()
    return copyable(plain).cpu().resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements as bytes. A view where possible, so the tensor must not change while it is in use."""
    plain = as_plain_cpu(tensor)
    if plain.numel() == 0:
        return memoryview(b"")
    return bytes_in_place(plain).data


def bytes_in_place(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of an ordinary, contiguous CPU tensor that has elements."""
    # Not `reshape`: a single element may have any stride and count as contiguous, and could not be viewed as bytes.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    array: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array
