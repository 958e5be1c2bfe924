"""Sharded tensors, as FSDP1 makes them: all of their names are private."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor, ShardedTensorBase
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShardOfTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.remote_device import _remote_device as RemoteDevice

__all__ = [
    "ChunkShardingSpec",
    "LocalShardOfTensor",
    "RemoteDevice",
    "ShardMetadata",
    "ShardProperties",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "group_of_sharded",
    "make_sharded_tensor",
]


def make_sharded_tensor(shards: list[Any], **options: Any) -> ShardedTensor:
    """A ShardedTensor of this rank's shards, without asking the other ranks."""
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, **options)


def group_of_sharded(tensor: ShardedTensor) -> dist.ProcessGroup:
    """The process group that the shards are spread over."""
    return tensor._process_group
