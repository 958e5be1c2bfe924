"""numpy arrays, scalars and dtypes out of pickles, without numpy's own unpickling.

``numpy.dtype.__setstate__`` believes what it is told about sizes and flags, which is enough to read and write foreign
memory. Here a dtype is made from a short name of a few simple kinds, and an array from bytes that have its length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from holdfast.formats.dcp.known_names import Draft, Inert, Known, Name, Refusal, brief

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


def numpy_names() -> Iterator[tuple[Name, Known]]:
    """The table of what numpy writes."""
    yield ("numpy", "dtype"), Known(np.dtype, call=_dtype)
    yield ("numpy", "ndarray"), Known(np.ndarray)
    for module in _MODULES:
        yield (f"{module}.multiarray", "_reconstruct"), Known(Inert("numpy._reconstruct"), call=_start_array)
        yield (f"{module}.multiarray", "scalar"), Known(Inert("numpy.scalar"), call=_scalar)
        yield (f"{module}.numeric", "_frombuffer"), Known(Inert("numpy._frombuffer"), call=_array)
