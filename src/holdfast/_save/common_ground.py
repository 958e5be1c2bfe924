"""Whether all ranks have the same to save: found out by digests of a few bytes, joined on their way to all.

What must be the same is the tree, what the tensors are, and the rules by which they are divided. If it is, every rank
knows what all others would say. Copies are compared along with it, by a sum (``holdfast._ranks.copies``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from holdfast._base.divisions import Division, DivisionNumbers
from holdfast._base.json_parts import dumps
from holdfast._layout.descriptions import TensorDescription
from holdfast._ranks.copies import added_up, share_of_copy


class Ballot(NamedTuple):
    """What a rank, or several whose ballots were joined, have to say."""

    digest: bytes
    """Of all that must be the same."""
    agree: bool
    """Whether it is the same on all of them, and follows rules."""
    own_tensors: int = 0
    """That each rank has of its own."""
    copies: int = 0
    """What the copies of everything add up to: 0 if they are equal."""
    generation: str = ""
    """The name of the save, which the coordinator gives it."""

    @property
    def is_unanimous(self) -> bool:
        """Whether every rank knows what all others have."""
        return self.agree and self.copies == 0


def joined(ballots: Sequence[Ballot]) -> Ballot:
    """Those of several ranks as one.

    >>> joined([Ballot(b"x", True, copies=3, generation="a"), Ballot(b"x", True, copies=added_up([-3]))]).is_unanimous
    True
    >>> joined([Ballot(b"x", True), Ballot(b"y", True)]).is_unanimous
    False
    """
    first = ballots[0]
    return Ballot(
        first.digest,
        all(each.agree and each[:3] == first[:3] for each in ballots),
        first.own_tensors,
        added_up(each.copies for each in ballots),
        "".join(each.generation for each in ballots),
    )


def digest_of_layout(descriptions: Sequence[TensorDescription], options: Sequence[Any]) -> bytes:
    """Of everything that decides who writes what, but for what a rank has of its own."""
    rules = DivisionNumbers()
    said = [
        (key, dtype, shape, kind, str(numpy), tied_to, from_first_rank, rules.of(division))
        for key, dtype, shape, kind, _, _, numpy, tied_to, from_first_rank, _, division in descriptions
    ]
    return xxhash.xxh3_128_digest(repr((said, list(rules.known), list(options))).encode())


def digest_of_tree(tree: Any, kinds: Any) -> bytes:
    """Of everything else that must be the same: the values and the structure of a state."""
    return xxhash.xxh3_128_digest(f"{dumps(tree)}\n{dumps(dict(sorted(kinds.items())))}".encode())


def sum_of_copies(descriptions: Iterable[TensorDescription], rank: int, world_size: int) -> int:
    """What this rank adds to the sum of copies, of tensors that are described alike on all ranks."""
    shares: list[int] = []
    places: dict[int, tuple[int, int]] = {}
    for number, described in enumerate(descriptions):
        division = described.division
        if described.digests and division is not None:
            if id(division) not in places:
                places[id(division)] = _place_of(rank, division, world_size)
            part, copy = places[id(division)]
            (digest,) = described.digests
            copies = division.copy_count
            shares.append(share_of_copy(f"{number} {part}", digest, copies=copies, is_first=copy == 0))
    return added_up(shares)


def _place_of(rank: int, division: Division, world_size: int) -> tuple[int, int]:
    """The number of the part that a rank has, and of its copy of that part."""
    parts, copies = np.nonzero(division.ranks_with(world_size=world_size) == rank)
    return int(parts[0]), int(copies[0])
