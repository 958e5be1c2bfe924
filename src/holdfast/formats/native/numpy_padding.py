"""Structures of numpy whose fields have gaps between them.

Nobody ever set the bytes of a gap, so that equal arrays may differ there. They are stored as zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


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
