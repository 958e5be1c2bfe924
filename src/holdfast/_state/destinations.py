"""What a live object is loaded with: memory for stored tensors, and what it has at present where nothing is stored."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from holdfast._formats.native.refs import ANYTHING, TensorRef
from holdfast._formats.native.torch_elements import torch_dtype
from holdfast._layout.materialize import is_meta, with_memory
from holdfast._layout.tensor_kinds import is_dtensor, is_sharded_tensor

# Memory to load a stored tensor into.


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


# What a live object has at present, put where nothing was loaded for it.


_ABSENT = object()


def with_present(loaded: Any, present: Callable[[], Any]) -> Any:
    """What was loaded, without gaps. The present state is asked for only if there are any.

    >>> with_present({"step": ANYTHING, "rate": 0.1}, lambda: {"step": 7, "rate": 0.5})
    {'step': 7, 'rate': 0.1}
    """
    return _filled_up(loaded, present()) if _has_gaps(loaded) else loaded


def _has_gaps(loaded: Any) -> bool:
    if isinstance(loaded, Mapping):
        return any(map(_has_gaps, loaded.values()))
    return loaded is ANYTHING or (isinstance(loaded, (list, tuple)) and any(map(_has_gaps, loaded)))


def _filled_up(loaded: Any, present: Any) -> Any:
    if loaded is ANYTHING:
        return present
    if isinstance(loaded, dict):
        known = present if isinstance(present, Mapping) else {}
        made = copy.copy(loaded)
        for key, child in loaded.items():
            made[key] = _filled_up(child, known.get(key, _ABSENT))
            if made[key] is _ABSENT:
                del made[key]
        return made
    if isinstance(loaded, (list, tuple)):
        beside = list(present) if isinstance(present, (list, tuple)) else []
        beside += [_ABSENT] * (len(loaded) - len(beside))
        filled = [_filled_up(*pair) for pair in zip(loaded, beside, strict=False)]
        # Positions must not move, so None stands where there is nothing at present either.
        kept: Any = [None if child is _ABSENT else child for child in filled]
        kind: Any = type(loaded)
        return kind(*kept) if hasattr(kind, "_fields") else kind(kept)
    return loaded
