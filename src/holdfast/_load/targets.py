"""Tensors and arrays to load into: what they are, compared with what is stored, and fresh ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from holdfast._compat.sharded_tensors import ShardedTensor
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.refs import (
    ANYTHING,
    PerRankValues,
    PickledValue,
    TensorRef,
    UnknownValue,
    UnregisteredValue,
)
from holdfast._formats.native.registered_types import registered_as
from holdfast._formats.native.torch_elements import torch_dtype
from holdfast._formats.native.values import numpy_dtype_from
from holdfast._layout.sharded_tensors import local_shards
from holdfast._layout.tensor_items import (
    CHUNKS_HOOK,
    local_tensor,
    on_this_rank,
    refuse_if_it_has_no_bytes,
    size_and_dtype,
)
from holdfast.errors import UnsupportedTensorError


def is_target(value: Any) -> bool:
    """Whether it is a tensor or an array, which is filled."""
    return isinstance(value, (torch.Tensor, np.ndarray))


def takes_anything(target: Any) -> bool:
    """Whether a place of a state says nothing about what belongs there."""
    return target is None or target is ANYTHING or (isinstance(target, (dict, list)) and not target)


def shape_and_dtype(target: Any) -> tuple[tuple[int, ...], str]:
    """The shape of the whole tensor, and the name of its element type."""
    if isinstance(target, np.ndarray):
        return target.shape, _numpy_name(target.dtype)
    size, dtype = size_and_dtype(target)
    return tuple(size), str(dtype).removeprefix("torch.")


def stored_dtype_name(ref: TensorRef) -> str:
    """The name of the element type of a stored tensor, comparable with that of a target."""
    return ref.dtype.name if ref.numpy is None else _numpy_name(numpy_dtype_from(ref.numpy))


def can_be_converted(ref: TensorRef) -> bool:
    """Whether stored elements are numbers, which can become numbers of another type."""
    if ref.numpy is not None:
        return numpy_dtype_from(ref.numpy).kind in "biufc"
    dtype = torch_dtype(ref.dtype)
    return dtype is not None and _are_numbers(dtype)


def why_not_real(key: str, saved: str, current: str) -> str | None:
    """Why no cast makes elements of one type into those of another, in words: halves of complex numbers get lost."""
    if not _is_complex(saved) or _is_complex(current):
        return None
    return (
        f"is {saved} in the checkpoint and {current} in the state, so that imaginary parts would be lost; load it as "
        f"complex numbers, or say what to make of them: transform={{{key!r}: lambda checkpoint, key: ...}}"
    )


def _is_complex(dtype: str) -> bool:
    """By the names that torch and numpy have for such types: complex64, >c8."""
    return dtype.lstrip("<>").startswith("c")


def takes_numbers(target: Any) -> bool:
    """Whether numbers of another type can become elements of a target."""
    if isinstance(target, np.ndarray):
        return target.dtype.kind in "biufc"
    return _are_numbers(size_and_dtype(target)[1])


@cache
def _are_numbers(dtype: torch.dtype) -> bool:
    """Whether torch converts such elements. Of those that are smaller than a byte, it only keeps the bits."""
    try:
        torch.empty(1, dtype=dtype, device="cpu").copy_(torch.zeros(1, device="cpu"))
    except (NotImplementedError, RuntimeError):
        return False
    return True


def held_elements(target: Any) -> int | None:
    """How many elements this rank holds of a target, by its memory; None if only the target itself knows."""
    if isinstance(target, np.ndarray):
        return target.size
    if isinstance(target, DTensor):
        if not on_this_rank(target):
            return 0
        local = local_tensor(target)
        return None if hasattr(local, CHUNKS_HOOK) else local.numel()
    if isinstance(target, ShardedTensor):
        return sum(shard.tensor.numel() for shard in local_shards(target))
    return None if hasattr(type(target), CHUNKS_HOOK) else target.numel()


def why_not_fillable(key: str, target: Any) -> str | None:
    """Why nothing can be read into a target, in words; None if it can."""
    if isinstance(target, np.ndarray):
        if not target.flags.writeable:
            return "is a numpy array that is read-only"
        strides = [abs(stride) for stride in target.strides]
        overlaps = _overlaps_itself(strides, target.shape, target.itemsize)
        return "is an array whose elements share memory; copy it first" if overlaps else None
    if isinstance(target, (DTensor, ShardedTensor)) or hasattr(type(target), CHUNKS_HOOK):
        return None
    try:
        refuse_if_it_has_no_bytes(key, target)
    except UnsupportedTensorError as error:
        return f"is {error.kind} in the state, which cannot be read into"
    overlaps = _overlaps_itself(target.stride(), target.shape, 1)
    return "is a tensor whose elements share memory; clone it first" if overlaps else None


def fresh_memory(ref: TensorRef, dtype: torch.dtype | None) -> Any:
    """Memory for a stored tensor, of another dtype if that is given and the stored one is of the floating kind.

    Complex numbers only become other complex ones, since a pattern such as ``*`` must not take away a half of them.
    None if torch does not have such elements.
    """
    if ref.numpy is not None:
        return np.empty(ref.shape, numpy_dtype_from(ref.numpy))
    found = torch_dtype(ref.dtype)
    if found is not None and dtype is not None and can_be_converted(ref):
        found = dtype if found.is_floating_point or (found.is_complex and dtype.is_complex) else found
    return None if found is None else torch.empty(ref.shape, dtype=found, device="cpu")


def in_words(stored: Any) -> str:
    """What is stored, for a message that goes on with what the state has."""
    if isinstance(stored, TensorRef):
        return "a tensor"
    if isinstance(stored, (PerRankValues, PickledValue, UnregisteredValue, UnknownValue)):
        return "not a plain value"
    return f"a {type(stored).__name__}"


def why_not_restorable(value: Any) -> str | None:
    """Why a stored value cannot be given back as what it was; None if it can."""
    if isinstance(value, PickledValue):
        return "is stored as a pickle, which can run any code; allow_pickle=True loads it"
    if isinstance(value, UnregisteredValue) and registered_as(value.kind, value.type) is not None:
        return (
            f"is a {value.kind} of {value.type} of which only some fields are stored or to be loaded, or others than "
            "the class has; put one into the state to load the fields into"
        )
    if isinstance(value, UnregisteredValue):
        return (
            f"is a {value.kind} of {value.type}, which this program has not registered; call "
            "holdfast.register_type with that class"
        )
    if isinstance(value, UnknownValue):
        return f"is of a type that this Holdfast does not know ({value.type})"
    return None


def _numpy_name(dtype: np.dtype[Any]) -> str:
    try:
        known = dtype_named(dtype.name)
    except ValueError:
        return str(dtype)
    return known.name if known.numpy == dtype and dtype == dtype.newbyteorder("<") else str(dtype)


def _overlaps_itself(strides: Sequence[int], shape: Sequence[int], element: int) -> bool:
    """Whether two elements are at the same place, as in expanded tensors. Strides are in units of which one element
    takes ``element``."""
    extent = element
    dims = [(stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1]
    for stride, size in sorted(dims) if element and 0 not in shape else []:
        if stride < extent:
            return True
        extent += stride * (size - 1)
    return False
