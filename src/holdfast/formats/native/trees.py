"""Nested states as they come out of a checkpoint: plain containers with references in place of tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.formats.native.refs import PerRankValues, TensorRef, UndeclaredValue
from holdfast.formats.native.values import Path

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
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def hides_tensor(value: Any) -> bool:
    """Whether a stored tensor, or a value per rank, is somewhere in a value."""
    if isinstance(value, (TensorRef, PerRankValues)):
        return True
    parts = children_of(value)
    return parts is not None and any(hides_tensor(child) for _, child in parts)


def is_named(value: Any) -> bool:
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


def refs_in(value: Any) -> Iterator[TensorRef]:
    """All references to tensors in a value, in order."""
    if isinstance(value, TensorRef):
        yield value
        return
    for _, child in children_of(value) or []:
        yield from refs_in(child)


def collect_refs(value: Any, refs: dict[str, TensorRef]) -> None:
    """Note all references to tensors in a value, by key."""
    refs.update({ref.key: ref for ref in refs_in(value)})


def pruned(value: Any, path: Path, wanted: Callable[[Path], bool]) -> Any:
    """A value with only the leaves that are wanted, or ``NOTHING``. Positions in lists stay: None takes the place."""
    parts = children_of(value)
    if not parts or (isinstance(value, (list, tuple)) and not is_named(value) and not hides_tensor(value)):
        return value if wanted(path) else NOTHING
    kept = {name: pruned(child, (*path, name), wanted) for name, child in parts}
    if all(child is NOTHING for child in kept.values()):
        return NOTHING
    if all(kept[name] is child for name, child in parts):
        return value
    if isinstance(value, PerRankValues):
        return PerRankValues(tuple(None if child is NOTHING else child for child in kept.values()))
    if isinstance(value, Mapping):
        rebuilt: Any = copy.copy(value)
        rebuilt.clear()
        rebuilt.update({name: child for name, child in kept.items() if child is not NOTHING})
        return rebuilt
    held: list[Any] = [None if child is NOTHING else child for child in kept.values()]
    if isinstance(value, tuple):
        kind: Any = type(value)
        return kind(*held) if is_named(value) else tuple(held)
    return held if isinstance(value, list) else dict(zip(kept, held, strict=True))


NOTHING = object()
"""Stands for a part of a state that is not wanted."""
