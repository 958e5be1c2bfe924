"""Who writes which part of tensors that are divided by rules, computed for all ranks at once.

Each rank has one part of a tensor, so the parts that several ranks hold can be given out tensor by tensor. The result
is that of ``owners.balanced_owners`` for a list of all parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from holdfast._base.divisions import Division, Numbers


class OneOfSeveral(NamedTuple):
    """A part that ranks have in common though the rule gives each of them another one: it has no cells."""

    number: int
    holders: Numbers


class HeldParts:
    """The different parts of a tensor. What has no cells and begins at the same place is one part."""

    def __init__(self, division: Division | None, shape: Sequence[int], world_size: int) -> None:
        rule = Division(copies=((world_size, 1),)) if division is None else division
        self.offsets, self.sizes = rule.boxes(shape)
        # What has no cells in a dimension begins behind its end, whatever was cut before.
        self.offsets = np.where(self.sizes == 0, np.array(shape, np.int64), self.offsets)
        self.elements: Numbers = self.sizes.prod(axis=1)
        self.holders = np.sort(rule.ranks_with(world_size=world_size), axis=1)
        """One row per part, one column per copy, in ascending order."""
        empty = np.flatnonzero(self.elements == 0)
        self.together: list[OneOfSeveral] = []
        self.regular = np.arange(len(self.elements))
        if len(empty) > 1:
            _, group = np.unique(self.offsets[empty], axis=0, return_inverse=True)
            for number in range(int(group.max()) + 1):
                same = empty[group.ravel() == number]
                self.together.append(OneOfSeveral(int(same[0]), np.unique(self.holders[same])))
            self.regular = np.flatnonzero(self.elements > 0)

    @cached_property
    def partition(self) -> tuple[int, bytes]:
        """Equal for tensors whose parts are held by the same sets of ranks."""
        return self.copies, self.holders.tobytes()

    @property
    def copies(self) -> int:
        """How many ranks have each part."""
        return int(self.holders.shape[1])

    def part_of(self, rank: int) -> int | None:
        """The part that a rank holds, as its holders name it."""
        rows = np.flatnonzero((self.holders == rank).any(axis=1))
        if not len(rows):
            return None
        number = int(rows[0])
        if self.elements[number]:
            return number
        return next((one.number for one in self.together if rank in one.holders), number)


class Owned(NamedTuple):
    """The parts of a tensor in the order of the ranks that write them."""

    ranks: Numbers
    numbers: Numbers


class Divided(NamedTuple):
    """A tensor, or a value, which has one part that all ranks hold."""

    parts: HeldParts
    item_bytes: int
    """Of one element; of all of it if it is a value."""


Settled = Mapping[tuple[int, int], tuple[int, int]]
"""For parts, each given by the number of its tensor and its own, the rank that must write it, and its bytes."""


class _Some(NamedTuple):
    """Parts of one tensor that have the same size."""

    tensor: int
    parts: HeldParts
    rows: Numbers


def owned_parts(
    tensors: Sequence[Divided], world_size: int, *, by_lowest: bool = False, settled: Settled | None = None
) -> list[Owned]:
    """For each tensor, which rank writes which part: the holder with the fewest bytes, or the lowest."""
    loads = np.zeros(world_size, np.int64)
    shared: dict[int, list[_Some | tuple[int, OneOfSeveral]]] = {}
    given: list[list[tuple[Numbers, Numbers]]] = [[] for _ in tensors]
    alone: dict[int, Owned] = {}
    fixed = settled or {}
    alike: Counter[tuple[int, int]] = Counter()
    by_id = {id(tensor.parts): tensor.parts for tensor in tensors}
    tensors_with_settled = {tensor for tensor, _ in fixed}
    for number, (parts, item_bytes) in enumerate(tensors):
        if parts.copies == 1 and not parts.together:
            alike[id(parts), item_bytes] += 1
            if id(parts) not in alone:
                order = np.argsort(parts.holders[:, 0], kind="stable")
                alone[id(parts)] = Owned(parts.holders[order, 0], order)
            continue
        for one in parts.together:
            if by_lowest or len(one.holders) == 1:
                given[number].append((one.holders[:1], np.array([one.number])))
                loads[one.holders[0]] += 1
            else:
                shared.setdefault(0, []).append((number, one))
        rows = parts.regular
        if number in tensors_with_settled:
            rows = np.array([row for row in rows.tolist() if (number, row) not in fixed], np.int64)
        if parts.copies == 1:
            alike[id(parts), item_bytes] += 1
        if by_lowest or parts.copies == 1:
            given[number].append((parts.holders[rows, 0], rows))
            continue
        bytes_each = parts.elements[rows] * item_bytes
        for size in np.unique(bytes_each).tolist():
            shared.setdefault(size, []).append(_Some(number, parts, rows[bytes_each == size]))
    for (parts_id, item_bytes), times in alike.items():
        parts = by_id[parts_id]
        cost = np.maximum(1, parts.elements[parts.regular] * item_bytes) * times
        np.add.at(loads, parts.holders[parts.regular, 0], cost)
    for (number, row), (rank, size) in fixed.items():
        given[number].append((np.array([rank]), np.array([row])))
        loads[rank] += max(1, size)
    for size in sorted(shared, reverse=True):
        _give_out(shared[size], max(1, size), loads, given)
    return [alone.get(id(tensor.parts)) or _in_order(own) for tensor, own in zip(tensors, given, strict=True)]


def _give_out(
    group: list[_Some | tuple[int, OneOfSeveral]],
    cost: int,
    loads: Numbers,
    given: list[list[tuple[Numbers, Numbers]]],
) -> None:
    """Give parts of the same size to the holders that have least, in the order of their lowest holders."""
    regular = [some for some in group if isinstance(some, _Some)]
    if len(regular) == len(group) and len({some.parts.partition for some in regular}) == 1:
        # The sets of holders are the same for all tensors, and have no rank in common: one set does not affect another.
        for tensor, parts, rows in regular:
            holders = parts.holders[rows]
            owners = holders[np.arange(len(rows)), loads[holders].argmin(axis=1)]
            loads[owners] += cost
            given[tensor].append((owners, rows))
        return
    single: list[tuple[int, int, int, Numbers]] = []
    for some in group:
        if isinstance(some, _Some):
            single += [
                (int(some.parts.holders[row, 0]), some.tensor, row, some.parts.holders[row])
                for row in some.rows.tolist()
            ]
        else:
            tensor, one = some
            single.append((int(one.holders[0]), tensor, one.number, one.holders))
    for _, tensor, number, holders in sorted(single, key=lambda item: item[:3]):
        owner = holders[loads[holders].argmin()]
        loads[owner] += cost
        given[tensor].append((np.array([owner]), np.array([number])))


def _in_order(given: list[tuple[Numbers, Numbers]]) -> Owned:
    ranks = np.concatenate([ranks for ranks, _ in given])
    numbers = np.concatenate([numbers for _, numbers in given])
    order = np.argsort(ranks, kind="stable")
    return Owned(ranks[order], numbers[order])
