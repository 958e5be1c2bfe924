"""From a checkpoint and what a user wants of it to what goes out: chosen, renamed, with new dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from holdfast._base.patterns import Patterns, Rename, Renaming, Selection
from holdfast._base.provenance import optimizers_noted
from holdfast._formats.native.dtypes import dtype_named, name_of
from holdfast._formats.native.members import CannotStore
from holdfast._formats.native.refs import PickledValue, TensorRef, UnknownValue, UnregisteredValue
from holdfast._formats.native.trees import NOTHING, children_of, mapped, pruned, substituted, with_lists
from holdfast._formats.native.values import stored_numpy_dtype
from holdfast._formats.source import Source
from holdfast._load.renaming import new_keys
from holdfast._load.renaming import rename as rename_leaves
from holdfast._load.stored_nodes import StoredNode
from holdfast._tools.converting.casts import Cast, Casts
from holdfast._tools.converting.outgoing import Outgoing, OutTensor, leaves_of
from holdfast._tools.converting.target import Target, refuse_values
from holdfast.errors import UnknownKeyError

# Numpy arrays that a source holds as values, which other formats store as tensors.


def with_references(tree: Any, arrays: dict[str, Any]) -> Any:
    """The tree with references in place of arrays, which are put into ``arrays`` by the keys of those references.

    >>> arrays = {}
    >>> with_references({"mean": np.zeros(3), "step": 7}, arrays)["mean"].shape, len(arrays)
    ((3,), 1)
    """
    if isinstance(tree, np.ndarray):
        ref = _reference(tree, f"\0array {len(arrays)}")
        if ref is None:
            return tree
        arrays[ref.key] = np.ascontiguousarray(tree).reshape(tree.shape)
        return ref
    return mapped(tree, lambda child: with_references(child, arrays)) if _holds_array(tree) else tree


def _holds_array(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return True
    return any(_holds_array(child) for _, child in children_of(value) or ())


def _reference(array: npt.NDArray[Any], key: str) -> TensorRef | None:
    """What is stored of an array; None if it has no bytes of its own, such as one of objects."""
    try:
        stored = stored_numpy_dtype(array.dtype)
    except CannotStore:
        return None
    if array.dtype.itemsize == 0:
        return None
    name = name_of(array.dtype) or ""
    try:
        is_known = dtype_named(name).numpy is not None and array.dtype == array.dtype.newbyteorder("<")
    except ValueError:
        is_known = False
    dtype = dtype_named(name if is_known else f"raw{array.dtype.itemsize}")
    return TensorRef(key, dtype, array.shape, "replicated", stored)


T = TypeVar("T")


@dataclass(frozen=True)
class ConversionOptions:
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
    unused: dict[str, list[str]]
    """Patterns of renames and casts that fit nothing, by the name of the option."""
    elements_in_source: int
    """Of all tensors that the source has, each counted once, whatever names it has."""
    elements_left_out: int
    """Of those that were left out under all of their names."""


def prepare(source: Source, target: Target, options: ConversionOptions) -> Prepared:
    """Choose, rename and cast what is in a source, as far as a target can hold it. Nothing is read but values."""
    arrays: dict[str, Any] = {}
    tree = with_references(source.tree, arrays) if target.arrays_are_tensors else source.tree
    leaves = {leaf.path: leaf for leaf in StoredNode.of(tree).leaves()}
    chosen = Selection(options.include, options.exclude)

    def is_wanted(leaf: StoredNode) -> bool:
        return chosen(leaf.key) and (not options.only_tensors or isinstance(leaf.value, TensorRef))

    renaming = Renaming(options.rename)
    by_key = new_keys(StoredNode.of(tree), renaming) if renaming else {}
    wanted = {path for path, leaf in leaves.items() if is_wanted(leaf)}
    if len(wanted) < len(leaves):
        tree = pruned(tree, (), lambda path: path in wanted)
    if tree is NOTHING or not wanted:
        raise _nothing_left(source, options)
    if target.has_flat_keys:
        names = _flat_names([leaf for path, leaf in leaves.items() if path in wanted])
        flat = rename_flat(names, lambda name: by_key.get(name) or renaming(name))
        tree = {new: leaf.value for new, (_, leaf) in flat.items()}
        renamed = {old: new for new, (old, _) in flat.items() if old != new}
    else:
        root, renamed = rename_leaves(StoredNode.of(tree), by_key.get)
        tree = root.value
    casts = Casts.of(options.cast, [(leaf.key, leaf.value) for path, leaf in leaves.items() if path in wanted])
    prepared = prepare_renamed(
        source,
        target,
        tree if target.keeps_per_rank else with_lists(tree),
        options,
        casts,
        leaves={leaf.key: leaf.value for leaf in leaves.values()},
        left_out=[leaf.key for path, leaf in leaves.items() if path not in wanted],
        renamed=renamed,
        unused=unused(renaming, casts),
    )
    prepared.outgoing.arrays = arrays
    kept = [leaf.key for path, leaf in leaves.items() if path in wanted]
    prepared.outgoing.optimizers = _moved(optimizers_noted(source.provenance), kept, renamed)
    return prepared


def _moved(optimizers: Mapping[str, str], kept: Sequence[str], renamed: Mapping[str, str]) -> dict[str, str]:
    """What is noted about optimizers, by the keys that they have after renaming."""
    moved: dict[str, str] = {}
    for key, name in optimizers.items():
        groups = next((leaf for leaf in kept if leaf.startswith(f"{key}.param_groups")), None)
        if groups is not None:
            new, tail = renamed.get(groups, groups), groups[len(key) :]
            if new.endswith(tail):
                moved[new[: -len(tail)]] = name
    return moved


def prepare_renamed(
    source: Source,
    target: Target,
    tree: Any,
    options: ConversionOptions,
    casts: Casts,
    *,
    leaves: Mapping[str, Any],
    left_out: list[str],
    renamed: dict[str, str],
    unused: dict[str, list[str]],
) -> Prepared:
    """What goes out of a tree that was chosen and renamed already. ``leaves`` are all that the source has, by key."""
    tensors: dict[str, OutTensor] = {}
    refs: dict[str, TensorRef] = {}
    for key, ref in leaves_of(tree, is_flat=target.has_flat_keys).items():
        if isinstance(ref, TensorRef) and ref.key not in refs:
            dtype = casts.dtypes.get(ref.key, ref.dtype)
            kind, rank = (ref.kind, ref.rank) if target.keeps_per_rank else (_kind_for_all(ref), None)
            tensors[key] = OutTensor(key, ref.key, ref.shape, ref.dtype, dtype, kind, ref.numpy, rank)
            refs[ref.key] = TensorRef(key, dtype, ref.shape, kind, ref.numpy, rank)
    tree = substituted(tree, lambda ref: refs[ref.key])
    outgoing = Outgoing(
        source=source,
        tree=tree,
        tensors=tensors,
        leaves=leaves_of(tree, is_flat=target.has_flat_keys),
        is_flat=target.has_flat_keys,
        allow_pickle=options.allow_pickle,
        memory_budget=options.memory_budget,
    )
    if not (source.format == target.format == "native"):
        _refuse_unread_values(outgoing, target)
    cast = {
        key: (tensor.stored.name, tensor.dtype.name) for key, tensor in tensors.items() if tensor.dtype != tensor.stored
    }
    elements = {ref.key: prod(ref.shape) for ref in leaves.values() if isinstance(ref, TensorRef)}
    gone = {leaves[key].key for key in left_out if isinstance(leaves[key], TensorRef)} - refs.keys()
    return Prepared(
        outgoing, left_out, renamed, cast, unused, sum(elements.values()), sum(elements[key] for key in gone)
    )


def rename_flat(names: Mapping[str, T], renaming: Callable[[str], Any]) -> dict[str, tuple[str, T]]:
    """What has these names under new ones, each with the old one."""
    renamed: dict[str, tuple[str, T]] = {}
    for name, found in names.items():
        new: Any = renaming(name)
        new = name if new is None else new
        if not isinstance(new, str):
            raise TypeError(f"rename gives {name!r} the name {new!r}, which is not a str")
        if not new and name:
            raise TypeError(f"rename gives {name!r} an empty name; give it one that can be asked for")
        if new in renamed:
            raise ValueError(
                f"rename would give both '{renamed[new][0]}' and '{name}' the name '{new}'. Every name can be given "
                "once."
            )
        renamed[new] = (name, found)
    return renamed


def _flat_names(leaves: Sequence[StoredNode]) -> dict[str, StoredNode]:
    """Leaves by what they are called where names are all there is. Names that were flat before stay as they are."""
    names = [leaf.path[0] if len(leaf.path) == 1 and type(leaf.path[0]) is str else leaf.key for leaf in leaves]
    if len(set(names)) < len(names):
        names = [leaf.key for leaf in leaves]
    return dict(zip(names, leaves, strict=True))


def unused(renaming: Renaming, casts: Casts) -> dict[str, list[str]]:
    """Renames and casts that were given for nothing, by the name of the option."""
    found = {"rename": renaming.unused, "cast": casts.unused}
    return {option: names for option, names in found.items() if names}


def _nothing_left(source: Source, options: ConversionOptions) -> UnknownKeyError:
    what = "include and exclude leave nothing" if options.include or options.exclude else "there is nothing"
    return UnknownKeyError(
        f"{what} of {source.location} to be written, so nothing was. Strings may have wildcards ('model', '*.bias'); "
        "`holdfast show` lists the keys.",
        key=str(options.include),
        path=source.location,
        near=list(source.tensors)[:3],
    )


def _kind_for_all(ref: TensorRef) -> str:
    return "replicated" if ref.kind == "per_rank" else ref.kind


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
        "Pass allow_pickle=True (--allow-pickle) if you trust who wrote pickles, exclude these keys, or pass "
        "only_tensors=True (--only-tensors).",
    )


def _why_unread(value: Any) -> str | None:
    if isinstance(value, PickledValue):
        return "it is a pickle, and pickles were not allowed"
    if isinstance(value, UnknownValue):
        return f"it is a {value.type}, which cannot be read"
    if isinstance(value, UnregisteredValue):
        return f"it is a {value.kind} {value.type}, which this program does not have (see holdfast.register_type)"
    found = (_why_unread(child) for _, child in children_of(value) or ())
    return next((why for why in found if why is not None), None)
