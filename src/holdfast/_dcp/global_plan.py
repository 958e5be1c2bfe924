"""From the plans of all ranks to the description of one checkpoint, and the proof that it is whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from holdfast._base.boxes import first_overlap, out_of_bounds, volume
from holdfast._formats.dcp.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from holdfast._formats.dcp.plan import SavePlan, WriteItem, WriteItemType
from holdfast.errors import InvalidPlanError


def create_default_global_save_plan(
    all_plans: list[SavePlan], rewrite_index_hints: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """Describe the checkpoint that ``all_plans`` make, whose items must be unique already.

    With ``rewrite_index_hints`` the index of each tensor item says which chunk of its tensor it is.
    """
    described: dict[str, STORAGE_TYPES] = {}
    new_plans = []
    for plan in all_plans:
        items = [_enter(item, described, rewrite_index_hints) for item in plan.items]
        new_plans.append(replace(plan, items=items, replica_digests={}))  # which have been compared before
    return new_plans, Metadata(described)


def _enter(item: WriteItem, described: dict[str, STORAGE_TYPES], rewrite_hint: bool) -> WriteItem:
    fqn = item.index.fqn
    if item.type != WriteItemType.SHARD and fqn in described:
        raise InvalidPlanError(
            f"'{fqn}' is to be written twice as a whole, or as a whole and in parts. Keys must be unique over all "
            "ranks once copies are removed; give the second one another key.",
            problems=[fqn],
        )
    if item.type == WriteItemType.BYTE_IO:
        described[fqn] = BytesStorageMetadata()
        return item
    data = item.tensor_data
    if data is None:
        raise InvalidPlanError(f"'{fqn}' is a {item.type.name} item without tensor_data", problems=[fqn])
    entry = described.setdefault(fqn, TensorStorageMetadata(data.properties, data.size, []))
    if not isinstance(entry, TensorStorageMetadata):
        raise InvalidPlanError(f"'{fqn}' is both a tensor and a value; give one another key", problems=[fqn])
    entry.chunks.append(data.chunk)
    if not rewrite_hint:
        return item
    return replace(item, index=MetadataIndex(fqn, item.index.offset, len(entry.chunks) - 1))


def validate_global_plan(global_plan: Sequence[SavePlan], metadata: Metadata) -> list[str]:
    """Everything that is wrong with the chunks: out of bounds, overlapping, or leaving holes.

    Holes are only looked for when several ranks plan together; a rank on its own may save just its part.
    """
    problems: list[str] = []
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and len(entry.size) > 0:
            problems.extend(tiling_problems(key, entry, look_for_holes=len(global_plan) > 1))
    return problems


def refuse_invalid_plan(global_plan: Sequence[SavePlan], metadata: Metadata) -> None:
    """Raise if the chunks do not tile their tensors."""
    problems = validate_global_plan(global_plan, metadata)
    if problems:
        shown = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else "")
        raise InvalidPlanError(f"Failed to validate global plan: {shown}. Nothing was saved.", problems=problems)


def tiling_problems(key: str, entry: TensorStorageMetadata, *, look_for_holes: bool) -> list[str]:
    """Why the chunks of a tensor do not tile it; nothing if they do."""
    chunks = entry.chunks
    if len(chunks) == 1 and chunks[0].sizes == entry.size and not any(chunks[0].offsets):
        return []  # nearly all tensors are whole
    problems = [
        f"key '{key}': chunk {describe(chunks[position])} lies outside of a tensor of size {list(entry.size)}"
        for position in out_of_bounds(chunks, entry.size)
    ]
    pair = first_overlap(chunks)
    if pair is not None:
        one, other = (describe(chunks[position]) for position in pair)
        problems.append(f"key '{key}': chunks {one} and {other} overlap")
    stored = sum(volume(chunk.sizes) for chunk in chunks)
    if look_for_holes and not problems and stored != volume(entry.size):
        problems.append(f"key '{key}': {stored} of {volume(entry.size)} elements are in the chunks of the ranks")
    return problems


def describe(chunk: ChunkStorageMetadata) -> str:
    """A chunk in words."""
    return f"[offsets {list(chunk.offsets)}, sizes {list(chunk.sizes)}]"


def merge_planner_data(plans: Sequence[SavePlan]) -> dict[str, Any] | None:
    """All ranks' paths in one mapping, earlier ranks first."""
    merged: dict[str, Any] = {}
    for plan in plans:
        for key, path in (plan.planner_data or {}).items():
            merged.setdefault(key, path)
    return merged
