"""Nested states as they come out of a checkpoint: containers with references in place of tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast._formats.native.encoding import Path
from holdfast._formats.native.refs import PerRankValues, TensorRef, UnregisteredValue
from holdfast._formats.native.registered_types import registered_type

# Nested states as they come out of a checkpoint: plain containers with references in place of tensors.


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
    if isinstance(value, UnregisteredValue) and value.kind != "enum":
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
    if isinstance(value, UnregisteredValue):
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


# The part of a state that is wanted, chosen leaf by leaf: of a live one before it is stored, or of a stored one.


NOTHING = object()
"""Stands for a part of a state that is not wanted."""


def part_of(value: Any, fields: Mapping[str, Any], path: Path) -> UnregisteredValue:
    """Some fields of a dataclass or named tuple, as they are stored: no object has fewer fields than its class."""
    if isinstance(value, UnregisteredValue):
        return dataclasses.replace(value, fields=fields)
    cls, registered = type(value), registered_type(type(value))
    name = f"{cls.__module__}:{cls.__qualname__}" if registered is None else registered.name
    return UnregisteredValue("namedtuple" if isinstance(value, tuple) else "dataclass", name, fields)


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
