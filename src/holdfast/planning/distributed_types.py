"""Torch's kinds of tensors that are spread over ranks, told apart without importing the modules that define them.

These take a second to import, and a program that has not imported them has no such tensors.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

    from holdfast.compat.sharded_tensors import ShardedTensor


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
