"""A checkpoint as lines of text: a tree with shapes, dtypes, sizes, and where the tensors lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from holdfast.checkpoint import Checkpoint
from holdfast.errors import HoldfastError
from holdfast.formats.native.refs import TensorRef
from holdfast.inspecting.diff_report import shortly
from holdfast.inspecting.tree import Alike, Branch, grouped
from holdfast.progress import size

_WIDEST_NAME = 60


class Row(NamedTuple):
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

    def _rows(self, branch: Branch, level: int) -> Iterator[Row]:
        below = list(branch.below.values())
        for part in below if self._everything else grouped(below):
            if isinstance(part, Alike):
                name = f"{part.first.name}…{part.last.name}  ({part.count:,} x the same)"
                yield from self._row_and_below(part.first, name, level, part.count)
            else:
                yield from self._row_and_below(part, part.name, level, 1)

    def _row_and_below(self, branch: Branch, name: str, level: int, count: int) -> Iterator[Row]:
        name = "  " * level + printable(name)
        times = f"{count:,} x " if count > 1 else ""
        if branch.leaf is not None:
            yield self._leaf_row(branch, name, times)
        elif branch.below:
            yield Row(name, f"{times}{summed(branch)}", f"{times}{size(branch.nbytes)}" if branch.tensors else "", "")
        if self._depth is None or level + 1 < self._depth:
            yield from self._rows(branch, level + 1)

    def _leaf_row(self, branch: Branch, name: str, times: str) -> Row:
        ref = branch.ref
        if ref is None or branch.leaf is None:
            return Row(name, shortly(None if branch.leaf is None else branch.leaf.value), "", "")
        rest = layout_in_words(self._checkpoint, ref)
        if ref.key != branch.leaf.key and not branch.tensors:
            rest = f"the same as {ref.key}"
        if self._remark is not None:
            rest = f"{rest}  {self._remark(ref)}"
        return Row(name, f"{ref.dtype} {list(ref.shape)}", f"{times}{size(ref.nbytes)}", rest)


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
        chunks = checkpoint.source.chunk_places(ref.key)
    except HoldfastError:
        return "where it lies cannot be read"
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


def aligned(rows: Sequence[Row]) -> str:
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
