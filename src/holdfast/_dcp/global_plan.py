"""From the plans of all ranks to the description of one checkpoint, and the proof that it is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from holdfast._base.texts import quoted_key
from holdfast._base.tiling import refuse_bad_tiling, tiling_problems
from holdfast._formats.dcp.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
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
            found = tiling_problems(entry.chunks, entry.size, may_have_gaps=len(global_plan) == 1)
            problems.extend(f"{quoted_key(key)}: {problem}" for problem in found)
    return problems


def refuse_invalid_plan(global_plan: Sequence[SavePlan], metadata: Metadata) -> None:
    """Raise if the chunks do not tile their tensors."""
    refuse_bad_tiling(validate_global_plan(global_plan, metadata), "Failed to validate global plan:")


def merge_planner_data(plans: Sequence[SavePlan]) -> dict[str, Any] | None:
    """All ranks' paths in one mapping, earlier ranks first."""
    merged: dict[str, Any] = {}
    for plan in plans:
        for key, path in (plan.planner_data or {}).items():
            merged.setdefault(key, path)
    return merged
