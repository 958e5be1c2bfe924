"""The tree of a checkpoint as nodes that know their path and key, and whether anything took what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.formats.native.values import Path, keys_of
from holdfast.sources.trees import children_of, hides_tensor, is_named

_MADE_UP = object()
"""In place of the value of a node that is made of others."""


class StoredNode:
    """A place in a stored tree: a container with children, or a leaf.

    A list or tuple in which no tensor hides is a leaf. Still it has children for those who ask; to take one is to take
    the leaf.
    """

    __slots__ = ("_by_text", "_children", "_stripped", "_value", "key", "leaf", "path", "taken")

    def __init__(self, value: Any, path: Path, leaf: StoredNode | None = None) -> None:
        self._value = value
        self.path = path
        self.key = ""
        """Of a leaf: what it is called."""
        self.leaf = leaf
        """The leaf that this lies in, or is."""
        self.taken = False
        self._children: dict[Any, StoredNode] | None = None
        self._by_text: dict[str, StoredNode] | None = None
        self._stripped: dict[str, StoredNode | None] | None = None
        if leaf is None:
            parts = children_of(value)
            if parts and (not isinstance(value, (list, tuple)) or is_named(value) or hides_tensor(value)):
                self._children = {name: StoredNode(child, (*path, name)) for name, child in parts}
            else:
                self.leaf = self

    @classmethod
    def of(cls, tree: Any) -> StoredNode:
        """The root of a tree, with keys at all leaves."""
        root = cls(tree, ())
        leaves = list(root.leaves())
        for leaf, key in zip(leaves, keys_of(leaf.path for leaf in leaves), strict=True):
            leaf.key = key
        return root

    @classmethod
    def with_children(cls, children: Mapping[Any, StoredNode], path: Path) -> StoredNode:
        """A place that the tree does not have: a dict of these nodes."""
        node = cls(_MADE_UP, path)
        node.leaf = None
        node._children = dict(children)
        return node

    @property
    def value(self) -> Any:
        """What is stored, with references in place of tensors."""
        if self._value is _MADE_UP:
            return {name: child.value for name, child in self.children.items()}
        return self._value

    @property
    def children(self) -> Mapping[Any, StoredNode]:
        """The nodes below, by the key, position or field name that leads to them."""
        if self._children is None:
            parts = children_of(self._value) or []
            self._children = {name: StoredNode(child, (*self.path, name), self.leaf) for name, child in parts}
        return self._children

    @property
    def is_leaf(self) -> bool:
        """Whether this is a leaf as a whole."""
        return self.leaf is self

    def leaves(self) -> Iterator[StoredNode]:
        """All leaves at or below this place."""
        if self.leaf is not None:
            yield self.leaf
            return
        for child in self.children.values():
            yield from child.leaves()

    def take(self) -> None:
        """Note that somebody has taken all that is here."""
        for leaf in self.leaves():
            leaf.taken = True

    def child(self, name: Any) -> StoredNode | None:
        """The node below that a state calls ``name``: by the very key, by its text, or by what it is joined to by dots.

        A flat checkpoint has ``a.b`` where a nested state has ``b`` in ``a``, and the other way round.
        """
        found = self.children.get(name) if _is_hashable(name) else None
        if found is not None and type(next(k for k in self.children if k == name)) is type(name):
            return found
        text = str(name)
        if self._by_text is None:
            self._by_text = {str(key): node for key, node in self.children.items()}
        if text in self._by_text:
            return self._by_text[text]
        below = {key[len(text) + 1 :]: node for key, node in self._by_text.items() if key.startswith(f"{text}.")}
        if below:
            return StoredNode.with_children(below, (*self.path, name))
        if not isinstance(name, str):
            return None
        return self._nested(name) or self._without_wrappers(name)

    def _nested(self, name: str) -> StoredNode | None:
        at = name.find(".")
        while at > 0:
            outer = (self._by_text or {}).get(name[:at])
            if outer is not None and outer.children:
                found = outer.child(name[at + 1 :])
                if found is not None:
                    return found
            at = name.find(".", at + 1)
        return None

    def _without_wrappers(self, name: str) -> StoredNode | None:
        """A node whose name differs only by what wrappers of models add, if there is just one."""
        from holdfast.states.module_names import strip_wrapper_names  # needs torch, which listing a checkpoint does not

        if self._stripped is None:
            self._stripped = {}
            for key, node in (self._by_text or {}).items():
                bare = strip_wrapper_names(key)
                self._stripped[bare] = None if bare in self._stripped else node
        return self._stripped.get(strip_wrapper_names(name))


def rename(root: StoredNode, new_name: Callable[[str], str | None]) -> tuple[StoredNode, dict[str, str]]:
    """The tree with its leaves under other keys. Returns it with what was renamed.

    ``new_name`` gives the new key of a leaf; None or the same key leaves it where it is.
    """
    moved: list[tuple[StoredNode, str]] = []
    for leaf in root.leaves():
        name = new_name(leaf.key)
        if name is not None and name != leaf.key:
            moved.append((leaf, name))
    if not moved:
        return root, {}
    _refuse_collisions(root, moved)
    goes = {id(leaf) for leaf, _ in moved}
    tree = _without(root, goes) or StoredNode.with_children({}, ())
    for leaf, name in moved:
        tree = _insert(tree, _new_path(leaf, name), leaf)
    return tree, {leaf.key: name for leaf, name in moved}


def _refuse_collisions(root: StoredNode, moved: list[tuple[StoredNode, str]]) -> None:
    names = {leaf.key: leaf.key for leaf in root.leaves()}
    for leaf, _ in moved:
        del names[leaf.key]
    for leaf, name in moved:
        if name in names:
            raise ValueError(
                f"rename gives '{leaf.key}' the key '{name}', which '{names[name]}' has. Every key can be given once."
            )
        names[name] = leaf.key


def _without(node: StoredNode, goes: set[int]) -> StoredNode | None:
    if node.leaf is not None:
        return None if id(node.leaf) in goes else node
    if not any(id(leaf) in goes for leaf in node.leaves()):
        return node
    kept = {name: rest for name, child in node.children.items() if (rest := _without(child, goes)) is not None}
    return StoredNode.with_children(kept, node.path) if kept else None


def _new_path(leaf: StoredNode, name: str) -> Path:
    """The path of a renamed leaf: its old one, with what changed in the middle as one part."""
    front: list[Any] = []
    rest = name
    old = list(leaf.path)
    while len(old) > 1 and rest.startswith(f"{old[0]}."):
        rest = rest[len(str(old[0])) + 1 :]
        front.append(old.pop(0))
    back: list[Any] = []
    while len(old) > 1 and rest.endswith(f".{old[-1]}"):
        rest = rest[: -len(str(old[-1])) - 1]
        back.insert(0, old.pop())
    return (*front, rest, *back)


def _insert(node: StoredNode, path: Path, leaf: StoredNode) -> StoredNode:
    children = dict(node.children) if node.leaf is None else {}
    name, *rest = path
    if rest:
        below = children.get(name) or StoredNode.with_children({}, (*node.path, name))
        children[name] = _insert(below, tuple(rest), leaf)
    else:
        children[name] = leaf
    return StoredNode.with_children(children, node.path)


def _is_hashable(name: Any) -> bool:
    try:
        hash(name)
    except TypeError:
        return False
    return True
