"""What a stored description says about a tensor, checked against the bytes it claims to describe.

torch stores a tensor as a call that rebuilds it from a storage, a storage as a reference to an entry of the archive.
Here these calls only fill records. A shape that reaches beyond its storage never becomes a record, so a view that is
made from one cannot touch foreign memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch

from holdfast._compat.tensors import DTYPES
from holdfast._formats.archives.known_names import AllowedName, Inert, Name, brief
from holdfast._formats.archives.safe_pickle import damaged_pickle, load

T = TypeVar("T")

LEGACY_STORAGES = {
    torch.float32: "FloatStorage",
    torch.float64: "DoubleStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage",
    torch.complex128: "ComplexDoubleStorage",
}
"""dtypes that have a storage class of their own. All others are stored as bytes, with their names beside them."""

_QUANTIZED_STORAGES = {
    torch.qint8: "QInt8Storage",
    torch.quint8: "QUInt8Storage",
    torch.qint32: "QInt32Storage",
}

QUANTIZED_DTYPES = {*_QUANTIZED_STORAGES, torch.quint4x2, torch.quint2x4}

_MOST = 1 << 63
"""torch counts in signed 64 bits."""


@dataclass(frozen=True)
class StorageRecord:
    """The bytes that one or more tensors are views of."""

    key: str
    """The entry ``data/<key>`` of the archive."""
    nbytes: int
    dtype: torch.dtype | None
    """None if only the tensors know it."""
    location: str


@dataclass(frozen=True)
class TensorRecord:
    """A tensor as a view of a storage. Everything in elements, as in torch, except where the name says bytes."""

    storage: StorageRecord
    dtype: torch.dtype
    storage_offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    conj: bool = False
    neg: bool = False
    quantizer: tuple[Any, ...] | None = None
    is_parameter: bool = False

    def __post_init__(self) -> None:
        _check_bounds(self)

    @property
    def storage_nbytes(self) -> int:
        """The size of the storage."""
        return self.storage.nbytes

    @property
    def is_row_major(self) -> bool:
        """Whether its bytes are in the storage in row-major order without gaps, as they are."""
        step = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size == 0:
                return not (self.conj or self.neg)
            if size != 1 and stride != step:
                return False
            step *= size
        return not (self.conj or self.neg)


def _check_bounds(record: TensorRecord) -> None:
    sizes, strides = record.sizes, record.strides
    if len(sizes) != len(strides):
        raise ValueError(f"a tensor of {len(sizes)} sizes and {len(strides)} strides")
    if max(prod(sizes), record.storage_offset, *strides) * record.dtype.itemsize >= _MOST:
        raise ValueError("a tensor larger than any memory")
    if 0 in sizes:
        return  # it has no elements, so it may be anywhere
    last = record.storage_offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    end = (last + 1) * record.dtype.itemsize
    if end > record.storage.nbytes:
        raise ValueError(f"a tensor that reaches to byte {end} of a storage of {record.storage.nbytes} bytes")


class TensorNames:
    """The table of the calls that rebuild tensors.

    ``make`` turns a record into what the call is to produce. It must return something else for every record, because
    that is how nested calls (a parameter around a tensor) find the record again.
    """

    def __init__(self, make: Callable[[TensorRecord, dict[str, Any]], Any]) -> None:
        self._make = make
        self._made: dict[int, tuple[TensorRecord, Any]] = {}
        self._storages: dict[int, tuple[StorageRecord, Any]] = {}
        self._rebuilds: dict[str, Callable[..., TensorRecord]] = {
            "_rebuild_tensor": self._rebuild_tensor,
            "_rebuild_tensor_v2": self._rebuild_tensor_v2,
            "_rebuild_tensor_v3": self._rebuild_tensor_v3,
            "_rebuild_qtensor": self._rebuild_qtensor,
            "_rebuild_parameter": self._rebuild_parameter,
        }

    def find(self, module: str, name: str) -> AllowedName | None:
        """The entry of a name."""
        shared = _SHARED.get((module, name))
        if shared is None or type(shared.value) is not Inert:
            return shared
        if module == "torch._utils" and name in self._rebuilds:
            return AllowedName(shared.value, call=self._call_of(self._rebuilds[name]))
        if name == "_rebuild_parameter_with_state":
            return AllowedName(shared.value, call=self._rebuild_with_state)
        if name == "_rebuild_from_type_v2":
            return AllowedName(shared.value, call=self._rebuild_from_type)
        return shared

    def add_storage(self, value: Any, record: StorageRecord) -> None:
        """Let the calls know that ``value`` stands for the storage that ``record`` describes."""
        self._storages[id(value)] = record, value

    def _call_of(self, rebuild: Callable[..., TensorRecord]) -> Callable[..., Any]:
        return lambda *arguments: self._finish(rebuild(*arguments), {})

    def _finish(self, record: TensorRecord, attributes: dict[str, Any]) -> Any:
        value = self._make(record, attributes)
        self._made[id(value)] = record, value
        return value

    def _rebuild_tensor(self, storage: Any, offset: Any, size: Any, stride: Any) -> TensorRecord:
        return self._record(storage, None, offset, size, stride, False, None)

    def _rebuild_tensor_v2(
        self, storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, flags: Any = None
    ) -> TensorRecord:
        _no_hooks(hooks)
        return self._record(storage, None, offset, size, stride, requires_grad, flags)

    def _rebuild_tensor_v3(
        self,
        storage: Any,
        offset: Any,
        size: Any,
        stride: Any,
        requires_grad: Any,
        hooks: Any,
        dtype: Any,
        flags: Any = None,
    ) -> TensorRecord:
        _no_hooks(hooks)
        return self._record(storage, _typed(dtype, torch.dtype), offset, size, stride, requires_grad, flags)

    def _rebuild_qtensor(
        self, storage: Any, offset: Any, size: Any, stride: Any, quantizer: Any, requires_grad: Any, hooks: Any
    ) -> TensorRecord:
        _no_hooks(hooks)
        return self._record(storage, None, offset, size, stride, requires_grad, None, _typed(quantizer, tuple))

    def _rebuild_parameter(self, data: Any, requires_grad: Any, hooks: Any) -> TensorRecord:
        _no_hooks(hooks)
        inner = self._made.get(id(data))
        if inner is None:
            raise TypeError(f"{brief(data)} as the data of a parameter")
        record = dict(vars(inner[0]), requires_grad=_typed(requires_grad, bool), is_parameter=True)
        return TensorRecord(**record)

    def _rebuild_with_state(self, data: Any, requires_grad: Any, hooks: Any, state: Any) -> Any:
        return self._finish(self._rebuild_parameter(data, requires_grad, hooks), _attributes(state))

    def _rebuild_from_type(self, function: Any, cls: Any, arguments: Any, state: Any) -> Any:
        rebuild = self._rebuilds.get(function.name) if type(function) is Inert else None
        if rebuild is None or cls not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"a tensor made by {brief(function)}")
        return self._finish(rebuild(*_typed(arguments, tuple)), _attributes(state))

    def _record(
        self,
        storage: Any,
        dtype: torch.dtype | None,
        offset: Any,
        size: Any,
        stride: Any,
        requires_grad: Any,
        flags: Any,
        quantizer: tuple[Any, ...] | None = None,
    ) -> TensorRecord:
        known = self._storages.get(id(storage))
        if known is None:
            raise TypeError(f"{brief(storage)} as a storage")
        own_dtype = dtype or known[0].dtype
        if own_dtype is None or (quantizer is None) == (own_dtype in QUANTIZED_DTYPES):
            raise TypeError("a tensor without a dtype that it could have")
        marks = {} if flags is None else _typed(flags, dict)
        if not marks.keys() <= {"conj", "neg"}:
            raise ValueError("a tensor with unknown marks")
        return TensorRecord(
            known[0],
            own_dtype,
            _counts((offset,))[0],
            _counts(size),
            _counts(stride),
            _typed(requires_grad, bool),
            _typed(marks.get("conj", False), bool),
            _typed(marks.get("neg", False), bool),
            quantizer,
        )


def storage_record(persistent_id: Any) -> StorageRecord:
    """What a reference to a storage says."""
    kind, cls, key, location, count = _typed(persistent_id, tuple)
    if kind != "storage" or id(cls) not in _STORAGE_DTYPES:
        raise ValueError(f"a reference to {brief(kind)}")
    dtype = _STORAGE_DTYPES[id(cls)]
    nbytes = _counts((count,))[0] * (1 if dtype is None else dtype.itemsize)
    return StorageRecord(_typed(key, str), nbytes, dtype, _typed(location, str))


def describe_tensor(data_pkl: bytes, *, source: str, key: str | None = None) -> TensorRecord:
    """What ``data.pkl`` of a tensor's archive says: where in which storage its elements are. Nothing is read."""
    record = _described.get(data_pkl)
    if record is None:
        record = _describe(data_pkl, source, key)
        if len(_described) >= _MOST_DESCRIBED:
            _described.clear()
        _described[data_pkl] = record
    return record


