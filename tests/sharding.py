"""Meshes, and DTensors of tensors that every rank has, and back."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

_WITHOUT_MESSAGES = "src_data_rank" in inspect.signature(distribute_tensor).parameters  # since torch 2.7


def mesh_of_all_ranks() -> DeviceMesh:
    """One dimension, all ranks in a line."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(full: torch.Tensor, dim: int = 0) -> DTensor:
    """``full`` of rank 0, split over all ranks."""
    return distribute_tensor(full, mesh_of_all_ranks(), [Shard(dim)])


def dtensor_of(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's part of ``full``, as a DTensor, without messages between the ranks."""
    if _WITHOUT_MESSAGES:
        return distribute_tensor(full, mesh, placements, src_data_rank=None)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if mesh.get_coordinate() is None:  # this rank is not part of the mesh
        nothing = full.detach().new_empty(0)
        return DTensor.from_local(nothing, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
    sizes, offsets = compute_local_shape_and_global_offset(full.shape, mesh, placements)
    box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    local = full.detach()[box].clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of what FSDP2 and tensor parallelism have split, on every rank.

    FSDP2, which stands on the left, has split last, so its parts are joined first. Until torch 2.9, ``full_tensor()``
    mixes up the uneven shards of both.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    joined = tensor.to_local().detach()
    for mesh_dim, placement in enumerate(tensor.placements):
        if not isinstance(placement, Replicate):
            parts: list[torch.Tensor] = [joined] * tensor.device_mesh.size(mesh_dim)
            dist.all_gather_object(parts, joined.clone(), group=tensor.device_mesh.get_group(mesh_dim))
            joined = torch.cat(parts, placement.dim)
    return joined
