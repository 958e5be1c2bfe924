"""Arrays of numbers as a small safetensors file: what the index, the columns and the tables of data files are."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from holdfast._formats.native.blocks import refuse
from holdfast._formats.safetensors.header import plan_header, read_header

U8, U32, U64 = "U8", "U32", "U64"

_TYPES: dict[str, np.dtype[Any]] = {U8: np.dtype("u1"), U32: np.dtype("<u4"), U64: np.dtype("<u8")}


def encode_arrays(
    arrays: Mapping[str, Any], stored_as: Mapping[str, str], notes: Mapping[str, str] | None = None
) -> bytes:
    """The bytes of a file of these arrays, all in one dimension, with notes in its header if there are any."""
    stored = {name: np.ascontiguousarray(arrays[name], _TYPES[kind]) for name, kind in stored_as.items()}
    header, start = plan_header([(name, stored_as[name], array.shape) for name, array in stored.items()], notes or {})
    return b"".join([start, *(stored[name].tobytes() for name in header.tensors)])


def count_bytes(lengths: Mapping[str, int], stored_as: Mapping[str, str], notes: Mapping[str, str]) -> int:
    """How many bytes arrays of these lengths take as a file.

    >>> count_bytes({"a": 3}, {"a": U64}, {}) == len(encode_arrays({"a": [1, 2, 3]}, {"a": U64}))
    True
    """
    _, start = plan_header([(name, kind, (lengths[name],)) for name, kind in stored_as.items()], notes)
    return len(start) + sum(lengths[name] * _TYPES[kind].itemsize for name, kind in stored_as.items())


def decode_arrays(
    data: bytes | bytearray, stored_as: Mapping[str, str], source: str
) -> tuple[dict[str, Any], Mapping[str, str]]:
    """The arrays of a file that ``source`` is the name of, and its notes. Numbers of 64 bits become signed ones."""
    header = read_header(io.BytesIO(data), source)
    arrays: dict[str, Any] = {}
    for name, kind in stored_as.items():
        tensor = header.tensors.get(name)
        if tensor is None or tensor.dtype != kind or len(tensor.shape) != 1:
            refuse(source, f"lacks the column {name!r}", f"{kind} in one dimension", tensor)
        found = np.frombuffer(data, _TYPES[kind], count=tensor.shape[0], offset=header.position(name))
        if kind == U64:
            if found.size and int(found.max()) >= 1 << 62:
                refuse(source, f"has impossible numbers in {name!r}", "less than 2**62", int(found.max()))
            found = found.astype(np.int64)
        arrays[name] = found
    return arrays, header.notes
