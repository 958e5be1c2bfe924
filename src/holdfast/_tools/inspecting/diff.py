"""``holdfast.diff``: what is different between two checkpoints, whatever formats and layouts they have."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from holdfast._base.arguments import Size, checked_budget
from holdfast._base.patterns import Patterns, Rename, Renaming, Selection
from holdfast._base.threads import work_through
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.trees import children_of
from holdfast._formats.source import Source
from holdfast._load.checkpoint import Checkpoint, no_such_keys, opened, source_of
from holdfast._load.renaming import rename as rename_leaves
from holdfast._load.stored_nodes import StoredNode
from holdfast._stores.store import Store
from holdfast._tools.inspecting.changes import Change, compare
from holdfast._tools.inspecting.diff_report import ChangedTensor, DiffReport, shortly
from holdfast._tools.inspecting.parts import Lot, TensorPart, elements_at_once, lots_of, read_parts, threads_for
from holdfast._watching.progress import OnProgress, Progress

# Whether two values of checkpoints are the same.


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are the same: of one kind, equal, and nan where the other is.

    Lists and tuples with the same elements are the same, since not all formats know which it was.

    >>> same_value({"lr": float("nan")}, {"lr": float("nan")}), same_value(1, True), same_value([1], (1,))
    (True, False, True)
    """
    if isinstance(a, TensorRef) or isinstance(b, TensorRef):
        return isinstance(a, TensorRef) and isinstance(b, TensorRef) and (a.dtype, a.shape) == (b.dtype, b.shape)
    parts, others = children_of(a), children_of(b)
    if parts is not None and others is not None:
        if isinstance(a, dict) != isinstance(b, dict):
            return False
        names, other_names = ([name for name, _ in some] for some in (parts, others))
        if isinstance(a, dict) and isinstance(b, dict):
            return a.keys() == b.keys() and all(same_value(child, b[name]) for name, child in parts)
        return names == other_names and all(
            same_value(child, other) for (_, child), (_, other) in zip(parts, others, strict=True)
        )
    if type(a) is not type(b):
        return False
    try:
        return bool(a == b) or (a != a and b != b)
    except Exception:  # what cannot be compared, such as arrays inside of values
        return repr(a) == repr(b)


def diff(
    a: str | os.PathLike[str] | Store | Checkpoint,
    b: str | os.PathLike[str] | Store | Checkpoint,
    *,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    values: bool = True,
    memory_budget: Size | None = None,
    allow_pickle: bool = False,
    on_progress: OnProgress | None = None,
) -> DiffReport:
    """Compare two checkpoints: keys, shapes, dtypes, every element of every tensor, and every value.

    Both are read in parts, so that tensors may be larger than the memory. They may be of different formats, saved by
    different numbers of ranks. Elements of the same dtype are equal if their bits are, nan too; elements of different
    dtypes if their values are.

    Args:
        a: the first checkpoint, before.
        b: the second, after.
        include: only keys (of the second) that these patterns mean.
        exclude: without those that these mean.
        rename: from keys of the first to keys of the second, as for ``load``.
        values: False compares keys, shapes and dtypes only, and reads no tensor.
        memory_budget: how many bytes buffers may take; 64 MiB by default.
        allow_pickle: load values that were stored as pickles, which can run any code.
        on_progress: called with the bytes that are done, and those there are in all.

    Returns:
        What is different. ``report.ok`` if nothing is.

    Example:
        >>> import tempfile, torch
        >>> import holdfast
        >>> folder = tempfile.mkdtemp()
        >>> _ = holdfast.save({"w": torch.zeros(4), "step": 1}, folder + "/a")
        >>> _ = holdfast.save({"w": torch.tensor([0.0, 0, 2, 0]), "step": 2, "new": True}, folder + "/b")
        >>> report = holdfast.diff(folder + "/a", folder + "/b")
        >>> report.ok, report.only_in_b, report.changed_values
        (False, ('new',), {'step': ('1', '2')})
        >>> report.changed_tensors["w"].differing, report.changed_tensors["w"].largest
        (1, 2.0)
    """
    started = time.perf_counter()
    budget = checked_budget(memory_budget)
    chosen = Selection(include, exclude)
    with ExitStack() as stack:
        before, after = (stack.enter_context(opened(place, allow_pickle=allow_pickle)) for place in (a, b))
        first, second = _leaves_of(source_of(before), Renaming(rename)), _leaves_of(source_of(after))
        both = _Comparison(source_of(before), source_of(after), first, second, chosen)
        if both.is_empty and not chosen.is_everything:
            raise no_such_keys(after, include, exclude)
        both.look_at_keys()
        bytes_read = both.compare_tensors(budget, on_progress) if values else 0
        return both.report(time.perf_counter() - started, bytes_read, compared=values)


