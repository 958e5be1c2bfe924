"""The keys of a checkpoint as a tree, with sums for every part of it, and with layers that are alike put together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from holdfast.formats.native.refs import TensorRef
from holdfast.sources.stored_nodes import StoredNode

_FEWEST_ALIKE = 3
"""Fewer parts that are alike are shown one by one."""


@dataclass
class Branch:
    """A part of a checkpoint: a tensor, a value, or all that lies below a name."""

    name: str
    leaf: StoredNode | None = None
    below: dict[str, Branch] = field(default_factory=dict)
    tensors: int = 0
    elements: int = 0
    nbytes: int = 0
    values: int = 0
    looks: int = 0
    """The same for branches that look the same: names, dtypes and shapes of all that is in them."""

    @property
    def ref(self) -> TensorRef | None:
        """The tensor that it is, if it is one."""
        value = None if self.leaf is None else self.leaf.value
        return value if isinstance(value, TensorRef) else None


@dataclass(frozen=True)
class Alike:
    """Several branches, one after the other, that look the same."""

    first: Branch
    last: Branch
    count: int


def tree_of(leaves: Iterable[StoredNode]) -> Branch:
    """The tree of some leaves. A tensor that has several names counts once."""
    root = Branch("")
    for leaf in leaves:
        branch = root
        for name in _names(leaf):
            branch = branch.below.setdefault(name, Branch(name))
        if branch.leaf is not None:  # two paths that look alike
            branch = branch.below.setdefault(leaf.key, Branch(leaf.key))
        branch.leaf = leaf
    _sum_up(root, set())
    return root


def _names(leaf: StoredNode) -> Iterator[str]:
    for part in leaf.path:
        yield from part.split(".") if isinstance(part, str) else [str(part)]


def _sum_up(branch: Branch, seen: set[str]) -> None:
    looks: list[Any] = []
    ref = branch.ref
    if ref is not None:
        looks.append((str(ref.dtype), ref.shape))
        if ref.key not in seen:
            seen.add(ref.key)
            branch.tensors, branch.elements, branch.nbytes = 1, prod(ref.shape), ref.nbytes
    elif branch.leaf is not None:
        looks.append(type(branch.leaf.value).__name__)
        branch.values = 1
    for name, child in branch.below.items():
        _sum_up(child, seen)
        branch.tensors += child.tensors
        branch.elements += child.elements
        branch.nbytes += child.nbytes
        branch.values += child.values
        looks.append((name, child.looks))
    branch.looks = hash(tuple(looks))


def grouped(branches: Iterable[Branch]) -> Iterator[Branch | Alike]:
    """The same, with numbered branches that look the same and follow each other put together.

    >>> from holdfast.formats.native.dtypes import dtype_named
    >>> tree = {str(n): {"w": TensorRef(f"{n}.w", dtype_named("float32"), (2,))} for n in range(4)}
    >>> [group] = grouped(tree_of(StoredNode.of(tree).leaves()).below.values())
    >>> group.first.name, group.last.name, group.count
    ('0', '3', 4)
    """
    waiting: list[Branch] = []
    for branch in branches:
        if waiting and not _follows(waiting[-1], branch):
            yield from _put_together(waiting)
            waiting = []
        waiting.append(branch)
    yield from _put_together(waiting)


def _put_together(branches: list[Branch]) -> Iterator[Branch | Alike]:
    if len(branches) < _FEWEST_ALIKE:
        yield from branches
    else:
        yield Alike(branches[0], branches[-1], len(branches))


def _follows(before: Branch, after: Branch) -> bool:
    numbers = before.name.isdecimal() and after.name.isdecimal()
    return numbers and int(after.name) == int(before.name) + 1 and before.looks == after.looks
