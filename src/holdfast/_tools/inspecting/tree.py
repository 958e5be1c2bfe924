"""The keys of a checkpoint as a tree with sums for every part of it, and that tree as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from holdfast._formats.native.refs import TensorRef
from holdfast._load.checkpoint import Checkpoint, source_of
from holdfast._load.stored_nodes import StoredNode
from holdfast._tools.inspecting.diff_report import shortly
from holdfast._watching.progress import size
from holdfast.errors import HoldfastError

# The keys of a checkpoint as a tree, with sums for every part of it, and with layers that are alike put together.


_FEWEST_ALIKE = 3
"""Fewer parts that are alike are shown one by one."""


@dataclass
class Branch:
    """A part of a checkpoint: a tensor, a value, or all that is below a name."""

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

    >>> from holdfast._formats.native.dtypes import dtype_named
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


# A checkpoint as lines of text: a tree with shapes, dtypes, sizes, and where the tensors are stored.


_WIDEST_NAME = 60


class TreeRow(NamedTuple):
    """A line, in columns."""

    name: str
    what: str
    nbytes: str
    rest: str


class Drawing:
    """Draws trees. ``depth`` is how far down; ``everything`` shows layers that are alike one by one."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        depth: int | None = None,
        everything: bool = False,
        remark: Callable[[TensorRef], str] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._depth = depth
        self._everything = everything
        self._remark = remark

    def text(self, root: Branch) -> str:
        """The lines for all that is below."""
        return aligned(list(self._rows(root, 0)))

    def _rows(self, branch: Branch, level: int) -> Iterator[TreeRow]:
        below = list(branch.below.values())
        for part in below if self._everything else grouped(below):
            if isinstance(part, Alike):
                name = f"{part.first.name}…{part.last.name}  ({part.count:,} x the same)"
                yield from self._row_and_below(part.first, name, level, part.count)
            else:
                yield from self._row_and_below(part, part.name, level, 1)

    def _row_and_below(self, branch: Branch, name: str, level: int, count: int) -> Iterator[TreeRow]:
        name = "  " * level + printable(name)
        times = f"{count:,} x " if count > 1 else ""
        if branch.leaf is not None:
            yield self._leaf_row(branch, name, times)
        elif branch.below:
            yield TreeRow(
                name, f"{times}{summed(branch)}", f"{times}{size(branch.nbytes)}" if branch.tensors else "", ""
            )
        if self._depth is None or level + 1 < self._depth:
            yield from self._rows(branch, level + 1)

    def _leaf_row(self, branch: Branch, name: str, times: str) -> TreeRow:
        ref = branch.ref
        if ref is None or branch.leaf is None:
            return TreeRow(name, shortly(None if branch.leaf is None else branch.leaf.value), "", "")
        rest = layout_in_words(self._checkpoint, ref)
        if ref.key != branch.leaf.key and not branch.tensors:
            rest = f"the same as {ref.key}"
        if self._remark is not None:
            rest = f"{rest}  {self._remark(ref)}"
        return TreeRow(name, f"{ref.dtype} {list(ref.shape)}", f"{times}{size(ref.nbytes)}", rest)


def summed(branch: Branch) -> str:
    """What is in a branch, in words."""
    parts = []
    if branch.tensors:
        parts.append(f"{branch.tensors:,} tensor{'' if branch.tensors == 1 else 's'}")
    if branch.values:
        parts.append(f"{branch.values:,} value{'' if branch.values == 1 else 's'}")
    return ", ".join(parts)


def layout_in_words(checkpoint: Checkpoint, ref: TensorRef) -> str:
    """How a tensor is cut over files and ranks."""
    try:
        chunks = source_of(checkpoint).chunk_places(ref.key)
    except HoldfastError:
        return "where it is stored cannot be read"
    ranks = sorted({chunk.rank for chunk in chunks if chunk.rank is not None})
    if not chunks:
        return ""
    if len(chunks) == 1:
        return f"rank {ranks[0]}" if ranks else ""
    files = len({chunk.file for chunk in chunks})
    where = f"ranks {_ranges(ranks)}" if ranks else f"{files} file{'' if files == 1 else 's'}"
    return f"{len(chunks):,} chunks, {where}"


def printable(text: str) -> str:
    """A name with escapes in place of what a terminal would act on.

    >>> print(printable("red\x1b[31m"))
    red\\x1b[31m
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def aligned(rows: Sequence[TreeRow]) -> str:
    """Rows as lines with columns."""
    widths = [max((len(row[at]) for row in rows), default=0) for at in range(3)]
    widths[0] = min(widths[0], _WIDEST_NAME)
    return "\n".join(
        f"{row.name:<{widths[0]}}  {row.what:<{widths[1]}}  {row.nbytes:>{widths[2]}}  {row.rest}".rstrip()
        for row in rows
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in order, with neighbours put together.

    >>> _ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    groups: list[list[Any]] = []
    for number in numbers:
        if groups and groups[-1][1] == number - 1:
            groups[-1][1] = number
        else:
            groups.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in groups)
