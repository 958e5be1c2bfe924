"""The states that are saved and loaded. Random numbers: neither compression nor sparse files help."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.scales import Scale

State = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


def transformer(scale: Scale) -> Shapes:
    """A transformer and the two moments that Adam keeps of every parameter."""
    shapes = dict(_parameters(scale))
    return {f"{part}.{name}": shape for part in ("model", "exp_avg", "exp_avg_sq") for name, shape in shapes.items()}


def _parameters(scale: Scale) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = scale.width
    yield "embedding.weight", (scale.vocabulary, width)
    for layer in range(scale.layers):
        yield f"layers.{layer}.attention.qkv.weight", (3 * width, width)
        yield f"layers.{layer}.attention.out.weight", (width, width)
        yield f"layers.{layer}.mlp.up.weight", (4 * width, width)
        yield f"layers.{layer}.mlp.down.weight", (width, 4 * width)
        yield f"layers.{layer}.norm1.weight", (width,)
        yield f"layers.{layer}.norm2.weight", (width,)
    yield "norm.weight", (width,)


def small_tensors(scale: Scale) -> Shapes:
    """Very many tensors of 1 KB."""
    return {f"model.tensor{number}": (256,) for number in range(scale.small_tensors)}


def huge_tensor(scale: Scale) -> Shapes:
    """A single one."""
    return {"model.weight": (scale.huge_bytes // 4,)}


WORKLOADS: dict[str, Callable[[Scale], Shapes]] = {
    "transformer": transformer,
    "small tensors": small_tensors,
    "huge tensor": huge_tensor,
}


def filled(shapes: Shapes) -> State:
    """A state of these shapes in float32, the same each time."""
    generator = torch.Generator().manual_seed(len(shapes))
    return {key: torch.rand(shape, generator=generator) for key, shape in shapes.items()}


def room_for(shapes: Shapes, dtype: torch.dtype = torch.float32) -> State:
    """A state to load into, whose memory has been touched: no load pays for its first use."""
    return {key: torch.ones(shape, dtype=dtype) for key, shape in shapes.items()}


def few_bytes() -> State:
    """For a first call, which imports and sets up whatever a contender needs."""
    return filled({"model.weight": (16, 16), "exp_avg.weight": (16, 16)})


def shapes_of(state: State) -> Shapes:
    """The shapes of all tensors."""
    return {key: tuple(tensor.shape) for key, tensor in state.items()}


def bytes_of(state: State) -> int:
    """All bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def wipe(state: State) -> None:
    """So that what a load did not write shows."""
    for tensor in state.values():
        tensor.zero_()


def differing_key(state: State, other: State) -> str | None:
    """The first key whose tensors are not the same."""
    return next((key for key, tensor in state.items() if not torch.equal(tensor, other[key])), None)
