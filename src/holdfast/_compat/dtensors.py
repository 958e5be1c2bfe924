"""DTensors: names that torch keeps private or has moved.

Importing this takes a second, since torch's own modules do; a program without DTensors need not.
``holdfast._layout.tensor_kinds`` recognizes the class without importing it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = [
    "AsyncCollectiveTensor",
    "ShardOrder",
    "StridedShard",
    "given_shard_order",
    "placements_of",
    "splits_parts_of_their_own_sizes",
]

ShardOrder: TypeAlias = Mapping[int, Sequence[int]]
"""For each sharded tensor dimension the mesh dimensions that split it, in the order in which they do."""


def placements_of(tensor: DTensor) -> tuple[Any, ...]:
    """How a DTensor is spread over its mesh."""
    return tuple(tensor._spec.placements)


def given_shard_order(tensor: DTensor) -> ShardOrder | None:
    """The order in which the mesh dimensions split the tensor, if it is given beside the placements.

    Since 2.10 a DTensor may have one. Without, the placements alone say what is where.
    """
    spec = tensor._spec
    order: Any = getattr(spec, "shard_order", None)
    # Strided shards can stand for an order themselves. Since 2.11 a flag says whether they do; before they always do.
    are_the_order = any(isinstance(placement, StridedShard) for placement in spec.placements) or not order
    if getattr(spec, "use_strided_shard_as_shard_order", are_the_order):
        return None
    return {entry.tensor_dim: entry.mesh_dims for entry in order}


@cache
def splits_parts_of_their_own_sizes() -> bool:
    """Whether a literal strided shard of an uneven size is a share of each part, as it is in torch since 2.10.

    Before, 2.8 and 2.9 deal out equal slices of the whole and cannot put them together again, and older ones refuse
    to split at all.
    """
    try:
        shares, _ = StridedShard(0, split_factor=2)._split_tensor(torch.arange(5), 2, with_padding=False)
    except AssertionError:
        return False
    return shares[0].tolist() == [0, 1, 3]
