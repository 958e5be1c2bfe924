"""The element types of safetensors, by the names that its headers use."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

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


def nbytes(dtype: str, shape: Sequence[int]) -> int | None:
    """Bytes of a tensor; None if its elements, of fewer than 8 bits, do not fill whole bytes.

    >>> nbytes("BF16", (2, 3))
    12
    """
    bits = prod(shape) * BITS[dtype]
    return None if bits % 8 else bits // 8
