"""Which way bytes take from one rank to many along a tree of groups, computed alike by every rank.

Who is in a group with the rank that has them gets them from it. For the others they go up to the leader of its group,
from there to the leaders of the groups that want them, and down again. In a group at the lowest level that they come to
from outside, another member than the leader passes them on: so no leader sends everything to everybody.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

_FEW = 2
"""So many ranks of a group are served by its leader."""


class Route(NamedTuple):
    """What one rank has to do with bytes that are on their way to many."""

    stage: int
    """How many ranks have passed them on before this one may."""
    comes_from: int | None
    """None if it has had them from the beginning."""
    passes_on: tuple[int, ...] = ()
    """Those that get everything from it, because they pass it on in turn."""
    serves: tuple[int, ...] = ()
    """Those that get from it what they want themselves, and are the last."""

    @property
    def is_last(self) -> bool:
        """Whether the rank only gets what it wants itself."""
        return self.comes_from is not None and not self.passes_on and not self.serves


class _Hop(NamedTuple):
    """From one rank to the next one, which speaks for the ranks from ``low`` up to ``high``."""

    to: int
    low: int
    high: int
    came: int = -1
    """The level of the group in which both are."""
    goes_up: bool = False
    relays: bool = False
    is_last: bool = False


def route_of(rank: int, origin: int, receivers: Sequence[int], strides: Sequence[int], turn: int = 0) -> Route | None:
    """What ``rank`` has to do when ``origin`` has something for ``receivers``; None if it is not on the way.

    ``receivers`` are in order. ``strides`` are those of the tree (see ``trees``). ``turn`` chooses who passes it on in
    groups that are not those of the origin.

    >>> ranks, strides = range(8), [1, 4, 16]
    >>> route_of(1, 1, ranks, strides)
    Route(stage=0, comes_from=None, passes_on=(0,), serves=(2, 3))
    >>> route_of(0, 1, ranks, strides)
    Route(stage=1, comes_from=1, passes_on=(4,), serves=())
    >>> route_of(4, 1, ranks, strides), route_of(5, 1, ranks, strides).serves, route_of(7, 1, ranks, strides).is_last
    (Route(stage=2, comes_from=0, passes_on=(5,), serves=()), (6, 7), True)
    """
    routing = _Routing(receivers, strides, turn)
    hop, comes_from, stage = _Hop(origin, origin, origin + 1, goes_up=True), None, 0
    while True:
        hops = [] if hop.is_last else routing.hops_from(hop)
        if hop.to == rank:
            others = [each.to for each in hops if not each.is_last]
            return Route(stage, comes_from, tuple(others), tuple(each.to for each in hops if each.is_last))
        following = next((each for each in hops if each.low <= rank < each.high and not each.goes_up), None)
        following = following or next((each for each in hops if each.goes_up), None)
        if following is None:
            return None
        hop, comes_from, stage = following, hop.to, stage + 1


class _Routing:
    def __init__(self, receivers: Sequence[int], strides: Sequence[int], turn: int) -> None:
        self._receivers = receivers
        self._strides = strides
        self._turn = turn

    def hops_from(self, hop: _Hop) -> list[_Hop]:
        """To whom a rank sends what has come to it."""
        if hop.relays:
            return [_last(rank) for rank in self._between(hop.low, hop.high) if rank != hop.to]
        found = self._down(hop.to, hop.came)
        return found + self._up(hop.to, hop.came + 1) if hop.goes_up else found

    def _up(self, rank: int, level: int) -> list[_Hop]:
        """In the groups of a rank from a level on."""
        found: list[_Hop] = []
        while level < len(self._strides) - 1:
            stride, reach = self._strides[level : level + 2]
            leader = rank // reach * reach
            is_all = len(self._between(leader, leader + reach)) == len(self._receivers)
            goes_up = not is_all and leader != rank
            found += self._members(rank, leader, leader + reach, stride, level, leader if goes_up else None)
            if is_all or goes_up:
                break
            level += 1
        return found

    def _down(self, leader: int, level: int) -> list[_Hop]:
        """In the groups that a rank leads below a level."""
        found: list[_Hop] = []
        for below in range(level - 1, -1, -1):
            stride, reach = self._strides[below : below + 2]
            members = self._members(leader, leader, leader + reach, stride, below, None)
            if not below and len(members) > _FEW:
                relay = members[self._turn % len(members)].to
                members = [_Hop(relay, leader + 1, leader + reach, relays=True)]
            found += members
        return found

    def _members(self, rank: int, low: int, high: int, stride: int, level: int, upwards: int | None) -> list[_Hop]:
        """To the other members of a group of a rank, if they or those that they lead are to receive something."""
        found = []
        inside = self._between(low, high)
        at = 0
        members = [] if upwards is None else [upwards]
        while at < len(inside):
            member = low + (inside[at] - low) // stride * stride
            at = bisect_left(inside, member + stride, at)
            if member not in (rank, upwards):
                members.append(member)
        for member in members:
            led = self._between(member, member + stride)
            is_last = member != upwards and list(led) == [member]
            found.append(_Hop(member, member, member + stride, level, member == upwards, is_last=is_last))
        return found

    def _between(self, low: int, high: int) -> Sequence[int]:
        receivers = self._receivers
        return receivers[bisect_left(receivers, low) : bisect_left(receivers, high)]


def _last(rank: int) -> _Hop:
    return _Hop(rank, rank, rank + 1, is_last=True)
