"""Who writes an item that several ranks hold."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from holdfast.metadata import MetadataIndex
from holdfast.planning.plan import SavePlan, WriteItem, written_bytes


def dedup_save_plans(all_plans: list[SavePlan], save_to_lowest_rank: bool = False) -> list[SavePlan]:
    """Leave each item in the plan of one rank only.

    What only one rank holds stays where it is. The rest goes, largest first, to the rank that has the fewest bytes to
    write so far (the lowest of several), or always to the lowest rank that holds it.
    """
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    samples: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(all_plans):
        for item in plan.items:
            if not holders[item.index] or holders[item.index][-1] != rank:
                holders[item.index].append(rank)
            samples.setdefault(item.index, item)

    load = [0] * len(all_plans)
    owner: dict[MetadataIndex, int] = {}
    shared: list[MetadataIndex] = []
    for index, ranks in holders.items():
        if len(ranks) > 1 and not save_to_lowest_rank:
            shared.append(index)
        else:
            owner[index] = ranks[0]
            load[ranks[0]] += written_bytes(samples[index])
    shared.sort(key=lambda index: written_bytes(samples[index]), reverse=True)
    for index in shared:
        owner[index] = min(holders[index], key=lambda rank: (load[rank], rank))
        # An item without bytes still costs a little; counting it spreads many of them.
        load[owner[index]] += max(1, written_bytes(samples[index]))

    return [replace(plan, items=_first_of_each(plan.items, owner, rank)) for rank, plan in enumerate(all_plans)]


def _first_of_each(items: list[WriteItem], owner: dict[MetadataIndex, int], rank: int) -> list[WriteItem]:
    kept: dict[MetadataIndex, WriteItem] = {}
    for item in items:
        if owner[item.index] == rank:
            kept.setdefault(item.index, item)
    return list(kept.values())
