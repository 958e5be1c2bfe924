"""Torch's kinds of tensors that are spread over ranks, recognized without importing the modules that define them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from holdfast._base.texts import some_of
from holdfast.errors import PartitionedParameterError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

    from holdfast._compat.sharded_tensors import ShardedTensor


# These take a second to import, and a program that has not imported them has no such tensors.


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Whether a value is a ``DTensor``.

    >>> is_dtensor(3)
    False
    """
    return isinstance(value, _class_in("torch.distributed.tensor", "DTensor"))


def is_sharded_tensor(value: object) -> TypeIs[ShardedTensor]:
    """Whether a value is a ``ShardedTensor``.

    >>> is_sharded_tensor(3)
    False
    """
    return isinstance(value, _class_in("torch.distributed._shard.sharded_tensor", "ShardedTensor"))


def _class_in(module: str, name: str) -> Any:
    """A class, or no class at all while its module is not imported."""
    return getattr(sys.modules.get(module), name, ())


# Parameters that DeepSpeed ZeRO-3 has partitioned: what is left of them has no elements, and would be saved so.
#
# DeepSpeed keeps the parts in memory of its own and leaves marks on the parameters, by which they are known here.


_MOST_SHOWN = 20
KIND = "a parameter that DeepSpeed ZeRO-3 has partitioned, so that nothing of it is in the model"

_TO_SAVE = (
    "Save inside of `with deepspeed.zero.GatheredParameters(list(model.parameters())):`, on all ranks, or with "
    "engine.save_checkpoint or engine.save_16bit_model. Nothing was saved."
)
TO_LOAD = (
    "load inside of `with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):`, on all "
    "ranks, or with engine.load_checkpoint"
)


def is_partitioned(tensor: Any) -> bool:
    """Whether DeepSpeed has the elements of a parameter elsewhere. A gathered one has them itself."""
    if not isinstance(tensor, torch.Tensor) or not hasattr(tensor, "ds_id"):
        return False
    shape = getattr(tensor, "ds_shape", None)
    elements = int(tensor.numel())
    if shape is None:
        return hasattr(tensor, "ds_status") and elements == 0
    return elements != int(prod(shape))


def refused(keys: list[str]) -> PartitionedParameterError:
    """The error for parameters that cannot be saved."""
    return PartitionedParameterError(f"{_what(keys)}. {_TO_SAVE}", key=keys[0], kind=KIND, keys=keys)


def not_loadable(keys: list[str]) -> PartitionedParameterError:
    """The error for parameters that nothing can be loaded into."""
    return PartitionedParameterError(
        f"{_what(keys)}; {TO_LOAD}. Nothing was changed.", key=keys[0], kind=KIND, keys=keys
    )


def _what(keys: list[str]) -> str:
    if len(keys) == 1:
        return f"'{keys[0]}' is {KIND}"
    return f"{len(keys)} tensors are each {KIND}: {some_of([repr(key) for key in keys], _MOST_SHOWN)}"


def partitioned_in(state: Any) -> list[str]:
    """The keys of such parameters in a nesting of dicts and lists, and in the models there."""
    return list(dict.fromkeys(_keys(state, (), set())))


def _keys(value: Any, path: tuple[Any, ...], around: set[int]) -> Iterator[str]:
    if isinstance(value, torch.nn.Module):
        for name, parameter in value.named_parameters(remove_duplicate=False):
            if is_partitioned(parameter):
                yield ".".join([*map(str, path), name])
    elif isinstance(value, torch.Tensor):
        if is_partitioned(value):
            yield ".".join(map(str, path))
    elif isinstance(value, (Mapping, list, tuple)) and id(value) not in around:
        around.add(id(value))
        items: Any = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, child in items:
            yield from _keys(child, (*path, name), around)
        around.discard(id(value))
