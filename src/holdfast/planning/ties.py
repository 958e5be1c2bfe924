"""Tied tensors: keys that are names of one tensor, and so are stored once.

Every rank notes which of its keys have the very same memory, and the coordinator decides. Two keys are one tensor if
every rank that holds one of them holds the other in the same memory, described alike. A rank whose parts of both have
no elements cannot tell, and agrees with the others. What the ranks do not agree on is stored as separate tensors, each
complete and with its copies compared, so a rank must be able to write and to compare every key that it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.planning.holdings import HeldTensor, Holding, address_of, memory_of


def noted_ties(holdings: list[Holding], local: Mapping[str, HeldTensor]) -> list[Holding]:
    """One rank's descriptions, with those that are further names of the same memory, stored alike, marked as such."""
    addresses = [address_of(local[holding.key].value) for holding in holdings]
    how_often = Counter(addresses)
    if len(how_often) == len(addresses):
        return holdings
    first: dict[Any, str] = {}
    for number, (holding, address) in enumerate(zip(holdings, addresses, strict=True)):
        memory = memory_of(local[holding.key].value) if how_often[address] > 1 else None
        if memory is not None:
            name = first.setdefault((memory, holding.dtype, holding.kind, str(holding.numpy)), holding.key)
            if name != holding.key:
                holdings[number] = holding._replace(tied_to=name)
    return holdings


def agreed_ties(by_key: Mapping[str, Sequence[tuple[int, Holding]]]) -> dict[str, str]:
    """The keys that are stored under another one, given what the ranks hold under each."""
    noted = {
        name
        for held in by_key.values()
        for _, holding in held
        if holding.tied_to is not None
        for name in (holding.key, holding.tied_to)
    }
    ties: dict[str, str] = {}
    first: dict[Any, str] = {}
    for key, held in by_key.items() if noted else ():
        if key in noted and any(holding.boxes for _, holding in held):
            name = first.setdefault(tuple(_seen_by(rank, holding) for rank, holding in held), key)
            if name != key:
                ties[key] = name
    return ties


def _seen_by(rank: int, holding: Holding) -> tuple[Any, ...]:
    """What a rank says about a key that is the same for all names of one tensor."""
    memory = (holding.tied_to or holding.key) if holding.boxes else None
    described = holding._replace(key="", tied_to=None, numpy=str(holding.numpy), digests=())
    return rank, memory, described