_MOST_DESCRIBED = 4096
# Tensors of the same dtype and shape have the same description, and a checkpoint has few different ones.
_described: dict[bytes, TensorRecord] = {}


def _describe(data_pkl: bytes, source: str, key: str | None) -> TensorRecord:
    names = TensorNames(lambda record, _: _Made(record))

    def reference(persistent_id: Any) -> Any:
        record = storage_record(persistent_id)
        names.add_storage(record, record)
        return record

    made = load(data_pkl, names.find, source=source, key=key, persistent_load=reference)
    if type(made) is not _Made:
        problem = TypeError(f"{brief(made)} instead of a tensor")
        raise damaged_pickle(problem, source=source, key=key, position=len(data_pkl))
    return made.record


@dataclass(frozen=True)
class _Made:
    record: TensorRecord


def _counts(value: Any) -> tuple[int, ...]:
    numbers = tuple(value) if isinstance(value, (tuple, list)) else None
    if numbers is None or any(type(number) is not int or not 0 <= number < _MOST for number in numbers):
        raise ValueError(f"{brief(value)} as sizes or positions")
    return numbers


def _no_hooks(hooks: Any) -> None:
    if hooks is not None and (not isinstance(hooks, dict) or hooks):
        raise ValueError("a tensor with hooks")


