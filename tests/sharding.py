"""DTensors of tensors that every rank has, made without messages between the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

_WITHOUT_MESSAGES = "src_data_rank" in inspect.signature(distribute_tensor).parameters  # since torch 2.7


def dtensor_of(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's part of ``full``, as a DTensor."""
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
