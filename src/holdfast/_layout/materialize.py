"""Memory to load into: for tensors on the meta device, and for the own rows of ShardedTensors."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdfast._base.nested import Location, ObjectPath, flat_name, opens_list, set_element, walk
from holdfast._compat.groups import device_of_messages
from holdfast._compat.sharded_tensors import LocalShardOfTensor as Shard
from holdfast._compat.sharded_tensors import (
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    ShardProperties,
    make_sharded_tensor,
)
from holdfast._compat.tensors import local_part
from holdfast._formats.dcp.metadata import TensorProperties
from holdfast._layout.checkpointable import copy_fields, is_checkpointable
from holdfast._layout.sharded_tensors import local_shards
from holdfast._layout.tensor_kinds import is_dtensor

# Memory for tensors on the meta device, which describe a state without holding it.


def materialize(state_dict: MutableMapping[str, Any]) -> dict[Location, torch.Tensor]:
    """Replace every meta tensor of a nested state by an empty one with memory; touch nothing else.

    Returns what was replaced, by its place.
    """
    found: dict[Location, torch.Tensor] = {}
    replaced: dict[Location, torch.Tensor] = {}

    def look(path: ObjectPath, location: Location, value: Any) -> None:
        if isinstance(value, torch.Tensor) and is_meta(value):
            found[location] = with_memory(flat_name(path), value)
            replaced[location] = value

    walk(state_dict, look, opens_list)
    for location, memory in found.items():
        set_element(state_dict, location, memory)
    return replaced


def is_meta(tensor: torch.Tensor) -> bool:
    """Whether it has no memory here."""
    if isinstance(tensor, ShardedTensor):  # it knows its own device only while it has exactly one shard here
        return any(shard.tensor.is_meta for shard in local_shards(tensor))
    if is_dtensor(tensor) and hasattr(part := local_part(tensor), "__create_chunk_list__") and not part.numel():
        return False  # a local tensor without shards lacks no memory; before torch 2.10 it says that it is meta
    return tensor.is_meta


def with_memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor in the place of a meta tensor: same layout, on the device that this process uses."""
    if isinstance(tensor, ShardedTensor):
        raise RuntimeError(  # noqa: TRY004 - the type that callers know from torch
            f"Found unsupported type {type(tensor)} for meta device loading: '{name}' is a ShardedTensor on the meta "
            "device, which cannot be given memory; use a DTensor"
        )
    memory: torch.Tensor
    if is_dtensor(tensor):
        from torch.distributed.tensor import DTensor

        device = torch.device(tensor.device_mesh.device_type)
        memory = DTensor.from_local(
            torch.empty_like(local_part(tensor), device=_current(device)),
            device_mesh=tensor.device_mesh,
            placements=tensor.placements,
            shape=tensor.size(),
            stride=tensor.stride(),
        )
    else:
        memory = torch.empty_like(tensor, device=_default_device())
    if isinstance(tensor, torch.nn.Parameter):
        memory = torch.nn.Parameter(memory, tensor.requires_grad)
    if is_checkpointable(tensor):
        copy_fields(tensor, memory)
    return memory


def _default_device() -> torch.device:
    initialized: bool = dist.is_available() and dist.is_initialized()
    return _current(device_of_messages()) if initialized else torch.device("cpu")


def _current(device: torch.device) -> torch.device:
    """The accelerator that this process uses, for a device type without an index."""
    index: int | None = device.index  # torch's annotation forgets devices without one
    if device.type == "cpu" or index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


# ShardedTensors that are split by rows over a group, as FSDP1 splits: memory for the own rows, to be loaded into.


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
