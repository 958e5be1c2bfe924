"""What may be in a stored value without the reader's opt-in: data types of Python, torch and numpy."""

from __future__ import annotations

import datetime
import enum
import io
import os
import pathlib
import re
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch

from holdfast._formats.archives.known_names import (
    AllowedName,
    Draft,
    Inert,
    Name,
    Refusal,
    brief,
    draft_of,
    find_registered,
)

# numpy arrays, scalars and dtypes out of pickles, without numpy's own unpickling.
#
# ``numpy.dtype.__setstate__`` trusts the sizes and flags that it is given, which is enough to read and write
# foreign memory. Here a dtype is made from a short name of a few simple kinds, and an array from bytes that have its
# length.


_SIMPLE = re.compile(r"[biufcSU]\d{1,9}|[Mm]8")
_ORDERS = ("<", ">", "|", "=")
_TIME_UNITS = ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as")
_MODULES = ("numpy.core", "numpy._core")


def _dtype(code: Any, *flags: Any) -> Draft:
    if type(code) is not str or len(flags) != 2 or not all(type(flag) in (bool, int) for flag in flags):
        raise ValueError(f"{brief(code)} as a numpy dtype")
    if not _SIMPLE.fullmatch(code):
        raise Refusal("numpy", f"dtype('{code:.20}')")
    return Draft(lambda state: _finished_dtype(code, state))


def _finished_dtype(code: str, state: Any) -> np.dtype[Any]:
    if type(state) is not tuple or len(state) not in (8, 9):
        raise ValueError("a numpy dtype with an unknown state")
    order, *structure = state[1:5]
    if order not in _ORDERS or structure != [None, None, None]:
        raise ValueError("a numpy dtype that is not a simple one")
    unit = _time_unit(state[8]) if code[0] in "Mm" and len(state) == 9 else ""
    dtype: np.dtype[Any] = np.dtype(order + code + unit)
    return dtype


def _time_unit(metadata: Any) -> str:
    _, (unit, number, *rest) = metadata
    name = unit.decode() if type(unit) is bytes else unit
    if name == "generic":
        return ""
    if name not in _TIME_UNITS or type(number) is not int or number < 1 or rest != [1, 1]:
        raise ValueError("a numpy dtype with an unknown unit of time")
    return f"[{number}{name}]"


def _start_array(cls: Any, shape: Any, code: Any) -> Draft:
    if cls is not np.ndarray or shape != (0,) or code not in (b"b", "b"):
        raise Refusal("numpy", "ndarray of an unusual kind")
    return Draft(_finished_array)


def _finished_array(state: Any) -> np.ndarray[Any, Any]:
    if type(state) is not tuple or len(state) != 5:
        raise ValueError("a numpy array with an unknown state")
    _, shape, dtype, is_fortran, data = state
    return _array(data, dtype, shape, "F" if is_fortran else "C")


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    if not isinstance(dtype, np.dtype) or type(data) not in (bytes, bytearray) or type(shape) is not tuple:
        raise TypeError("a numpy array without dtype, shape and bytes")
    if any(type(size) is not int or size < 0 for size in shape) or order not in ("C", "F"):
        raise ValueError("a numpy array of no shape")
    if prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"a numpy array of {prod(shape)} elements in {len(data)} bytes")
    flat = np.frombuffer(data, dtype) if data else np.empty(0, dtype)
    array: np.ndarray[Any, Any] = flat.reshape(shape, order=order).copy(order=order)
    return array


def _scalar(dtype: Any, data: Any) -> Any:
    return _array(data, dtype, (1,), "C")[0]


def numpy_names() -> Iterator[tuple[Name, AllowedName]]:
    """The table of what numpy writes."""
    yield ("numpy", "dtype"), AllowedName(np.dtype, call=_dtype)
    yield ("numpy", "ndarray"), AllowedName(np.ndarray)
    for module in _MODULES:
        yield (f"{module}.multiarray", "_reconstruct"), AllowedName(Inert("numpy._reconstruct"), call=_start_array)
        yield (f"{module}.multiarray", "scalar"), AllowedName(Inert("numpy.scalar"), call=_scalar)
        yield (f"{module}.numeric", "_frombuffer"), AllowedName(Inert("numpy._frombuffer"), call=_array)


# Each entry takes apart what a hostile file could hand it: no argument here can run code, reserve memory that the
# file does not pay for with bytes of its own, or put an object into a state that its class would not have reached
# itself.


T = TypeVar("T")

# Names that Python 2 had, which protocol 2 still writes.
_RENAMED_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_RENAMED = {
    ("builtins", "xrange"): ("builtins", "range"),
    ("builtins", "long"): ("builtins", "int"),
    ("builtins", "unicode"): ("builtins", "str"),
}

_FRACTION = re.compile(r"-?\d{1,4000}(/\d{1,4000})?")
_PLAIN_TYPES = (bool, bytes, bytearray, complex, dict, float, frozenset, int, list, object, set, slice, str, tuple)
_FACTORIES = {bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple, Counter, OrderedDict, deque}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


