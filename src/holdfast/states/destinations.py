"""Memory to load a stored tensor into."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.formats.native.refs import TensorRef
from holdfast.formats.native.torch_elements import torch_dtype
from holdfast.planning.distributed_types import is_dtensor, is_sharded_tensor
from holdfast.planning.materialize import is_meta, with_memory


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether this rank has only a part of it."""
    return is_dtensor(tensor) or is_sharded_tensor(tensor)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.size())


def fits(tensor: Any, stored: TensorRef) -> bool:
    """Whether a stored tensor can be read into this one as it is."""
    return (
        isinstance(tensor, torch.Tensor)
        and stored.numpy is None
        and not is_meta(tensor)
        and shape_of(tensor) == tuple(stored.shape)
        and stored.dtype == tensor.dtype
    )


def like(tensor: torch.Tensor, stored: TensorRef) -> torch.Tensor:
    """Fresh memory with the layout of a tensor and the element type of a stored one."""
    dtype = torch_dtype(stored.dtype)
    example = tensor.detach()
    if is_sharded_tensor(example):
        raise NotImplementedError("fresh memory for a ShardedTensor")
    if is_meta(example):
        example = with_memory(stored.key, example)
    return torch.empty_like(example, dtype=dtype, requires_grad=False)