def _leaves_of(source: Source, renaming: Renaming | None = None) -> dict[str, StoredNode]:
    """Everything that has a key, by the one that it is to be compared under."""
    root = StoredNode.of(source.tree)
    renamed: Mapping[str, str] = {}
    if renaming:
        root, renamed = rename_leaves(root, renaming)
    return {renamed.get(leaf.key, leaf.key): leaf for leaf in root.leaves()}


class _Comparison:
    """Everything that is in both, and what was found out about it."""

    def __init__(
        self,
        a: Source,
        b: Source,
        first: Mapping[str, StoredNode],
        second: Mapping[str, StoredNode],
        chosen: Selection,
    ) -> None:
        self._a, self._b = a, b
        self._first = {key: node for key, node in first.items() if chosen(key)}
        self._second = {key: node for key, node in second.items() if chosen(key)}
        self._shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._dtypes: dict[str, tuple[str, str]] = {}
        self._values: dict[str, tuple[str, str]] = {}
        self._pairs: dict[str, tuple[TensorRef, TensorRef]] = {}
        """Tensors of the same shape, by key."""
        self._changes: dict[str, Change] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compare."""
        return not (self._first or self._second)

    def look_at_keys(self) -> None:
        """Compare all that needs no tensor to be read."""
        for key, node in self._first.items():
            if key not in self._second:
                continue
            a, b = node.value, self._second[key].value
            if not (isinstance(a, TensorRef) and isinstance(b, TensorRef)):
                if not same_value(a, b):
                    self._values[key] = (shortly(a), shortly(b))
                continue
            if a.shape != b.shape:
                self._shapes[key] = (a.shape, b.shape)
            if a.dtype != b.dtype:
                self._dtypes[key] = (str(a.dtype), str(b.dtype))
            if a.shape == b.shape:
                self._pairs[key] = (a, b)

    def compare_tensors(self, memory: int | None, on_progress: OnProgress | None) -> int:
        """Read all tensors of the same shape, and compare their elements. Returns how many bytes were read."""
        changes = {(a.key, b.key): Change() for a, b in self._pairs.values()}
        partners: dict[str, list[TensorRef]] = {}
        for a, b in dict.fromkeys(self._pairs.values()):
            partners.setdefault(a.key, []).append(b)
        refs = {a.key: a for a, _ in self._pairs.values()}
        total = sum(a.nbytes + sum(b.nbytes for b in partners[key]) for key, a in refs.items())
        progress, lock = Progress(total, on_progress), threading.Lock()
        threads = threads_for(total)

        def work(lot: Lot) -> None:
            before = read_parts(self._a, lot.parts, memory)
            nbytes, found = lot.nbytes, []
            for number in range(max(len(partners[part.ref.key]) for part in lot.parts)):
                chosen = [at for at, part in enumerate(lot.parts) if number < len(partners[part.ref.key])]
                others = [TensorPart(partners[lot.parts[at].ref.key][number], lot.parts[at].box) for at in chosen]
                for at, other, after in zip(chosen, others, read_parts(self._b, others, memory), strict=True):
                    ref = lot.parts[at].ref
                    found.append(((ref.key, other.ref.key), compare(before[at], ref, after, other.ref)))
                    nbytes += other.nbytes
            with lock:
                for pair, change in found:
                    changes[pair].add(change)
            progress.advance(nbytes)

        work_through(lots_of(refs.values(), elements_at_once(memory, threads)), work, threads, "holdfast-inspect")
        self._changes = {key: changes[a.key, b.key] for key, (a, b) in self._pairs.items()}
        return total

    def report(self, seconds: float, bytes_read: int, *, compared: bool) -> DiffReport:
        """What was found out."""
        changed = {key: ChangedTensor.of(change) for key, change in self._changes.items() if change.differing}
        common = [key for key in self._first if key in self._second]
        unlike = {*self._shapes, *self._dtypes, *self._values, *changed}
        return DiffReport(
            a=self._a.location,
            b=self._b.location,
            only_in_a=_without(self._first, self._second),
            only_in_b=_without(self._second, self._first),
            changed_shape=self._shapes,
            changed_dtype=self._dtypes,
            changed_tensors=changed,
            changed_values=self._values,
            equal=len(common) - len(unlike),
            compared=compared,
            bytes_read=bytes_read,
            seconds=seconds,
        )


def _without(keys: Mapping[str, Any], others: Mapping[str, Any]) -> tuple[str, ...]:
    missing: Sequence[str] = [key for key in keys if key not in others]
    return tuple(missing)
