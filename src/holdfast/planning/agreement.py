"""From what each rank holds to one checkpoint: who writes what, and the proof that it is whole.

This is pure arithmetic over descriptions; it happens on one rank, for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from holdfast.boxes import Box, first_overlap, out_of_bounds, volume
from holdfast.errors import InvalidPlanError, ReplicaMismatchError
from holdfast.formats.native.dtypes import dtype_named
from holdfast.formats.native.layout import ChunkToWrite
from holdfast.formats.native.refs import TensorRef
from holdfast.planning.holdings import Holding

_MOST_SHOWN = 20


class Differing(NamedTuple):
    """A key under which ranks hold different things, with the ranks grouped by what they hold."""

    key: str
    groups: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        place = f"'{self.key}'" if self.key else "the state itself"
        return f"{place}: " + " != ".join(f"ranks {_ranks(group)}" for group in self.groups[:4])


@dataclass(frozen=True)
class Agreement:
    """One checkpoint: its tensors, the chunks that each rank writes, and which keys are other names of tensors."""

    tensors: Sequence[TensorRef]
    chunks: Sequence[Sequence[ChunkToWrite]]
    ties: dict[str, str]
    differing: Sequence[Differing]
    """Keys whose copies differ; of each the copy of the lowest rank is written."""


def agree(all_holdings: Sequence[Sequence[Holding]]) -> Agreement:
    """Decide what is stored and who writes it, given what each rank holds."""
    by_key: dict[str, list[tuple[int, Holding]]] = {}
    for rank, holdings in enumerate(all_holdings):
        for holding in holdings:
            by_key.setdefault(holding.key, []).append((rank, holding))
    _refuse_different_kinds(by_key)
    ties = _agreed_ties(by_key)
    tensors: list[TensorRef] = []
    shared: list[tuple[int, int, Box, list[int]]] = []
    load = [0] * len(all_holdings)
    chunks: list[list[ChunkToWrite]] = [[] for _ in all_holdings]
    differing: list[Differing] = []
    for key, held in by_key.items():
        if key in ties:
            continue
        number = len(tensors)
        ref = _ref(held)
        tensors.append(ref)
        if len(held) == 1 and (box := _whole_box(held[0][1])) is not None:
            rank = held[0][0]
            load[rank] += volume(box.sizes) * ref.dtype.itemsize
            chunks[rank].append(_chunk(number, ref, box))
            continue
        holders = _holders(held)
        refuse_bad_tiling(ref, list(holders))
        groups = _differing_copies(held)
        if groups is not None:
            differing.append(Differing(key, groups))
        one_rank_counts = groups is not None or held[0][1].from_first_rank
        for box, ranks in holders.items():
            size = volume(box.sizes) * ref.dtype.itemsize
            if len(ranks) == 1 or one_rank_counts:
                load[ranks[0]] += size
                chunks[ranks[0]].append(_chunk(number, ref, box))
            else:
                shared.append((size, number, box, ranks))
    # What several could write goes, largest first, to the one that has least to write so far.
    for size, number, box, ranks in sorted(shared, key=lambda item: -item[0]):
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        load[writer] += max(1, size)
        chunks[writer].append(_chunk(number, tensors[number], box))
    for part in chunks:
        part.sort(key=lambda chunk: (chunk.tensor, chunk.offsets))
    return Agreement(tensors, chunks, ties, differing)


def refuse_differing(differing: Sequence[Differing], *, outcome: str = "Nothing was saved.") -> None:
    """Raise if ranks hold different things under one key, of which only one could be stored."""
    if differing:
        raise ReplicaMismatchError(describe_differing(differing, outcome), keys={d.key: str(d) for d in differing})


def describe_differing(differing: Sequence[Differing], outcome: str) -> str:
    """What to tell the user about keys whose copies differ."""
    lines = [f"  {one}" for one in differing[:_MOST_SHOWN]]
    if len(differing) > _MOST_SHOWN:
        lines.append(f"  … and {len(differing) - _MOST_SHOWN} more")
    return "\n".join(
        [
            f"Ranks hold different values under {len(differing)} key(s), of which only one can be stored:",
            *lines,
            f"{outcome} If every rank's value matters (a data position, a random state), wrap it in "
            "holdfast.PerRank(value). If not, make the copies equal first, or say check_replicas='warn' to store those "
            "of the lowest rank.",
        ]
    )


def _chunk(number: int, ref: TensorRef, box: Box) -> ChunkToWrite:
    return ChunkToWrite(number, ref.key, ref.dtype, ref.shape, box.offsets, box.sizes)


def _ref(held: Sequence[tuple[int, Holding]]) -> TensorRef:
    first = held[0][1]
    return TensorRef(first.key, dtype_named(first.dtype), first.shape, first.kind, first.numpy, first.rank)


def _whole_box(holding: Holding) -> Box | None:
    """The only box of a tensor, if there is just one: most tensors of one process are so."""
    boxes = holding.boxes
    return boxes[0] if len(boxes) == 1 and boxes[0].sizes == holding.shape else None


def _holders(held: Sequence[tuple[int, Holding]]) -> dict[Box, list[int]]:
    if len(held) == 1:
        rank, holding = held[0]
        return {box: [rank] for box in holding.boxes}
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank, holding in held:
        for box in holding.boxes:
            holders[box].append(rank)
    return holders


def _agreed_ties(by_key: dict[str, list[tuple[int, Holding]]]) -> dict[str, str]:
    """Keys that are another name of an earlier one on every rank that has them."""
    ties: dict[str, str] = {}
    for key, held in by_key.items():
        names = {holding.tied_to for _, holding in held}
        if len(names) == 1 and (name := names.pop()) is not None:
            first = ties.get(name, name)
            if {rank for rank, _ in by_key[first]} == {rank for rank, _ in held} and _same(by_key[first], held):
                ties[key] = first
    return ties


def _same(one: Sequence[tuple[int, Holding]], other: Sequence[tuple[int, Holding]]) -> bool:
    """Whether two keys are stored alike; a cast of one of them alone makes them different things."""
    return one[0][1]._replace(key="", tied_to=None, digests=()) == other[0][1]._replace(
        key="", tied_to=None, digests=()
    )


def _differing_copies(held: Sequence[tuple[int, Holding]]) -> tuple[tuple[int, ...], ...] | None:
    """The ranks grouped by equal copies, if there are several groups."""
    if len(held) == 1 or held[0][1].from_first_rank:
        return None
    copies: dict[tuple[Box, bytes], list[int]] = defaultdict(list)
    boxes: dict[Box, int] = defaultdict(int)
    for rank, holding in held:
        for box, digest in zip(holding.boxes, holding.digests, strict=False):
            if (box, digest) not in copies:
                boxes[box] += 1
            copies[box, digest].append(rank)
    for box, count in boxes.items():
        if count > 1:
            return tuple(tuple(ranks) for (where, _), ranks in copies.items() if where == box)
    return None


def _refuse_different_kinds(by_key: dict[str, list[tuple[int, Holding]]]) -> None:
    """A key must be the same kind of tensor everywhere."""
    problems: dict[str, str] = {}
    for key, held in by_key.items():
        if len(held) == 1:
            continue
        kinds: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
        for rank, holding in held:
            what = f"{holding.kind} tensor" if holding.numpy is None else f"numpy array ({holding.numpy})"
            kinds.setdefault((what, holding.shape, holding.dtype), []).append(rank)
        if len(kinds) > 1:
            problems[key] = "; ".join(
                f"a {what} of shape {list(shape)} and {dtype} on ranks {_ranks(ranks)}"
                for (what, shape, dtype), ranks in kinds.items()
            )
    if problems:
        lines = "\n".join(f"  '{key}': {text}" for key, text in list(problems.items())[:_MOST_SHOWN])
        raise ReplicaMismatchError(
            f"One key stands for different tensors on different ranks:\n{lines}\nNothing was saved. Give them "
            "different keys, make them the same on all ranks, or wrap them in holdfast.PerRank if each has its own.",
            keys=problems,
        )


def refuse_bad_tiling(ref: TensorRef, boxes: Sequence[Box]) -> None:
    """Raise if boxes do not cover a tensor exactly."""
    expected = prod(ref.shape)
    problem = None
    if len(boxes) == 1 and boxes[0].sizes == ref.shape:
        return
    if out_of_bounds(boxes, ref.shape):
        problem = f"chunks lie outside of a tensor of shape {list(ref.shape)}"
    elif first_overlap(boxes) is not None:
        problem = "chunks overlap"
    elif (stored := sum(volume(box.sizes) for box in boxes)) != expected:
        problem = f"the ranks that save hold {stored} of its {expected} elements"
    if problem is not None:
        raise InvalidPlanError(
            f"'{ref.key}' cannot be saved: {problem}. Save with all ranks that hold parts of it. Nothing was saved.",
            problems=[f"{ref.key}: {problem}"],
        )


def _ranks(group: Sequence[int]) -> str:
    shown = ",".join(map(str, group[:8]))
    return shown if len(group) <= 8 else f"{shown},… ({len(group)} in all)"
