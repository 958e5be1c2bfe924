"""Which dtype of torch each element type of safetensors is, and how shapes translate."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast._compat.tensors import DTYPES
from holdfast._formats.safetensors.dtypes import IN_MEMORY, PAIRS, in_memory
from holdfast.errors import UnsupportedTensorError

BY_NAME: dict[str, torch.dtype] = {name: DTYPES[called] for name, called in IN_MEMORY.items() if called in DTYPES}
NAMES = {dtype: name for name, dtype in BY_NAME.items()}
FLOAT8 = frozenset(dtype for name, dtype in BY_NAME.items() if name.startswith("F8_"))


def to_safetensors(key: str, dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Name and shape by which a file lists a tensor.

    >>> to_safetensors("weight", torch.bfloat16, (2, 3))
    ('BF16', (2, 3))
    """
    name = NAMES.get(dtype)
    if name is None or (name == PAIRS and not shape):
        raise UnsupportedTensorError(
            f"'{key}' is a tensor of {dtype}, which safetensors files cannot hold. Convert it, or save it with "
            "FileSystemWriter.",
            key=key,
            kind=str(dtype),
        )
    return name, (*shape[:-1], shape[-1] * 2) if name == PAIRS else tuple(shape)


def to_torch(key: str, name: str, shape: Sequence[int], source: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape that a tensor of a file has in torch.

    >>> to_torch("weight", "F4", (2, 8), "a file")
    (torch.float4_e2m1fn_x2, (2, 4))
    """
    called, shape_in_memory = in_memory(key, name, shape, source)
    if name not in BY_NAME:
        raise UnsupportedTensorError(
            f"{source}: '{key}' has elements of type {name}, which torch {torch.__version__} does not have (newer "
            f"versions call it {called}). Install a newer torch, or leave the tensor out.",
            key=key,
            kind=name,
        )
    return BY_NAME[name], shape_in_memory