def find_plain(module: str, name: str) -> AllowedName | None:
    """The entry of a name that has nothing to do with tensors."""
    wanted = _RENAMED_MODULES.get(module, module), name
    return _TABLE.get(_RENAMED.get(wanted, wanted)) or find_registered(module, name)


# Python's own types


def _bytes(*arguments: Any) -> bytes:
    if arguments:
        raise Refusal("builtins", "bytes")
    return b""


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise Refusal("_codecs", "encode")
    return _typed(text, str).encode("latin-1")


def _bytearray(data: Any = b"", *encoding: Any) -> bytearray:
    return bytearray(_encoded(data, *encoding) if encoding else _typed(data, bytes))


def _complex(real: Any, imaginary: Any) -> complex:
    return complex(_typed(real, float), _typed(imaginary, float))


def _members(items: Any = ()) -> list[Any]:
    if type(items) not in (list, tuple):
        raise TypeError(f"{brief(items)} as members of a set")
    return list(items)


def _range(*bounds: Any) -> range:
    return range(*(_typed(bound, int) for bound in bounds))


def _type(value: Any) -> Any:
    if value not in (None, Ellipsis, NotImplemented):
        raise Refusal("builtins", "type")
    return type(value)


def _getattr(target: Any, name: Any) -> Any:
    """The two forms in which pickle writes a reference to something inside a class."""
    if isinstance(target, type) and _is_registered(target) and type(name) is str:
        if issubclass(target, enum.Enum) and name in target.__members__:
            return target.__members__[name]
        inner = vars(target).get(name)
        if isinstance(inner, type) and _is_registered(inner):
            return inner
    raise Refusal("builtins", "getattr")


def _reconstruct(cls: Any, base: Any, state: Any) -> Any:
    if not isinstance(cls, type) or not _is_registered(cls) or base is not object or state is not None:
        raise Refusal("copyreg", "_reconstructor")
    return object.__new__(cls)


def _new_object(cls: Any, *arguments: Any) -> Any:
    if not isinstance(cls, type) or not _is_registered(cls):
        raise Refusal("copyreg", "__newobj__")
    return cls.__new__(cls, *arguments)


def _is_registered(cls: type) -> bool:
    known = find_registered(cls.__module__, cls.__qualname__)
    return known is not None and known.value is cls


# Collections


def _ordered_dict() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _with_attributes(target: OrderedDict[Any, Any], state: Any) -> OrderedDict[Any, Any]:
    """``Module.state_dict()`` keeps its versions in an attribute of the dictionary."""
    if any(type(name) is not str or hasattr(OrderedDict, name) for name in _typed(state, dict)):
        raise ValueError("a dictionary with attributes in the place of its own")
    vars(target).update(state)
    return target


def _defaultdict(factory: Any = None) -> defaultdict[Any, Any]:
    if factory is not None and not (isinstance(factory, type) and (factory in _FACTORIES or _is_registered(factory))):
        raise Refusal("collections", "defaultdict")
    return defaultdict(factory)


def _counter(counts: Any = None) -> Counter[Any]:
    return Counter(_typed(counts, dict)) if counts is not None else Counter()


def _bytes_io(state: Any) -> io.BytesIO:
    content, position, attributes = _typed(state, tuple)
    if attributes:
        raise ValueError("a BytesIO with attributes of its own")
    made = io.BytesIO(_typed(content, bytes))
    made.seek(_typed(position, int))
    return made


def _deque(items: Any = (), maxlen: Any = None) -> deque[Any]:
    if type(items) not in (list, tuple):
        raise TypeError(f"{brief(items)} as items of a deque")
    return deque(items, None if maxlen is None else _typed(maxlen, int))


# Times, numbers, names


def _datetime(state: Any, zone: Any = None) -> datetime.datetime:
    high, low, month, day, hour, minute, second, *micro = _octets(state, 10)
    return datetime.datetime(
        high << 8 | low,
        month & 0x7F,
        day,
        hour,
        minute,
        second,
        int.from_bytes(micro, "big"),
        tzinfo=_zone(zone),
        fold=month >> 7,
    )


def _date(state: Any) -> datetime.date:
    high, low, month, day = _octets(state, 4)
    return datetime.date(high << 8 | low, month, day)


def _time(state: Any, zone: Any = None) -> datetime.time:
    hour, minute, second, *micro = _octets(state, 6)
    microsecond = int.from_bytes(micro, "big")
    return datetime.time(hour & 0x7F, minute, second, microsecond, tzinfo=_zone(zone), fold=hour >> 7)


def _octets(state: Any, length: int) -> bytes:
    # Taken apart here: given these bytes, datetime's own classes check no more than the month.
    if type(state) is not bytes or len(state) != length:
        raise ValueError(f"{brief(state)} as a time")
    return state


def _zone(zone: Any) -> datetime.timezone | None:
    return None if zone is None else _typed(zone, datetime.timezone)


def _timedelta(*parts: Any) -> datetime.timedelta:
    return datetime.timedelta(*(_typed(part, int) for part in parts))


def _timezone(offset: Any, *name: Any) -> datetime.timezone:
    return datetime.timezone(_typed(offset, datetime.timedelta), *(_typed(text, str) for text in name))


