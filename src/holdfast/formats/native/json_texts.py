"""JSON in parts: Python's encoder lets no other thread run until it is done, and a large tree takes it long.

A save in the background must not stop the training that goes on beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

AT_ONCE = 2000
"""Entries that are encoded in one go, which takes about a millisecond."""


def dumps(value: Any) -> str:
    """The shortest JSON of a value. Keys of dicts are texts.

    >>> dumps({"a": [1, 2.5, None], "b": {}})
    '{"a":[1,2.5,null],"b":{}}'
    """
    if _weight(value) <= AT_ONCE:
        return _at_once(value)
    if type(value) is dict:
        return "{" + ",".join(_parts_of_dict(value)) + "}"
    return "[" + ",".join(_parts_of_list(value)) + "]"


def _parts_of_dict(value: dict[str, Any]) -> Iterable[str]:
    batch: dict[str, Any] = {}
    weight = 0
    for key, child in value.items():
        own = _weight(child)
        if weight + own > AT_ONCE and batch:
            yield _at_once(batch)[1:-1]
            batch, weight = {}, 0
        if own > AT_ONCE:
            yield f"{encode_basestring_ascii(key)}:{dumps(child)}"
        else:
            batch[key] = child
            weight += own
    if batch:
        yield _at_once(batch)[1:-1]


def _parts_of_list(value: Sequence[Any]) -> Iterable[str]:
    batch: list[Any] = []
    weight = 0
    for child in value:
        own = _weight(child)
        if weight + own > AT_ONCE and batch:
            yield _at_once(batch)[1:-1]
            batch, weight = [], 0
        if own > AT_ONCE:
            yield dumps(child)
        else:
            batch.append(child)
            weight += own
    if batch:
        yield _at_once(batch)[1:-1]


def _weight(value: Any) -> int:
    """About how much there is to encode: what lies deeper is not counted, as most of it is small."""
    if type(value) is dict:
        return (
            1 + len(value) + sum(len(child) for child in value.values() if type(child) is dict or type(child) is list)
        )
    return 1 + len(value) if type(value) is list or type(value) is tuple else 1


def _at_once(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
