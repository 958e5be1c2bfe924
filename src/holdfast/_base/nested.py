"""Nested state as a flat mapping and back: which containers are opened, and what the leaves are called.

The rules are those of DCP, because keys in existing checkpoints follow them: mappings are always opened, lists only
if a tensor or a mapping hides in them, everything else (tuples too) is a leaf. A key is the dot-joined path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from itertools import pairwise
from typing import Any, TypeAlias, cast

import torch

PathItem: TypeAlias = str | int
ObjectPath: TypeAlias = tuple[PathItem, ...]
Location: TypeAlias = tuple[Any, ...]
"""Like a path, with the keys as they really are in the container (an int key stays an int)."""

Visitor: TypeAlias = Callable[[ObjectPath, Any], None]


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor."""
    return isinstance(value, torch.Tensor)


def walk(
    state: Any, visit: Callable[[ObjectPath, Location, Any], None], opens_list: Callable[[list[Any]], bool]
) -> None:
    """Call ``visit(path, location, leaf)`` for every leaf of ``state``, in order."""
    # The outermost mapping is opened even where a rule would call it a leaf.
    for key, child in state.items():
        _descend((str(key),), (key,), child, visit, opens_list)


# A function of its own and not one inside of `walk`: that would refer to itself, and such a circle keeps the tensors
# that `visit` collects in memory until the garbage collector comes round.
def _descend(
    path: ObjectPath,
    location: Location,
    value: Any,
    visit: Callable[[ObjectPath, Location, Any], None],
    opens_list: Callable[[list[Any]], bool],
) -> None:
    if isinstance(value, Mapping):
        for key, child in value.items():
            _descend((*path, str(key)), (*location, key), child, visit, opens_list)
    elif isinstance(value, list) and opens_list(value):
        for position, child in enumerate(value):
            _descend((*path, position), (*location, position), child, visit, opens_list)
    else:
        visit(path, location, value)


def opens_list(value: list[Any], is_inner: Callable[[Any], bool] | None = is_tensor) -> bool:
    """Whether a list is opened: somewhere in it, through nested lists, is a mapping or a tensor."""
    return any(
        isinstance(child, Mapping)
        or (is_inner is not None and is_inner(child))
        or (isinstance(child, list) and opens_list(child, is_inner))
        for child in value
    )


def _holds_tensor(container: Any, is_inner: Callable[[Any], bool] | None) -> bool:
    return any(
        (isinstance(child, (Mapping, list)) and _holds_tensor(child, is_inner))
        or (is_inner is not None and is_inner(child))
        for child in (container.values() if isinstance(container, Mapping) else container)
    )


def traverse_state_dict(
    state_dict: Any, visitor: Visitor, keep_traversing: Callable[[Any], bool] | None = is_tensor
) -> None:
    """Call ``visitor(path, leaf)`` for every leaf.

    ``keep_traversing`` says which values inside a list are reason enough to open the list.
    """
    walk(
        state_dict,
        lambda path, _, value: visitor(path, value),
        lambda value: opens_list(value, keep_traversing),
    )


def traverse_state_dict_v_2_3(
    state_dict: Any, visitor: Visitor, keep_traversing: Callable[[Any], bool] | None = is_tensor
) -> None:
    """The rules of torch 2.3 and before: mappings and lists without a tensor inside are leaves."""
    _walk_v_2_3(state_dict, lambda path, _, value: visitor(path, value), keep_traversing)


def _walk_v_2_3(
    state: Any,
    visit: Callable[[ObjectPath, Location, Any], None],
    is_inner: Callable[[Any], bool] | None = is_tensor,
) -> None:
    for key, child in state.items():
        _descend_v_2_3((str(key),), (key,), child, visit, is_inner)


def _descend_v_2_3(
    path: ObjectPath,
    location: Location,
    value: Any,
    visit: Callable[[ObjectPath, Location, Any], None],
    is_inner: Callable[[Any], bool] | None,
) -> None:
    if isinstance(value, Mapping) and _holds_tensor(value, is_inner):
        for key, child in value.items():
            _descend_v_2_3((*path, str(key)), (*location, key), child, visit, is_inner)
    elif isinstance(value, list) and _holds_tensor(value, is_inner):
        for position, child in enumerate(value):
            _descend_v_2_3((*path, position), (*location, position), child, visit, is_inner)
    else:
        visit(path, location, value)


def flat_name(path: ObjectPath) -> str:
    """The key of a leaf: its path, joined by dots."""
    return ".".join(map(str, path))


class FlatState:
    """A nested state seen as a flat mapping, with the way back to every leaf's place."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.paths: dict[str, ObjectPath] = {}
        self.locations: dict[str, Location] = {}

    def add(self, path: ObjectPath, location: Location, value: Any) -> None:
        """Record a leaf; two leaves of one name cannot be told apart in a checkpoint and are refused."""
        name = flat_name(path)
        if name in self.values:
            raise ValueError(f"duplicated flatten key {name}")
        self.values[name] = value
        self.paths[name] = path
        self.locations[name] = location


def flatten(state_dict: Any) -> FlatState:
    """Flatten by today's rules, remembering the real keys on the way."""
    flat = FlatState()
    walk(state_dict, flat.add, opens_list)
    return flat


def flatten_v_2_3(state_dict: Any) -> FlatState:
    """Flatten as torch 2.3 and before did."""
    flat = FlatState()
    _walk_v_2_3(state_dict, flat.add)
    return flat


def flatten_state_dict(state_dict: Any) -> tuple[dict[str, Any], dict[str, ObjectPath]]:
    """Flatten ``state_dict`` into ``{key: leaf}`` and ``{key: path}``."""
    flat = flatten(state_dict)
    return flat.values, flat.paths


def unflatten_state_dict(state_dict: Mapping[str, Any], mapping: Mapping[str, ObjectPath]) -> dict[str, Any]:
    """Build the nested state again from flat values and their paths."""
    nested: dict[str, Any] = {}
    for name, value in state_dict.items():
        set_element(nested, mapping[name], value)
    return nested


def set_element(root_dict: Any, path: Location, value: Any) -> None:
    """Put ``value`` at ``path``, creating the containers on the way: lists for int items, dicts for others."""
    place = cast(MutableMapping[Any, Any], root_dict)
    for item, following in pairwise(path):
        fresh: Any = [] if isinstance(following, int) and not isinstance(following, bool) else {}
        place = _child_or_insert(place, item, fresh)
    _put(place, path[-1], value)


def _child_or_insert(container: Any, item: Any, fresh: Any) -> Any:
    if isinstance(container, Mapping):
        if item not in container:
            _put(container, item, fresh)
        return container[item]
    if item >= len(container) or container[item] is None:
        _put(container, item, fresh)
    return container[item]


def _put(container: Any, item: Any, value: Any) -> None:
    if isinstance(container, MutableSequence) and isinstance(item, int):
        # Leaves of a list may arrive in any order; the gaps are filled by later ones.
        container.extend([None] * (item + 1 - len(container)))
    container[item] = value


def get_element(root_dict: Any, path: Location, default_value: Any = None) -> Any:
    """The value at ``path``, or ``default_value`` if there is none."""
    place = root_dict
    for item in path:
        if isinstance(item, int) and isinstance(place, list):
            if not 0 <= item < len(place):
                return default_value
        elif not isinstance(place, Mapping) or item not in place:
            return default_value
        place = place[item]
    return place
