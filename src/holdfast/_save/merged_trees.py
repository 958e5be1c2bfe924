"""One tree out of the trees of all ranks, which are mostly the same.

Trees are typed values as they are stored (``docs/format.md``). A rank may have entries that others lack, as the stages
of a pipeline do. What several have must be the same; only the lists of parameters in the groups of an optimizer are put
together, since each stage has an optimizer of its own parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from holdfast._base.json_parts import dumps
from holdfast._formats.native.encoding import SLOT, Path
from holdfast._formats.native.keys import readable
from holdfast._formats.native.leaves import OF_FIELDS, OF_PAIRS, key_from
from holdfast._ranks.differences import Differing
from holdfast.errors import UnsupportedValueError

TYPE = "$"
Tree = Any
Held = list[tuple[tuple[int, ...], Tree]]
"""The different things that are at one place, each with the ranks that have it, lowest rank first."""


def merge_trees(trees: Sequence[Tree]) -> tuple[Tree, list[Differing]]:
    """Merge the trees of all ranks. Returns the whole, and where ranks differ; what the lowest one has counts there.

    >>> merge_trees([{"a": 1}, {"a": 1, "b": 2}])
    ({'a': 1, 'b': 2}, [])
    >>> merge_trees([{"a": 1}, {"a": 3}])[1]
    [Differing(key='a', groups=((0,), (1,)))]
    """
    merger = _Merger()
    return merger.merge([((rank,), tree) for rank, tree in enumerate(trees)], ()), merger.differing


def renamed_tensors(tree: Tree, names: Mapping[str, str]) -> Tree:
    """The tree with other keys in its references to tensors."""
    if isinstance(tree, list):
        return [renamed_tensors(child, names) for child in tree]
    if isinstance(tree, dict):
        if tree.get(TYPE) == "tensor":
            return {**tree, "key": names.get(tree["key"], tree["key"])}
        return {name: renamed_tensors(child, names) for name, child in tree.items()}
    return tree


def fill_slots(tree: Tree, values: Mapping[str, list[Tree]]) -> Tree:
    """The tree with the values of all ranks in its slots."""
    if isinstance(tree, list):
        return [fill_slots(child, values) for child in tree]
    if isinstance(tree, dict):
        if tree.get(TYPE) == SLOT:
            return {TYPE: "per_rank", "ranks": values[tree["name"]]}
        return {name: fill_slots(child, values) for name, child in tree.items()}
    return tree


def tensor_keys(tree: Tree) -> Iterator[str]:
    """The keys of all tensors that a tree refers to."""
    if isinstance(tree, list):
        for child in tree:
            yield from tensor_keys(child)
    elif isinstance(tree, dict):
        if tree.get(TYPE) == "tensor":
            yield tree["key"]
        else:
            for child in tree.values():
                yield from tensor_keys(child)


def refuse_shared_keys(tree: Tree) -> None:
    """Raise if different places have one key, of which no rank could know alone: they would be stored as one tensor."""
    seen: set[str] = set()
    for key in tensor_keys(tree):
        if key in seen:
            raise UnsupportedValueError(
                f"'{key}' is the key of tensors at two different places. Give one of them another name. Nothing was "
                "saved.",
                key=key,
                keys=[key],
            )
        seen.add(key)


class _Merger:
    def __init__(self) -> None:
        self.differing: list[Differing] = []

    def merge(self, everything: Held, path: Path) -> Tree:
        held = _grouped(everything)
        first = held[0][1]
        if len(held) == 1:
            return first
        if _are_parameter_names(held, path):
            return list(dict.fromkeys(name for _, names in held for name in names))
        shapes = {_shape(tree) for _, tree in held}
        if len(shapes) == 1:
            kind = shapes.pop()[0]
            if kind == "object":
                return self._union([(ranks, tree.items()) for ranks, tree in held], path)
            if kind == "list":
                return self._elementwise(held, path)
            if kind == "tuple":
                return {**first, "items": self._elementwise([(ranks, tree["items"]) for ranks, tree in held], path)}
            if kind in OF_PAIRS:
                return {**first, "items": self._merged_pairs(held, path)}
            if kind in OF_FIELDS:
                return {**first, "fields": self._union([(ranks, tree["fields"].items()) for ranks, tree in held], path)}
        self.differing.append(Differing(readable(path), tuple(ranks for ranks, _ in held)))
        return first

    def _union(self, held: Iterable[tuple[tuple[int, ...], Iterable[tuple[str, Tree]]]], path: Path) -> dict[str, Tree]:
        by_name: dict[str, Held] = {}
        for ranks, members in held:
            for name, child in members:
                by_name.setdefault(name, []).append((ranks, child))
        return {name: self.merge(children, (*path, name)) for name, children in by_name.items()}

    def _merged_pairs(self, held: Held, path: Path) -> list[list[Tree]]:
        keys: dict[str, Tree] = {}
        by_key: dict[str, Held] = {}
        for ranks, tree in held:
            for key, child in tree["items"]:
                name = json.dumps(key)
                keys.setdefault(name, key)
                by_key.setdefault(name, []).append((ranks, child))
        return [
            [keys[name], self.merge(children, (*path, key_from(keys[name], path)))] for name, children in by_key.items()
        ]

    def _elementwise(self, held: Held, path: Path) -> list[Tree]:
        return [
            self.merge([(ranks, tree[position]) for ranks, tree in held], (*path, position))
            for position in range(len(held[0][1]))
        ]


def _grouped(held: Held) -> Held:
    """The same with equal trees put together.

    Their texts are compared, because Python calls 1, 1.0 and True equal, which are different values, and 0.0 and -0.0.
    """
    if len(held) == 1:
        return held
    texts: dict[int, str] = {}
    groups: dict[str, tuple[tuple[int, ...], Tree]] = {}
    for ranks, tree in held:
        text = texts.get(id(tree)) or texts.setdefault(id(tree), dumps(tree))
        together, same = groups.get(text, ((), tree))
        groups[text] = ((*together, *ranks), same)
    return list(groups.values())


def _are_parameter_names(held: Held, path: Path) -> bool:
    """Whether these are the parameters of a group of an optimizer. Numbers do not say which parameters are meant."""
    return (
        len(path) >= 3
        and path[-1] == "params"
        and path[-3] == "param_groups"
        and all(isinstance(names, list) and all(isinstance(name, str) for name in names) for _, names in held)
    )


def _shape(tree: Tree) -> tuple[Any, ...]:
    """What trees must have in common to be merged part by part."""
    if isinstance(tree, list):
        return "list", len(tree)
    if not isinstance(tree, dict):
        return "value", json.dumps(tree)
    kind = tree.get(TYPE)
    if kind is None:
        return ("object",)
    if kind in OF_PAIRS:
        return kind, tree.get("factory")
    if kind == "tuple":
        return kind, len(tree["items"])
    if kind in OF_FIELDS:
        return kind, tree["type"], tuple(tree["fields"])
    return "value", json.dumps(tree)
