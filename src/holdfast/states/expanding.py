"""A live state as plain nested containers: every model, optimizer or other live object replaced by what it saves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.formats.native.refs import PerRankValues
from holdfast.formats.native.values import key_of
from holdfast.states.adapters import Context, adapter_for, per_rank_of
from holdfast.states.contract import Path

_DEEPEST = 200

_LEFT_OUT = object()


@dataclass
class Expanded:
    """A state without live objects."""

    tree: Any = None
    slots: dict[str, tuple[Path, Any]] = field(default_factory=dict)
    """What each rank has its own of, by key: where it is, and this rank's value. The tree has only the key there."""
    from_first_rank: set[Path] = field(default_factory=set)
    """Places of tensors whose copy on the first rank counts."""


def expand(state: Any, wanted: Callable[[str], bool] | None = None) -> Expanded:
    """Replace all live objects of a state by what they save, and leave out keys that are not wanted."""
    expander = _Expander(Context.of(state), wanted)
    tree = expander.visit(state, ())
    expander.result.tree = {} if tree is _LEFT_OUT else tree
    return expander.result


class _Expander:
    def __init__(self, context: Context, wanted: Callable[[str], bool] | None) -> None:
        self.context = context
        self.wanted = wanted
        self.result = Expanded()

    def visit(self, value: Any, path: Path) -> Any:
        if len(path) > _DEEPEST:
            return value  # deeper than can be stored, or a cycle: whoever stores it will say so
        kind = type(value)
        if kind is dict:
            return self._children(value, path)
        if kind is list or kind is tuple:
            return self._items(value, path)
        per_rank = per_rank_of(value)
        if per_rank is not None:
            return self._slot(per_rank.value, path)
        adapter = adapter_for(value, path, self.context)
        if adapter is not None:
            self.result.from_first_rank.update((*path, key) for key in adapter.from_first_rank)
            return self.visit(adapter.saved(), path)
        if isinstance(value, Mapping):
            return self._other_mapping(value, path)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return kind(*self._items(tuple(value), path, named=kind._fields))
        return value if self._is_wanted(path) else _LEFT_OUT

    def _is_wanted(self, path: Path) -> bool:
        return self.wanted is None or self.wanted(key_of(path))

    def _children(self, mapping: Mapping[Any, Any], path: Path) -> Any:
        if not mapping and not self._is_wanted(path):
            return _LEFT_OUT
        visited = {key: self.visit(child, (*path, key)) for key, child in mapping.items()}
        if self.wanted is None:
            return visited
        kept = {key: child for key, child in visited.items() if child is not _LEFT_OUT}
        return _LEFT_OUT if visited and not kept else kept

    def _items(self, items: Any, path: Path, named: tuple[str, ...] | None = None) -> Any:
        if not items and not self._is_wanted(path):
            return _LEFT_OUT
        names = named or range(len(items))
        visited = [self.visit(child, (*path, name)) for name, child in zip(names, items, strict=True)]
        if visited and all(child is _LEFT_OUT for child in visited):
            return (None,) * len(visited) if named else _LEFT_OUT
        # Positions must not move, so nothing stands where something was left out.
        return type(items)(None if child is _LEFT_OUT else child for child in visited)

    def _other_mapping(self, mapping: Mapping[Any, Any], path: Path) -> Any:
        children = self._children(mapping, path)
        if children is _LEFT_OUT or (
            len(children) == len(mapping) and all(children[key] is mapping[key] for key in mapping)
        ):
            return mapping if children is not _LEFT_OUT else _LEFT_OUT
        rebuilt: Any = copy.copy(mapping)
        rebuilt.clear()
        rebuilt.update(children)
        return rebuilt

    def _slot(self, value: Any, path: Path) -> Any:
        key = key_of(path)
        if self.wanted is not None and not self.wanted(key):
            return _LEFT_OUT
        inner = _Expander(self.context, None)
        adapter = adapter_for(value, path, self.context)
        tree = inner.visit(value if adapter is None else adapter.saved(), path)
        if inner.result.slots:
            raise ValueError(f"'{key}' is per rank, and something in it is per rank again; wrap it once")
        self.result.slots[key] = (path, tree)
        return PerRankValues((key,))
