"""The element types of the native format, without a need for torch.

Elements travel as plain numpy elements of the same size, here called carriers: numpy has no bfloat16, but it can move
two bytes. What they mean is only asked at the ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_IN_NUMPY = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
_STORED_AS = _IN_NUMPY | {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_OTHER_SIZES = {
    "float8_e8m0fnu": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float4_e2m1fn_x2": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "bfloat16": 2,
    "complex32": 4,
    "bcomplex32": 4,
    "complex64": 8,
    "complex128": 16,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
}
_CARRIERS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_RAW = re.compile(r"raw([1-9][0-9]{0,6})")
_LARGEST_RAW = 1 << 20


@dataclass(frozen=True, eq=False)
class DType:
    """An element type: a name and a size. Equal to torch's, numpy's and the str of the same name.

    >>> DType("bfloat16").itemsize
    2
    >>> DType("float32") == np.float32
    True
    """

    name: str
    itemsize: int = field(init=False)
    stored_as: str = field(init=False)
    """The element type of its data in safetensors files."""
    carrier: np.dtype[Any] = field(init=False)
    """A numpy type of the same size, for moving elements about."""

    def __post_init__(self) -> None:
        size = _size_of(self.name)
        if size is None:
            raise ValueError(f"there is no element type {self.name!r}")
        set_field = object.__setattr__
        set_field(self, "itemsize", size)
        set_field(self, "stored_as", _STORED_AS.get(self.name, "U8"))
        set_field(self, "carrier", np.dtype(_CARRIERS.get(size, f"V{size}")))

    @property
    def numpy(self) -> np.dtype[Any] | None:
        """The numpy type that holds such elements, if there is one."""
        return np.dtype(self.name) if self.name in _IN_NUMPY or self.name in ("complex64", "complex128") else None

    def __eq__(self, other: object) -> bool:
        return name_of(other) == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def shape_in_file(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape by which a safetensors file lists a tensor of this type."""
        if self.stored_as == "U8" and self.itemsize != 1:
            return (*shape, self.itemsize)
        return tuple(shape)


def name_of(dtype: object) -> str | None:
    """The name of an element type, given as a str, a ``DType``, or a type of torch or numpy.

    >>> name_of(np.dtype("int16"))
    'int16'
    """
    if isinstance(dtype, DType):
        return dtype.name
    if isinstance(dtype, str):
        return dtype.removeprefix("torch.")
    if type(dtype).__module__.partition(".")[0] == "torch":
        return str(dtype).removeprefix("torch.")
    if not isinstance(dtype, (np.dtype, type)):
        return None
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return None


def dtype_named(name: str) -> DType:
    """The element type of that name; made once, since there are few and they are asked for often."""
    found = _made.get(name)
    if found is None:
        found = _made[name] = DType(name)
    return found


_made: dict[str, DType] = {}


def _size_of(name: str) -> int | None:
    if name in _IN_NUMPY:
        return np.dtype(name).itemsize
    raw = _RAW.fullmatch(name)
    if raw is not None:
        size = int(raw.group(1))
        return size if size <= _LARGEST_RAW else None
    return _OTHER_SIZES.get(name)
