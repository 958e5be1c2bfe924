"""From what each rank holds to one checkpoint: who writes what, and the proof that it is complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from holdfast._base.boxes import Box
from holdfast._base.texts import quoted_key
from holdfast._base.tiling import refuse_bad_tiling, tiling_problems
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.layout import ChunkToWrite
from holdfast._formats.native.refs import TensorRef
from holdfast._layout.descriptions import TensorDescription, address_of, memory_of
from holdfast._layout.many_descriptions import Descriptions, LocalTensors
from holdfast._layout.owners import balanced_owners
from holdfast._ranks.differences import Differing, differing, refuse_different_kinds

# Tied tensors: keys that are names of one tensor, and so are stored once.
#
# Every rank notes which of its keys have the very same memory, and the coordinator decides. Two keys are one tensor
# if every rank that holds one of them holds the other in the same memory, described alike. A rank whose parts of both
# have no elements cannot know, and agrees with the others. What the ranks do not agree on is stored as separate
# tensors, each complete and with its copies compared, so a rank must be able to write and to compare every key that
# it has.


def noted_ties(descriptions: Descriptions, local: LocalTensors) -> Descriptions:
    """One rank's descriptions, with those that are further names of the same memory, stored alike, marked as such."""
    values = local.values_in_order
    addresses = [address or address_of(value) for address, value in zip(local.addresses, values, strict=True)]
    if len(set(addresses)) == len(addresses):
        return descriptions
    how_often = Counter(addresses)
    first: dict[Any, str] = {}
    tied: dict[int, TensorDescription] = {}
    for number, address in enumerate(addresses):
        memory = memory_of(values[number]) if how_often[address] > 1 else None
        if memory is not None:
            description = descriptions[number]
            name = first.setdefault(
                (memory, description.dtype, description.kind, str(description.numpy)), description.key
            )
            if name != description.key:
                tied[number] = description._replace(tied_to=name)
    return descriptions.with_others(tied) if tied else descriptions


def ties_of_one(descriptions: Descriptions) -> dict[str, str]:
    """The keys that are stored under another one, given what one rank holds, or all of them alike."""
    names = {like.tied_to for like in descriptions.likes if like.tied_to is not None}
    if not names:
        return {}
    is_tied = descriptions.each([like.tied_to is not None for like in descriptions.likes])
    positions = [
        position
        for position, (key, tied) in enumerate(zip(descriptions.keys, is_tied, strict=True))
        if tied or key in names
    ]
    return agreed_ties({descriptions.keys[position]: [(0, descriptions[position])] for position in positions})


def agreed_ties(by_key: Mapping[str, Sequence[tuple[int, TensorDescription]]]) -> dict[str, str]:
    """The keys that are stored under another one, given what the ranks hold under each."""
    noted = {
        name
        for held in by_key.values()
        for _, description in held
        if description.tied_to is not None
        for name in (description.key, description.tied_to)
    }
    ties: dict[str, str] = {}
    first: dict[Any, str] = {}
    for key, held in by_key.items() if noted else ():
        if key in noted and any(description.boxes for _, description in held):
            name = first.setdefault(tuple(_seen_by(rank, description) for rank, description in held), key)
            if name != key:
                ties[key] = name
    return ties


def _seen_by(rank: int, description: TensorDescription) -> tuple[Any, ...]:
    """What a rank says about a key that is the same for all names of one tensor."""
    memory = (description.tied_to or description.key) if description.boxes else None
    described = description._replace(key="", tied_to=None, numpy=str(description.numpy), digests=())
    return rank, memory, described


# From what each rank holds to one checkpoint: who writes what, and the proof that it is complete.
#
# This is pure arithmetic over descriptions; it happens on one rank, for all.


Held = list[tuple[int, TensorDescription]]
"""What ranks hold under one key, lowest rank first."""


@dataclass(frozen=True)
class SaveAgreement:
    """One checkpoint: its tensors, the chunks that each rank writes, and which keys are other names of tensors."""

    tensors: Sequence[TensorRef]
    chunks: Sequence[Sequence[ChunkToWrite]]
    ties: dict[str, str]
    differing: Sequence[Differing]
    """Keys whose copies differ; of each the copy of the lowest rank is written."""


