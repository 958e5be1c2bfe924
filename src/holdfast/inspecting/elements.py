"""The elements of tensors for people to look at: a few of many, with as little read as that takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.boxes import volume
from holdfast.inspecting.numbers import Array
from holdfast.tensor_handles import TensorHandle

_EDGE = 3
"""So many elements at either end of a long dimension are shown."""


class Excerpt(list[Any]):
    """Elements as nested lists, with ``...`` where some were left out."""


def elements_of(handle: TensorHandle, part: Any = None, *, limit: int | None = None) -> Array | Excerpt:
    """A part of a tensor, or all of it. If that is more than ``limit`` elements, only those at the edges are read."""
    if part is not None or limit is None or volume(handle.shape) <= limit:
        return _numbers(handle, ... if part is None else part)
    return _excerpt(handle, ())


def in_words(elements: Array | Excerpt, *, everything: bool) -> str:
    """Elements as text, as numpy writes them."""
    if isinstance(elements, Excerpt):
        return _nested_text(elements)
    threshold = elements.size + 1 if everything else 1000
    return np.array2string(elements, separator=", ", threshold=threshold, max_line_width=120)


def plain_elements(elements: Array) -> Any:
    """Elements as JSON can have them. What JSON has no numbers for becomes text."""
    return elements.tolist() if elements.dtype.kind in "biuf" else _texts(elements.tolist())


def _texts(value: Any) -> Any:
    return [_texts(item) for item in value] if isinstance(value, list) else str(value)


def _numbers(handle: TensorHandle, index: Any) -> Array:
    try:
        return np.asarray(handle.numpy(index))
    except TypeError:  # numpy has no such numbers: their bits are all that can be shown
        return handle.raw(index)


def _excerpt(handle: TensorHandle, at: tuple[int, ...]) -> Excerpt:
    length = handle.shape[len(at)]
    chosen: list[Any] = list(range(length))
    if length > 2 * _EDGE:
        chosen = [*range(_EDGE), ..., *range(length - _EDGE, length)]
    if len(at) + 1 < handle.ndim:
        return Excerpt(item if item is ... else _excerpt(handle, (*at, item)) for item in chosen)
    if length <= 2 * _EDGE:
        return Excerpt(_numbers(handle, at).tolist())
    first, last = (_numbers(handle, (*at, part)) for part in (slice(0, _EDGE), slice(length - _EDGE, length)))
    return Excerpt([*first.tolist(), ..., *last.tolist()])


def _nested_text(value: Any) -> str:
    if isinstance(value, Excerpt):
        return f"[{', '.join(map(_nested_text, value))}]"
    if value is ...:
        return "..."
    return f"{value:.6g}" if isinstance(value, float) else str(value)
