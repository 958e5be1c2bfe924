"""The tensors in a record: a line for each, of which thousands are the same but for the key.

So what a line says is put into words, and understood, once for all that say the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from math import prod
from typing import Any, NamedTuple

import numpy as np

from holdfast._base.alike import Numbers, numbered
from holdfast._base.json_objects import are_sizes, parse_json_object
from holdfast._base.json_parts import dumps
from holdfast._formats.native.blocks import refuse
from holdfast._formats.native.dtypes import DType, dtype_named
from holdfast._formats.native.numpy_types import numpy_dtype_from
from holdfast._formats.native.refs import TensorRef, TensorRefs
from holdfast._formats.native.stored_files import LARGEST_FILE, MOST_DIMENSIONS
from holdfast._formats.native.stored_parts import Places
from holdfast.errors import DamagedCheckpointError, UnsupportedValueError

KINDS = ("sharded", "replicated", "per_rank")

_BEGIN, _END, _BETWEEN = '\n"tensors":[\n', "}],\n", ",\n"
"""What is around and between the lines. A line of a text cannot end inside of a JSON string."""
_FIRST = '{"key":"'


class TensorRows(NamedTuple):
    """The rows of a record, as columns."""

    keys: list[Any]
    members: Sequence[Any]
    """What different rows say; of the same ones, one."""
    kinds: Numbers
    """Which of these each row says, apart from its key."""

    @classmethod
    def of(cls, rows: Sequence[Any]) -> TensorRows:
        """Rows that are given one by one."""
        keys = [row.get("key") if isinstance(row, dict) else None for row in rows]
        return cls(keys, rows, np.arange(len(rows)))


def tensor_lines(tensors: TensorRefs, places: Places) -> list[str]:
    """What a record says of each tensor."""
    looks = list(zip(tensors.kinds.tolist(), places.division_of, places.first_of, strict=True))
    said = {look: _members_but_key(tensors.likes[look[0]], look[1], look[2]) for look in set(looks)}
    quoted = map(encode_basestring_ascii, tensors.keys)
    return [f'{{"key":{key},{said[look]}' for key, look in zip(quoted, looks, strict=True)]


def _members_but_key(tensor: TensorRef, division: int, first: int) -> str:
    members: dict[str, Any] = {"dtype": tensor.dtype.name, "shape": list(tensor.shape), "kind": tensor.kind}
    if tensor.rank is not None:
        members["rank"] = tensor.rank
    if tensor.numpy is not None:
        members["numpy"] = tensor.numpy
    if division:
        members["division"] = None if division < 0 else division
    if first:
        members["first"] = first
    return dumps(members)[1:]


def parse_record(data: bytes, source: str) -> dict[str, Any]:
    """The members of a record, with ``TensorRows`` for its tensors if these have the form that we write."""
    if not data.isascii():  # as those are that we write
        return parse_json_object(data, source)
    text = data.decode("ascii")
    begin = text.find(_BEGIN)
    end = text.find(_END, begin)
    if begin >= 0 and end >= 0:
        first, last = begin + len(_BEGIN), end + 1
        rows = _rows_of(text[first:last], source)
        if rows is not None:
            others = f"{text[: first - 2]}NaN{text[last + 1 :]}"
            members = parse_json_object(others, source, instead_of_nan=rows)
            if members.get("tensors") is rows:  # and not some other object that is called so too
                return members
    return parse_json_object(text, source)


def _rows_of(lines: str, source: str) -> TensorRows | None:
    """The rows, if each line is just one, and begins with the key."""
    cut = [line.partition('",') for line in lines.split(_BETWEEN)]
    if {head[: len(_FIRST)] for head, _, _ in cut} != {_FIRST}:
        return None
    keys = [head[len(_FIRST) :] for head, _, _ in cut]
    said, kinds = numbered([rest for _, _, rest in cut])
    try:
        together = "".join(keys)
        if "\\" in together or '"' in together or not together.isprintable():
            keys = [json.loads(f'"{key}"') for key in keys]
        members = [parse_json_object("{" + rest, source) for rest in said]
    except (ValueError, DamagedCheckpointError):
        return None
    if not {str}.issuperset(map(type, keys)) or any("key" in row for row in members):
        return None
    return TensorRows(keys, members, kinds)


def tensors_from(rows: TensorRows, source: str) -> TensorRefs:
    """The tensors of a record, each of which can be."""
    of_kind = dict(zip(rows.kinds.tolist(), rows.keys, strict=True))
    likes = [_tensor(row, of_kind[kind], source) for kind, row in enumerate(rows.members)]
    if len(set(rows.keys)) < len(rows.keys):
        refuse(source, "lists a tensor twice", "each key once", "a key more than once")
    return TensorRefs(rows.keys, likes, rows.kinds)


def _tensor(row: Any, key: Any, source: str) -> TensorRef:
    if not isinstance(row, dict):
        refuse(source, "describes a tensor in a wrong way", "an object", row)
    name: Any = row.get("dtype")
    shape, kind, rank = row.get("shape"), row.get("kind"), row.get("rank")
    if not isinstance(key, str):
        refuse(source, "has a tensor without a key", "a str", key)
    if not isinstance(shape, list) or not are_sizes(shape) or len(shape) > MOST_DIMENSIONS:
        refuse(source, f"has no valid shape for {key!r}", f"up to {MOST_DIMENSIONS} sizes", shape)
    if kind not in KINDS or (kind == "per_rank") != are_sizes([rank]):
        refuse(source, f"has no valid kind for {key!r}", f"one of {KINDS}", (kind, rank))
    try:
        dtype = dtype_named(name)
    except (ValueError, TypeError):
        refuse(source, f"has an unknown dtype for {key!r}", "a dtype of the format", name)
    if prod(size or 1 for size in shape) * dtype.itemsize > LARGEST_FILE:  # no library can make it, even if empty
        refuse(source, f"has a tensor {key!r} that cannot be", f"at most {LARGEST_FILE} bytes", shape)
    if "numpy" in row and not _is_numpy_type_of(dtype, row["numpy"]):
        refuse(source, f"has a numpy type that does not fit {key!r}", f"one for elements of {dtype}", row["numpy"])
    return TensorRef(key, dtype, tuple(shape), kind, row.get("numpy"), rank)


def _is_numpy_type_of(dtype: DType, stored: Any) -> bool:
    try:
        found = numpy_dtype_from(stored)
    except UnsupportedValueError:
        return True  # of a numpy that has more types: everything else can still be read
    except DamagedCheckpointError:
        return False
    return found.itemsize == dtype.itemsize and dtype.numpy in (None, found)
