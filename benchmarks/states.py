"""The states that are saved and loaded. Random numbers: neither compression nor sparse files help."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.scales import Scale

State = dict[str, torch.Tensor]


def transformer(scale: Scale) -> State:
    """A transformer and the two moments that Adam keeps of every parameter, all in float32."""
    generator = torch.Generator().manual_seed(0)
    shapes = dict(_parameters(scale))
    return {
        f"{part}.{name}": torch.rand(shape, generator=generator)
        for part in ("model", "exp_avg", "exp_avg_sq")
        for name, shape in shapes.items()
    }


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


def small_tensors(scale: Scale) -> State:
    """Very many tensors of 1 KB."""
    generator = torch.Generator().manual_seed(1)
    return {f"model.tensor{number}": torch.rand(256, generator=generator) for number in range(scale.small_tensors)}


def huge_tensor(scale: Scale) -> State:
    """A single one."""
    generator = torch.Generator().manual_seed(2)
    return {"model.weight": torch.rand(scale.huge_bytes // 4, generator=generator)}


def few_bytes() -> State:
    """For a first call, which imports and sets up whatever a contender needs."""
    return {"model.weight": torch.ones(16, 16), "exp_avg.weight": torch.ones(16, 16)}


def bytes_of(state: State) -> int:
    """All bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def place_for(state: State) -> State:
    """A state of the same shapes, whose memory has been touched: no load pays for its first use."""
    return {key: torch.zeros_like(tensor) for key, tensor in state.items()}


def wipe(state: State) -> None:
    """So that what a load did not write shows."""
    for tensor in state.values():
        tensor.zero_()


def differing_key(state: State, other: State) -> str | None:
    """The first key whose tensors are not the same."""
    return next((key for key, tensor in state.items() if not torch.equal(tensor, other[key])), None)
