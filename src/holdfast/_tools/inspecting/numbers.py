"""Stored bits as numbers to count with, exactly, whatever type they have and whether torch is there or not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast._base.tuning import COUNTED_ELEMENTS
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.numpy_types import numpy_dtype_from
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.small_floats import widened

Array: TypeAlias = npt.NDArray[Any]

_SMALLEST_SQUARES = 1e-280
"""Below, squares may have lost digits."""
_WIDENED = frozenset(
    {"bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}
)


def are_numbers(ref: TensorRef) -> bool:
    """Whether the elements of a tensor are numbers that can be counted with, and not just bits."""
    if ref.numpy is not None:
        try:
            return numpy_dtype_from(ref.numpy).kind in "biufc"
        except Exception:  # of a numpy that has more types than this one
            return False
    return ref.dtype.numpy is not None or ref.dtype.name in _WIDENED or ref.dtype.name in ("complex32", "bcomplex32")


def blocks_of(raw: Array, ref: TensorRef) -> Iterator[Array]:
    """Bits as numbers, in blocks that the processor's cache has room for."""
    flat = np.ascontiguousarray(raw).reshape(-1)
    for begin in range(0, flat.size, COUNTED_ELEMENTS):
        yield numbers_of(flat[begin : begin + COUNTED_ELEMENTS], ref)


def norm_of(numbers: Array) -> float:
    """The square root of the sum of squares, also where the squares are too large or too small to be had.

    >>> f"{norm_of(np.array([3e200, 4e200])):.6g} {norm_of(np.array([3e-200, 4e-200])):.6g}"
    '5e+200 5e-200'
    """
    if numbers.dtype.kind == "c":
        numbers = numbers.astype(np.complex128, copy=False).view(np.float64)
    wide = numbers.astype(np.float64, copy=False)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        squares = float(np.einsum("i,i->", wide, wide))  # not dot, which starts threads of its own
        if _SMALLEST_SQUARES < squares < math.inf:
            return math.sqrt(squares)
        largest = float(np.abs(wide).max(initial=0.0))
        if largest == 0 or not math.isfinite(largest):
            return largest
        scaled = wide / largest
        return largest * math.sqrt(float(np.einsum("i,i->", scaled, scaled)))


def numbers_of(raw: Array, ref: TensorRef) -> Array:
    """Bits as a flat array of numbers that holds each of them exactly.

    >>> from holdfast._formats.native.dtypes import dtype_named
    >>> numbers_of(np.array([0x3FC0], "<u2"), TensorRef("w", dtype_named("bfloat16"), (1,)))
    array([1.5], dtype=float32)
    """
    flat = np.ascontiguousarray(raw).reshape(-1)
    if ref.numpy is not None:
        return flat.view(numpy_dtype_from(ref.numpy))
    if ref.dtype.name == "complex32":
        return flat.view("<f2").astype(np.float32).view(np.complex64)
    if ref.dtype.name == "bcomplex32":
        return widened(flat.view("<u2"), TensorRef(ref.key, dtype_named("bfloat16"), ref.shape)).view(np.complex64)
    if ref.dtype.numpy is not None:
        return flat.view(ref.dtype.numpy)
    return widened(flat, ref)


def is_nan(numbers: Array) -> npt.NDArray[np.bool_]:
    """Which of them are not numbers; of complex ones, where either part is."""
    if numbers.dtype.kind in "biu":
        return np.zeros(numbers.shape, np.bool_)
    found: npt.NDArray[np.bool_] = np.isnan(numbers)
    return found


def magnitudes(numbers: Array) -> Array:
    """Complex numbers by how large they are, and all others as they are, for putting them in order."""
    if numbers.dtype.kind == "c":
        return np.abs(numbers.astype(np.complex128))
    if numbers.dtype.kind == "b":
        return numbers.view(np.uint8)
    return numbers
