"""The numbers of a tensor in a few: how many, how large, how they are spread. Read in parts, in constant memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast._base.arguments import Size, checked_budget
from holdfast._base.texts import plain
from holdfast._base.threads import work_through
from holdfast._formats.native.dtypes import DType
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.source import Source
from holdfast._tools.inspecting.numbers import Array, are_numbers, blocks_of, is_nan, magnitudes, norm_of, numbers_of
from holdfast._tools.inspecting.parts import Lot, elements_at_once, lots_of, read_parts, threads_for
from holdfast._watching.progress import OnProgress, Progress
from holdfast.errors import UnsupportedTensorError

_NARROW_BYTES = 2
"""Elements of so many bytes can be 65,536 numbers at most, which are soon counted with."""

_SMALL, _LARGE = 1e-30, 1e30
"""Between these, float32 has the distance of two numbers with all its digits, and its inverse."""


@dataclass(frozen=True)
class Statistics:
    """What the elements of a tensor, or of several, are like.

    All but the first five count finite elements only. Complex numbers are taken by their magnitude.
    """

    count: int
    finite: int
    nan: int
    inf: int
    zeros: int
    minimum: float | int | None
    """None if no element is finite."""
    maximum: float | int | None
    mean: float | None
    std: float | None
    """Of all elements that there are, and not an estimate from a sample."""
    norm: float
    """The square root of the sum of squares."""
    histogram: tuple[int, ...] = ()
    edges: tuple[float, ...] = ()
    """Between the bins of the histogram, one more than there are bins."""

    def __str__(self) -> str:
        if not self.finite:
            return f"{_elements(self.count)}: {self.nan:,} nan, {self.inf:,} inf"
        odd = f", {self.nan:,} nan" * bool(self.nan) + f", {self.inf:,} inf" * bool(self.inf)
        zeros = f", {self.zeros / self.count:.1%} zeros" if self.zeros else ""
        return (
            f"{_elements(self.count)}, {_short(self.minimum)} to {_short(self.maximum)}, mean {_short(self.mean)}, "
            f"std {_short(self.std)}, norm {_short(self.norm)}{zeros}{odd}"
        )

    def to_json(self) -> dict[str, Any]:
        """All fields as plain data."""
        fields: dict[str, Any] = plain(vars(self))
        return fields


def statistics_of(
    source: Source,
    refs: Sequence[TensorRef],
    *,
    bins: int = 64,
    memory_budget: Size | None = None,
    on_progress: OnProgress | None = None,
) -> Statistics:
    """The statistics of all elements of some tensors together. ``bins=0`` leaves the histogram out, and reads once."""
    if type(bins) is not int or bins < 0:
        raise ValueError(f"bins is the number of bins of the histogram, not {bins!r}")
    # Of elements of 8 and 16 bits it is enough to know how often there is which: that takes one pass for all.
    narrow, wide = list[TensorRef](), list[TensorRef]()
    for ref in refs:
        is_narrow = ref.dtype.itemsize <= _NARROW_BYTES and ref.numpy is None and are_numbers(ref)
        (narrow if is_narrow else wide).append(ref)
    once, again = sum(ref.nbytes for ref in narrow), sum(ref.nbytes for ref in wide)
    total = once + again * (2 if bins else 1)
    whole = Counts()
    for counts in count(source, wide, memory_budget=memory_budget, on_progress=_part(on_progress, 0, total)).values():
        whole.add(counts)
    patterns = _count_patterns(source, narrow, memory_budget, _part(on_progress, again, total))
    for numbers, times in patterns:
        whole.add(Counts.of_patterns(numbers, times))
    edges = _edges(whole, bins)
    histogram = np.zeros(max(len(edges) - 1, 0), np.int64)
    if edges.size:
        progress = _part(on_progress, again + once, total)
        all_finite = whole.finite == whole.count
        histogram = _histogram(source, wide, edges, memory_budget, progress, all_finite=all_finite)
        for numbers, times in patterns:
            histogram += _bins_of_patterns(numbers, times, edges)
    return whole.result(histogram.tolist(), edges.tolist())


def count(
    source: Source,
    refs: Sequence[TensorRef],
    *,
    memory_budget: Size | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, Counts]:
    """All but the histogram, for each of these tensors, by its key."""
    for ref in refs:
        if not are_numbers(ref):
            raise UnsupportedTensorError(
                f"{ref.key!r} has elements of {ref.dtype}, which are not numbers. Leave it out.",
                key=ref.key,
                kind=str(ref.dtype),
            )
    found = {ref.key: Counts() for ref in refs}
    lock = threading.Lock()

    def work(lot: Lot, bits: Sequence[Array]) -> None:
        counted = [
            (part.ref.key, Counts.of(numbers))
            for part, raw in zip(lot.parts, bits, strict=True)
            for numbers in blocks_of(raw, part.ref)
        ]
        with lock:
            for key, counts in counted:
                found[key].add(counts)

    _through(source, refs, work, memory_budget, on_progress)
    return found


def _through(source: Source, refs: Sequence[TensorRef], work: Any, memory: Size | None, on_progress: Any) -> None:
    budget = checked_budget(memory)
    total = sum(ref.nbytes for ref in refs)
    progress = Progress(total, on_progress)
    threads = threads_for(total)
    most = elements_at_once(budget, threads)

    def read_and_work(lot: Lot) -> None:
        work(lot, read_parts(source, lot.parts, budget))
        progress.advance(lot.nbytes)

    work_through(lots_of(refs, most), read_and_work, threads, "holdfast-inspect")


def _histogram(
    source: Source,
    refs: Sequence[TensorRef],
    edges: Array,
    memory: Size | None,
    on_progress: OnProgress | None,
    *,
    all_finite: bool,
) -> Array:
    whole = np.zeros(len(edges) - 1, np.int64)
    lock = threading.Lock()

    def work(lot: Lot, bits: Sequence[Array]) -> None:
        own = np.zeros_like(whole)
        for part, raw in zip(lot.parts, bits, strict=True):
            for block in blocks_of(raw, part.ref):
                numbers = magnitudes(block)
                own += in_bins(numbers if all_finite else numbers[np.isfinite(numbers)], edges)
        with lock:
            np.add(whole, own, out=whole)

    _through(source, refs, work, memory, on_progress)
    return whole


def in_bins(numbers: Array, edges: Array) -> Array:
    """How many of some numbers are between each two edges, which are equally far apart, and around all numbers.

    These are the counts of ``numpy.histogram``, which compares every number with the edges of its bin. Here that is
    done for those only that are so near an edge that rounding may have put them on the wrong side.

    >>> in_bins(np.array([0.0, 0.5, 1.0, 2.0]), np.array([0.0, 1.0, 2.0])).tolist()
    [2, 2]
    """
    low, high, bins = float(edges[0]), float(edges[-1]), len(edges) - 1
    precise = np.float32 if numbers.dtype in (np.float16, np.float32) and _SMALL < high - low < _LARGE else np.float64
    scale = bins / (high - low)
    if not math.isfinite(scale):
        return np.histogram(numbers.astype(np.float64), bins, (low, high))[0]
    place = numbers.astype(precise)
    place -= precise(low)
    place *= precise(scale)
    index = place.astype(np.intp)
    place -= index
    error = 16 * float(np.finfo(precise).eps) * bins * max(1.0, abs(low) / (high - low), abs(high) / (high - low))
    doubtful = np.flatnonzero((place < error) | (place > 1 - error))
    if doubtful.size:
        index[doubtful] = _bins_of(numbers[doubtful], edges)
    return np.bincount(index, minlength=bins)


def _bins_of(numbers: Array, edges: Array) -> Array:
    """The bin of each number. The last edge belongs to the last bin."""
    return np.minimum(np.searchsorted(edges, numbers.astype(np.float64), "right") - 1, len(edges) - 2)


def _count_patterns(
    source: Source, refs: Sequence[TensorRef], memory: Size | None, on_progress: OnProgress | None
) -> list[tuple[Array, Array]]:
    """The numbers that elements of few bits can be, with how often each of them is there, for each type of element."""
    found: dict[DType, Array] = {}
    lock = threading.Lock()

    def work(lot: Lot, bits: Sequence[Array]) -> None:
        by_type: dict[DType, list[Array]] = {}
        for part, raw in zip(lot.parts, bits, strict=True):
            by_type.setdefault(part.ref.dtype, []).append(raw.reshape(-1))
        for dtype, parts in by_type.items():
            together = parts[0] if len(parts) == 1 else np.concatenate(parts)
            times = np.bincount(together, minlength=1 << 8 * dtype.itemsize)
            with lock:
                found[dtype] = found[dtype] + times if dtype in found else times

    if refs:
        _through(source, refs, work, memory, on_progress)
    patterns = []
    for dtype, times in found.items():
        every = np.arange(len(times)).astype(dtype.carrier)
        patterns.append((numbers_of(every, TensorRef("", dtype, every.shape)), times))
    return patterns


def _bins_of_patterns(numbers: Array, times: Array, edges: Array) -> Array:
    ordered = magnitudes(numbers)
    there = (times > 0) & np.isfinite(ordered)
    index = _bins_of(ordered[there], edges)
    return np.bincount(index, weights=times[there], minlength=len(edges) - 1).astype(np.int64)


def _edges(whole: Counts, bins: int) -> Array:
    if not bins or whole.minimum is None or whole.maximum is None:
        return np.empty(0)
    low, high = float(whole.minimum), float(whole.maximum)
    if not math.isfinite(high - low):
        return np.empty(0)
    if low == high:
        around = max(0.5, abs(low) * 2**-40)  # enough to be another number
        low, high = low - around, high + around
    edges = np.linspace(low, high, bins + 1)
    return edges if np.all(np.diff(edges) > 0) else np.empty(0)  # so near each other that there is nothing between


def _part(on_progress: OnProgress | None, before: int, total: int) -> OnProgress | None:
    """Progress of one of several passes, before which so many bytes have been read."""
    if on_progress is None:
        return None
    return lambda done, _: on_progress(before + done, total)


@dataclass
class Counts:
    """What is known of some elements; can be added to what is known of others."""

    count: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    minimum: Any = None
    maximum: Any = None
    mean: float = 0.0
    spread: float = 0.0
    """The norm of how far elements are from the mean."""
    norm: float = 0.0

    @property
    def finite(self) -> int:
        """How many are neither infinite nor no numbers."""
        return self.count - self.nan - self.inf

    @classmethod
    def of(cls, numbers: Array) -> Counts:
        """Count some elements."""
        if numbers.dtype == np.float16:
            numbers = numbers.astype(np.float32)  # which processors count with
        counts = cls(count=numbers.size, zeros=int(np.count_nonzero(numbers == 0)))
        ordered = magnitudes(numbers)
        if not ordered.size:
            return counts
        low, high = ordered.min(), ordered.max()
        if ordered.dtype.kind == "f" and not (np.isfinite(low) and np.isfinite(high)):
            nan = is_nan(numbers)
            finite = np.isfinite(ordered) & ~nan
            counts.nan = int(np.count_nonzero(nan))
            counts.inf = numbers.size - counts.nan - int(np.count_nonzero(finite))
            ordered = ordered[finite]
            if not ordered.size:
                return counts
            low, high = ordered.min(), ordered.max()
        counts.minimum, counts.maximum = low.item(), high.item()
        counts.mean = float(counts.minimum)
        if low != high:
            wide = ordered.astype(np.float64)
            counts.mean = _mean(wide)
            with np.errstate(over="ignore"):
                wide -= counts.mean
            counts.spread = norm_of(wide)
        counts.norm = math.hypot(counts.spread, counts.mean * math.sqrt(ordered.size))
        return counts

    @classmethod
    def of_patterns(cls, numbers: Array, times: Array) -> Counts:
        """Count elements of which it is known how often each number is there."""
        there = times > 0
        numbers, times = numbers[there], times[there]
        ordered, nan = magnitudes(numbers), is_nan(numbers)
        finite = np.isfinite(ordered) & ~nan
        counts = cls(count=int(times.sum()), nan=int(times[nan].sum()), zeros=int(times[numbers == 0].sum()))
        counts.inf = counts.count - counts.nan - int(times[finite].sum())
        if finite.any():
            ordered, times = ordered[finite], times[finite]
            counts.minimum, counts.maximum = ordered.min().item(), ordered.max().item()
            wide = ordered.astype(np.float64)
            counts.mean = float((wide * times).sum()) / counts.finite
            counts.spread = math.sqrt(float((np.square(wide - counts.mean) * times).sum()))
            counts.norm = math.hypot(counts.spread, counts.mean * math.sqrt(counts.finite))
        return counts

    def add(self, other: Counts) -> None:
        """Take in what is known of other elements."""
        mine, theirs = self.finite, other.finite
        both = mine + theirs
        if theirs:
            apart = other.mean - self.mean if mine else 0.0
            self.mean = self.mean + apart * (theirs / both) if mine else other.mean
            self.spread = math.hypot(self.spread, other.spread, apart * math.sqrt(mine / both * theirs))
            self.norm = math.hypot(self.norm, other.norm)
            self.minimum = other.minimum if self.minimum is None else min(self.minimum, other.minimum)
            self.maximum = other.maximum if self.maximum is None else max(self.maximum, other.maximum)
        self.count += other.count
        self.nan += other.nan
        self.inf += other.inf
        self.zeros += other.zeros

    def result(self, histogram: Sequence[int] = (), edges: Sequence[float] = ()) -> Statistics:
        """The same for people."""
        has_any = self.finite > 0
        return Statistics(
            count=self.count,
            finite=self.finite,
            nan=self.nan,
            inf=self.inf,
            zeros=self.zeros,
            minimum=self.minimum,
            maximum=self.maximum,
            mean=self.mean if has_any else None,
            std=self.spread / math.sqrt(self.finite) if has_any else None,
            norm=self.norm,
            histogram=tuple(histogram),
            edges=tuple(edges),
        )


def _elements(count: int) -> str:
    return f"{count:,} element{'' if count == 1 else 's'}"


def _mean(wide: Array) -> float:
    with np.errstate(over="ignore"):
        mean = float(wide.mean())
    return mean if math.isfinite(mean) else float((wide / wide.size).sum())


def _short(number: float | int | None) -> str:
    if isinstance(number, int):
        return f"{number:,}"
    return "-" if number is None else f"{number + 0.0:.4g}"  # which has no sign of zero
