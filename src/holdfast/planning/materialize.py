"""Memory for tensors on the meta device, which describe a state without holding it."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
import torch.distributed as dist

from holdfast.compat.groups import device_of_messages
from holdfast.compat.sharded_tensors import ShardedTensor
from holdfast.compat.tensors import local_part
from holdfast.planning.checkpointable import copy_fields, is_checkpointable
from holdfast.planning.distributed_types import is_dtensor
from holdfast.planning.sharded_tensors import local_shards
from holdfast.planning.trees import Location, ObjectPath, flat_name, opens_list, set_element, walk


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
