"""Which rank has stored which part of a tensor: by a rule, or, where there is none, part by part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast._base.divisions import Cut, Division, DivisionNumbers
from holdfast._base.json_objects import are_sizes
from holdfast._base.json_parts import dumps
from holdfast._formats.native.blocks import refuse
from holdfast._formats.native.refs import TensorRef, TensorRefs

Numbers = npt.NDArray[np.int64]

MOST_RANKS = 1 << 20
MOST_PARTS = 1 << 20
_MOST_CUTS = 64

WHOLE = Division()
"""A tensor that one rank has stored as a whole."""


class PartsByRule(NamedTuple):
    """Parts that follow from a few numbers, however many ranks there are."""

    division: Division
    """Without copies: each part is stored once."""
    first: int = 0
    """Which of the ranks that the division counts is the first one."""


class PartsByList(NamedTuple):
    """Parts that no rule describes, with a row for each. None of them is empty."""

    offsets: Numbers
    """One row per part, one column per dimension."""
    sizes: Numbers
    ranks: Numbers


StoredParts: TypeAlias = PartsByRule | PartsByList


class _Chunk(Protocol):
    @property
    def tensor(self) -> int: ...
    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...


def parts_of_shares(
    tensors: Sequence[TensorRef], shares: Mapping[int, Iterable[_Chunk]] | Sequence[Iterable[_Chunk]]
) -> list[StoredParts]:
    """Where tensors are stored, given the chunks that each rank writes: by a rule if one rank writes all of it."""
    by_rank = shares.items() if isinstance(shares, Mapping) else enumerate(shares)
    found: list[StoredParts | None] = [None] * len(tensors)
    listed: dict[int, list[tuple[tuple[int, ...], tuple[int, ...], int]]] = {}
    for rank, chunks in by_rank:
        whole = PartsByRule(WHOLE, rank)
        for chunk in chunks:
            if chunk.sizes == tensors[chunk.tensor].shape:
                found[chunk.tensor] = whole
            else:
                listed.setdefault(chunk.tensor, []).append((chunk.offsets, chunk.sizes, rank))
    for tensor, rows in listed.items():
        found[tensor] = listed_parts(rows)
    nothing = PartsByRule(WHOLE)
    return [nothing if parts is None else parts for parts in found]


def listed_parts(rows: Iterable[tuple[Sequence[int], Sequence[int], int]]) -> PartsByList:
    """Parts, given as offsets, sizes and rank, in the order of their offsets."""
    offsets, sizes, ranks = zip(*sorted(rows), strict=True)
    return PartsByList(np.array(offsets, np.int64), np.array(sizes, np.int64), np.array(ranks, np.int64))


# As a record has them: rules that many tensors have in common are written once.


class Places(NamedTuple):
    """The parts of all tensors, as a record and an index have them."""

    divisions: Sequence[Division]
    division_of: Sequence[int]
    """Of each tensor the number of its division; -1 if its parts are in the index."""
    first_of: Sequence[int]


NO_PLACES = Places((), (), ())


def places_of(parts: Sequence[StoredParts]) -> Places:
    """What a record says of where tensors are stored."""
    numbers = DivisionNumbers()
    known: dict[int, tuple[int, int]] = {}  # by identity: thousands of tensors have the very same
    for stored in {id(stored): stored for stored in parts}.values():
        if isinstance(stored, PartsByList):
            known[id(stored)] = -1, 0
        else:
            known[id(stored)] = numbers.of(stored.division), stored.first
    divisions = [division for division in numbers.known if division is not None]
    for division in divisions:
        if division.copies:
            raise ValueError(f"a stored division has each part once, and {division} has copies")
    return Places(divisions, [known[id(stored)][0] for stored in parts], [known[id(stored)][1] for stored in parts])


def division_rows(divisions: Sequence[Division]) -> tuple[list[str], list[str]]:
    """What a record says of divisions, and the lists of ranks that they refer to."""
    lists: dict[tuple[int, ...], int] = {}
    rows = []
    for division in divisions:
        members: dict[str, Any] = {"cuts": [list(cut) for cut in division.cuts], "steps": list(division.steps)}
        if division.ranks is not None:
            members["ranks"] = lists.setdefault(division.ranks, len(lists))
        rows.append(dumps(members))
    return rows, [dumps(list(ranks)) for ranks in lists]


def divisions_from(rows: Any, lists: Any, world_size: int, source: str) -> list[Division]:
    """The divisions of a record, and the lists of ranks that they refer to."""
    if not isinstance(rows, list) or not isinstance(lists, list):
        refuse(source, "has no divisions of tensors", "lists", type(rows).__name__)
    known = []
    for ranks in lists:
        if not isinstance(ranks, list) or not ranks or not are_sizes(ranks) or max(ranks) >= world_size:
            refuse(source, "has a wrong list of ranks", f"some numbers below {world_size}", ranks)
        known.append(tuple(ranks))
    return [_division(row, known, source) for row in rows]


def _division(row: Any, lists: Sequence[tuple[int, ...]], source: str) -> Division:
    cuts, steps = (row.get("cuts"), row.get("steps")) if isinstance(row, dict) else (None, None)
    if not isinstance(cuts, list) or len(cuts) > _MOST_CUTS or not all(map(_is_cut, cuts)):
        refuse(source, "has a division with wrong cuts", f"up to {_MOST_CUTS} of [dimension, parts]", cuts)
    if prod(parts for _, parts in cuts) > MOST_PARTS:
        refuse(source, "has a division into too many parts", f"at most {MOST_PARTS}", cuts)
    if (
        not isinstance(steps, list)
        or not are_sizes(steps)
        or len(steps) != len(cuts)
        or max(steps, default=0) > MOST_RANKS
    ):
        refuse(source, "has a division with wrong steps", f"{len(cuts)} numbers", steps)
    ranks = row.get("ranks")
    if ranks is not None and not (type(ranks) is int and 0 <= ranks < len(lists)):
        refuse(source, "has a division over unknown ranks", f"below {len(lists)}", ranks)
    return Division(
        tuple(Cut(dim, parts) for dim, parts in cuts),
        tuple(steps),
        ranks=None if ranks is None else lists[ranks],
    )


def _is_cut(cut: Any) -> bool:
    return are_sizes(cut) and len(cut) == 2 and cut[0] < 1 << 10 and 1 <= cut[1] <= MOST_PARTS


def checked_places(
    tensors: TensorRefs, rows: Sequence[Mapping[str, Any]], divisions: Sequence[Division], source: str
) -> Places:
    """What a record says of each tensor as ``division`` and ``first``, given the rows of those that are alike."""
    given, first_of = [row.get("division", 0) for row in rows], [row.get("first", 0) for row in rows]
    if not {int, type(None)}.issuperset(map(type, given)) or not {int}.issuperset(map(type, first_of)):
        refuse(source, "does not say how tensors are divided", "numbers", "others")
    dims = [max((cut.dim for cut in division.cuts), default=-1) for division in divisions]
    for kind, (ref, division, first) in enumerate(zip(tensors.likes, given, first_of, strict=True)):
        if division is not None and not 0 <= division < len(divisions):
            what, expected, found = "has an unknown division for", f"below {len(divisions)}", division
        elif not 0 <= first < MOST_RANKS:
            what, expected, found = "has no valid first rank for", f"below {MOST_RANKS}", first
        elif division is not None and dims[division] >= len(ref.shape):
            what, expected, found = (
                "cuts a dimension that does not exist, of",
                f"below {len(ref.shape)}",
                dims[division],
            )
        else:
            continue
        if 0 not in ref.shape:
            key = tensors.keys[int(np.argmax(tensors.kinds == kind))]
            refuse(source, f"{what} {key!r}", expected, found)
    return Places(
        divisions,
        tensors.each([-1 if division is None else division for division in given]),
        tensors.each(first_of),
    )
