"""Builds the nested state of a checkpoint out of leaves and their paths, which nobody has vouched for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_DEEPEST = 100
"""Deeper states are not made by people, and would be too deep for whoever walks through them."""


def nested(leaves: Mapping[str, Any], paths: object) -> dict[Any, Any]:
    """The state in which every leaf is at its path: under texts in dicts, under ints in lists.

    If the paths do not say where all leaves belong, or are not those that the keys were made from, the state is flat.
    A list of which elements are missing (empty containers leave no trace) becomes a dict of those that are there.

    >>> nested({"a.b": 1, "a.c.0": 2}, {"a.b": ("a", "b"), "a.c.0": ("a", "c", 0)})
    {'a': {'b': 1, 'c': [2]}}
    >>> nested({"a.b": 1, "a": 2}, {"a.b": ("a", "b"), "a": ("a",)})
    {'a.b': 1, 'a': 2}
    """
    if not isinstance(paths, Mapping) or not all(_belongs(key, paths.get(key)) for key in leaves):
        return dict(leaves)
    root = _Branch()
    branches = [root]
    for key, leaf in leaves.items():
        *way, last = paths[key]
        branch = root
        for item in way:
            if item not in branch.children:
                branch.children[item] = _Branch()
                branches.append(branch.children[item])
            branch = branch.children[item]
            if not isinstance(branch, _Branch):
                return dict(leaves)
        if last in branch.children:
            return dict(leaves)
        branch.children[last] = leaf
    # Children are made after their parents, so that they are finished before them when going backwards.
    for branch in reversed(branches):
        branch.finish()
    return root.children


def renamed_by_a_bit(keys: Iterable[str], paths: object) -> tuple[str, str] | None:
    """The key that is not the one which its path makes, and that one, if no other is so and they differ by one bit.

    Planners may give keys that have nothing to do with paths, but hardly a single one that is so near.

    >>> renamed_by_a_bit(["a.b", "a.c"], {"a.b": ("a", "b"), "a.c": ("a", "k")})
    ('a.c', 'a.k')
    >>> renamed_by_a_bit(["b", "a"], {"b": ("c",), "a": ("c",)})
    """
    if not isinstance(paths, Mapping):
        return None
    others: list[tuple[str, Any]] = [(key, paths.get(key)) for key in keys]
    others = [(key, path) for key, path in others if not _belongs(key, path)]
    if len(others) != 1 or not _is_path(others[0][1]):
        return None
    key, name = others[0][0], ".".join(map(str, others[0][1]))
    one, other = key.encode(errors="surrogatepass"), name.encode(errors="surrogatepass")
    changed = sum((a ^ b).bit_count() for a, b in zip(one, other, strict=False))
    return (key, name) if len(one) == len(other) and changed == 1 else None


class _Branch:
    """A container while it is being filled."""

    def __init__(self) -> None:
        self.children: dict[Any, Any] = {}
        self.finished: Any = None

    def finish(self) -> None:
        for item, child in self.children.items():
            if isinstance(child, _Branch):
                self.children[item] = child.finished
        positions = range(len(self.children))
        is_list = all(type(item) is int and item in positions for item in self.children)
        self.finished = [self.children[position] for position in positions] if is_list else self.children


def _belongs(key: str, path: Any) -> bool:
    """Whether a key was made from this path."""
    return _is_path(path) and ".".join(map(str, path)) == key


def _is_path(path: Any) -> bool:
    if not isinstance(path, Sequence) or not 0 < len(path) <= _DEEPEST:
        return False
    return all(type(item) in (str, int) for item in path)
