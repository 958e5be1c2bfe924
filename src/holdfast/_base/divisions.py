"""Tensors that are divided by a rule: which box each part is and which rank has it, computed in arrays.

A sharded tensor has as many parts as there are ranks, and a model thousands of tensors. Where a rule says what the
parts are, nobody needs a list of them: a rule is a few numbers however many ranks there are, equal rules can be
compared, and whoever wants to know about some of the parts computes just these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast._base.boxes import BoxLike

Numbers = npt.NDArray[np.int64]


class Cut(NamedTuple):
    """One dimension, cut into parts of equal length; the last ones may be shorter, or have nothing."""

    dim: int
    parts: int


class Division(NamedTuple):
    """A tensor that is cut, and then each part of it, and so on, and which ranks have the parts.

    The parts are numbered in the order of their places in the cuts, the last cut's place changing fastest. A part's
    place in a cut, multiplied by the cut's step, is how many ranks further on it is found.
    """

    cuts: tuple[Cut, ...] = ()
    """One after the other. Cutting ``n`` cells into ``p`` parts gives parts of ``ceil(n / p)`` cells, as long as there
    are so many left."""
    steps: tuple[int, ...] = ()
    """One per cut."""
    copies: tuple[tuple[int, int], ...] = ()
    """How often every part is there, and the step from one rank that has it to the next, for each dimension of a mesh
    over which it is replicated."""
    ranks: tuple[int, ...] | None = None
    """The ranks that are counted, as a mesh lists them; None for all, in their order."""

    @property
    def part_count(self) -> int:
        """The number of parts, with those that have no cells."""
        return math.prod(cut.parts for cut in self.cuts)

    @property
    def copy_count(self) -> int:
        """How many ranks have each part."""
        return math.prod(count for count, _ in self.copies)

    def boxes(self, shape: Sequence[int], numbers: Numbers | None = None) -> tuple[Numbers, Numbers]:
        """The offsets and the sizes of parts (all by default) of a tensor of that shape, one row for each.

        >>> offsets, sizes = Division((Cut(0, 2), Cut(1, 2)), (2, 1)).boxes((3, 4))
        >>> offsets.tolist(), sizes.tolist()
        ([[0, 0], [0, 2], [2, 0], [2, 2]], [[2, 2], [2, 2], [1, 2], [1, 2]])
        """
        places = self._places(numbers)
        rows = self.part_count if numbers is None else len(numbers)
        offsets = np.zeros((rows, len(shape)), np.int64)
        sizes = np.empty((rows, len(shape)), np.int64)
        sizes[:] = shape
        for dim, parts, own in self._by_dimension():
            first, length = _sides(shape[dim], parts)
            position = np.ravel_multi_index([places[number] for number in own], parts)
            offsets[:, dim], sizes[:, dim] = first[position], length[position]
        return offsets, sizes

    def overlapping(self, shape: Sequence[int], box: BoxLike) -> Numbers:
        """The numbers of the parts that share cells with a box, in ascending order.

        >>> from holdfast._base.boxes import Box
        >>> Division((Cut(0, 4),), (1,)).overlapping((8, 3), Box((3, 0), (2, 3))).tolist()
        [1, 2]
        """
        if not all(box.sizes):
            return np.zeros(0, np.int64)
        numbers = np.zeros(1, np.int64)
        weights = self._weights()
        for dim, parts, own in self._by_dimension():
            first, length = _sides(shape[dim], parts)
            begin, end = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
            found = np.flatnonzero((first < end) & (first + length > begin) & (length > 0))
            places = np.unravel_index(found, parts)
            here = sum((places[at] * weights[number] for at, number in enumerate(own)), np.zeros(len(found), np.int64))
            numbers = (numbers[:, None] + here).ravel()
        numbers.sort()
        return numbers

    def ranks_with(self, numbers: Numbers | None = None, *, first: int = 0, world_size: int = 0) -> Numbers:
        """The ranks that have some parts (all by default), one row per part and one column per copy.

        Counting starts at the rank of number ``first`` and goes on in a circle. ``world_size`` is needed where all
        ranks are counted.

        >>> Division((Cut(0, 2),), (1,), copies=((2, 2),)).ranks_with(world_size=4).tolist()
        [[0, 2], [1, 3]]
        """
        rows = self.part_count if numbers is None else len(numbers)
        at = np.full((rows, 1), first, np.int64)
        for place, step in zip(self._places(numbers), self.steps, strict=True):
            at += place[:, None] * step
        for count, step in self.copies:
            at = (at[:, :, None] + np.arange(count) * step).reshape(rows, -1)
        if self.ranks is None:
            return at % world_size
        return np.asarray(self.ranks, np.int64)[at % len(self.ranks)]

    def _places(self, numbers: Numbers | None) -> tuple[Numbers, ...]:
        """The places of parts in the cuts, one array per cut."""
        if not self.cuts:
            return ()
        wanted = np.arange(self.part_count) if numbers is None else numbers
        return np.unravel_index(wanted, tuple(cut.parts for cut in self.cuts))

    def _weights(self) -> list[int]:
        """By how much a part's number grows with its place in each cut."""
        return [math.prod(cut.parts for cut in self.cuts[number + 1 :]) for number in range(len(self.cuts))]

    def _by_dimension(self) -> list[tuple[int, tuple[int, ...], list[int]]]:
        """Each dimension that is cut, with the numbers of parts, and which cuts these are."""
        dims: dict[int, list[int]] = {}
        for number, cut in enumerate(self.cuts):
            dims.setdefault(cut.dim, []).append(number)
        return [(dim, tuple(self.cuts[number].parts for number in own), own) for dim, own in dims.items()]


class DivisionNumbers:
    """Different divisions, numbered in the order in which they are first seen.

    Those of a mesh of thousands of ranks take long to compare, and most tensors have the very same one.

    >>> numbers = DivisionNumbers()
    >>> [numbers.of(Division()), numbers.of(Division((Cut(0, 2),), (1,))), numbers.of(Division())]
    [0, 1, 0]
    """

    def __init__(self) -> None:
        self.known: dict[Division | None, int] = {}
        self._by_identity: dict[int, tuple[int, Division | None]] = {}

    def of(self, division: Division | None) -> int:
        """The number of one, which may be None."""
        found = self._by_identity.get(id(division))
        if found is None:
            number = self.known.setdefault(division, len(self.known))
            # An identity means nothing once what had it is gone.
            found = self._by_identity[id(division)] = number, division
        return found[0]


@lru_cache(maxsize=1024)
def _sides(size: int, parts: tuple[int, ...]) -> tuple[Numbers, Numbers]:
    """Where the parts of a dimension begin that is cut several times, and how long they are."""
    first, length = np.zeros(1, np.int64), np.full(1, size, np.int64)
    for count in parts:
        longest = -(-length // count)
        begin = np.minimum(length[:, None], longest[:, None] * np.arange(count))
        first = (first[:, None] + begin).ravel()
        length = np.minimum(longest[:, None], length[:, None] - begin).ravel()
    return first, length
