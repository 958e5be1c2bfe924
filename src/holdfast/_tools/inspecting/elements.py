"""Elements of tensors for people to look at, and what they type to name some: ``model.w[0:4, :8]``."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any, NamedTuple

import numpy as np

from holdfast._base.boxes import volume
from holdfast._load.tensor_handles import TensorHandle
from holdfast._tools.inspecting.numbers import Array

# What a person types to name a part of a tensor: ``model.w[0:4, :8]``.


_NUMBER = re.compile(r"[+-]?[0-9]+")


class KeySlice(NamedTuple):
    """A key, and which part of its tensor is meant."""

    key: str
    part: tuple[Any, ...] | None
    """Numbers, slices and ``...``, as Python has them between brackets; None for all."""


def parse_key_slice(text: str, keys: Container[str]) -> KeySlice:
    """Take apart what was typed. What is a key as it stands is that key, whatever brackets it ends in.

    >>> parse_key_slice("w[0:4, -1]", {"w"})
    KeySlice(key='w', part=(slice(0, 4, None), -1))
    >>> parse_key_slice('["a.b"][0]', {'["a.b"]'})
    KeySlice(key='["a.b"]', part=(0,))
    >>> parse_key_slice("w[0]", {"w[0]", "w"})
    KeySlice(key='w[0]', part=None)
    """
    if text in keys or not text.endswith("]"):
        return KeySlice(text, None)
    key, _, inside = text[:-1].rpartition("[")
    key = key.rstrip()
    if key not in keys and parsed(inside) is None:
        return KeySlice(text, None)  # a key that there is not, and that is what whoever looks it up will say
    index = parsed(inside)
    if index is None:
        raise ValueError(
            f"{text!r}: there is no such part as [{inside}]. Write it as in Python, with numbers, slices and '...', "
            f"for example {key}[0:4, :8]"
        )
    return KeySlice(key, index)


def parsed(inside: str) -> tuple[Any, ...] | None:
    """What stands between brackets; None if it makes no sense.

    >>> parsed("0:4, ..., ::2")
    (slice(0, 4, None), Ellipsis, slice(None, None, 2))
    """
    words = [word.strip() for word in inside.split(",")]
    if len(words) > 1 and not words[-1]:
        words.pop()  # a comma at the end, as in a tuple of one
    found = [_part(word) for word in words]
    return None if _NOTHING in found else tuple(found)


_NOTHING = object()


def _part(word: str) -> Any:
    if word == "...":
        return Ellipsis
    if ":" not in word:
        return int(word) if _NUMBER.fullmatch(word) else _NOTHING
    numbers = [number.strip() for number in word.split(":")]
    if len(numbers) > 3 or not all(not number or _NUMBER.fullmatch(number) for number in numbers):
        return _NOTHING
    limits = [int(number) if number else None for number in numbers]
    return _NOTHING if limits[2:] == [0] else slice(*limits)


# The elements of tensors for people to look at: a few of many, with as little read as that takes.


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
