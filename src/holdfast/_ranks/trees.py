"""Who talks to whom: the ranks of a group as a tree of small groups, computed alike by every rank.

Neighbouring ranks make a group, and its lowest rank leads it. The leaders of neighbouring groups make a group in turn,
and so on, until there is one. So nobody is connected to many, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

LARGEST_GROUP = 32
"""The most ranks of a group, each of which is connected to each other."""

_FEWEST_ON_A_MACHINE = 4
"""Where a machine has fewer ranks, groups of several machines make a flatter tree."""


class TreeGroup(NamedTuple):
    """Ranks that are connected to each other."""

    level: int
    members: range
    """The first of them leads the group."""
    stride: int
    """Each member speaks for so many ranks, beginning with itself."""
    size: int
    """Of the whole tree."""

    @property
    def leader(self) -> int:
        """The rank that speaks for the group."""
        return self.members[0]

    def led_by(self, member: int) -> range:
        """The ranks that a member speaks for, itself among them."""
        return range(member, min(member + self.stride, self.size))


def strides_of(size: int, leaf: int | None = None, largest: int = LARGEST_GROUP) -> list[int]:
    """How far apart the members of a group are, by level from the leaves up; the last one reaches over all ranks.

    ``leaf`` is the number of ranks that make a group at the lowest level, if there are too many for one group.

    >>> strides_of(8), strides_of(40), strides_of(4096, leaf=8), strides_of(16384)
    ([1, 8], [1, 32, 64], [1, 8, 184, 4232], [1, 32, 256, 2048, 16384])
    """
    if size <= largest:
        return [1, max(size, 1)]
    leaf = largest if leaf is None or not _FEWEST_ON_A_MACHINE <= leaf <= largest else leaf
    fan_out, levels = _fan_out(-(-size // leaf), 2 * largest - leaf + 1, largest)
    return [1, *(leaf * fan_out**level for level in range(levels + 1))]


def _fan_out(leaders: int, connections: int, largest: int) -> tuple[int, int]:
    """The size of the groups above the leaves, and how many levels of them there are.

    The first leader is in a group of every level, and must not have more connections than that.
    """
    levels = 1
    while True:
        fan_out = 2
        while fan_out**levels < leaders:
            fan_out += 1
        if fan_out == 2 or (fan_out <= largest and levels * (fan_out - 1) <= connections):
            return fan_out, levels
        levels += 1


def groups_of(rank: int, size: int, strides: Sequence[int]) -> list[TreeGroup]:
    """The groups of a rank, from its leaf up to the first one that it does not lead. None of them is of one rank.

    >>> [list(group.members) for group in groups_of(4, 10, [1, 4, 16])]
    [[4, 5, 6, 7], [0, 4, 8]]
    >>> [list(group.members) for group in groups_of(9, 10, [1, 4, 16])]
    [[8, 9]]
    """
    groups = []
    for level, (stride, reach) in enumerate(pairwise(strides)):
        if rank % stride:
            break
        first = rank // reach * reach
        members = range(first, min(first + reach, size), stride)
        if len(members) > 1:
            groups.append(TreeGroup(level, members, stride, size))
    return groups
