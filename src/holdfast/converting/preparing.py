"""From a checkpoint and what a user wants of it to what goes out: chosen, renamed, with new dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from holdfast.converting.casts import FLOATS, floating_dtype
from holdfast.converting.held_arrays import with_references
from holdfast.converting.outgoing import Outgoing, OutTensor
from holdfast.converting.target import Target, refuse_values
from holdfast.errors import UnknownKeyError
from holdfast.formats.native.dtypes import DType
from holdfast.formats.native.pruning import NOTHING, pruned
from holdfast.formats.native.refs import PerRankValues, PickledValue, TensorRef, UndeclaredValue, UnknownValue
from holdfast.formats.native.trees import children_of, mapped, substituted
from holdfast.patterns import Choice, Pattern, Patterns, Selection
from holdfast.renames import Rename, Renaming
from holdfast.sources.renaming import rename as rename_leaves
from holdfast.sources.source import Source
from holdfast.sources.stored_nodes import StoredNode

Cast: TypeAlias = "Any | Mapping[Pattern, Any]"
"""A floating point type for all tensors that are of one, or types by patterns of keys."""


@dataclass(frozen=True)
class Wishes:
    """What of a checkpoint is to be written, and how. All patterns are about the keys that the source has."""

    include: Patterns | None = None
    exclude: Patterns | None = None
    rename: Rename | None = None
    cast: Cast | None = None
    only_tensors: bool = False
    allow_pickle: bool = False
    memory_budget: int | None = None


@dataclass(frozen=True)
class Prepared:
    """What goes out, and how it differs from the source."""

    outgoing: Outgoing
    left_out: list[str]
    renamed: dict[str, str]
    cast: dict[str, tuple[str, str]]


def prepare(source: Source, target: Target, wishes: Wishes) -> Prepared:
    """Choose and rename what is in a source, as far as a target can hold it. Nothing is read but values."""
    arrays: dict[str, Any] = {}
    tree = with_references(source.tree, arrays) if target.arrays_are_tensors else source.tree
    leaves = {leaf.path: leaf for leaf in StoredNode.of(tree).leaves()}
    chosen = Selection(wishes.include, wishes.exclude)

    def is_wanted(leaf: StoredNode) -> bool:
        return chosen(leaf.key) and (not wishes.only_tensors or isinstance(leaf.value, TensorRef))

    wanted = {path for path, leaf in leaves.items() if is_wanted(leaf)}
    if len(wanted) < len(leaves):
        tree = pruned(tree, (), lambda path: path in wanted)
    if tree is NOTHING or not wanted:
        raise _nothing_left(source, wishes)
    left_out = [leaf.key for path, leaf in leaves.items() if path not in wanted]
    if target.has_flat_keys:
        tree = {leaves[path].key: leaves[path].value for path in leaves if path in wanted}
    root, renamed = rename_leaves(StoredNode.of(tree), Renaming(wishes.rename))
    tree = root.value if target.keeps_per_rank else _with_lists(root.value)
    prepared = _outgoing(source, target, tree, wishes, left_out, renamed)
    prepared.outgoing.arrays = arrays
    return prepared


def prepare_flat(
    source: Source,
    target: Target,
    flat: Mapping[str, TensorRef],
    wishes: Wishes,
    left_out: list[str],
    renamed: dict[str, str],
) -> Prepared:
    """What goes out under keys that were chosen and renamed already."""
    return _outgoing(source, target, dict(flat), wishes, left_out, renamed)


def _outgoing(
    source: Source, target: Target, tree: Any, wishes: Wishes, left_out: list[str], renamed: dict[str, str]
) -> Prepared:
    wish = _casting(wishes.cast)
    tensors: dict[str, OutTensor] = {}
    refs: dict[str, TensorRef] = {}
    for leaf in StoredNode.of(tree).leaves():
        ref = leaf.value
        if isinstance(ref, TensorRef) and ref.key not in refs:
            dtype = _new_dtype(ref, wish)
            kind, rank = (ref.kind, ref.rank) if target.keeps_per_rank else (_kind_for_all(ref), None)
            tensors[leaf.key] = OutTensor(leaf.key, ref.key, ref.shape, ref.dtype, dtype, kind, ref.numpy, rank)
            refs[ref.key] = TensorRef(leaf.key, dtype, ref.shape, kind, ref.numpy, rank)
    tree = substituted(tree, lambda ref: refs[ref.key])
    outgoing = Outgoing(
        source=source,
        tree=tree,
        tensors=tensors,
        leaves={leaf.key: leaf.value for leaf in StoredNode.of(tree).leaves()},
        allow_pickle=wishes.allow_pickle,
        memory_budget=wishes.memory_budget,
    )
    if not (source.format == target.format == "native"):
        _refuse_unread_values(outgoing, target)
    cast = {
        key: (tensor.stored.name, tensor.dtype.name) for key, tensor in tensors.items() if tensor.dtype != tensor.stored
    }
    return Prepared(outgoing, left_out, renamed, cast)


def _nothing_left(source: Source, wishes: Wishes) -> UnknownKeyError:
    what = "include and exclude leave nothing" if wishes.include or wishes.exclude else "there is nothing"
    return UnknownKeyError(
        f"{what} of {source.location} to be written, so nothing was. Texts take wildcards ('model', '*.bias'); "
        "`holdfast show` lists the keys.",
        key=str(wishes.include),
        path=source.location,
        near=list(source.tensors)[:3],
    )


def _casting(cast: Cast | None) -> Callable[[str], DType | None]:
    if cast is None:
        return lambda key: None
    if isinstance(cast, Mapping):
        return Choice({pattern: floating_dtype(wish) for pattern, wish in cast.items()})
    dtype = floating_dtype(cast)
    return lambda key: dtype


def _new_dtype(ref: TensorRef, wish: Callable[[str], DType | None]) -> DType:
    # A wish such as "all of the model" is about weights, and must not take away a counter's or a mask's meaning.
    if ref.dtype.name not in FLOATS or ref.numpy is not None:
        return ref.dtype
    return wish(ref.key) or ref.dtype


def _kind_for_all(ref: TensorRef) -> str:
    return "replicated" if ref.kind == "per_rank" else ref.kind


def _with_lists(tree: Any) -> Any:
    """A tree with lists where it has a value per rank."""
    if isinstance(tree, PerRankValues):
        return [_with_lists(value) for value in tree.ranks]
    if isinstance(tree, TensorRef):
        return tree
    return mapped(tree, _with_lists)


def _refuse_unread_values(outgoing: Outgoing, target: Target) -> None:
    """Values that could not be read as what they are can only go back to where they came from, if at all."""
    refused = {}
    for key, value in outgoing.leaves.items():
        why = _why_unread(value)
        if why is not None:
            refused[key] = why
    refuse_values(
        outgoing,
        target.format,
        refused,
        "Pass allow_pickle=True if you trust who wrote pickles, exclude these keys, or pass only_tensors=True.",
    )


def _why_unread(value: Any) -> str | None:
    if isinstance(value, PickledValue):
        return "it is a pickle, and pickles were not allowed"
    if isinstance(value, UnknownValue):
        return f"it is a {value.type}, which cannot be read"
    if isinstance(value, UndeclaredValue):
        return f"it is a {value.kind} {value.type}, which this program does not have (see holdfast.declare)"
    found = (_why_unread(child) for _, child in children_of(value) or ())
    return next((why for why in found if why is not None), None)
