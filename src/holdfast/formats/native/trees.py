"""Nested states as they come out of a checkpoint: plain containers with references in place of tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.formats.native.refs import PerRankValues, TensorRef, UndeclaredValue

_NO_CONTAINERS = frozenset({int, float, bool, str, bytes, type(None), TensorRef})
"""Most values are of these types, and need no closer look."""


def children_of(value: Any) -> list[tuple[Any, Any]] | None:
    """What is in a container, with the names that lead there; None if it is none.

    >>> children_of((1, {}))
    [(0, 1), (1, {})]
    """
    if type(value) in _NO_CONTAINERS:
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, PerRankValues):
        return list(enumerate(value.ranks))
    if isinstance(value, tuple) and is_named(value):
        return list(zip(type(value)._fields, value, strict=True))  # type: ignore[attr-defined]
    if type(value) in (list, tuple):
        return list(enumerate(value))
    if isinstance(value, UndeclaredValue) and value.kind != "enum":
        return list(value.fields.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, TensorRef)) and _is_of_user(value):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return None


def hides_tensor(value: Any, tensors: tuple[type, ...] = (TensorRef,)) -> bool:
    """Whether a tensor, which is of one of these types, or a value per rank is somewhere in a value."""
    if isinstance(value, (*tensors, PerRankValues)):
        return True
    parts = children_of(value)
    return parts is not None and any(hides_tensor(child, tensors) for _, child in parts)


def is_named(value: Any) -> bool:
    """Whether it is a tuple whose elements have names."""
    return hasattr(type(value), "_fields")


def _is_of_user(value: Any) -> bool:
    return not type(value).__module__.startswith("holdfast.")


def substituted(value: Any, tensor: Callable[[TensorRef], Any]) -> Any:
    """A stored value with tensors put in for references, in containers of the same types."""
    if isinstance(value, TensorRef):
        return tensor(value)
    return mapped(value, lambda child: substituted(child, tensor))


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container with other children; anything else as it is.

    >>> mapped((1, 2), str)
    ('1', '2')
    """
    parts = children_of(value)
    if parts is None:
        return value
    changed = {name: change(child) for name, child in parts}
    if type(value) is dict:
        return changed
    if type(value) is list:
        return list(changed.values())
    if isinstance(value, PerRankValues):
        return PerRankValues(tuple(changed.values()))
    if isinstance(value, UndeclaredValue):
        return dataclasses.replace(value, fields=changed)
    if isinstance(value, tuple):
        return type(value)(*changed.values()) if is_named(value) else tuple(changed.values())
    if all(changed[name] is child for name, child in parts):
        return value
    rebuilt: Any = copy.copy(value)
    for name, child in changed.items():
        if isinstance(rebuilt, Mapping):
            rebuilt[name] = child  # type: ignore[index]
        else:
            object.__setattr__(rebuilt, name, child)
    return rebuilt


def with_lists(tree: Any) -> Any:
    """A tree with lists where it has a value per rank.

    >>> with_lists({"seed": PerRankValues((1, 2))})
    {'seed': [1, 2]}
    """
    if isinstance(tree, PerRankValues):
        return [with_lists(value) for value in tree.ranks]
    if isinstance(tree, TensorRef):
        return tree
    return mapped(tree, with_lists)


def refs_in(value: Any) -> Iterator[TensorRef]:
    """All references to tensors in a value, in order."""
    if isinstance(value, TensorRef):
        yield value
        return
    for _, child in children_of(value) or []:
        yield from refs_in(child)
