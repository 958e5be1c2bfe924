"""A checkpoint in memory, for testing how live objects become state and come back without any files.

`stored_form` is what a checkpoint knows before it is read (a `TensorRef` for every tensor), and `fill` does what a load
does: it reads into the tensors of a template, and notes what is missing or left over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.refs import ANYTHING, TensorRef
from holdfast._state.expanding import Context, adapter_for


@dataclass
class MemoryCheckpoint:
    """What was saved: the tree, and the tensors by key."""

    tree: Any = None
    tensors: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    """Tensors that do not have the shape or dtype of what is stored."""

    @classmethod
    def of(cls, state: Any) -> MemoryCheckpoint:
        checkpoint = cls()
        checkpoint.tree = checkpoint._stored_form(state, "")
        return checkpoint

    def _stored_form(self, value: Any, key: str) -> Any:
        if isinstance(value, dict):
            copy = type(value)()
            for name, inner in value.items():
                copy[name] = self._stored_form(inner, f"{key}.{name}")
            return copy
        if type(value) in (list, tuple):
            return type(value)(self._stored_form(inner, f"{key}.{index}") for index, inner in enumerate(value))
        if isinstance(value, torch.Tensor):
            whole = _whole(value)
            self.tensors[key] = whole
            return TensorRef(key, dtype_named(str(whole.dtype).removeprefix("torch.")), tuple(whole.shape))
        if isinstance(value, np.ndarray):
            self.tensors[key] = value.copy()
            return TensorRef(key, dtype_named(value.dtype.name), value.shape, numpy=value.dtype.str)
        assert value is None or type(value) in (bool, int, float, str, bytes), f"{key}: {type(value)}"
        return value

    def fill(self, template: Any) -> Any:
        return self._fill(template, self.tree, "")

    def _fill(self, template: Any, stored: Any, key: str) -> Any:
        if template is ANYTHING:
            return self._read(stored)
        if isinstance(template, torch.Tensor):
            self._fill_tensor(template, stored, key)
            return template
        if isinstance(template, dict) and isinstance(stored, dict):
            self.unexpected += [f"{key}.{name}" for name in stored if name not in template]
            loaded = type(template)()
            for name, inner in template.items():
                if name in stored:
                    loaded[name] = self._fill(inner, stored[name], f"{key}.{name}")
                else:
                    self.missing.append(f"{key}.{name}")
                    loaded[name] = inner
            return loaded
        if type(template) in (list, tuple) and type(stored) is type(template) and len(template) == len(stored):
            pairs = enumerate(zip(template, stored, strict=True))
            return type(template)(self._fill(inner, beside, f"{key}.{index}") for index, (inner, beside) in pairs)
        return self._read(stored)

    def _fill_tensor(self, target: torch.Tensor, stored: Any, key: str) -> None:
        assert isinstance(stored, TensorRef), f"{key} is not stored as a tensor"
        if tuple(target.size()) != stored.shape or stored.dtype != target.dtype:
            self.misfits.append(key)
            return
        _copy_into(target, self.tensors[stored.key])

    def _read(self, stored: Any) -> Any:
        if isinstance(stored, TensorRef):
            found = self.tensors[stored.key]
            return found.copy() if isinstance(found, np.ndarray) else found.clone()
        if isinstance(stored, dict):
            copy = type(stored)()
            for name, inner in stored.items():
                copy[name] = self._read(inner)
            return copy
        if type(stored) in (list, tuple):
            return type(stored)(self._read(inner) for inner in stored)
        return stored


def save(state: dict[str, Any]) -> MemoryCheckpoint:
    """Save live objects, as a dict of them."""
    context = Context.of(state)
    return MemoryCheckpoint.of(
        {key: adapter_for(value, (key,), context).saved() for key, value in state.items()}  # type: ignore[union-attr]
    )


def load(
    checkpoint: MemoryCheckpoint, state: dict[str, Any], *, strict: bool = True, optimizer_mismatch: Any = "error"
) -> list[str]:
    """Load into live objects and return the notes."""
    context = Context.of(state)
    adapters = {key: adapter_for(value, (key,), context) for key, value in state.items()}
    for adapter in adapters.values():
        adapter.expect(None, optimizer_mismatch)  # type: ignore[union-attr]
    template = {key: adapter.template(checkpoint.tree.get(key)) for key, adapter in adapters.items()}  # type: ignore[union-attr]
    loaded = checkpoint.fill(template)
    if strict:
        assert (checkpoint.missing, checkpoint.unexpected, checkpoint.misfits) == ([], [], [])
    for key, adapter in adapters.items():
        adapter.apply(loaded[key])  # type: ignore[union-attr]
    return [note for adapter in adapters.values() for note in adapter.notes()]  # type: ignore[union-attr]


def difference(one: Any, other: Any, key: str = "") -> str | None:
    """Where two states differ in structure, type, or any bit; None if nowhere."""
    if type(one) is not type(other):
        return f"{key}: {type(one)} and {type(other)}"
    if isinstance(one, dict):
        if list(one) != list(other):
            return f"{key}: keys {list(one)} and {list(other)}"
        return next((found for name in one if (found := difference(one[name], other[name], f"{key}.{name}"))), None)
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"{key}: {len(one)} and {len(other)} elements"
        pairs = enumerate(zip(one, other, strict=True))
        return next((found for index, pair in pairs if (found := difference(*pair, f"{key}.{index}"))), None)
    if isinstance(one, torch.Tensor):
        return _tensor_difference(one, other, key)
    return None if one == other or (one != one and other != other) else f"{key}: {one!r} and {other!r}"


def _tensor_difference(one: torch.Tensor, other: torch.Tensor, key: str) -> str | None:
    if (one.dtype, one.device, one.shape) != (other.dtype, other.device, other.shape):
        return f"{key}: {one.dtype} {one.shape} and {other.dtype} {other.shape}"
    if isinstance(one, DTensor):
        assert isinstance(other, DTensor)
        if one.placements != other.placements or one.device_mesh != other.device_mesh:
            return f"{key}: placed differently"
        one, other = one.to_local(), other.to_local()
    same = one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))
    return None if same else f"{key}: other numbers"


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().clone()
    if isinstance(tensor, ShardedTensor):
        # Every rank needs all of it; `gather` fills it on one rank only.
        whole = torch.zeros(tensor.size(), dtype=tensor.dtype)
        for shard in tensor.local_shards():
            _region(whole, shard.metadata.shard_offsets, shard.metadata.shard_sizes).copy_(shard.tensor)
        torch.distributed.all_reduce(whole)
        return whole
    return tensor.clone()


def _copy_into(target: torch.Tensor, whole: torch.Tensor) -> None:
    with torch.no_grad():
        if isinstance(target, DTensor):
            sizes, offsets = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
            target._local_tensor.copy_(_region(whole, offsets, sizes))
        elif isinstance(target, ShardedTensor):
            for shard in target.local_shards():
                shard.tensor.copy_(_region(whole, shard.metadata.shard_offsets, shard.metadata.shard_sizes))
        else:
            target.detach().copy_(whole)


def _region(tensor: torch.Tensor, offsets: Any, sizes: Any) -> torch.Tensor:
    for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dimension, offset if size else 0, size)
    return tensor
