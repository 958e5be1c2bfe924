"""Which dtype of torch each element type of safetensors is, and how shapes translate."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.errors import UnsupportedTensorError

BY_NAME = {
    "BOOL": torch.bool,
    "F4": torch.float4_e2m1fn_x2,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in BY_NAME.items()}
FLOAT8 = frozenset(dtype for name, dtype in BY_NAME.items() if name.startswith("F8_"))

_PAIRS = "F4"
"""One element of torch's dtype is two of safetensors', side by side in the last dimension."""


def to_safetensors(key: str, dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Name and shape by which a file lists a tensor.

    >>> to_safetensors("weight", torch.bfloat16, (2, 3))
    ('BF16', (2, 3))
    """
    name = NAMES.get(dtype)
    if name is None or (name == _PAIRS and not shape):
        raise UnsupportedTensorError(
            f"'{key}' is a tensor of {dtype}, which safetensors files cannot hold. Convert it, or save it with "
            "FileSystemWriter.",
            key=key,
            kind=str(dtype),
        )
    return name, (*shape[:-1], shape[-1] * 2) if name == _PAIRS else tuple(shape)


def to_torch(key: str, name: str, shape: Sequence[int], source: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape that a tensor of a file has in torch.

    >>> to_torch("weight", "F4", (2, 8), "a file")
    (torch.float4_e2m1fn_x2, (2, 4))
    """
    dtype = BY_NAME.get(name)
    if dtype is None or (name == _PAIRS and (not shape or shape[-1] % 2)):
        raise UnsupportedTensorError(
            f"{source}: '{key}' has elements of type {name} and shape {list(shape)}, for which torch "
            "has no dtype. Leave it out of the folder (or of its index), or have the model converted to another type.",
            key=key,
            kind=name,
        )
    return dtype, (*shape[:-1], shape[-1] // 2) if name == _PAIRS else tuple(shape)