def _attributes(state: Any) -> dict[str, Any]:
    """Attributes that somebody put onto a tensor. They may add to what a tensor has, not take its place."""
    in_dict, in_slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    attributes = {} if in_dict is None else _typed(in_dict, dict)
    if in_slots or any(type(name) is not str or hasattr(torch.Tensor, name) for name in attributes):
        raise ValueError("a tensor with attributes in the place of its own")
    return attributes


def _typed(value: Any, cls: type[T]) -> T:
    if type(value) is not cls:
        raise TypeError(f"{brief(value)} instead of {cls.__name__}")
    return value


def _shared() -> Iterator[tuple[Name, AllowedName]]:
    # What the calls do depends on who reads; only their names are the same for all.
    for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor"):
        yield ("torch._utils", name), AllowedName(Inert(name))
    for name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
        yield ("torch._utils", name), AllowedName(Inert(name))
    yield ("torch._tensor", "_rebuild_from_type_v2"), AllowedName(Inert("_rebuild_from_type_v2"))
    for name in (*LEGACY_STORAGES.values(), *_QUANTIZED_STORAGES.values()):
        yield ("torch", name), AllowedName(Inert(f"torch.{name}"))
    yield ("torch.storage", "UntypedStorage"), AllowedName(Inert("torch.storage.UntypedStorage"))
    yield ("torch", "Tensor"), AllowedName(torch.Tensor)
    yield ("torch.nn.parameter", "Parameter"), AllowedName(torch.nn.Parameter)
    yield ("collections", "OrderedDict"), AllowedName(OrderedDict, call=lambda: OrderedDict())
    yield ("torch", "per_tensor_affine"), AllowedName(torch.per_tensor_affine)
    yield ("torch", "per_channel_affine"), AllowedName(torch.per_channel_affine)
    for name, dtype in DTYPES.items():
        yield ("torch", name), AllowedName(dtype)


_SHARED = dict(_shared())
_STORAGE_DTYPES: dict[int, torch.dtype | None] = {
    id(_SHARED["torch", name].value): dtype for dtype, name in {**LEGACY_STORAGES, **_QUANTIZED_STORAGES}.items()
}
_STORAGE_DTYPES[id(_SHARED["torch.storage", "UntypedStorage"].value)] = None
