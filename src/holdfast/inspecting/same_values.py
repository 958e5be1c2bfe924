"""Whether two values of checkpoints are the same."""

from __future__ import annotations

from typing import Any

from holdfast.formats.native.refs import TensorRef
from holdfast.formats.native.trees import children_of


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are the same: of one kind, equal, and nan where the other is.

    Lists and tuples with the same elements are the same, since not all formats know which it was.

    >>> same_value({"lr": float("nan")}, {"lr": float("nan")}), same_value(1, True), same_value([1], (1,))
    (True, False, True)
    """
    if isinstance(a, TensorRef) or isinstance(b, TensorRef):
        return isinstance(a, TensorRef) and isinstance(b, TensorRef) and (a.dtype, a.shape) == (b.dtype, b.shape)
    parts, others = children_of(a), children_of(b)
    if parts is not None and others is not None:
        if isinstance(a, dict) != isinstance(b, dict):
            return False
        names, other_names = ([name for name, _ in some] for some in (parts, others))
        if isinstance(a, dict) and isinstance(b, dict):
            return a.keys() == b.keys() and all(same_value(child, b[name]) for name, child in parts)
        return names == other_names and all(
            same_value(child, other) for (_, child), (_, other) in zip(parts, others, strict=True)
        )
    if type(a) is not type(b):
        return False
    try:
        return bool(a == b) or (a != a and b != b)
    except Exception:  # what cannot be compared, such as arrays inside of values
        return repr(a) == repr(b)
