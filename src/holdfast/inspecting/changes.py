"""How far the elements of one tensor are from those of another of the same shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.formats.native.refs import TensorRef
from holdfast.inspecting.numbers import Array, are_numbers, is_nan, numbers_of

_EXACT_IN_64_BITS = 4
"""Differences of integers of so many bytes fit into 64 bits with a sign."""


@dataclass
class Change:
    """How two tensors of the same shape differ; can be added up over parts of them."""

    elements: int = 0
    differing: int = 0
    """Elements of one dtype differ if their bits do; elements of two dtypes, if their values do."""
    incomparable: int = 0
    """Of these, those where one is nan and the other is not, or their bits differ: there is no distance."""
    largest: float | int | None = None
    """The largest distance between two elements that differ; None if there is none to be had."""
    squares: float = 0.0
    squares_before: float = 0.0
    """Of the finite elements of the first."""

    def add(self, other: Change) -> None:
        """Take in another part."""
        self.elements += other.elements
        self.differing += other.differing
        self.incomparable += other.incomparable
        if other.largest is not None:
            self.largest = other.largest if self.largest is None else max(self.largest, other.largest)
        self.squares += other.squares
        self.squares_before += other.squares_before

    @property
    def norm(self) -> float:
        """Of the difference, over all elements that can be compared."""
        return math.sqrt(self.squares)

    @property
    def norm_before(self) -> float:
        """Of the first tensor."""
        return math.sqrt(self.squares_before)

    @property
    def relative(self) -> float | None:
        """The norm of the difference by that of the first tensor; None if that is zero or infinite."""
        return self.norm / self.norm_before if 0 < self.norm_before < math.inf else None


def compare(a: Array, a_ref: TensorRef, b: Array, b_ref: TensorRef) -> Change:
    """Compare the bits of the same part of two tensors."""
    same_type = a_ref.dtype == b_ref.dtype and a_ref.numpy == b_ref.numpy
    countable = are_numbers(a_ref) and are_numbers(b_ref)
    change = Change(elements=a.size)
    if not countable:
        change.differing = int(np.count_nonzero(_unlike_bits(a, b))) if a.dtype == b.dtype else a.size
        return change
    before = numbers_of(a, a_ref)
    change.squares_before = _squares(before[np.isfinite(before)] if before.dtype.kind in "fc" else before)
    after = numbers_of(b, b_ref)
    differ = _unlike_bits(a, b) if same_type else _unlike_values(before, after)
    change.differing = int(np.count_nonzero(differ))
    if change.differing:
        _measure(change, before[differ], after[differ])
    return change


def _measure(change: Change, before: Array, after: Array) -> None:
    """How far those are apart that differ."""
    nan = is_nan(before) | is_nan(after)
    change.incomparable = int(np.count_nonzero(nan))
    before, after = before[~nan], after[~nan]
    if not before.size:
        return
    if before.dtype.kind in "biu" and after.dtype.kind in "biu":
        apart = _apart_exactly(before, after)
        change.largest = int(apart.max())
        change.squares = _squares(apart.astype(np.float64))
        return
    wide = np.complex128 if "c" in before.dtype.kind + after.dtype.kind else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(after.astype(wide) - before.astype(wide))
    distance = np.where(before == after, 0.0, distance)  # two of the same infinity
    change.largest = float(np.max(np.where(np.isnan(distance), np.inf, distance)))
    change.squares = _squares(distance)


def _unlike_values(before: Array, after: Array) -> npt.NDArray[np.bool_]:
    """Which values are not the same; nan is the same as nan."""
    if before.dtype.kind in "biu" and after.dtype.kind in "biu":
        return np.not_equal(_apart_exactly(before, after), 0)
    if "c" in before.dtype.kind + after.dtype.kind:
        unlike: Any = before.astype(np.complex128) != after.astype(np.complex128)
    else:
        unlike = before.astype(np.float64) != after.astype(np.float64)
    found: npt.NDArray[np.bool_] = unlike & ~(is_nan(before) & is_nan(after))
    return found


def _apart_exactly(before: Array, after: Array) -> Array:
    """The distances of integers, without rounding."""
    if max(before.dtype.itemsize, after.dtype.itemsize) <= _EXACT_IN_64_BITS:
        return np.abs(after.astype(np.int64) - before.astype(np.int64))
    is_signed = [numbers.dtype.kind == "i" for numbers in (before, after)]
    if any(is_signed) and np.uint64 in (before.dtype, after.dtype):
        apart: Array = np.abs(after.astype(object) - before.astype(object))  # may be more than 64 bits
        return apart
    wide = np.int64 if any(is_signed) else np.uint64
    a, b = before.astype(wide), after.astype(wide)
    # Without signs the difference of two 64-bit numbers fits, and is right even where their signs differ.
    return np.where(a > b, a.view(np.uint64) - b.view(np.uint64), b.view(np.uint64) - a.view(np.uint64))


def _squares(numbers: Array) -> float:
    if numbers.dtype.kind == "c":
        return _squares(numbers.astype(np.complex128).view(np.float64))
    wide = numbers.astype(np.float64, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.einsum("i,i->", wide, wide))  # not dot, which starts threads of its own


def _unlike_bits(a: Array, b: Array) -> npt.NDArray[np.bool_]:
    """Which elements are not bit by bit the same."""
    a, b = (np.ascontiguousarray(array).reshape(-1) for array in (a, b))
    if a.dtype.kind == "V":
        by_byte = (array.view(np.uint8).reshape(-1, a.dtype.itemsize) for array in (a, b))
        unlike: npt.NDArray[np.bool_] = np.any(np.not_equal(*by_byte), axis=1)
    else:
        unlike = np.not_equal(a, b)
    return unlike
