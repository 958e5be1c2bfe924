"""What a trainer that calls stock torch does, for ranks of the pool."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from holdfast.integrations.torch_dcp import HoldfastReader, HoldfastWriter
from tests.sharding import mesh_of_all_ranks


def quiet() -> AbstractContextManager[Any]:
    """Without what torch says to itself, such as that there is just one process."""
    return _quiet()


@contextmanager
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save(state: dict[str, Any], path: Path | str | None, **options: Any) -> Any:
    """By stock torch; options of the writer and of `save`."""
    of_save = {name: options.pop(name) for name in ("planner", "no_dist", "checkpoint_id") if name in options}
    with quiet():
        return stock.save(state, storage_writer=HoldfastWriter(path, **options), **of_save)


def load(state: dict[str, Any], path: Path | str | None, **options: Any) -> dict[str, Any]:
    """By stock torch, into `state`; options of the reader and of `load`."""
    of_load = {name: options.pop(name) for name in ("planner", "no_dist", "checkpoint_id") if name in options}
    with quiet():
        stock.load(state, storage_reader=HoldfastReader(path, **options), **of_load)
    return state


def trained(seed: int, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that FSDP2 has sharded over all ranks, and its optimizer, after some steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    if dist.is_initialized():
        mesh = mesh_of_all_ranks()
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    for _ in range(steps):
        model(torch.linspace(-1, 1, 24).reshape(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As trainers that use torch's helpers make it."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": 7}


def whole(state: Any) -> Any:
    """A state with full tensors in place of shards."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return state.full_tensor() if hasattr(state, "full_tensor") else state


def same(left: Any, right: Any) -> bool:
    """Whether two states are the same to the bit, types of containers included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and _bytes(left) == _bytes(right)
    if hasattr(left, "tobytes"):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    return bool(left == right)


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().flatten())
    return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