def _decimal(text: Any) -> Decimal:
    return Decimal(_typed(text, str))


def _fraction(numerator: Any, *denominator: Any) -> Fraction:
    if type(numerator) is str and not denominator:
        # Not just any text: Fraction("1e999999999") is a number of a billion digits.
        if not _FRACTION.fullmatch(numerator):
            raise ValueError(f"{brief(numerator)} as a fraction")
        return Fraction(numerator)
    return Fraction(_typed(numerator, int), *(_typed(number, int) for number in denominator))


def _uuid(state: Any) -> uuid.UUID:
    fields = _typed(state, dict)
    is_safe = uuid.SafeUUID(fields.get("is_safe", uuid.SafeUUID.unknown.value))
    return uuid.UUID(int=_typed(fields["int"], int), is_safe=is_safe)


def _path_maker(cls: type[pathlib.PurePath]) -> Any:
    return lambda *parts: cls(*(_typed(part, str) for part in parts))


# torch's own types


def _size(numbers: Any = ()) -> torch.Size:
    if type(numbers) not in (tuple, list):
        raise TypeError(f"{brief(numbers)} as a size")
    return torch.Size([_typed(number, int) for number in numbers])


def _device(kind: Any, *index: Any) -> torch.device:
    return torch.device(_typed(kind, str), *(_typed(number, int) for number in index))


def _typed(value: Any, cls: type[T]) -> T:
    if type(value) is not cls:
        raise TypeError(f"{brief(value)} instead of {cls.__name__}")
    return value


def _names() -> Iterator[tuple[Name, AllowedName]]:
    calls: dict[type, Callable[..., Any]] = {bytes: _bytes, bytearray: _bytearray, complex: _complex}
    for cls in _PLAIN_TYPES:
        yield ("builtins", cls.__name__), AllowedName(cls, call=calls.get(cls))
    yield ("builtins", "set"), AllowedName(set, call=lambda *items: set(_members(*items)), hashes_items=True)
    yield (
        ("builtins", "frozenset"),
        AllowedName(frozenset, call=lambda *items: frozenset(_members(*items)), hashes_items=True),
    )
    yield ("builtins", "slice"), AllowedName(slice, call=slice)
    yield ("builtins", "range"), AllowedName(range, call=_range)
    yield ("builtins", "type"), AllowedName(type, call=_type)
    yield ("builtins", "getattr"), AllowedName(Inert("getattr"), call=_getattr)
    yield ("builtins", "Ellipsis"), AllowedName(Ellipsis)
    yield ("builtins", "NotImplemented"), AllowedName(NotImplemented)
    yield ("_codecs", "encode"), AllowedName(Inert("encode"), call=_encoded)
    yield ("copyreg", "_reconstructor"), AllowedName(Inert("_reconstructor"), call=_reconstruct)
    yield ("copyreg", "__newobj__"), AllowedName(Inert("__newobj__"), call=_new_object)
    yield ("collections", "OrderedDict"), AllowedName(OrderedDict, call=_ordered_dict, build=_with_attributes)
    yield ("collections", "defaultdict"), AllowedName(defaultdict, call=_defaultdict)
    yield ("collections", "Counter"), AllowedName(Counter, call=_counter)
    yield ("collections", "deque"), AllowedName(deque, call=_deque)
    yield ("datetime", "datetime"), AllowedName(datetime.datetime, call=_datetime)
    yield ("datetime", "date"), AllowedName(datetime.date, call=_date)
    yield ("datetime", "time"), AllowedName(datetime.time, call=_time)
    yield ("datetime", "timedelta"), AllowedName(datetime.timedelta, call=_timedelta)
    yield ("datetime", "timezone"), AllowedName(datetime.timezone, call=_timezone)
    yield ("decimal", "Decimal"), AllowedName(Decimal, call=_decimal)
    yield ("fractions", "Fraction"), AllowedName(Fraction, call=_fraction)
    yield ("_io", "BytesIO"), draft_of("io.BytesIO", _bytes_io)
    yield ("uuid", "UUID"), draft_of("uuid.UUID", _uuid)
    yield from _path_names()
    yield ("torch", "Size"), AllowedName(torch.Size, call=_size)
    yield ("torch", "device"), AllowedName(torch.device, call=_device)
    yield ("torch.serialization", "_get_layout"), AllowedName(Inert("_get_layout"), call=lambda name: _LAYOUTS[name])
    yield from numpy_names()


def _path_names() -> Iterator[tuple[Name, AllowedName]]:
    on_windows = os.name == "nt"
    classes: dict[str, type[pathlib.PurePath]] = {
        "PurePosixPath": pathlib.PurePosixPath,
        "PureWindowsPath": pathlib.PureWindowsPath,
        # A path of the other system can be looked at here, but names nothing.
        "PosixPath": pathlib.PurePosixPath if on_windows else pathlib.PosixPath,
        "WindowsPath": pathlib.WindowsPath if on_windows else pathlib.PureWindowsPath,
    }
    for name, cls in classes.items():
        for module in ("pathlib", "pathlib._local"):
            yield (module, name), AllowedName(cls, call=_path_maker(cls))


_TABLE = dict(_names())
