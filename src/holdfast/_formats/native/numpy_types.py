"""numpy in typed values: dtypes as text or lists, scalars and small arrays as bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast._formats.native.leaf_types import LeafType
from holdfast._formats.native.members import (
    JSON,
    CannotStore,
    Malformed,
    Members,
    NotHere,
    bytes_from,
    member,
    stored_bytes,
)
from holdfast._formats.native.names import RECORD
from holdfast.errors import DamagedCheckpointError, UnsupportedValueError

_SIMPLE = re.compile(r"[<>|](?:[biufcSUV][0-9]{1,9}|[mM]8(?:\[(?:[1-9][0-9]{0,8})?[A-Za-zμ]{1,7}\])?)")
_DEEPEST_STRUCTURE = 16
_MOST_DIMENSIONS = 64


def stored_numpy_dtype(dtype: np.dtype[Any]) -> JSON:
    """A numpy dtype as the format writes it. Raises ``CannotStore`` for those that bytes do not describe.

    >>> stored_numpy_dtype(np.dtype("datetime64[ns]"))
    '<M8[ns]'
    """
    try:
        return _dtypes_written[dtype]
    except KeyError:
        pass
    if dtype.hasobject:
        raise CannotStore(f"arrays of dtype {dtype} hold Python objects and no bytes; store a list instead")
    if any(leaf in (np.longdouble, np.clongdouble) and leaf not in (np.double, np.cdouble) for leaf in _leaves(dtype)):
        raise CannotStore(f"the bytes of dtype {dtype} mean different things on different machines; use float64")
    try:
        stored = _as_lists(np.lib.format.dtype_to_descr(dtype))
        is_exact = _dtype_from(stored) == dtype
    except (ValueError, Malformed, NotHere):  # ValueError: fields that overlap
        is_exact = False
    if not is_exact:
        raise CannotStore(f"dtype {dtype!r} has no exact description as text; convert the array to another one")
    if len(_dtypes_written) < 1000:
        _dtypes_written[dtype] = stored
    return stored


_dtypes_written: dict[np.dtype[Any], JSON] = {}


def numpy_dtype_from(stored: JSON) -> np.dtype[Any]:
    """The numpy dtype that ``stored_numpy_dtype`` stored.

    Raises ``DamagedCheckpointError`` for what is none, and ``UnsupportedValueError`` for one that numpy does not have
    on this machine.

    >>> numpy_dtype_from("<M8[ns]")
    dtype('<M8[ns]')
    """
    try:
        return _dtype_from(stored)
    except Malformed as error:
        raise DamagedCheckpointError(
            f"{RECORD}: a numpy dtype is damaged: {error}. Load another checkpoint, or copy this one again from where "
            "it came from.",
            file=RECORD,
            key=None,
            expected="a numpy dtype",
            found=str(error),
        ) from None
    except NotHere as error:
        raise UnsupportedValueError(f"{error}. Load this part with the numpy that saved it.", key="") from error


def _dtype_from(stored: JSON) -> np.dtype[Any]:
    """The same; raises ``Malformed`` or ``NotHere``."""
    description = _description(stored, _DEEPEST_STRUCTURE)
    try:
        dtype = np.lib.format.descr_to_dtype(description)
    except (TypeError, ValueError, OverflowError, MemoryError, SyntaxError) as error:
        raise NotHere(f"numpy here has no dtype {str(stored)[:200]!r}") from error
    if dtype.hasobject:
        raise Malformed("a numpy dtype of objects is never stored")
    return dtype


def _description(stored: JSON, depth: int) -> Any:
    """What numpy takes: like the stored one, with tuples where it wants tuples. Lets through plain types only."""
    if isinstance(stored, str):
        if _SIMPLE.fullmatch(stored) is None:
            raise Malformed(f"{stored[:100]!r} is not a numpy dtype")
        return stored
    if not isinstance(stored, list) or depth == 0:
        raise Malformed("it is not a numpy dtype")
    fields = []
    for field in stored:
        if not isinstance(field, list) or len(field) not in (2, 3) or type(field[0]) not in (str, list):
            raise Malformed("a field of a numpy dtype is a name, a type and perhaps a shape")
        name = field[0]
        if isinstance(name, list):  # a field with a title
            if len(name) != 2 or not all(isinstance(part, str) for part in name):
                raise Malformed("the name of a field is a str, or a title and a name")
            name = tuple(name)
        inner = _description(field[1], depth - 1)
        fields.append((name, inner) if len(field) == 2 else (name, inner, _shape_from(field[2])))
    return fields


def _as_lists(description: Any) -> JSON:
    if isinstance(description, (list, tuple)):
        return [_as_lists(part) for part in description]
    return description


def _leaves(dtype: np.dtype[Any]) -> list[np.dtype[Any]]:
    """The types of the elements in all fields, and of their fields."""
    dtype = dtype.base
    if dtype.fields is None:
        return [dtype]
    return [leaf for field in dtype.fields.values() for leaf in _leaves(field[0])]


def _shape_from(stored: JSON) -> tuple[int, ...]:
    if not isinstance(stored, list) or len(stored) > _MOST_DIMENSIONS:
        raise Malformed(f"a shape is a list of at most {_MOST_DIMENSIONS} sizes")
    if any(type(size) is not int or not 0 <= size < 1 << 63 for size in stored):
        raise Malformed("sizes are ints of 64 bits and not negative")
    return tuple(stored)


def _write_dtype(value: np.dtype[Any]) -> dict[str, Any]:
    return {"numpy": stored_numpy_dtype(value)}


def _read_dtype(members: Members) -> np.dtype[Any]:
    return _dtype_from(member(members, "numpy", (str, list)))


def _write_scalar(value: np.generic) -> dict[str, Any]:
    if isinstance(value, np.str_):
        # numpy takes zeros at the end for padding, and leaves them out in most ways; here they are part of the text.
        content = str.encode(value, "utf-32-le", "surrogatepass")
        return {"numpy": f"<U{len(value)}", "base64": stored_bytes(content)}
    if isinstance(value, np.bytes_):
        return {"numpy": f"|S{len(value)}", "base64": stored_bytes(bytes(value))}
    described = stored_numpy_dtype(value.dtype)
    if type(value) is not value.dtype.type or type(value) is np.record:
        raise CannotStore("it is of a class of its own; convert it to a numpy scalar")
    return {"numpy": described, "base64": stored_bytes(without_gaps(np.asarray(value)).tobytes())}


def _read_scalar(members: Members) -> Any:
    dtype = _read_dtype(members)
    content = _content(members, dtype, ())
    if dtype.kind == "S":
        return np.bytes_(content)
    if dtype.kind == "U":
        try:
            return np.str_(content.decode("utf-32-le" if dtype.byteorder != ">" else "utf-32-be", "surrogatepass"))
        except UnicodeDecodeError:
            raise Malformed("it is not a str of numpy") from None
    return _array((), dtype, content)[()]


def _write_array(value: np.ndarray) -> dict[str, Any]:
    described = stored_numpy_dtype(value.dtype)
    return {"numpy": described, "shape": list(value.shape), "base64": stored_bytes(without_gaps(value).tobytes())}


def _read_array(members: Members) -> Any:
    dtype, shape = _read_dtype(members), _shape_from(member(members, "shape", list))
    return _array(shape, dtype, _content(members, dtype, shape))


def _content(members: Members, dtype: np.dtype[Any], shape: Sequence[int]) -> bytes:
    content = bytes_from(members)
    if len(content) != dtype.itemsize * math.prod(shape):
        raise Malformed(f"its shape and dtype take {dtype.itemsize * math.prod(shape)} bytes, not {len(content)}")
    return content


def _array(shape: Sequence[int], dtype: np.dtype[Any], content: bytes) -> Any:
    try:
        return np.ndarray(shape, dtype, buffer=bytearray(content or 1))  # there is no view of an empty buffer
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise Malformed(f"there is no such array: {error}") from None


NUMPY_DTYPE = LeafType("numpy.dtype", _write_dtype, _read_dtype)
NUMPY_SCALAR = LeafType("numpy.scalar", _write_scalar, _read_scalar)
NUMPY_ARRAY = LeafType("numpy.array", _write_array, _read_array)


# Structures of numpy whose fields have gaps between them.
#
# Nobody ever set the bytes of a gap, so that equal arrays may differ there. They are stored as zeros.


def has_gaps(dtype: np.dtype[Any]) -> bool:
    """Whether elements have bytes that belong to no field.

    >>> has_gaps(np.dtype([("flag", "u1"), ("number", "<i8")], align=True))
    True
    """
    base = dtype.base
    return base.fields is not None and _bytes_of_fields(base) < base.itemsize


def without_gaps(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same elements with zeros in the gaps: a copy, unless there are none.

    >>> dtype = np.dtype([("flag", "u1"), ("number", "<u2")], align=True)
    >>> without_gaps(np.full(4, 255, "u1").view(dtype)).view("u1").tolist()
    [255, 0, 255, 255]
    """
    if not has_gaps(array.dtype):
        return array
    clean = np.zeros(array.shape, array.dtype)
    _copy_fields(array, clean)
    return clean


def _bytes_of_fields(dtype: np.dtype[Any]) -> int:
    count = dtype.itemsize // dtype.base.itemsize if dtype.base.itemsize else 0
    if dtype.base.fields is None:
        return dtype.itemsize
    return count * sum(_bytes_of_fields(dtype.base[name]) for name in dtype.base.names or ())


def _copy_fields(array: npt.NDArray[Any], clean: npt.NDArray[Any]) -> None:
    for name in array.dtype.names or ():
        if array[name].dtype.fields is None:
            clean[name] = array[name]
        else:
            _copy_fields(array[name], clean[name])
