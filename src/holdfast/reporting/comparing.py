"""What changed since another checkpoint, in columns beside those of the entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.checkpoint import Checkpoint
from holdfast.inspecting.diff import diff
from holdfast.inspecting.diff_report import DiffReport
from holdfast.progress import OnProgress
from holdfast.reporting.describing import description
from holdfast.reporting.entries import Entry, entries_of, entry_columns
from holdfast.reporting.facts import totals_of
from holdfast.reporting.packing import Distinct, as_json_number


def compare_facts(
    other: Checkpoint,
    checkpoint: Checkpoint,
    entries: Sequence[Entry],
    memory_budget: int | None,
    on_progress: OnProgress,
) -> dict[str, Any]:
    """How ``checkpoint``, with its entries, differs from ``other``, which was before."""
    found = diff(other, checkpoint, memory_budget=memory_budget, on_progress=on_progress)
    before = entries_of(other.source)
    gone = set(found.only_in_a)
    numbers = {entry.key: number for number, entry in enumerate(entries)}
    statuses = Distinct()
    equal = statuses.number("equal")
    status = [equal] * len(entries)
    for name, keys in (
        ("changed", [*found.changed_tensors, *found.changed_values]),
        ("dtype", found.changed_dtype),
        ("shape", found.changed_shape),  # says more than the one before, which may be so too
        ("added", found.only_in_b),
    ):
        for key in keys:
            status[numbers[key]] = statuses.number(name)
    if gone:
        statuses.number("removed")
    return {
        "checkpoint": description(other.source),
        "totals": totals_of(other.source, before),
        "statuses": statuses.things,
        "status": status,
        "differences": {numbers[key]: difference for key, difference in _differences(found).items()},
        "removed": entry_columns([entry for entry in before if entry.key in gone]),
    }


def _differences(found: DiffReport) -> dict[str, dict[str, Any]]:
    """What is to be told of each changed key."""
    told: dict[str, dict[str, Any]] = {}
    for key, (old, new) in found.changed_values.items():
        told[key] = {"old": old, "new": new}
    for key, (shape, _) in found.changed_shape.items():
        told.setdefault(key, {})["wasShape"] = list(shape)
    for key, (dtype, _) in found.changed_dtype.items():
        told.setdefault(key, {})["wasDtype"] = dtype
    for key, change in found.changed_tensors.items():
        told.setdefault(key, {}).update(
            elements=change.differing,
            incomparable=change.incomparable,
            largest=as_json_number(change.largest),
            norm=as_json_number(change.norm),
            before=as_json_number(change.norm_before),
            relative=as_json_number(change.relative),
        )
    return told
