"""One tree out of the trees of all ranks, which are mostly the same.

Trees are typed values as they are stored (``docs/format.md``). A rank may have entries that others lack, as the stages
of a pipeline do. What several have must be the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from holdfast.planning.agreement import Differing

TYPE = "$"
Tree = Any
Held = list[tuple[int, Tree]]
"""What ranks have at one place, lowest rank first."""

_ITEMS = {"dict", "OrderedDict", "defaultdict", "Counter"}
_SEQUENCES = {"tuple"}
_FIELDS = {"dataclass", "namedtuple"}


def merge_trees(trees: Sequence[tuple[int, Tree]]) -> tuple[Tree, list[Differing]]:
    """Merge the trees of ranks. Returns the whole, and the places where ranks differ, of which the lowest one's count.

    >>> merge_trees([(0, {"a": 1}), (1, {"a": 1, "b": 2})])
    ({'a': 1, 'b': 2}, [])
    >>> merge_trees([(0, {"a": 1}), (1, {"a": 3})])[1]
    [Differing(key='a', groups=((0,), (1,)))]
    """
    merger = _Merger()
    return merger.merge(list(trees), ()), merger.differing


def renamed_tensors(tree: Tree, names: dict[str, str]) -> Tree:
    """The tree with other keys in its references to tensors."""
    if isinstance(tree, list):
        return [renamed_tensors(child, names) for child in tree]
    if isinstance(tree, dict):
        if tree.get(TYPE) == "tensor":
            return {**tree, "key": names.get(tree["key"], tree["key"])}
        return {name: renamed_tensors(child, names) for name, child in tree.items()}
    return tree


def fill_slots(tree: Tree, values: dict[str, list[Tree]]) -> Tree:
    """The tree with the values of all ranks where it has only the name of the place so far."""
    if isinstance(tree, list):
        return [fill_slots(child, values) for child in tree]
    if isinstance(tree, dict):
        if tree.get(TYPE) == "per_rank":
            return {TYPE: "per_rank", "ranks": values[tree["ranks"][0]]}
        return {name: fill_slots(child, values) for name, child in tree.items()}
    return tree


class _Merger:
    def __init__(self) -> None:
        self.differing: list[Differing] = []

    def merge(self, held: Held, path: tuple[str, ...]) -> Tree:
        first = held[0][1]
        if all(tree == first and _same_types(tree, first) for _, tree in held[1:]):
            return first
        shapes = {_shape(tree) for _, tree in held}
        if len(shapes) == 1:
            kind = shapes.pop()[0]
            if kind == "object":
                return self._union([(rank, tree.items()) for rank, tree in held], path)
            if kind == "list":
                return self._elementwise(held, path)
            if kind in _ITEMS:
                return {**first, "items": self._merged_items(held, path)}
            if kind in _SEQUENCES:
                return {**first, "items": self._elementwise([(rank, tree["items"]) for rank, tree in held], path)}
            if kind in _FIELDS:
                return {**first, "fields": self._union([(rank, tree["fields"].items()) for rank, tree in held], path)}
        self._differ(held, path)
        return first

    def _union(self, held: Iterable[tuple[int, Iterable[tuple[str, Tree]]]], path: tuple[str, ...]) -> dict[str, Tree]:
        by_name: dict[str, Held] = {}
        for rank, members in held:
            for name, child in members:
                by_name.setdefault(name, []).append((rank, child))
        return {name: self.merge(children, (*path, name)) for name, children in by_name.items()}

    def _merged_items(self, held: Held, path: tuple[str, ...]) -> list[list[Tree]]:
        keys: dict[str, Tree] = {}
        by_key: dict[str, Held] = {}
        for rank, tree in held:
            for key, child in tree["items"]:
                name = json.dumps(key)
                keys.setdefault(name, key)
                by_key.setdefault(name, []).append((rank, child))
        return [[keys[name], self.merge(children, (*path, _label(keys[name])))] for name, children in by_key.items()]

    def _elementwise(self, held: Held, path: tuple[str, ...]) -> list[Tree]:
        length = len(held[0][1])
        return [
            self.merge([(rank, tree[position]) for rank, tree in held], (*path, str(position)))
            for position in range(length)
        ]

    def _differ(self, held: Held, path: tuple[str, ...]) -> None:
        groups: dict[str, list[int]] = {}
        for rank, tree in held:
            groups.setdefault(json.dumps(tree, sort_keys=True), []).append(rank)
        self.differing.append(Differing(".".join(path), tuple(map(tuple, groups.values()))))


def _same_types(one: Tree, other: Tree) -> bool:
    """Python calls 1, 1.0 and True equal, which are different values; and 0.0 and -0.0."""
    return json.dumps(one) == json.dumps(other)


def _shape(tree: Tree) -> tuple[Any, ...]:
    """What trees must have in common to be merged part by part."""
    if isinstance(tree, list):
        return "list", len(tree)
    if not isinstance(tree, dict):
        return "value", json.dumps(tree)
    kind = tree.get(TYPE)
    if kind is None:
        return ("object",)
    if kind in _ITEMS:
        return kind, tree.get("factory")
    if kind in _SEQUENCES:
        return kind, len(tree["items"])
    if kind in _FIELDS:
        return kind, tree["type"], tuple(tree["fields"])
    return "value", json.dumps(tree, sort_keys=True)


def _label(key: Tree) -> str:
    return key if isinstance(key, str) else json.dumps(key)
