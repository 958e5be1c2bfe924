"""The same memory as an array of carriers, which is how elements travel, and as a tensor of torch.

Only this module of the format needs torch, so whoever does without imports it where a tensor is asked for.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy.typing as npt
import torch

from holdfast._compat.tensors import PACKED
from holdfast._formats.native.dtypes import DType, dtype_named, name_of

_IN_BOTH: dict[int, tuple[str, torch.dtype]] = {
    1: ("u1", torch.uint8),
    2: ("i2", torch.int16),
    4: ("i4", torch.int32),
    8: ("i8", torch.int64),
    16: ("c16", torch.complex128),
}
"""For each size of elements a type that both libraries have, so that neither looks at what the bytes mean."""


@cache
def dtype_of(dtype: torch.dtype) -> DType | None:
    """The element type that is called like torch's; None for those that are more than bytes, such as quantized ones.

    >>> dtype_of(torch.bfloat16) == torch.bfloat16, dtype_of(torch.quint8)
    (True, None)
    """
    try:
        return dtype_named(name_of(dtype) or "")
    except ValueError:
        return None


def torch_dtype(dtype: DType) -> torch.dtype | None:
    """The element type in torch, if torch has it.

    >>> torch_dtype(DType("bfloat16")), torch_dtype(DType("raw12"))
    (torch.bfloat16, None)
    """
    found = getattr(torch, dtype.name, None)
    return found if isinstance(found, torch.dtype) else None


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The elements of a CPU tensor as carriers: its own memory, unless its elements are only computed when read.

    >>> as_array(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    array([16256, 49152], dtype=uint16)
    """
    dtype = dtype_named(name_of(tensor.dtype) or "")
    plain = tensor.detach().resolve_conj().resolve_neg().view(_IN_BOTH[dtype.itemsize][1])
    return plain.numpy().view(dtype.carrier)


def as_tensor(array: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor | None:
    """The memory of an array of carriers as a tensor; None if its strides are such as no tensor can have.

    >>> import numpy as np
    >>> as_tensor(np.array([16256, 49152], "<u2"), torch.bfloat16)
    tensor([ 1., -2.], dtype=torch.bfloat16)
    """
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        return None
    in_numpy, _ = _IN_BOTH[array.itemsize]
    return torch.from_numpy(array.view(in_numpy)).view(dtype)


# The dtypes that users name, as objects of torch or numpy or as str.


def dtype_from_user(wish: Any) -> torch.dtype:
    """The dtype of torch that is meant.

    >>> dtype_from_user("bfloat16")
    torch.bfloat16
    """
    dtype = getattr(torch, name_of(wish) or "", None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{wish!r} is not a dtype to cast to; give one such as torch.bfloat16 or 'bfloat16'")
    return dtype


def floating_dtype_from_user(wish: Any) -> torch.dtype:
    """The same, if it is one that floating point tensors can be stored as."""
    dtype = dtype_from_user(wish)
    if not dtype.is_floating_point or dtype in PACKED:
        raise ValueError(f"tensors are cast from one floating point type to another, and {dtype} is not one")
    return dtype
