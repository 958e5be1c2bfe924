"""ShardedTensors: the local shards of one, also when shards are ShardedTensors themselves.

FSDP1 over tensor parallelism makes such nested ones: the outer shard is this rank's part of the parameter, the inner
one this rank's part of that. What counts is the sum of the offsets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdfast._base.nested import set_element, traverse_state_dict
from holdfast._compat.sharded_tensors import LocalShardOfTensor as Shard
from holdfast._compat.sharded_tensors import (
    RemoteDevice,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    make_sharded_tensor,
)
from holdfast._formats.dcp.metadata import STATE_DICT_TYPE


class LocalShard(NamedTuple):
    """Data of this rank and the box of the full tensor that it is."""

    offsets: torch.Size
    sizes: torch.Size
    tensor: torch.Tensor


def local_shards(tensor: ShardedTensor) -> Iterator[LocalShard]:
    """All data that this rank holds of ``tensor``."""
    for shard in tensor.local_shards():
        offsets = torch.Size(shard.metadata.shard_offsets)
        if not isinstance(shard.tensor, ShardedTensor):
            yield LocalShard(offsets, torch.Size(shard.metadata.shard_sizes), shard.tensor)
            continue
        for inner in local_shards(shard.tensor):
            yield LocalShard(torch.Size(_sum(offsets, inner.offsets)), inner.sizes, inner.tensor)


def flatten_sharded_tensors(state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
    """A copy of ``state_dict`` with every nested ShardedTensor replaced by a flat one.

    A ShardedTensor without data on this rank is left out. Planners do not need this (they see through nesting by
    themselves); it is for programs that look at the shards.
    """
    result: STATE_DICT_TYPE = {}

    def visit(path: Any, value: Any) -> None:
        if isinstance(value, ShardedTensor):
            shards = value.local_shards()
            if not shards:
                return
            if len(shards) == 1 and isinstance(shards[0].tensor, ShardedTensor):
                value = _flat_copy(value)
        set_element(result, path, value)

    traverse_state_dict(state_dict, visit)
    return result


def _flat_copy(tensor: ShardedTensor) -> ShardedTensor:
    shards = list(local_shards(tensor))
    if len(shards) != 1:
        raise ValueError(f"a nested ShardedTensor has one shard on a rank, this one has {len(shards)}")
    (mine,) = shards
    rank = dist.get_rank()
    own = ShardMetadata(list(mine.offsets), list(mine.sizes), _placement(rank, mine.tensor.device))
    # A description must tile the tensor. Who holds the other shards does not matter to those who look at local ones.
    another = _placement((rank + 1) % dist.get_world_size(), mine.tensor.device)
    others = [ShardMetadata(offsets, sizes, another) for offsets, sizes in _held_elsewhere(tensor, [0] * tensor.dim())]
    inner = tensor.local_shards()[0].tensor
    assert isinstance(inner, ShardedTensor)
    whole = ShardedTensorMetadata(
        shards_metadata=[own, *others],
        size=tensor.size(),
        tensor_properties=inner.metadata().tensor_properties,
    )
    flat: ShardedTensor = make_sharded_tensor([Shard(mine.tensor, own)], sharded_tensor_metadata=whole)
    return flat


def _held_elsewhere(tensor: ShardedTensor, origin: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The boxes of all shards but this rank's only one, at every level of nesting."""
    (mine,) = tensor.local_shards()
    for shard in tensor.metadata().shards_metadata:
        if shard.shard_offsets != mine.metadata.shard_offsets:
            yield _sum(origin, shard.shard_offsets), list(shard.shard_sizes)
    if isinstance(mine.tensor, ShardedTensor):
        yield from _held_elsewhere(mine.tensor, _sum(origin, mine.metadata.shard_offsets))


def _sum(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [left + right for left, right in zip(one, other, strict=True)]


def _placement(rank: int, device: torch.device) -> RemoteDevice:
    return RemoteDevice(f"rank:{rank}/{device}")
