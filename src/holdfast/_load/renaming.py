"""Stored trees with other keys, for states whose parts are called otherwise now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast._formats.native.values import key_of
from holdfast._load.renamed_parameters import NOTHING_KNOWN, LiveState, with_renamed_parameters
from holdfast._load.stored_nodes import StoredNode


def rename(
    root: StoredNode, new_name: Callable[[str], Any], live: LiveState = NOTHING_KNOWN
) -> tuple[StoredNode, dict[str, str]]:
    """The tree with its leaves under other keys. Returns it with what was renamed.

    ``new_name`` gives the new key of a leaf; None or the same key leaves it where it is. What is renamed as a whole
    stays together, so that a list is still a list. Optimizers get the new names of parameters of a model that is
    renamed. ``live`` is what is known of the state that the tree is for.
    """
    given = _given(root, new_name)
    if not given:
        return root, {}
    root, of_optimizers = with_renamed_parameters(root, given, live)
    renamed = _changed({**given, **{old: new.key for old, new in of_optimizers.items()}})
    _refuse_collisions(root, renamed)
    goes = {**given, **{old: new.move for old, new in of_optimizers.items()}}
    names = {id(leaf): goes[leaf.key] for leaf in root.leaves() if goes.get(leaf.key, leaf.key) != leaf.key}
    moves = list(_moves(root, names))
    tree = _without(root, {id(node) for node, _ in moves})
    for node, name in moves:
        tree = _insert(tree, name, node)
    return _without_empty_places(tree), renamed


def new_keys(root: StoredNode, new_name: Callable[[str], Any]) -> dict[str, str]:
    """What ``rename`` would rename, for those who take only a part of the tree."""
    given = _given(root, new_name)
    of_optimizers = with_renamed_parameters(root, given)[1] if given else {}
    return _changed({**given, **{old: new.key for old, new in of_optimizers.items()}})


def _given(root: StoredNode, new_name: Callable[[str], Any]) -> dict[str, str]:
    given: dict[str, str] = {}
    for leaf in root.leaves():
        name = new_name(leaf.key)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"rename gives '{leaf.key}' the key {name!r}, which is not a str")
        if name == "" and leaf.key:
            raise TypeError(f"rename gives '{leaf.key}' an empty key; give it one that can be asked for")
        given[leaf.key] = leaf.key if name is None else name
    return _changed(given)


def _changed(names: Mapping[str, str]) -> dict[str, str]:
    return {old: new for old, new in names.items() if old != new}


def _refuse_collisions(root: StoredNode, renamed: Mapping[str, str]) -> None:
    owners: dict[str, str] = {}
    for leaf in root.leaves():
        name = renamed.get(leaf.key, leaf.key)
        other = owners.setdefault(name, leaf.key)
        if other != leaf.key:
            raise ValueError(
                f"rename would give both '{other}' and '{leaf.key}' the key '{name}'. Every key can be given once."
            )


def _moves(node: StoredNode, names: Mapping[int, str]) -> Iterator[tuple[StoredNode, str]]:
    """The nodes that move, each as high up as it moves as a whole, and the keys that they get."""
    if node.leaf is not None:
        if id(node.leaf) in names:
            yield node.leaf, names[id(node.leaf)]
        return
    leaves = list(node.leaves())
    if not any(id(leaf) in names for leaf in leaves):
        return
    whole = _new_prefix(node, leaves, names)
    if whole:
        yield node, whole
        return
    for child in node.children.values():
        yield from _moves(child, names)


def _new_prefix(node: StoredNode, leaves: list[StoredNode], names: Mapping[int, str]) -> str | None:
    """What all leaves below a node have in place of its key, if that is the same and nothing else changes."""
    if not node.path:
        return None
    prefix = f"{key_of(node.path)}."
    found: set[str] = set()
    for leaf in leaves:
        rest = leaf.key[len(prefix) - 1 :]
        name = names.get(id(leaf), leaf.key)
        if not leaf.key.startswith(prefix) or not name.endswith(rest):
            return None
        found.add(name[: -len(rest)])
    return found.pop() if len(found) == 1 else None


def _without(node: StoredNode, goes: set[int]) -> StoredNode:
    """The tree without the nodes that move. Containers stay, even if nothing is left in them: something may come."""
    if node.leaf is not None:
        return node if id(node.leaf) not in goes else StoredNode.with_children({}, node.path)
    children = node.children.items()
    kept = {name: _without(child, goes) for name, child in children if not {id(child), id(child.leaf)} & goes}
    if len(kept) == len(children) and all(kept[name] is child for name, child in children):
        return node
    return StoredNode.with_children(kept, node.path, node.like)


def _insert(tree: StoredNode, name: str, node: StoredNode) -> StoredNode:
    """The tree with a node more: in the innermost container that its key leads to."""
    children: dict[Any, StoredNode] = dict(tree.children)
    for key, child in children.items():
        if child.leaf is not None:
            continue
        if name.startswith(f"{key}."):
            children[key] = _insert(child, name[len(str(key)) + 1 :], node)
            return StoredNode.with_children(children, tree.path, tree.like)
        if name == str(key) and node.leaf is None:
            children[key] = _joined(child, node)
            return StoredNode.with_children(children, tree.path, tree.like)
    own_kind = next((key for key in node.path[-1:] if str(key) == name), name)
    children[own_kind] = node
    return StoredNode.with_children(children, tree.path, tree.like)


def _joined(one: StoredNode, other: StoredNode) -> StoredNode:
    """A container with all that is in two of them."""
    if not one.children:
        return other
    for name, child in other.children.items():
        one = _insert(one, str(name), child)
    return one


def _without_empty_places(node: StoredNode) -> StoredNode:
    if node.leaf is not None:
        return node
    children = {name: _without_empty_places(child) for name, child in node.children.items()}
    kept = {name: child for name, child in children.items() if child.leaf is not None or child.children}
    if len(kept) == len(node.children) and all(kept[name] is child for name, child in node.children.items()):
        return node
    return StoredNode.with_children(kept, node.path, node.like)
