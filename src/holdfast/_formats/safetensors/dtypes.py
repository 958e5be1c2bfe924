"""The element types of safetensors, by the names that its headers use."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from holdfast.errors import UnsupportedTensorError

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits of one element. ``C64`` is a complex number of two 32-bit floats."""

IN_MEMORY = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
"""What torch calls them. It has no names for types of six bits."""

PAIRS = "F4"
"""One element of torch's is two of safetensors', side by side in the last dimension."""


def in_memory(key: str, name: str, shape: Sequence[int], source: str) -> tuple[str, tuple[int, ...]]:
    """The name that torch has for the elements of a tensor of a file, and the shape that it has there.

    >>> in_memory("weight", "F4", (2, 8), "a file")
    ('float4_e2m1fn_x2', (2, 4))
    """
    found = IN_MEMORY.get(name)
    if found is None or (name == PAIRS and (not shape or shape[-1] % 2)):
        raise UnsupportedTensorError(
            f"{source}: '{key}' has elements of type {name} and shape {list(shape)}, for which torch "
            "has no dtype. Leave it out of the folder (or of its index), or have the model converted to another type.",
            key=key,
            kind=name,
        )
    return found, (*shape[:-1], shape[-1] // 2) if name == PAIRS else tuple(shape)


def nbytes(dtype: str, shape: Sequence[int]) -> int | None:
    """Bytes of a tensor; None if its elements, of fewer than 8 bits, do not fill whole bytes.

    >>> nbytes("BF16", (2, 3))
    12
    """
    bits = prod(shape) * BITS[dtype]
    return None if bits % 8 else bits // 8
