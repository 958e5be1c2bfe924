"""The dtypes that users name, as objects of torch or numpy or as texts."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.compat.tensors import PACKED
from holdfast.formats.native.dtypes import name_of


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
        raise ValueError(f"tensors are cast from one floating point type to another, and {dtype} is none")
    return dtype
