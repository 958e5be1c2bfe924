"""The leaves of a stored tree: its tensors, and the values that are not opened, each with path and key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from holdfast._formats.native.decoding import PLAIN, decode, malformed
from holdfast._formats.native.encoding import SLOT, Path
from holdfast._formats.native.keys import keys_of
from holdfast._formats.native.members import DEEPEST, JSON
from holdfast.errors import DamagedCheckpointError, UnsupportedValueError

OF_PAIRS = frozenset({"dict", "OrderedDict", "defaultdict", "Counter"})
"""Types whose ``items`` are pairs of a key and a value."""
OF_FIELDS = frozenset({"dataclass", "namedtuple"})
"""Types whose ``fields`` are an object."""
_OF_RANKS = frozenset({"per_rank", SLOT})


class Leaf(NamedTuple):
    """A part of a state that has a key."""

    path: Path
    key: str
    """Made from its path. A tensor that is at several places is stored under one of their keys: ``node["key"]``."""
    node: JSON
    """Its typed value."""
    is_tensor: bool


def leaves(stored: JSON) -> Iterator[Leaf]:
    """All leaves of a stored tree, in its order.

    >>> tree = {"w": {"$": "tensor", "key": "w"}, "betas": {"$": "tuple", "items": [0.9, 0.999]}}
    >>> [leaf.key for leaf in leaves(tree)]
    ['w', 'betas']
    """
    found = nodes_with_paths(stored)
    try:
        keys = keys_of(path for path, _ in found)
    except UnsupportedValueError as error:
        raise malformed((), f"a key of a dict cannot be one ({error.key:.100})") from None
    for key, (path, node) in zip(keys, found, strict=True):
        yield Leaf(path, key, node, type(node) is dict and node.get("$") == "tensor")


def nodes_with_paths(stored: JSON) -> list[tuple[Path, JSON]]:
    """The typed values of all leaves with their paths, for those who make the keys themselves."""
    found: list[tuple[Path, JSON]] = []
    _visit(stored, (), found)
    return found


def _visit(node: JSON, path: Path, found: list[tuple[Path, JSON]]) -> bool:
    """Note the leaves in a node, or the node itself if it is one. Whether there is a tensor, or a value per rank."""
    kind = _kind_of(node, path)
    if kind == "tensor":
        found.append((path, node))
        return True
    parts = _parts(node, path)
    if not parts:
        found.append((path, node))
        return kind in _OF_RANKS
    if len(path) >= DEEPEST:
        raise malformed(path, f"it is nested in more than {DEEPEST} containers")
    before, has_tensor = len(found), kind in _OF_RANKS
    for part, child in parts:
        if type(child) in PLAIN:
            found.append(((*path, part), child))
        elif type(child) is dict and child.get("$") == "tensor" and type(child.get("key")) is str:
            found.append(((*path, part), child))
            has_tensor = True
        elif _visit(child, (*path, part), found):
            has_tensor = True
    if not has_tensor and (kind == "tuple" or type(node) is list):
        found[before:] = [(path, node)]
    return has_tensor


def _kind_of(node: JSON, path: Path) -> str | None:
    if type(node) is not dict or "$" not in node:
        return None
    kind = node["$"]
    if type(kind) is not str or (kind == "tensor" and type(node.get("key")) is not str):
        raise malformed(path, "its type, or the key of its tensor, is not a str")
    return kind


def _parts(node: JSON, path: Path) -> Iterable[tuple[Any, JSON]] | None:
    """The parts of a container that is opened, with what they add to the path. Nothing for leaves."""
    if type(node) is list:
        return _positions(node)
    if type(node) is not dict:
        return None
    if "$" not in node:
        return node.items()
    kind = node["$"]
    if kind == "tuple":
        return _positions(_list_in(node, "items", path))
    if kind == "per_rank":
        return list(enumerate(_list_in(node, "ranks", path)))
    if kind == SLOT:
        return [(0, None)]  # whatever will be there, there is a first rank
    if kind in OF_PAIRS:
        return [(key_from(key, path), item) for key, item in _pairs_in(node, path)]
    if kind in OF_FIELDS:
        fields = node.get("fields")
        if type(fields) is not dict:
            raise malformed(path, "its fields are not an object")
        return fields.items()
    return None


def _positions(items: list[JSON]) -> Iterable[tuple[int, JSON]] | None:
    # Most lists are of numbers, and there is no need to look at each of them.
    return None if PLAIN.issuperset(map(type, items)) else list(enumerate(items))


def key_from(stored: JSON, path: Path) -> Any:
    """The key of a dict at ``path``, which is stored as a typed value."""
    if type(stored) in PLAIN:
        return stored
    try:
        return decode(stored, _no_tensors)
    except DamagedCheckpointError as error:
        raise malformed(path, f"a key in it is damaged: {error.found}") from None


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
    raise malformed((), "it refers to a tensor")
