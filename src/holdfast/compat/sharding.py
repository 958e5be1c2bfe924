"""Sharded tensors and DTensors: names that torch keeps private or has moved.

Importing this takes a second, since torch's own modules do. ``holdfast.planning.distributed_types`` tells the classes
apart without importing them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor, ShardedTensorBase
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShardOfTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.remote_device import _remote_device as RemoteDevice
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = [
    "AsyncCollectiveTensor",
    "ChunkShardingSpec",
    "LocalShardOfTensor",
    "RemoteDevice",
    "ShardMetadata",
    "ShardOrder",
    "ShardProperties",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "StridedShard",
]

ShardOrder: TypeAlias = Mapping[int, Sequence[int]]
"""For each sharded tensor dimension the mesh dimensions that split it, in the order in which they do."""


# DTensor


def placements_of(tensor: DTensor) -> tuple[Any, ...]:
    """How a DTensor is spread over its mesh."""
    return tuple(tensor._spec.placements)


def given_shard_order(tensor: DTensor) -> ShardOrder | None:
    """The order in which the mesh dimensions split the tensor, if it is given beside the placements.

    Since 2.10 a DTensor may have one. Without, the placements alone say what is where.
    """
    spec = tensor._spec
    if getattr(spec, "use_strided_shard_as_shard_order", True):
        return None
    return {entry.tensor_dim: entry.mesh_dims for entry in spec.shard_order}


# ShardedTensor


def make_sharded_tensor(shards: list[Any], **options: Any) -> ShardedTensor:
    """A ShardedTensor of this rank's shards, without asking the other ranks."""
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, **options)


def group_of_sharded(tensor: ShardedTensor) -> dist.ProcessGroup:
    """The process group that the shards are spread over."""
    return tensor._process_group
