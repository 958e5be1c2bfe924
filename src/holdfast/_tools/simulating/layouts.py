"""States of models that are too large for this machine: shapes, and the rules by which they are divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isqrt, prod
from typing import NamedTuple

import numpy as np

from holdfast._base.boxes import Box
from holdfast._base.divisions import Cut, Division
from holdfast._layout.descriptions import TensorDescription

ITEMSIZE = 4
_SMALL_EVERY = 5
"""One in so many tensors is a vector, as norms and biases are."""


class Shape(NamedTuple):
    """A tensor of a state."""

    key: str
    sizes: tuple[int, ...]
    is_cut_by_columns: bool
    """Where tensor parallelism cuts its matrices along the second dimension."""


def shapes_of(tensors: int, nbytes: int) -> list[Shape]:
    """So many tensors that take about so many bytes: square matrices, and some vectors of their width.

    >>> [shape.sizes for shape in shapes_of(5, 5 * 4096)]
    [(35, 35), (35, 35), (35, 35), (35, 35), (35,)]
    """
    matrices = tensors - tensors // _SMALL_EVERY
    width = max(1, isqrt(nbytes // ITEMSIZE // matrices))
    return [
        Shape(f"layers.{number // _SMALL_EVERY}.{number % _SMALL_EVERY}.weight", sizes, number % 2 == 1)
        for number in range(tensors)
        for sizes in [(width,) if number % _SMALL_EVERY == _SMALL_EVERY - 1 else (width, width)]
    ]


Rule = Callable[[Shape], Division]


def _ddp(ranks: int, _: int) -> Rule:
    everywhere = Division(copies=((ranks, 1),))
    return lambda shape: everywhere


def _fsdp(ranks: int, _: int) -> Rule:
    rows = Division((Cut(0, ranks),), (1,))
    return lambda shape: rows


def _hsdp(ranks: int, group: int) -> Rule:
    rows = Division((Cut(0, group),), (1,), copies=((ranks // group, group),))
    return lambda shape: rows


def _tp_fsdp(ranks: int, group: int) -> Rule:
    """Tensor parallelism within groups, which cuts first, and FSDP over what has the same place in all groups."""
    groups = ranks // group
    by_rows = Division((Cut(0, group), Cut(0, groups)), (1, group))
    by_columns = Division((Cut(0, groups), Cut(1, group)), (group, 1))
    small = Division((Cut(0, groups),), (group,), copies=((group, 1),))
    return lambda shape: small if len(shape.sizes) == 1 else by_columns if shape.is_cut_by_columns else by_rows


LAYOUTS: dict[str, Callable[[int, int], Rule]] = {
    "fsdp": _fsdp,
    "hsdp": _hsdp,
    "tp+fsdp": _tp_fsdp,
    "ddp": _ddp,
}
"""What is made of a number of ranks, and of the size of the groups that they are in."""

GROUPED = ("hsdp", "tp+fsdp")
"""Those for which the size of groups matters."""


def described(shapes: list[Shape], rule: Rule, rank: int, world_size: int) -> list[TensorDescription]:
    """What a rank would say of its parts of the tensors."""
    rules = list(map(rule, shapes))
    distinct = {id(division): division for division in rules}
    numbers = {known: _part(division, rank, world_size) for known, division in distinct.items()}
    return list(_described(shapes, rules, numbers))


def _described(shapes: list[Shape], rules: list[Division], part_of: dict[int, int]) -> Iterator[TensorDescription]:
    for (key, sizes, _), division in zip(shapes, rules, strict=True):
        offsets, lengths = division.boxes(sizes, np.array([part_of[id(division)]]))
        boxes = (Box(tuple(offsets[0].tolist()), tuple(lengths[0].tolist())),) if lengths.all() else ()
        kind = "sharded" if division.cuts else "replicated"
        digests = (bytes(16),) * len(boxes) if division.copies else ()
        yield TensorDescription(key, "float32", sizes, kind, boxes, digests=digests, division=division)


def _part(division: Division, rank: int, world_size: int) -> int:
    """Which part a rank has."""
    return int(np.nonzero(division.ranks_with(world_size=world_size) == rank)[0][0])


def bytes_of(shapes: list[Shape]) -> int:
    """All bytes of a state, each counted once."""
    return sum(prod(shape.sizes) for shape in shapes) * ITEMSIZE


def held_bytes(descriptions: list[TensorDescription]) -> int:
    """What a rank holds of a state."""
    return sum(prod(sizes) for described in descriptions for _, sizes in described.boxes) * ITEMSIZE
