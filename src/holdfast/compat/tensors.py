"""Dtypes that some versions of torch lack, and the private names of tensors and storages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as _is_traceable

from holdfast.compat.versions import check_torch

check_torch(torch.__version__)  # here, because whatever needs torch needs this module

DTYPES: dict[str, torch.dtype] = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
"""The dtypes of the installed torch by name, second names such as ``half`` included."""

LESS_THAN_A_BYTE = frozenset(
    DTYPES[name] for sign in ("", "u") for bits in range(1, 8) if (name := f"{sign}int{bits}") in DTYPES
)
"""Integers of fewer than 8 bits, which torch can store but not copy. 2.6 has only the unsigned ones."""

PACKED = frozenset(DTYPES[name] for name in ("float4_e2m1fn_x2",) if name in DTYPES)
"""Dtypes with two numbers in an element, which torch does not convert, and before 2.10 not copy. Since 2.8."""

rebuild_tensor: Callable[..., torch.Tensor] = torch._utils._rebuild_tensor_v2
"""What torch.save stores for a tensor of a dtype with a storage class of its own."""
rebuild_tensor_with_dtype: Callable[..., torch.Tensor] = torch._utils._rebuild_tensor_v3
"""What torch.save stores for all others."""
layout_named: Callable[[str], torch.layout] = torch.serialization._get_layout
"""What a pickle calls to get a layout."""


def is_wrapper_subclass(tensor: object) -> bool:
    """Whether a tensor has no elements of its own but is made of other tensors, which it can list."""
    return bool(_is_traceable(tensor))


def wrapper_subclass(cls: type, size: Sequence[int], dtype: torch.dtype) -> Any:
    """A tensor of a class of ours that has a shape and a dtype and no memory."""
    return torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype)


def local_part(dtensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor, without waiting for a collective and without a place in the autograd graph."""
    part: torch.Tensor = dtensor._local_tensor
    return part


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, read with the opposite sign."""
    return torch._neg_view(tensor)


def empty_quantized(size: Sequence[int], *, scale: float, zero_point: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of quantized elements with one scale."""
    return torch._empty_affine_quantized(size, scale=scale, zero_point=zero_point, dtype=dtype)


def empty_quantized_per_channel(size: Sequence[int], **options: Any) -> torch.Tensor:
    """A tensor of quantized elements with a scale for each index of one dimension."""
    return torch._empty_per_channel_affine_quantized(size, **options)


def count_of_changes(tensor: torch.Tensor) -> int | None:
    """How often torch saw the elements change in place; None for tensors of inference mode, which it does not watch."""
    return None if tensor.is_inference() else tensor._version


def storage_identity(storage: torch.UntypedStorage) -> int:
    """A number that two objects have in common if they stand for the same storage."""
    return int(storage._cdata)


def describe_typed_storage(storage: torch.storage.TypedStorage) -> tuple[type, torch.UntypedStorage, int]:
    """The class by which a pickle names a storage, its bytes, and its number of elements."""
    untyped = storage._untyped_storage
    kind = getattr(torch, storage._pickle_storage_type())  # type: ignore[no-untyped-call]
    return kind, untyped, untyped.nbytes() // storage._element_size()  # type: ignore[no-untyped-call]
