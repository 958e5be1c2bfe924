"""Stored tensors as things to be sliced: what is asked for is read, and given as torch tensors or numpy arrays."""

from __future__ import annotations

import importlib.util
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast._formats.native.dtypes import DType
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.small_floats import widened
from holdfast._formats.native.values import numpy_dtype_from
from holdfast._formats.source import ReadRequest, Source
from holdfast.errors import MissingPackageError

Array = npt.NDArray[Any]


class TensorHandle:
    """A stored tensor. Slicing it reads the needed blocks and gives a torch tensor (a numpy array if it was one, or
    where torch is not installed).
    """

    def __init__(self, source: Source, ref: TensorRef, on_read: Callable[[TensorRef], None] | None = None) -> None:
        self._source = source
        self._ref = ref
        self._on_read = on_read

    @property
    def key(self) -> str:
        """What it is stored as."""
        return self._ref.key

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self._ref.shape

    @property
    def dtype(self) -> DType:
        """Its element type, which equals torch's and numpy's of the same name."""
        return self._ref.dtype

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all its elements."""
        return self._ref.nbytes

    @property
    def kind(self) -> str:
        """``sharded``, ``replicated`` or ``per_rank``."""
        return self._ref.kind

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self._read(index, as_torch=self._ref.numpy is None and torch_is_here())

    def numpy(self, index: Any = ...) -> Array:
        """A part of it, or all, as a numpy array. Types that numpy lacks come as float32, which holds them exactly."""
        result: Array = self._read(index, as_torch=False)
        return result

    def torch(self, index: Any = ...) -> Any:
        """A part of it, or all, as a torch tensor."""
        return self._read(index, as_torch=True)

    def raw(self, index: Any = ...) -> Array:
        """A part of it, or all, as unsigned integers of the same size, or plain bytes: the very bits."""
        cut = _Cut(index, self.shape)
        if self._on_read is not None:
            self._on_read(self._ref)
        buffer = np.empty(cut.sizes, self.dtype.carrier)
        if buffer.size:
            self._source.read([ReadRequest(self.key, cut.offsets, cut.sizes, buffer)])
        return cut.applied(buffer)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("a stored tensor is always read into new memory; it cannot be had without a copy")
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __repr__(self) -> str:
        return f"<stored tensor {self.key!r}: {self.dtype} {list(self.shape)}>"

    def _read(self, index: Any, *, as_torch: bool) -> Any:
        return as_elements(self.raw(index), self._ref, as_torch=as_torch)


def torch_is_here() -> bool:
    """Whether torch can be imported."""
    if "torch" in sys.modules:
        return sys.modules["torch"] is not None
    return importlib.util.find_spec("torch") is not None


def as_elements(raw: Array, ref: TensorRef, *, as_torch: bool) -> Any:
    """Bits as elements: a torch tensor or a numpy array."""
    if as_torch:
        return _as_torch(raw, ref)
    if ref.numpy is not None:
        return raw.view(numpy_dtype_from(ref.numpy))
    if ref.dtype.numpy is not None:
        return raw.view(ref.dtype.numpy)
    return widened(raw, ref)


def _as_torch(raw: Array, ref: TensorRef) -> Any:
    try:
        from holdfast._formats.native.torch_elements import as_tensor, torch_dtype
    except ImportError as error:
        raise MissingPackageError(
            "a torch tensor was asked for and torch is not installed. Use .numpy(), or install torch", install="torch"
        ) from error
    dtype = torch_dtype(ref.dtype)
    if dtype is None:
        raise TypeError(f"{ref.key!r} has elements of {ref.dtype}, which torch does not have; use .numpy() or .raw()")
    raw = np.asarray(raw, order="C")  # not ascontiguousarray, which gives a single element a dimension
    tensor = as_tensor(raw, dtype)
    # A dimension of one element may have any stride in numpy, also one that a tensor cannot have.
    return as_tensor(raw.copy(), dtype) if tensor is None else tensor


class _Cut:
    """An index as the box that has to be read, and what is left to be done with it."""

    def __init__(self, index: Any, shape: Sequence[int]) -> None:
        parts = _expanded(index, len(shape))
        offsets, sizes, rest = [], [], []
        for part, size in zip(parts, shape, strict=True):
            if isinstance(part, slice):
                chosen = range(size)[part]
                if len(chosen) == 0:
                    offsets.append(0)
                    sizes.append(0)
                    rest.append(slice(None))
                    continue
                low, high = min(chosen[0], chosen[-1]), max(chosen[0], chosen[-1])
                offsets.append(low)
                sizes.append(high - low + 1)
                rest.append(slice(None, None, chosen.step))
            else:
                at = _position(part, size)
                offsets.append(at)
                sizes.append(1)
                rest.append(0)  # type: ignore[arg-type]
        self.offsets, self.sizes = tuple(offsets), tuple(sizes)
        self._rest = tuple(rest)

    def applied(self, box: Array) -> Array:
        """What the index means, given the box."""
        return np.asarray(box[self._rest], dtype=box.dtype)  # a single element comes as a scalar


def _expanded(index: Any, ndim: int) -> list[Any]:
    """An index with one part per dimension."""
    parts = [_simple(part) for part in (index if isinstance(index, tuple) else (index,))]
    if parts.count(Ellipsis) > 1:
        raise IndexError("an index has one '...' at most")
    given = len(parts) - parts.count(Ellipsis)
    if given > ndim:
        raise IndexError(f"{given} indices for a tensor of {ndim} dimensions")
    at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    return [*parts[:at], *[slice(None)] * (ndim - given), *parts[at + 1 :]]


def _simple(part: Any) -> Any:
    """A part of an index, as a number, a slice or an ellipsis."""
    if part is Ellipsis or isinstance(part, slice):
        return part
    try:
        if not isinstance(part, (bool, np.bool_)):
            return operator.index(part)
    except TypeError:
        pass
    raise TypeError(f"a stored tensor is sliced by numbers, slices and '...', not by {type(part).__name__}")


def _position(at: int, size: int) -> int:
    if not -size <= at < size:
        raise IndexError(f"index {at} is out of range for a dimension of {size}")
    return at % size
