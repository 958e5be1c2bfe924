"""Numpy arrays that a source holds as values, which other formats store as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.formats.native.dtypes import dtype_named, name_of
from holdfast.formats.native.refs import TensorRef
from holdfast.formats.native.stored_members import CannotStore
from holdfast.formats.native.trees import children_of, mapped
from holdfast.formats.native.values import stored_numpy_dtype


def with_references(tree: Any, arrays: dict[str, Any]) -> Any:
    """The tree with references in place of arrays, which are put into ``arrays`` by the keys of those references.

    >>> arrays = {}
    >>> with_references({"mean": np.zeros(3), "step": 7}, arrays)["mean"].shape, len(arrays)
    ((3,), 1)
    """
    if isinstance(tree, np.ndarray):
        ref = _reference(tree, f"\0array {len(arrays)}")
        if ref is None:
            return tree
        arrays[ref.key] = np.ascontiguousarray(tree).reshape(tree.shape)
        return ref
    return mapped(tree, lambda child: with_references(child, arrays)) if _holds_array(tree) else tree


def _holds_array(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return True
    return any(_holds_array(child) for _, child in children_of(value) or ())


def _reference(array: npt.NDArray[Any], key: str) -> TensorRef | None:
    """What is stored of an array; None if it has no bytes of its own, such as one of objects."""
    try:
        stored = stored_numpy_dtype(array.dtype)
    except CannotStore:
        return None
    if array.dtype.itemsize == 0:
        return None
    name = name_of(array.dtype) or ""
    try:
        is_known = dtype_named(name).numpy is not None and array.dtype == array.dtype.newbyteorder("<")
    except ValueError:
        is_known = False
    dtype = dtype_named(name if is_known else f"raw{array.dtype.itemsize}")
    return TensorRef(key, dtype, array.shape, "replicated", stored)
