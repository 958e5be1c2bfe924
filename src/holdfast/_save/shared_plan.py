"""Who writes what, where every rank knows it: computed on each of them alike, and sent to nobody.

Every tensor follows a rule (``holdfast._base.divisions``) that all ranks know, so that nobody needs to ask what the
others have. What only one rank has, that one writes. What several have is balanced by bytes: large parts are cut
further, as many ranks as have them writing a share each; small ones are not cut, and given, one after the other, to
those who have least to write. All of it is arithmetic with whole numbers in an order that is the same everywhere.

That the shares tile every tensor needs no proof: they are the parts of a rule, which has no gaps, and each has one
writer, which has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from holdfast._base.boxes import Box
from holdfast._base.divisions import Cut, Division, DivisionNumbers
from holdfast._base.tuning import SMALLEST_SHARE
from holdfast._formats.native.layout import ChunkToWrite
from holdfast._formats.native.refs import TensorRef
from holdfast._layout.descriptions import TensorDescription
from holdfast._save.agreement import agreed_ties, ref_of

SHARES_OF_A_RANK = 4
"""Parts that are larger than this share of what a rank writes are cut: what is left to be balanced is then smaller."""


class StoredTensor(NamedTuple):
    """A tensor of the checkpoint, and who writes which part of it."""

    ref: TensorRef
    division: Division
    """Without copies."""
    first: int
    """At which of its ranks counting begins."""


@dataclass(frozen=True)
class SharedPlan:
    """What is stored, by whom. All ranks have the same but for ``chunks``."""

    tensors: Sequence[StoredTensor]
    chunks: Sequence[ChunkToWrite]
    """That this rank writes."""
    ties: Mapping[str, str]
    """Keys that are other names of tensors."""
    writers: int
    """How many ranks write something."""


def has_a_rule(description: TensorDescription) -> bool:
    """Whether everybody knows who has what of a tensor, and who is to write it."""
    division = description.division
    if division is None:
        return False
    if description.rank is not None:  # somebody must have all of it
        return bool(description.boxes) or 0 in description.shape
    if description.from_first_rank:  # rather than of the first in a mesh, which may list its ranks in any order
        return not division.cuts and division.ranks is None
    return True


def share_out(
    descriptions: Sequence[TensorDescription],
    rank: int,
    world_size: int,
    *,
    cut_copies: bool = True,
    smallest_share: int = SMALLEST_SHARE,
) -> SharedPlan:
    """Who writes what of tensors that are described alike on all ranks.

    Without ``cut_copies`` all of a part is written by one rank: copies that nobody has compared must not be mixed.
    """
    ties = agreed_ties({described.key: [(0, described)] for described in descriptions})
    kept = [described for described in descriptions if described.key not in ties] if ties else descriptions
    refs = [ref_of(described) for described in kept]
    largest = max(smallest_share, sum(ref.nbytes for ref in refs) // (world_size * SHARES_OF_A_RANK))
    kinds: dict[tuple[object, ...], _Kind] = {}
    kind_of: list[_Kind] = []
    numbers = DivisionNumbers()
    for described, ref in zip(kept, refs, strict=True):
        division = described.division
        assert division is not None
        known = numbers.of(division), ref.shape, ref.dtype.itemsize, described.from_first_rank
        if known not in kinds:
            rule = division._replace(copies=()) if described.from_first_rank else division
            kinds[known] = _Kind.of(rule, ref.shape, ref.dtype.itemsize, world_size, largest if cut_copies else None)
        kind_of.append(kinds[known])
    choices = _balanced(kind_of, world_size)
    stored: list[StoredTensor] = []
    chunks: list[ChunkToWrite] = []
    for number, (ref, kind, choice) in enumerate(zip(refs, kind_of, choices, strict=True)):
        stored.append(StoredTensor(ref, kind.division, kind.firsts[choice]))
        chunks += [
            ChunkToWrite(number, ref.key, ref.dtype, ref.shape, offsets, sizes)
            for offsets, sizes in kind.boxes_of(rank, choice)
        ]
    writes = np.zeros(world_size, np.bool_)
    for kind, choice in set(zip(kind_of, choices, strict=True)):  # once for all tensors that are stored alike
        writes[kind.writers[kind.nbytes > 0, choice]] = True
    return SharedPlan(stored, chunks, ties, int(writes.sum()))


class _Kind:
    """Tensors of one shape, dtype and rule: the shares they are written in, and who could write these."""

    def __init__(self, division: Division, shape: tuple[int, ...], itemsize: int, world_size: int) -> None:
        self.division = division._replace(copies=())
        self.firsts = [0]
        """Where counting may begin, which decides who writes."""
        for count, step in division.copies:
            self.firsts = [first + place * step for first in self.firsts for place in range(count)]
        self.writers = division.ranks_with(world_size=world_size)
        """Of each share, a row, the rank that writes it for each of these, a column."""
        self.nbytes = division.boxes(shape)[1].prod(axis=1) * itemsize
        """Of each share."""
        self._shape = shape
        self._boxes: dict[int, list[Box]] = {}

    @classmethod
    def of(
        cls, division: Division, shape: tuple[int, ...], itemsize: int, world_size: int, largest: int | None
    ) -> _Kind:
        """Cut into shares of at most about so many bytes (None: of any size) where several ranks have the same."""
        if not division.copies or largest is None:
            return cls(division, shape, itemsize, world_size)
        part = [int(size) for size in division.boxes(shape, np.zeros(1, np.int64))[1][0]]  # the first is the largest
        most, step = max(division.copies)
        wanted = min(most, -(-prod(part) * itemsize // largest))
        if wanted < 2:
            return cls(division, shape, itemsize, world_size)
        cuts = list(_cuts(part, most // (most // wanted)))
        shares = prod(cut.parts for cut in cuts)
        steps = [prod(cut.parts for cut in cuts[number + 1 :]) * step for number in range(len(cuts))]
        # Those who have a part are divided into teams of as many as there are shares. One of the teams writes it.
        teams = [(most // shares, step * shares) if copy == (most, step) else copy for copy in division.copies]
        return cls(
            Division((*division.cuts, *cuts), (*division.steps, *steps), tuple(teams), division.ranks),
            shape,
            itemsize,
            world_size,
        )

    def boxes_of(self, rank: int, choice: int) -> list[Box]:
        """The boxes that a rank writes, if counting begins at the place of that number."""
        if choice not in self._boxes:
            numbers = np.flatnonzero((self.writers[:, choice] == rank) & (self.nbytes > 0))
            offsets, sizes = self.division.boxes(self._shape, numbers)
            boxes = zip(offsets.tolist(), sizes.tolist(), strict=True)
            self._boxes[choice] = sorted(Box(tuple(at), tuple(lengths)) for at, lengths in boxes)
        return self._boxes[choice]


def _cuts(sizes: Sequence[int], shares: int) -> Iterator[Cut]:
    """How to cut a box into so many shares, or less, of which each is one run of bytes.

    The first dimension is cut, and the next one only if nothing more can be cut there.

    >>> list(_cuts([1, 10, 4], 4)), list(_cuts([2, 10], 8))
    ([Cut(dim=1, parts=4)], [Cut(dim=0, parts=2), Cut(dim=1, parts=4)])
    """
    for dim, size in enumerate(sizes):
        if size > 1:
            longest = -(-size // min(size, shares))
            parts = -(-size // longest)
            yield Cut(dim, parts)
            shares //= parts
            if longest > 1 or shares < 2:
                return


def _balanced(kinds: Sequence[_Kind], world_size: int) -> list[int]:
    """Which of the choices is taken for each tensor, so that all ranks write about as many bytes.

    Where there is no choice, that is counted first. The rest goes, largest first, to those of whom the busiest has
    least to write so far, the first of several.
    """
    loads = np.zeros(world_size, np.int64)
    choices = [0] * len(kinds)
    for kind, count in Counter(kind for kind in kinds if len(kind.firsts) == 1).items():
        loads[kind.writers[:, 0]] += kind.nbytes * count
    largest = {kind: int(kind.nbytes.max(initial=0)) for kind in set(kinds)}
    to_choose = [number for number, kind in enumerate(kinds) if len(kind.firsts) > 1]
    for number in sorted(to_choose, key=lambda number: -largest[kinds[number]]):
        kind = kinds[number]
        choice = choices[number] = int(loads[kind.writers].max(axis=0).argmin())
        loads[kind.writers[:, choice]] += np.maximum(kind.nbytes, 1)  # many that are empty are spread, too
    return choices
