"""ShardedTensors that are split by rows over a group, as FSDP1 splits: memory for the own rows, to be loaded into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from holdfast.compat.groups import device_of_messages
from holdfast.compat.sharded_tensors import LocalShardOfTensor as Shard
from holdfast.compat.sharded_tensors import (
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    ShardProperties,
    make_sharded_tensor,
)
from holdfast.metadata import TensorProperties


class Rows(NamedTuple):
    """Consecutive rows of a tensor and who holds them."""

    holder: int
    first: int
    length: int


def split_rows(count: int, ways: int) -> list[Rows]:
    """Split as ``torch.chunk`` does: parts of the size of the first one, the last smaller, some without any.

    >>> split_rows(5, 4)
    [Rows(holder=0, first=0, length=2), Rows(holder=1, first=2, length=2), Rows(holder=2, first=4, length=1)]
    """
    most = -(-count // ways)
    return [Rows(holder, holder * most, min(most, count - holder * most)) for holder in range(-(-count // (most or 1)))]


def empty_row_shards(
    size: torch.Size, properties: TensorProperties, group: dist.ProcessGroup | None = None
) -> ShardedTensor:
    """A tensor of ``size``, split by rows over ``group``, with memory for this rank's own rows and no more.

    Nothing is sent between ranks: each works out the same description.
    """
    group = group or dist.group.WORLD
    device_type, members = group_device_type(group), dist.get_process_group_ranks(group)
    described: list[ShardMetadata] = []
    mine: list[Shard] = []
    for rows in split_rows(size[0], len(members)):
        rank, sizes = members[rows.holder], [rows.length, *size[1:]]
        memory = empty_tensor(properties, sizes, device_type) if rank == dist.get_rank() else None
        device = rank_device(rank, device_type) if memory is None else str(memory.device)
        shard = ShardMetadata([rows.first, *[0] * (len(size) - 1)], sizes, f"rank:{rank}/{device}")
        described.append(shard)
        if memory is not None:
            mine.append(Shard(memory, shard))
    whole = ShardedTensorMetadata(described, size, _shard_properties(properties, device_type))
    made: ShardedTensor = make_sharded_tensor(mine, sharded_tensor_metadata=whole, process_group=group)
    return made


def _shard_properties(properties: TensorProperties, device_type: str) -> ShardProperties:
    return ShardProperties(
        dtype=properties.dtype,
        layout=properties.layout,
        requires_grad=properties.requires_grad,
        pin_memory=_can_pin(properties, device_type),
    )


def empty_tensor(properties: TensorProperties, size: Sequence[int], device_type: str) -> torch.Tensor:
    """Memory for a tensor like the stored one, on the device that this process uses."""
    index = None if device_type == "cpu" else torch.accelerator.current_device_index()
    return torch.empty(
        torch.Size(size),
        dtype=properties.dtype,
        layout=properties.layout,
        requires_grad=properties.requires_grad,
        pin_memory=_can_pin(properties, device_type),
        device=torch.device(device_type) if index is None else torch.device(device_type, index),
    )


def _can_pin(properties: TensorProperties, device_type: str) -> bool:
    """Whether memory that was pinned when it was saved can be pinned here, too: that takes an accelerator."""
    return properties.pin_memory and device_type == "cpu" and torch.accelerator.is_available()


def group_device_type(group: dist.ProcessGroup | None = None) -> str:
    """Where tensors live that a group works on; in main memory if there is no group."""
    if not (dist.is_available() and dist.is_initialized()):
        return "cpu"
    return device_of_messages(group).type


def rank_device(rank: int, device_type: str) -> str:
    """The device of a rank if ranks are dealt out to the accelerators of each machine in turn."""
    if device_type == "cpu" or not torch.accelerator.is_available():
        return "cpu"
    return f"{device_type}:{rank % torch.accelerator.device_count()}"
