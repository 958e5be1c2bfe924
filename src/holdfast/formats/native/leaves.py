"""The leaves of a stored tree: its tensors, and the values that are not opened, each with path and key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from holdfast.formats.native.decoding import decode, malformed
from holdfast.formats.native.encoding import Path
from holdfast.formats.native.keys import keys_of
from holdfast.formats.native.stored_members import DEEPEST, JSON

_OF_PAIRS = frozenset({"dict", "OrderedDict", "defaultdict", "Counter"})
_OF_FIELDS = frozenset({"dataclass", "namedtuple"})


class Leaf(NamedTuple):
    """A part of a state that has a key."""

    path: Path
    key: str
    """Made from its path. A tensor that lies at several places is stored under one of their keys: ``node["key"]``."""
    node: JSON
    """Its typed value."""
    is_tensor: bool


def leaves(stored: JSON) -> Iterator[Leaf]:
    """All leaves of a stored tree, in its order.

    >>> tree = {"w": {"$": "tensor", "key": "w"}, "betas": {"$": "tuple", "items": [0.9, 0.999]}}
    >>> [leaf.key for leaf in leaves(tree)]
    ['w', 'betas']
    """
    walk = _Walk()
    walk.visit(stored, (), 0)
    for key, (path, node) in zip(keys_of(path for path, _ in walk.found), walk.found, strict=True):
        yield Leaf(path, key, node, type(node) is dict and node.get("$") == "tensor")


class _Walk:
    def __init__(self) -> None:
        self.found: list[tuple[Path, JSON]] = []
        self._hiding: dict[int, bool] = {}

    def visit(self, node: JSON, path: Path, depth: int) -> None:
        """Note the leaves in a node, or the node itself if it is one."""
        children = self._opened(node, path) if type(node) is dict or type(node) is list else None
        if not children:
            self.found.append((path, node))
            return
        if depth == DEEPEST:
            raise malformed(path, f"it lies in more than {DEEPEST} containers")
        for part, child in children:
            if type(child) is dict or type(child) is list:
                self.visit(child, (*path, part), depth + 1)
            else:
                self.found.append(((*path, part), child))

    def _opened(self, node: JSON, path: Path) -> list[tuple[Any, JSON]] | None:
        """The parts of a container that is opened, with what they add to the path."""
        if type(node) is list:
            return list(enumerate(node)) if self._hides_tensor(node, path, 0) else None
        kind = node.get("$")
        if kind is None and "$" not in node:
            return list(node.items())
        if kind == "tuple":
            items = _list_in(node, "items", path)
            return list(enumerate(items)) if self._hides_tensor(items, path, 0) else None
        if kind == "per_rank":
            return list(enumerate(_list_in(node, "ranks", path)))
        if kind in _OF_PAIRS:
            return [(decode(key, _no_tensors), item) for key, item in _pairs_in(node, path)]
        if kind in _OF_FIELDS:
            fields = node.get("fields")
            if type(fields) is not dict:
                raise malformed(path, "its fields are not an object")
            return list(fields.items())
        return None

    def _hides_tensor(self, node: JSON, path: Path, depth: int) -> bool:
        """Whether a tensor, or a value per rank, can be reached in a node."""
        if type(node) is list:
            known = self._hiding.get(id(node))
            if known is None:
                if depth > 4 * DEEPEST:
                    raise malformed(path, f"it lies in more than {DEEPEST} containers")
                containers = (item for item in node if type(item) is dict or type(item) is list)
                known = any(self._hides_tensor(item, path, depth + 1) for item in containers)
                self._hiding[id(node)] = known
            return known
        if type(node) is not dict:
            return False
        kind = node.get("$")
        if kind == "tensor" or kind == "per_rank":
            return True
        if kind is None or kind == "tuple" or kind in _OF_PAIRS or kind in _OF_FIELDS:
            return self._hides_tensor(list(node.values()), path, depth + 1)
        return False


def _list_in(node: dict[str, JSON], name: str, path: Path) -> list[JSON]:
    items = node.get(name)
    if type(items) is not list:
        raise malformed(path, f"its {name} are not a list")
    return items


def _pairs_in(node: dict[str, JSON], path: Path) -> list[list[JSON]]:
    pairs = _list_in(node, "items", path)
    if any(type(pair) is not list or len(pair) != 2 for pair in pairs):
        raise malformed(path, "its items are not pairs")
    return pairs


def _no_tensors(key: str) -> Any:
    raise malformed((), "a tensor is the key of a dict")
