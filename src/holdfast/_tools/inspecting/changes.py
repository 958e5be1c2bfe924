"""How far the elements of one tensor are from those of another of the same shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast._base.tuning import COUNTED_ELEMENTS
from holdfast._formats.native.refs import TensorRef
from holdfast._tools.inspecting.numbers import Array, are_numbers, is_nan, norm_of, numbers_of

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
    norm: float = 0.0
    """Of the difference, over all elements that can be compared."""
    norm_before: float = 0.0
    """Of the finite elements of the first."""

    def add(self, other: Change) -> None:
        """Take in another part."""
        self.elements += other.elements
        self.differing += other.differing
        self.incomparable += other.incomparable
        if other.largest is not None:
            self.largest = other.largest if self.largest is None else max(self.largest, other.largest)
        self.norm = math.hypot(self.norm, other.norm)
        self.norm_before = math.hypot(self.norm_before, other.norm_before)

    @property
    def relative(self) -> float | None:
        """The norm of the difference by that of the first tensor.

        None if that is zero or infinite, or if there are elements that have become nan, which have no distance.
        """
        return self.norm / self.norm_before if 0 < self.norm_before < math.inf and not self.incomparable else None


def compare(a: Array, a_ref: TensorRef, b: Array, b_ref: TensorRef) -> Change:
    """Compare the bits of the same part of two tensors."""
    change = Change()
    a, b = (np.ascontiguousarray(array).reshape(-1) for array in (a, b))
    for begin in range(0, a.size, COUNTED_ELEMENTS):
        block = slice(begin, begin + COUNTED_ELEMENTS)
        change.add(_compare_block(a[block], a_ref, b[block], b_ref))
    return change


def _compare_block(a: Array, a_ref: TensorRef, b: Array, b_ref: TensorRef) -> Change:
    change = Change(elements=a.size)
    if not (are_numbers(a_ref) and are_numbers(b_ref)):
        change.differing = int(np.count_nonzero(_unlike_bits(a, b))) if a.dtype == b.dtype else a.size
        return change
    before, after = numbers_of(a, a_ref), numbers_of(b, b_ref)
    is_same_type = a_ref.dtype == b_ref.dtype and a_ref.numpy == b_ref.numpy
    differ = _unlike_bits(a, b) if is_same_type else _unlike_values(before, after)
    change.differing = int(np.count_nonzero(differ))
    wide = before.astype(np.float64, copy=False) if before.dtype.kind != "c" else before
    change.norm_before = norm_of(wide)
    if not math.isfinite(change.norm_before):
        change.norm_before = norm_of(wide[np.isfinite(wide)])
    if change.differing and not (is_same_type and before.dtype.kind == "f" and _measure_all(change, wide, after)):
        _measure(change, before[differ], after[differ])
    return change


def _measure_all(change: Change, before: Array, after: Array) -> bool:
    """How far all are apart, for which none need to be picked out. False if some have no distance."""
    with np.errstate(invalid="ignore", over="ignore"):
        distance = after.astype(np.float64) - before
    norm = norm_of(distance)
    if not math.isfinite(norm):
        return False
    change.norm, change.largest = norm, max(float(distance.max()), -float(distance.min()))
    return True


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
        change.norm = norm_of(apart.astype(np.float64))
        return
    wide = _wide_enough(before, after)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(after.astype(wide) - before.astype(wide)).astype(np.float64)
    distance = np.where(before == after, 0.0, distance) if wide != np.longdouble else distance  # of equal infinities
    distance = np.where(np.isnan(distance), np.inf, distance)
    change.largest = float(np.max(distance))
    change.norm = norm_of(distance)


def _wide_enough(before: Array, after: Array) -> Any:
    """A type in which the difference of such numbers can be taken."""
    kinds = before.dtype.kind + after.dtype.kind
    if "c" in kinds:
        return np.complex128
    return np.longdouble if any(map(_is_long, (before, after))) else np.float64


def _is_long(numbers: Array) -> bool:
    """Whether there may be integers that float64 rounds."""
    return numbers.dtype.kind in "iu" and numbers.dtype.itemsize > _EXACT_IN_64_BITS


def _unlike_values(before: Array, after: Array) -> npt.NDArray[np.bool_]:
    """Which values are not the same; nan is the same as nan."""
    if before.dtype.kind in "biu" and after.dtype.kind in "biu":
        return np.not_equal(_apart_exactly(before, after), 0)
    if _is_long(before) and after.dtype.kind not in "biu":
        return _unlike_integers(before, after)
    if _is_long(after) and before.dtype.kind not in "biu":
        return _unlike_integers(after, before)
    if "c" in before.dtype.kind + after.dtype.kind:
        unlike: Any = before.astype(np.complex128) != after.astype(np.complex128)
    else:
        unlike = before.astype(np.float64) != after.astype(np.float64)
    found: npt.NDArray[np.bool_] = unlike & ~(is_nan(before) & is_nan(after))
    return found


def _unlike_integers(integers: Array, others: Array) -> npt.NDArray[np.bool_]:
    """Which numbers with a fraction are not the same as long integers, of which float64 would round some."""
    if others.dtype.kind == "c":
        unlike: npt.NDArray[np.bool_] = _unlike_integers(integers, others.real) | np.not_equal(others.imag, 0)
        return unlike
    wide = others.astype(np.float64)
    limits = np.iinfo(integers.dtype)
    fits = (wide >= float(limits.min)) & (wide < float(limits.max))  # the largest is rounded up, to what does not fit
    whole = np.where(fits, wide, 0.0)
    found: npt.NDArray[np.bool_] = ~fits | (whole != np.trunc(whole)) | (whole.astype(integers.dtype) != integers)
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


def _unlike_bits(a: Array, b: Array) -> npt.NDArray[np.bool_]:
    """Which elements are not bit by bit the same."""
    if a.dtype.kind == "V":
        by_byte = (array.view(np.uint8).reshape(-1, a.dtype.itemsize) for array in (a, b))
        unlike: npt.NDArray[np.bool_] = np.any(np.not_equal(*by_byte), axis=1)
    else:
        unlike = np.not_equal(a, b)
    return unlike