def agree(all_descriptions: Sequence[Sequence[TensorDescription]]) -> SaveAgreement:
    """Decide what is stored and who writes it, given what each rank holds."""
    by_key = _by_key(all_descriptions)
    _refuse_different_kinds(by_key)
    ties = agreed_ties(by_key)
    tensors: list[TensorRef] = []
    differing_keys: list[Differing] = []
    tilings: list[tuple[TensorRef, Sequence[Box]]] = []
    chunks: list[ChunkToWrite] = []
    writers: list[Sequence[int]] = []
    for key, held in by_key.items():
        if key in ties:
            continue
        ref = ref_of(held[0][1])
        if len(held) > 1 and (groups := _differing_copies(held)) is not None:
            differing_keys.append(Differing(key, groups))
            first_counts = True
        else:
            first_counts = held[0][1].from_first_rank
        holders = _holders(held)
        tilings.append((ref, list(holders)))
        for (offsets, sizes), ranks in holders.items():
            chunks.append(ChunkToWrite(len(tensors), key, ref.dtype, ref.shape, offsets, sizes))
            writers.append(ranks[:1] if first_counts else ranks)
        tensors.append(ref)
    refuse_bad_tilings(tilings)
    return SaveAgreement(tensors, _shared_out(chunks, writers, len(all_descriptions)), ties, differing_keys)


def _shared_out(
    chunks: Sequence[ChunkToWrite], holders: Sequence[Sequence[int]], world_size: int
) -> list[list[ChunkToWrite]]:
    """What each rank writes, given who could write each chunk."""
    shares: list[list[ChunkToWrite]] = [[] for _ in range(world_size)]
    owners = balanced_owners(holders, [chunk.nbytes for chunk in chunks], world_size)
    for chunk, owner in zip(chunks, owners, strict=True):
        shares[owner].append(chunk)
    for share in shares:
        share.sort(key=_tensor_and_offsets)
    return shares


_tensor_and_offsets = attrgetter("tensor", "offsets")


def _by_key(all_descriptions: Sequence[Sequence[TensorDescription]]) -> dict[str, Held]:
    by_key: dict[str, Held] = {}
    for rank, descriptions in enumerate(all_descriptions):
        for description in descriptions:
            by_key.setdefault(description.key, []).append((rank, description))
    return by_key


def ref_of(description: TensorDescription) -> TensorRef:
    """What the checkpoint says of a tensor."""
    key, dtype, shape, kind, _, rank, numpy, *_ = description
    return TensorRef(key, dtype_named(dtype), shape, kind, numpy, rank)


def _holders(held: Held) -> Mapping[Box, Sequence[int]]:
    """The boxes of a tensor with the ranks that hold them."""
    first = held[0][1].boxes
    if len(first) == 1 and all(description.boxes == first for _, description in held):  # as is most often so
        return {first[0]: [rank for rank, _ in held]}
    holders: dict[Box, list[int]] = {}
    for rank, description in held:
        for box in description.boxes:
            holders.setdefault(box, []).append(rank)
    return holders


def _differing_copies(held: Held) -> tuple[tuple[int, ...], ...] | None:
    """The ranks grouped by equal copies, if there are several groups."""
    first = held[0][1]
    if first.from_first_rank or all(one.digests == first.digests and one.boxes == first.boxes for _, one in held):
        return None
    found = differing(
        (box, rank, digest)
        for rank, description in held
        if description.digests  # else nobody wants to know, or no other rank can have the same
        for box, digest in zip(description.boxes, description.digests, strict=True)
    )
    return next((tuple(map(tuple, groups.values())) for groups in found.values()), None)


def _refuse_different_kinds(by_key: dict[str, Held]) -> None:
    """A key must be the same kind of tensor everywhere."""
    suspects = {
        key: held
        for key, held in by_key.items()
        if any(one[1:4] != held[0][1][1:4] or one.numpy != held[0][1].numpy for _, one in held[1:])
    }
    refuse_different_kinds(
        differing((key, rank, _kind(description)) for key, held in suspects.items() for rank, description in held),
        "Give them different keys, make them the same on all ranks, or wrap them in holdfast.PerRank if each has its "
        "own.",
    )


def _kind(description: TensorDescription) -> str:
    what = f"{description.kind} tensor" if description.numpy is None else f"numpy array ({description.numpy})"
    return f"a {what} of shape {list(description.shape)} and {description.dtype}"


def refuse_bad_tilings(tensors: Iterable[tuple[TensorRef, Sequence[Box]]]) -> None:
    """Raise if the boxes of any tensor do not cover it exactly."""
    problems = [
        f"{quoted_key(ref.key)}: {problem}" for ref, boxes in tensors for problem in tiling_problems(boxes, ref.shape)
    ]
    refuse_bad_tiling(problems, "The chunks that the ranks would save do not tile their tensors:")
