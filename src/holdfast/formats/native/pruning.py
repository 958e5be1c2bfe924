"""The part of a state that is wanted, chosen leaf by leaf: of a live one before it is stored, or of a stored one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.formats.native.declared import declared_class
from holdfast.formats.native.encoding import Path
from holdfast.formats.native.refs import PerRankValues, TensorRef, UndeclaredValue
from holdfast.formats.native.trees import children_of, hides_tensor, is_named

NOTHING = object()
"""Stands for a part of a state that is not wanted."""


def part_of(value: Any, fields: Mapping[str, Any], path: Path) -> UndeclaredValue:
    """Some fields of a dataclass or named tuple, as they are stored: no object has fewer fields than its class."""
    if isinstance(value, UndeclaredValue):
        return dataclasses.replace(value, fields=fields)
    cls, declared = type(value), declared_class(type(value))
    name = f"{cls.__module__}:{cls.__qualname__}" if declared is None else declared.name
    return UndeclaredValue("namedtuple" if isinstance(value, tuple) else "dataclass", name, fields)


def pruned(
    value: Any,
    path: Path,
    wanted: Callable[[Path], bool],
    *,
    tensors: tuple[type, ...] = (TensorRef,),
    part_of: Callable[[Any, Mapping[str, Any], Path], Any] = part_of,
) -> Any:
    """A value with only the leaves that are wanted, or ``NOTHING``. A leaf is what has a key in a checkpoint.

    Positions in lists stay: None takes the place of what is not wanted. ``tensors`` are the types of what is a tensor
    in this state. ``part_of`` makes what is left of a dataclass or named tuple that has unwanted fields.

    >>> pruned({"model": {"w": 1, "b": 2}, "step": 3}, (), lambda path: path[-1] == "w")
    {'model': {'w': 1}}
    """
    parts = children_of(value)
    is_list = isinstance(value, (list, tuple)) and not is_named(value)
    if not parts or (is_list and not hides_tensor(value, tensors)):
        return value if wanted(path) else NOTHING
    kept = {name: pruned(child, (*path, name), wanted, tensors=tensors, part_of=part_of) for name, child in parts}
    if all(child is NOTHING for child in kept.values()):
        return NOTHING
    if all(kept[name] is child for name, child in parts):
        return value
    if is_list:
        return type(value)(_with_holes(kept))
    if isinstance(value, PerRankValues):
        return PerRankValues(tuple(_with_holes(kept)))
    left = {name: child for name, child in kept.items() if child is not NOTHING}
    return _mapping_with(value, left) if isinstance(value, Mapping) else part_of(value, left, path)


def _mapping_with(mapping: Any, items: Mapping[Any, Any]) -> Any:
    if type(mapping) is dict:
        return items
    rebuilt = copy.copy(mapping)  # of the same class, with the same default
    rebuilt.clear()
    rebuilt.update(items)
    return rebuilt


def _with_holes(kept: Mapping[Any, Any]) -> list[Any]:
    return [None if child is NOTHING else child for child in kept.values()]
