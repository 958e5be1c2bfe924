"""What a person types to name a part of a tensor: ``model.w[0:4, :8]``."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any, NamedTuple

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
