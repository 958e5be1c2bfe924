"""What one rank has to do to load a checkpoint, found out before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from holdfast._base.boxes import contains, overlaps, place_of, volume
from holdfast._base.patterns import dotted
from holdfast._base.provenance import optimizers_noted
from holdfast._base.tiling import missing_part
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.keys import readable
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.source import Source
from holdfast._load.applying import Outcome
from holdfast._load.checkpoint import Checkpoint
from holdfast._load.filling import DenseFills, Fill, Region, regions_of, sharing
from holdfast._load.findings import LoadFindings, Transform
from holdfast._load.matching import Matcher
from holdfast._load.options import AllowedCasts, LoadOptions
from holdfast._load.renamed_parameters import LiveState
from holdfast._load.renaming import rename
from holdfast._load.shared_memory import conflicts, host_memory, once_each, settle_missing_names, share_memory
from holdfast._load.stored_nodes import StoredNode
from holdfast._load.targets import held_elements, shape_and_dtype, takes_numbers, why_not_fillable, why_not_real
from holdfast._load.tensor_handles import TensorHandle
from holdfast._state.contract import Context
from holdfast._state.unwrapping import optimizers_in
from holdfast.errors import HoldfastError

# What functions of the user make out of a checkpoint, checked against the state that it is for.


def make(transform: Transform, checkpoint: Checkpoint, found: LoadFindings, casts: AllowedCasts) -> list[Region]:
    """Call the function; returns the parts of what it made that this rank holds. What is wrong goes to ``found``."""
    key = transform.key
    try:
        made = transform.function(checkpoint, key)
        if isinstance(made, TensorHandle):
            made = made[...]
        if transform.target is None:
            transform.take(made)
            return []
        return _parts(transform, made, found, casts)
    except HoldfastError as error:
        found.errors[key] = error
    except Exception as error:
        found.misfits[key] = f"has a transform that failed with {type(error).__name__}: {error}"
    return []


def _parts(transform: Transform, made: Any, found: LoadFindings, casts: AllowedCasts) -> list[Region]:
    key, target = transform.key, transform.target
    if not isinstance(made, (np.ndarray, torch.Tensor)):
        found.misfits[key] = f"is a tensor, and its transform made a {type(made).__name__}"
        return []
    (made_shape, made_dtype), (shape, dtype) = shape_and_dtype(made), shape_and_dtype(target)
    reason = why_not_fillable(key, target) or why_not_real(key, made_dtype, dtype)
    if reason is not None:
        found.misfits[key] = reason
        return []
    if made_shape != shape:
        found.shapes[key] = (made_shape, shape)
        return []
    if made_dtype != dtype:
        if not (casts.allow(key, dtype) and takes_numbers(target)):
            found.dtypes[key] = (made_dtype, dtype)
            return []
        found.cast[key] = (made_dtype, dtype)
    writes = []
    for region in regions_of(Fill(key, TensorRef(key, dtype_named("uint8"), shape), target)):
        part = made[place_of(region.box.offsets, region.box.sizes)]
        writes.append(replace(region, made=part.copy() if isinstance(part, np.ndarray) else part.detach().clone()))
    return writes


@dataclass(frozen=True)
class RankPlan:
    """What one rank will do if everything fits on all ranks."""

    outcome: Outcome
    """What becomes of the state once all is read."""
    writes: Sequence[Region]
    """What goes into memory that there is. Memory that has several names is written once."""
    dense: DenseFills
    """Tensors that take the stored bytes as they are, and share memory with nothing else."""
    found: LoadFindings
    uncovered: Mapping[str, str]
    """Keys of tensors that would not be filled to the last element, with the reason."""
    unexpected: Sequence[str]
    """Stored keys that have no place in the parts of the state that they belong to."""
    not_requested: Sequence[str]
    """Stored keys of parts that the state does not have."""
    root: StoredNode
    """Of the stored tree."""

    @property
    def regions(self) -> list[Region]:
        """What is to be read."""
        return [region for region in self.writes if region.made is None]

    @property
    def elements(self) -> int:
        """How many elements are to be written."""
        return sum(volume(region.box.sizes) for region in self.writes) + self.dense.elements

    @property
    def stored_keys(self) -> list[str]:
        """All keys of the checkpoint."""
        return [leaf.key for leaf in self.root.leaves()]


def plan_load(state: Any, source: Source, options: LoadOptions, *, rank: int, world_size: int) -> RankPlan:
    """Match a checkpoint with a state. What does not fit is noted in the plan."""
    root = StoredNode.of(source.tree)
    new_keys: Mapping[str, str] = {}
    matcher = Matcher(state, options, rank=rank, world_size=world_size, kinds=optimizers_noted(source.provenance))
    if options.renaming:
        root, new_keys = rename(root, options.renaming, _known_of(state, matcher.context))
    outcome = matcher.match_state(state, root)
    found = matcher.found
    found.notes += _unused(options, found)
    settle_missing_names(found)
    used = set[str]()
    checkpoint = Checkpoint(source, on_use=used.add)
    made = [write for transform in found.transforms for write in make(transform, checkpoint, found, options.casts)]
    dense, special = found.dense.without(source.incomplete_positions([ref.key for ref in found.dense.refs]))
    reads, uncovered = _reads([*found.fills, *special], source, rank)
    dense, tied = dense.without(_sharing(dense, [*reads, *made]))
    reads += _reads(tied, source, rank)[0]
    writes = [*reads, *made]
    if share_memory(writes):
        if not uncovered:
            found.misfits.update(conflicts(writes, source))
        writes = once_each(writes)
    unexpected, not_requested = _left_over(state, root, new_keys, used, options)
    return RankPlan(
        outcome=outcome,
        writes=writes,
        dense=dense,
        found=found,
        uncovered=uncovered,
        unexpected=[*found.unexpected, *unexpected],
        not_requested=not_requested,
        root=root,
    )


def _known_of(state: Any, context: Context) -> LiveState:
    """What the models of a state and the parameters of its optimizers are called."""
    names = {
        name
        for optimizer in optimizers_in(state)
        for name in context.names_of([each for group in optimizer.param_groups for each in group["params"]])
        if name is not None
    }
    return LiveState([readable(path) for path, _ in context.modules], frozenset(names))


def _sharing(dense: DenseFills, writes: Sequence[Region]) -> list[int]:
    """Which tensors share memory with others, or with something else that is written, by position."""
    if not dense.keys:
        return []
    places = dense.reads
    return sharing(places.addresses, places.addresses + places.nbytes, [*filter(None, map(host_memory, writes))])


def _unused(options: LoadOptions, found: LoadFindings) -> list[str]:
    """Remarks on what the caller asked for and nothing was like."""
    names = [f"rename: no stored key is, or begins with, '{name}'" for name in options.renaming.unused]
    patterns = [
        f"transform: no key of the state is meant by '{pattern}'"
        for pattern, is_meant in options.transform_patterns
        if not any(is_meant(transform.key) for transform in found.transforms)
    ]
    return names + patterns


def _reads(fills: Sequence[Fill], source: Source, rank: int) -> tuple[list[Region], dict[str, str]]:
    """The regions of all tensors that are to be filled, and which tensors these do not fill."""
    reads: list[Region] = []
    uncovered: dict[str, str] = {}
    for fill in fills:
        regions = regions_of(fill)
        held = held_elements(fill.target)
        planned = sum(volume(region.box.sizes) for region in regions)
        if held is not None and held != planned:
            uncovered[fill.key] = f"of the {held} elements on rank {rank}, {planned} would be filled"
        boxes, chunks = [region.box for region in regions], source.covered(fill.ref.key)
        if len(chunks) != 1 or not all(contains(chunks[0], box) for box in boxes):
            gap = missing_part(boxes, chunks, fill.ref.shape, overlaps(boxes, chunks))
            if gap is not None:
                uncovered[fill.key] = gap
        reads += regions
    return reads, uncovered


def _left_over(
    state: Any, root: StoredNode, new_keys: Mapping[str, str], used: Collection[str], options: LoadOptions
) -> tuple[list[str], list[str]]:
    """Stored keys that nothing took: of parts of the checkpoint that the state has too, and of others."""
    of_state, of_others = list[str](), list[str]()
    left = [leaf for leaf in root.leaves() if not leaf.taken]
    if not left:
        return of_state, of_others
    parts = {_first_part(readable((name,))) for name in state} if isinstance(state, Mapping) else None
    for leaf in left:
        key = new_keys.get(leaf.key, leaf.key)
        if leaf.key in used or not options.wanted(key):
            continue
        (of_state if parts is None or _first_part(key) in parts else of_others).append(leaf.key)
    return of_state, of_others


def _first_part(key: str) -> str:
    return dotted(key).split(".", 1)[0]
