"""What the golden checkpoints of stock DCP contain. Never changed: checkpoints that exist cannot change either.

Runs with every torch from 2.4 on, in the process that writes and in the tests that read: it uses old names only.
"""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import nn

WORLD_SIZE = 4


def numbers(*shape: int, dtype: torch.dtype = torch.float32, start: int = 1) -> torch.Tensor:
    """A tensor that holds ``start``, ``start + 1`` and so on."""
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count).reshape(shape).to(dtype)


def one_dimension() -> dict[str, torch.Tensor]:
    """The tensors of ``dtensor-1d``, in full. Each was sharded over four ranks, ``copies`` was on all of them."""
    return {
        "rows": numbers(7, 5),
        "columns": numbers(5, 6, dtype=torch.int64),
        "few rows": numbers(2, 3, dtype=torch.uint8),
        "copies": numbers(4, dtype=torch.float64),
    }


def two_dimensions() -> dict[str, torch.Tensor]:
    """The tensors of ``dtensor-2d``, in full. They were sharded over two times two ranks."""
    return {
        "blocks": numbers(7, 11, dtype=torch.float16),
        "hybrid": numbers(9, 2),
        "rows twice": numbers(8, 3),
        "copies of columns": numbers(3, 5, dtype=torch.int32),
    }


class Net(nn.Module):
    """The model of the FSDP checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.embed(tokens))))


MODEL_SHAPES = {"embed.weight": (9, 4), "up.weight": (6, 4), "up.bias": (6,), "down.weight": (4, 6)}


def model() -> dict[str, torch.Tensor]:
    """The parameters of ``Net`` in the FSDP checkpoints, in full."""
    found, start = {}, 100
    for name, shape in MODEL_SHAPES.items():
        found[name] = numbers(*shape, start=start)
        start += found[name].numel()
    return found


def moments() -> dict[str, dict[str, torch.Tensor]]:
    """The state of its Adam, in full."""
    return {
        name: {"step": torch.tensor(3.0), "exp_avg": weight + 1000, "exp_avg_sq": weight + 2000}
        for name, weight in model().items()
    }


LEARNING_RATE = 0.0625


def odd_tensors() -> dict[str, torch.Tensor]:
    """Tensors of many dtypes, shapes and strides."""
    names = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
    found = {name: numbers(2, 3).to(getattr(torch, name)) for name in names}
    found["complex64"] = torch.complex(numbers(3), numbers(3, start=4))
    found["float8_e4m3fn"] = numbers(4).to(torch.float8_e4m3fn)
    found["no dimensions"] = torch.tensor(-1.5)
    found["no elements"] = torch.empty(3, 0, 2)
    found["transposed"] = numbers(2, 3).T
    found["channels last"] = numbers(1, 2, 2, 3).to(memory_format=torch.channels_last)
    found["every other"] = numbers(10)[::2]
    found["of a larger storage"] = numbers(6, 4)[2:4]
    found["expanded"] = numbers(3, 1).expand(3, 4)
    found["wanted gradient"] = numbers(2, 2).requires_grad_()
    return found


def values() -> dict[str, Any]:
    """Values of the types that states of training have."""
    return {
        "int": 3,
        "large": 2**70,
        "float": 0.1,
        "truth": True,
        "text": "ü€",
        "bytes": b"\x00\xff",
        "nothing": None,
        "list": [1, "two", [3.5, None]],
        "tuple": (1, (2, "x")),
        "dict": {"a": {"b": 1, "c": [numbers(2), 5]}, "empty": {}},
        "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
        "groups": [{"lr": LEARNING_RATE, "betas": (0.9, 0.999), "params": [0, 1]}],
        "empty list": [],
    }


def of_one_process() -> dict[str, Any]:
    """The state of ``one-process`` and its variants."""
    return {"tensors": odd_tensors(), "values": values()}


def own_of(rank: int) -> dict[str, Any]:
    """What only this rank had in ``own-keys``."""
    return {f"rank {rank}": {"position": rank * 100, "buffer": numbers(rank + 1, start=rank)}}


HUGGING_FACE_FILES = {"embed.weight": 1, "up.weight": 1, "up.bias": 2, "down.weight": 2}
"""Which file of the Hugging Face folders has which weight."""
