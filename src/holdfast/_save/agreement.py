"""From what each rank holds to one checkpoint: who writes what, and the proof that it is complete."""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

from holdfast._base.boxes import Box, first_overlap, out_of_bounds, volume
from holdfast._base.tuning import ENTRIES_AT_ONCE
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.layout import ChunkToWrite
from holdfast._formats.native.refs import TensorRef
from holdfast._layout.descriptions import HeldTensor, Holding, address_of, memory_of
from holdfast.errors import InvalidPlanError, ReplicaMismatchError

# Lists of named tuples that travel between ranks.


Row = TypeVar("Row", bound=tuple[Any, ...])


class NamedRows(list[Row]):
    """A list of named tuples of one class, which is pickled as columns: several times faster than row by row.

    >>> import pickle
    >>> from holdfast._base.boxes import Box
    >>> pickle.loads(pickle.dumps(NamedRows([Box((0,), (2,)), Box((2,), (1,))])))
    [Box(offsets=(0,), sizes=(2,)), Box(offsets=(2,), sizes=(1,))]
    """

    def __reduce__(self) -> tuple[Any, ...]:
        parts = [self[at : at + ENTRIES_AT_ONCE] for at in range(0, len(self), ENTRIES_AT_ONCE)]
        return _joined, (
            type(self[0]) if self else None,
            [pickle.dumps(list(zip(*part, strict=True))) for part in parts],
        )


def _joined(kind: Any, parts: list[bytes]) -> NamedRows[Any]:
    rows: NamedRows[Any] = NamedRows()
    for part in parts:
        columns = pickle.loads(part)  # noqa: S301 - it came in a message of a rank of this job, as all of this did
        rows.extend(map(kind._make, zip(*columns, strict=True)))
    return rows


# Tied tensors: keys that are names of one tensor, and so are stored once.
#
# Every rank notes which of its keys have the very same memory, and the coordinator decides. Two keys are one tensor
# if every rank that holds one of them holds the other in the same memory, described alike. A rank whose parts of both
# have no elements cannot tell, and agrees with the others. What the ranks do not agree on is stored as separate
# tensors, each complete and with its copies compared, so a rank must be able to write and to compare every key that
# it has.


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


# From what each rank holds to one checkpoint: who writes what, and the proof that it is whole.
#
# This is pure arithmetic over descriptions; it happens on one rank, for all.


_MOST_SHOWN = 20

Held = list[tuple[int, Holding]]
"""What ranks hold under one key, lowest rank first."""


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
    by_key = _by_key(all_holdings)
    _refuse_different_kinds(by_key)
    ties = agreed_ties(by_key)
    tensors: list[TensorRef] = []
    differing: list[Differing] = []
    shares = _Shares(len(all_holdings))
    for key, held in by_key.items():
        if key in ties:
            continue
        ref = _ref(held)
        if len(held) > 1 and (groups := _differing_copies(held)) is not None:
            differing.append(Differing(key, groups))
            first_counts = True
        else:
            first_counts = held[0][1].from_first_rank
        for (offsets, sizes), ranks in _holders(ref, held):
            chunk = ChunkToWrite(len(tensors), key, ref.dtype, ref.shape, offsets, sizes)
            shares.offer(chunk, ranks[:1] if first_counts else ranks)
        tensors.append(ref)
    return Agreement(tensors, shares.settled(), ties, differing)


class _Shares:
    """What each rank writes."""

    def __init__(self, world_size: int) -> None:
        self._chunks: list[list[ChunkToWrite]] = [[] for _ in range(world_size)]
        self._undecided: list[tuple[ChunkToWrite, Sequence[int]]] = []

    def offer(self, chunk: ChunkToWrite, ranks: Sequence[int]) -> None:
        """One of these ranks is to write a chunk."""
        if len(ranks) == 1:
            self._chunks[ranks[0]].append(chunk)
        else:
            self._undecided.append((chunk, ranks))

    def settled(self) -> list[list[ChunkToWrite]]:
        """The chunks of each rank. What several could write goes, largest first, to the one with least to write."""
        if self._undecided:
            self._decide()
        for part in self._chunks:
            part.sort(key=_tensor_and_offsets)
        return self._chunks

    def _decide(self) -> None:
        loads = [sum(chunk.nbytes for chunk in part) for part in self._chunks]
        offers = [(chunk.nbytes, chunk, ranks) for chunk, ranks in self._undecided]
        for nbytes, chunk, ranks in sorted(offers, key=itemgetter(0), reverse=True):
            rank = min(ranks, key=loads.__getitem__)  # the lowest of those with least
            self._chunks[rank].append(chunk)
            loads[rank] += nbytes
        self._undecided.clear()


_tensor_and_offsets = attrgetter("tensor", "offsets")


def refuse_differing(differing: Sequence[Differing]) -> None:
    """Raise if ranks hold different things under one key, of which only one could be stored."""
    if differing:
        raise ReplicaMismatchError(
            describe_differing(differing, "Nothing was saved."), keys={one.key: str(one) for one in differing}
        )


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
            "holdfast.PerRank(value). If not, make the copies equal first, or say replica_mismatch='warn' to store "
            "those of the lowest rank.",
        ]
    )


def _by_key(all_holdings: Sequence[Sequence[Holding]]) -> dict[str, Held]:
    by_key: dict[str, Held] = {}
    for rank, holdings in enumerate(all_holdings):
        for holding in holdings:
            by_key.setdefault(holding.key, []).append((rank, holding))
    return by_key


def _ref(held: Held) -> TensorRef:
    key, dtype, shape, kind, _, rank, numpy, _, _, _ = held[0][1]
    return TensorRef(key, dtype_named(dtype), shape, kind, numpy, rank)


def _holders(ref: TensorRef, held: Held) -> Iterable[tuple[Box, Sequence[int]]]:
    """The boxes of a tensor with the ranks that hold them. Raises if the boxes are not the whole of it."""
    first = held[0][1].boxes
    if len(first) == 1 and first[0].sizes == ref.shape:  # all have all of it, as is most often so
        if len(held) == 1:
            return ((first[0], held[0][:1]),)
        if all(holding.boxes == first for _, holding in held):
            return ((first[0], [rank for rank, _ in held]),)
    holders: dict[Box, list[int]] = {}
    for rank, holding in held:
        for box in holding.boxes:
            holders.setdefault(box, []).append(rank)
    refuse_bad_tiling(ref, list(holders))
    return holders.items()


def _differing_copies(held: Held) -> tuple[tuple[int, ...], ...] | None:
    """The ranks grouped by equal copies, if there are several groups."""
    first = held[0][1]
    if first.from_first_rank or all(one.digests == first.digests and one.boxes == first.boxes for _, one in held):
        return None
    copies: dict[tuple[Box, bytes], list[int]] = defaultdict(list)
    boxes: dict[Box, int] = defaultdict(int)
    for rank, holding in held:
        if not holding.digests:
            continue  # nobody wants to know, or no other rank can have the same
        for box, digest in zip(holding.boxes, holding.digests, strict=True):
            if (box, digest) not in copies:
                boxes[box] += 1
            copies[box, digest].append(rank)
    for box, count in boxes.items():
        if count > 1:
            return tuple(tuple(ranks) for (where, _), ranks in copies.items() if where == box)
    return None


def _refuse_different_kinds(by_key: dict[str, Held]) -> None:
    """A key must be the same kind of tensor everywhere."""
    problems: dict[str, str] = {}
    for key, held in by_key.items():
        first = held[0][1]
        if all(one[1:4] == first[1:4] and one.numpy == first.numpy for _, one in held[1:]):
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
