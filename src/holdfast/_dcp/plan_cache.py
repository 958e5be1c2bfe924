"""Planning less when nothing changed: ranks and coordinator send each other notes instead of plans.

A plan is remembered per planner class and set of ranks. It counts as unchanged only if every item, with its dtype and
layout, and every path is the same. The coordinator checks by digest that it remembers what the rank remembers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from holdfast._dcp.planner import SavePlanner
from holdfast._formats.dcp.metadata import STORAGE_TYPES, ChunkStorageMetadata, Metadata, TensorStorageMetadata
from holdfast._formats.dcp.plan import SavePlan
from holdfast.errors import InvalidPlanError


@dataclass(frozen=True)
class Unchanged:
    """Takes the place of ``planner_data`` in a plan that only says that nothing changed."""

    signature: bytes


def signature(plan: SavePlan) -> bytes:
    """Digest of all that a plan says about the layout. Sizes of values may vary without changing it."""
    items = [(item.index.fqn, item.index.offset, item.type.name, item.tensor_data) for item in plan.items]
    # Texts, not pickles: a plan that travelled pickles differently from the one that stayed.
    return xxhash.xxh3_128(repr((items, plan.planner_data)).encode()).digest()


_pending_plans: dict[str, SavePlan] = {}


class PlanCache:
    """The plans that planners of one class remember for one set of ranks."""

    def __init__(self, key: str) -> None:
        self.key = key

    def announce(self, plan: SavePlan) -> SavePlan:
        """What to send to the coordinator: the plan, or a note that it is the one of the last save."""
        remembered = SavePlanner._cached_save_plan.get(self.key)
        _pending_plans[self.key] = plan
        if remembered is None or self.key not in SavePlanner._cached_final_save_plan:
            return plan
        own = signature(plan)
        if own != signature(remembered):
            return plan
        return SavePlan([], planner_data=Unchanged(own), usable=False, replica_digests=plan.replica_digests)

    def plan_globally(
        self, all_plans: list[SavePlan], plan: Callable[[list[SavePlan]], tuple[list[SavePlan], Metadata]]
    ) -> tuple[list[SavePlan], Metadata]:
        """Plan with what was sent and what is remembered; answer with a note where nothing changed."""
        complete = self._expand(all_plans)
        if not any(sent.usable for sent in all_plans) and not _copies_differ(complete):
            metadata = SavePlanner._cached_metadata[self.key]
            return [_note(sent) for sent in all_plans], _fresh(metadata)
        before = SavePlanner._cached_global_plan.get(self.key)
        global_plan, described = plan(complete)
        metadata = _fresh(described)
        SavePlanner._cached_all_plans[self.key] = complete
        SavePlanner._cached_global_plan[self.key] = global_plan
        SavePlanner._cached_metadata[self.key] = described
        if before is None or len(before) != len(global_plan):
            return global_plan, metadata
        answers = [
            # Only a rank that said "unchanged" is known to remember its last part of the plan.
            _note(sent) if not sent.usable and signature(new) == signature(old) else new
            for sent, new, old in zip(all_plans, global_plan, before, strict=True)
        ]
        return answers, metadata

    def recall(self, new_plan: SavePlan) -> SavePlan:
        """This rank's part: the one just received, or the remembered one with what the storage says this time."""
        if new_plan.usable:
            final = new_plan
        elif self.key in SavePlanner._cached_final_save_plan:
            final = replace(SavePlanner._cached_final_save_plan[self.key], storage_data=new_plan.storage_data)
        else:
            raise self._out_of_step("this rank")
        # Remembered only now: a plan that the coordinator refused must not count as agreed.
        pending = _pending_plans.pop(self.key, None)
        if pending is not None:
            SavePlanner._cached_save_plan[self.key] = pending
        SavePlanner._cached_final_save_plan[self.key] = final
        return final

    def forget(self) -> None:
        """Plan everything afresh next time."""
        memories: tuple[dict[str, Any], ...] = (
            SavePlanner._cached_save_plan,
            SavePlanner._cached_final_save_plan,
            SavePlanner._cached_all_plans,
            SavePlanner._cached_global_plan,
            SavePlanner._cached_metadata,
            _pending_plans,
        )
        for memory in memories:
            memory.pop(self.key, None)

    def _expand(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        remembered = SavePlanner._cached_all_plans.get(self.key, [])
        complete = []
        for rank, sent in enumerate(all_plans):
            if sent.usable:
                complete.append(sent)
                continue
            known = remembered[rank] if rank < len(remembered) else None
            note = sent.planner_data
            if known is None or not isinstance(note, Unchanged) or note.signature != signature(known):
                raise self._out_of_step(f"rank {rank}")
            # What is particular to this save comes with the note.
            complete.append(replace(known, storage_data=sent.storage_data, replica_digests=sent.replica_digests))
        return complete

    def _out_of_step(self, who: str) -> InvalidPlanError:
        self.forget()
        return InvalidPlanError(
            f"{who} relies on a plan of an earlier save that is no longer cached. Nothing was saved, and all "
            "remembered plans are dropped: save again, or turn plan caching off.",
            problems=["plan cache"],
        )


def _note(sent: SavePlan) -> SavePlan:
    """Says to a rank that its last plan is still valid, keeping what its storage has put down for this save."""
    return SavePlan([], storage_data=sent.storage_data, usable=False)


def _copies_differ(plans: list[SavePlan]) -> bool:
    seen: dict[object, bytes] = {}
    return any(
        seen.setdefault(index, digest) != digest for plan in plans for index, digest in plan.replica_digests.items()
    )


def _fresh(metadata: Metadata) -> Metadata:
    """A copy that a caller may fill in and keep without changing the remembered one."""
    paths = metadata.planner_data
    return Metadata(
        state_dict_metadata={key: _fresh_entry(entry) for key, entry in metadata.state_dict_metadata.items()},
        planner_data=dict(paths) if isinstance(paths, dict) else paths,
    )


def _fresh_entry(entry: STORAGE_TYPES) -> STORAGE_TYPES:
    if not isinstance(entry, TensorStorageMetadata):
        return replace(entry)
    chunks = [ChunkStorageMetadata(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    return TensorStorageMetadata(replace(entry.properties), entry.size, chunks)
