"""The tree of a checkpoint as nodes that know their path and key, and whether anything took what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from holdfast._formats.native.refs import PerRankValues, TensorRef
from holdfast._formats.native.trees import children_of, hides_tensor, is_named
from holdfast._formats.native.values import Path, keys_of

_MADE_UP = object()
"""In place of the value of a node that is made of others."""


class StoredNode:
    """A place in a stored tree: a container with children, or a leaf.

    A list or tuple in which no tensor hides is a leaf. Still it has children for those who ask; to take one is to take
    the leaf.
    """

    # Most nodes are leaves, so what only some of them need is set where it is needed.
    key = ""
    """Of a leaf: what it is called."""
    taken = False
    _children: dict[Any, StoredNode] | None = None
    _by_kind: dict[tuple[type, Any], StoredNode] | None = None
    _by_prefix: dict[str, dict[str, StoredNode]] | None = None
    _stripped: dict[str, StoredNode | None] | None = None

    def __init__(self, value: Any, path: Path, leaf: StoredNode | None = None) -> None:
        self._value = value
        self.path = path
        self.leaf = leaf
        """The leaf that this is in, or is itself."""
        if type(value) is TensorRef:
            self.leaf = self
        elif leaf is None:
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
        for leaf, key in zip(leaves, keys_of([leaf.path for leaf in leaves]), strict=True):
            leaf.key = key
        return root

    @classmethod
    def with_children(cls, children: Mapping[Any, StoredNode], path: Path, like: type = dict) -> StoredNode:
        """A place that the tree does not have: a container of these nodes, of the kind of another if that can be."""
        node = cls(_MADE_UP, path)
        node.leaf = None
        node.like = like
        node._children = dict(children)
        return node

    @property
    def value(self) -> Any:
        """What is stored, with references in place of tensors."""
        if self._value is not _MADE_UP:
            return self._value
        values = {name: child.value for name, child in self.children.items()}
        if self.like is PerRankValues:
            return PerRankValues(tuple(values.values()))
        if self.like in (list, tuple) and list(values) == list(range(len(values))):
            return self.like(values.values())
        return values

    @property
    def children(self) -> Mapping[Any, StoredNode]:
        """The nodes below, by the key, position or field name that leads to them."""
        if self._children is None:
            parts = children_of(self._value) or []
            self._children = {name: StoredNode(child, (*self.path, name), self.leaf) for name, child in parts}
        return self._children

    @cached_property
    def like(self) -> type:
        """The kind of container that this is."""
        return type(self._value)

    @cached_property
    def _by_text(self) -> dict[str, StoredNode | None]:
        found: dict[str, StoredNode | None] = {}
        for key, node in self.children.items():
            found[str(key)] = None if str(key) in found else node
        return found

    @property
    def is_leaf(self) -> bool:
        """Whether this is a leaf as a whole."""
        return self.leaf is self

    @property
    def is_per_rank(self) -> bool:
        """Whether every rank stored a value of its own here. Its children are those values."""
        return self.like is PerRankValues

    def leaves(self) -> Iterator[StoredNode]:
        """All leaves at or below this place."""
        if self.leaf is not None:
            yield self.leaf
            return
        for child in self.children.values():
            if child.leaf is not None:
                yield child.leaf
            else:
                yield from child.leaves()

    def take(self) -> None:
        """Note that somebody has taken all that is here."""
        if self.leaf is not None:
            self.leaf.taken = True
            return
        for leaf in self.leaves():
            leaf.taken = True

    def child(self, name: Any) -> StoredNode | None:
        """The node below that a state calls ``name``: by the very key, by its text, or by what it is joined to by dots.

        A flat checkpoint has ``a.b`` where a nested state has ``b`` in ``a``, and the other way round. If there is no
        such node, one whose name differs only by what wrappers of models add.
        """
        if type(name) is str and (found := self.children.get(name)) is not None:
            return found  # nothing but a str equals a str
        if self._by_kind is None:
            self._by_kind = {(type(key), key): node for key, node in self.children.items()}
        found = self._by_kind.get((type(name), name)) or self._by_text.get(str(name))
        if found is not None:
            return found
        below = self._below(str(name))
        if below:
            return StoredNode.with_children(below, (*self.path, name))
        if not isinstance(name, str):
            return None
        return self._nested(name) or self._without_wrappers(name)

    def tensors_called(self, names: Sequence[str]) -> list[tuple[StoredNode, TensorRef] | None]:
        """The tensors below that a state calls so, as ``child`` finds them; None where there is something else."""
        children = self.children
        found = [children.get(name) or self.child(name) for name in names]
        return [(node, node._value) if node is not None and type(node._value) is TensorRef else None for node in found]

    def _below(self, name: str) -> Mapping[str, StoredNode]:
        """What has ``name`` and a dot before its own name."""
        if self._by_prefix is None:
            self._by_prefix = {}
            for key, node in self._by_text.items():
                at = key.find(".")
                while at >= 0 and node is not None:
                    self._by_prefix.setdefault(key[:at], {})[key[at + 1 :]] = node
                    at = key.find(".", at + 1)
        return self._by_prefix.get(name, {})

    def _nested(self, name: str) -> StoredNode | None:
        at = name.find(".")
        while at > 0:
            outer = self._by_text.get(name[:at])
            if outer is not None and outer.children:
                found = outer.child(name[at + 1 :])
                if found is not None:
                    return found
            at = name.find(".", at + 1)
        return None

    def _without_wrappers(self, name: str) -> StoredNode | None:
        """A node whose name differs only by what wrappers of models add, if there is just one."""
        from holdfast._state.parameter_names import (
            strip_wrapper_names,  # needs torch, which listing a checkpoint does not
        )

        if self._stripped is None:
            self._stripped = {}
            for key, node in self._by_text.items():
                bare = strip_wrapper_names(key)
                self._stripped[bare] = None if bare in self._stripped else node
        return self._stripped.get(strip_wrapper_names(name))
