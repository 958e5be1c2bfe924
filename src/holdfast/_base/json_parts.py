"""JSON in parts: Python's encoder lets no other thread run until it is done, and a large tree takes it long.

A save in the background must not stop the training that goes on beside it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from holdfast._base.tuning import ENTRIES_AT_ONCE

SMALL = 8
"""Containers with more entries than that are looked into; smaller ones are taken to hold little."""

_CONTAINERS = frozenset({dict, list, tuple})


def dumps(value: Any) -> str:
    """The shortest JSON of a value. Keys of dicts are str.

    >>> dumps({"a": [1, 2.5, None], "b": {}})
    '{"a":[1,2.5,null],"b":{}}'
    """
    if type(value) is dict and _is_large(value.values()):
        return "{" + ",".join(_parts_of_dict(value)) + "}"
    if type(value) in (list, tuple) and _is_large(value):
        return "[" + ",".join(_parts_of_list(value)) + "]"
    return _at_once(value)


def _is_large(children: Collection[Any]) -> bool:
    return len(children) > ENTRIES_AT_ONCE or any(
        type(child) in _CONTAINERS and len(child) > SMALL for child in children
    )


def _parts_of_dict(value: dict[str, Any]) -> Iterator[str]:
    batch: dict[str, Any] = {}
    weight = 0
    for key, child in value.items():
        size = len(child) if type(child) in _CONTAINERS else 0
        if batch and (weight >= ENTRIES_AT_ONCE or size > SMALL):
            yield _at_once(batch)[1:-1]
            batch, weight = {}, 0
        if size > SMALL:
            yield f"{encode_basestring_ascii(key)}:{dumps(child)}"
        else:
            batch[key] = child
            weight += 1 + size
    if batch:
        yield _at_once(batch)[1:-1]


def _parts_of_list(value: Sequence[Any]) -> Iterator[str]:
    batch: list[Any] = []
    weight = 0
    for child in value:
        size = len(child) if type(child) in _CONTAINERS else 0
        if batch and (weight >= ENTRIES_AT_ONCE or size > SMALL):
            yield _at_once(batch)[1:-1]
            batch, weight = [], 0
        if size > SMALL:
            yield dumps(child)
        else:
            batch.append(child)
            weight += 1 + size
    if batch:
        yield _at_once(batch)[1:-1]


def _at_once(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
