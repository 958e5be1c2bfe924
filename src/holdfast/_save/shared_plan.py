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
from itertools import chain
from math import prod

import numpy as np

from holdfast._base.alike import Numbers, numbered
from holdfast._base.boxes import Box
from holdfast._base.divisions import Cut, Division, DivisionNumbers
from holdfast._base.tuning import SMALLEST_SHARE
from holdfast._formats.native.layout import Chunks, ChunkToWrite
from holdfast._formats.native.refs import TensorRefs
from holdfast._formats.native.shapes import numbers_of, starts_of
from holdfast._formats.native.stored_parts import PartsByRule
from holdfast._layout.descriptions import TensorDescription
from holdfast._layout.many_descriptions import Descriptions
from holdfast._save.agreement import ref_of, ties_of_one

SHARES_OF_A_RANK = 4
"""Parts that are larger than this share of what a rank writes are cut: what is left to be balanced is then smaller."""


@dataclass(frozen=True)
class SharedPlan:
    """What is stored, by whom. All ranks have the same but for ``chunks``."""

    tensors: TensorRefs
    parts: Sequence[PartsByRule]
    """Of each tensor: who writes which part of it."""
    chunks: Chunks
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
    kept = Descriptions.of(descriptions)
    ties = ties_of_one(kept)
    if ties:
        kept = kept.chosen(np.array([number for number, key in enumerate(kept.keys) if key not in ties], np.int64))
    refs = [ref_of(like) for like in kept.likes]
    total = sum(ref.nbytes * count for ref, count in zip(refs, kept.how_often(), strict=True))
    largest = max(smallest_share, total // (world_size * SHARES_OF_A_RANK))
    kinds: dict[tuple[object, ...], _Kind] = {}
    kind_of_like: list[_Kind] = []
    numbers = DivisionNumbers()
    for described, ref in zip(kept.likes, refs, strict=True):
        division = described.division
        assert division is not None
        known = numbers.of(division), ref.shape, ref.dtype.itemsize, described.from_first_rank
        if known not in kinds:
            rule = division._replace(copies=()) if described.from_first_rank else division
            kinds[known] = _Kind.of(rule, ref.shape, ref.dtype.itemsize, world_size, largest if cut_copies else None)
        kind_of_like.append(kinds[known])
    kind_of = kept.each(kind_of_like)
    choices = _balanced(kind_of, world_size)
    looks, which = numbered(zip(kept.kinds.tolist(), choices, strict=True))
    parts: list[PartsByRule] = []
    likes: list[list[ChunkToWrite]] = []
    writes = np.zeros(world_size, np.bool_)
    for like, choice in looks:  # once for all tensors that are stored alike
        kind, ref = kind_of_like[like], refs[like]
        parts.append(PartsByRule(kind.division, kind.firsts[choice]))
        likes.append([ChunkToWrite(0, "", ref.dtype, ref.shape, *box) for box in kind.boxes_of(rank, choice)])
        writes[kind.writers[kind.nbytes > 0, choice]] = True
    return SharedPlan(
        TensorRefs(kept.keys, refs, kept.kinds),
        [parts[look] for look in which.tolist()],
        _chunks_of(kept.keys, likes, which),
        ties,
        int(writes.sum()),
    )


def _chunks_of(keys: list[str], likes: Sequence[Sequence[ChunkToWrite]], which: Numbers) -> Chunks:
    """The chunks of tensors with these keys, given what those of a kind of tensors are like, and the kind of each."""
    counts = np.fromiter(map(len, likes), np.int64, len(likes))
    kinds = numbers_of(starts_of(counts), counts, which)
    tensors = np.repeat(np.arange(len(keys)), counts[which])
    own = keys if len(tensors) == len(keys) and (counts == 1).all() else [keys[number] for number in tensors.tolist()]
    return Chunks(own, list(chain.from_iterable(likes)), kinds, tensors)


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
    how_often = Counter(kinds)
    for kind, count in how_often.items():
        if len(kind.firsts) == 1:
            loads[kind.writers[:, 0]] += kind.nbytes * count
    if all(len(kind.firsts) == 1 for kind in how_often):
        return choices
    largest = {kind: int(kind.nbytes.max(initial=0)) for kind in how_often}
    to_choose = [number for number, kind in enumerate(kinds) if len(kind.firsts) > 1]
    for number in sorted(to_choose, key=lambda number: -largest[kinds[number]]):
        kind = kinds[number]
        choice = choices[number] = int(loads[kind.writers].max(axis=0).argmin())
        loads[kind.writers[:, choice]] += np.maximum(kind.nbytes, 1)  # many that are empty are spread, too
    return choices
