"""Floating point types that numpy lacks, as float32, which holds each of their numbers exactly."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast._formats.native.refs import TensorRef

_EIGHT_BITS = {
    # exponent bits, mantissa bits, bias
    "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2": (5, 2, 15),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2fnuz": (5, 2, 16),
}


def widened(raw: npt.NDArray[Any], ref: TensorRef) -> npt.NDArray[Any]:
    """Bits of such a type as float32 numbers."""
    name = ref.dtype.name
    if name == "bfloat16":
        wide: npt.NDArray[Any] = np.left_shift(raw.astype("<u4"), 16).view("<f4")
        return wide
    if name in _EIGHT_BITS or name == "float8_e8m0fnu":
        found: npt.NDArray[Any] = _table(name)[raw]
        return found
    raise TypeError(f"{ref.key!r} has elements of {ref.dtype}, which numpy does not have; use .torch() or .raw()")


@cache
def _table(name: str) -> npt.NDArray[np.float32]:
    return np.array([_number(name, bits) for bits in range(256)], dtype=np.float32)


def _number(name: str, bits: int) -> float:
    if name == "float8_e8m0fnu":
        return float("nan") if bits == 0xFF else 2.0 ** (bits - 127)
    exponent_bits, mantissa_bits, bias = _EIGHT_BITS[name]
    sign = -1.0 if bits & 0x80 else 1.0
    exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    if name.endswith("fnuz"):
        if bits == 0x80:
            return float("nan")
    elif name == "float8_e4m3fn":
        if bits & 0x7F == 0x7F:
            return float("nan")
    elif exponent == 31:
        return sign * float("inf") if mantissa == 0 else float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
