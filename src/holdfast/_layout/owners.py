"""Who takes an item that several could take: one of them, so that all have about the same number of bytes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced_owners(candidates: Sequence[Sequence[int]], sizes: Sequence[int], count: int) -> list[int]:
    """For each item, with its candidates (numbers below ``count``) and its bytes, the one that takes it.

    What has one candidate is counted first. The rest goes, largest first, to the candidate with the fewest bytes so
    far, the lowest of several: the most that one has is then at most a third above the best that is possible, if all
    can take all of it.

    >>> balanced_owners([[0], [0, 1], [0, 1], [0, 1]], [3, 5, 2, 4], 2)
    [0, 1, 1, 0]
    """
    owners = [taking[0] for taking in candidates]
    shared = [number for number, taking in enumerate(candidates) if len(taking) > 1]
    if not shared:
        return owners
    loads = [0] * count
    for owner, taking, size in zip(owners, candidates, sizes, strict=True):
        if len(taking) == 1:
            loads[owner] += _cost(size)
    by_load: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for number in sorted(shared, key=sizes.__getitem__, reverse=True):
        taking = tuple(candidates[number])
        heap = by_load.get(taking)
        if heap is None:
            heap = by_load[taking] = [(loads[one], one) for one in taking]
            heapq.heapify(heap)
        load, owner = heap[0]
        # Others may have taken something since they were put here, and never less: what is up to date is the least.
        while load != loads[owner]:
            heapq.heapreplace(heap, (loads[owner], owner))
            load, owner = heap[0]
        loads[owner] += _cost(sizes[number])
        heapq.heapreplace(heap, (loads[owner], owner))
        owners[number] = owner
    return owners


def _cost(size: int) -> int:
    """An item without bytes still costs a little. Counting it spreads many of them."""
    return max(1, size)
