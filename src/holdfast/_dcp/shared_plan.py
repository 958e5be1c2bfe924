"""Plans that every rank computes for itself, where all ranks have described the same state.

What a rank would send to the coordinator follows from the keys and from the rules by which tensors are divided. If all
ranks have the same of both, each of them knows what all of them write, and no plan is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from holdfast._base.divisions import Division, Numbers
from holdfast._base.tuning import ENTRIES_AT_ONCE
from holdfast._compat.sharded_tensors import ShardedTensor
from holdfast._dcp.replicas import fingerprint
from holdfast._dcp.state_objects import find_state_dict_object, is_ordinary
from holdfast._formats.dcp.columns import ChunkColumns, ChunksLater
from holdfast._formats.dcp.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast._formats.dcp.plan import BytesIOWriteData, TensorWriteData, WriteItem, WriteItemType
from holdfast._layout.checkpointable import is_checkpointable
from holdfast._layout.mesh_divisions import dtensor_division
from holdfast._layout.part_owners import Divided, HeldParts, Owned, Settled, owned_parts
from holdfast._layout.placements import dtensor_pieces
from holdfast._layout.tensor_items import (
    WRITE_HOOK,
    local_tensor,
    on_this_rank,
    refuse_if_it_has_no_bytes,
    speaks_for_itself,
)
from holdfast._layout.tensor_kinds import is_dtensor
from holdfast._ranks.copies import added_up, share_of_copy


class EntryKind(NamedTuple):
    """What is kept under a key, as all ranks know it."""

    type: WriteItemType
    size: tuple[int, ...] = ()
    properties: tuple[torch.dtype, torch.layout, bool, bool] | None = None
    """The dtype, the layout, whether it requires gradients, and whether its memory is pinned; None for a value."""
    division: Division | None = None
    """None if every rank has all of it."""


_VALUE = EntryKind(WriteItemType.BYTE_IO)


class Description(NamedTuple):
    """A flat state as all ranks know it."""

    keys: list[str]
    kinds: list[EntryKind]
    """The different kinds of things that there are."""
    kind_of: list[int]
    """For each key the number of its kind."""

    def digest(self, options: object, paths: Mapping[str, Any] | None) -> bytes:
        """Equal on ranks that have the same keys, kinds of things, options and paths of keys."""
        digest = xxhash.xxh3_128()
        each = (self.keys, self.kind_of, list((paths or {}).items()))
        for values in ([self.kinds, options, paths is None], *(part for many in each for part in _in_parts(many))):
            digest.update(repr(values).encode("utf-8", "surrogatepass"))
        return digest.digest()


def _in_parts(values: list[Any]) -> Iterator[list[Any]]:
    """While Python writes out one of them, no other thread runs."""
    yield [len(values)]
    for start in range(0, len(values), ENTRIES_AT_ONCE):
        yield values[start : start + ENTRIES_AT_ONCE]


def describe(state_dict: Mapping[Any, Any], members: tuple[int, ...]) -> Description | None:
    """A flat state, by rules; None if there is something that has no rule, or a key that no plan takes.

    ``members`` are the ranks that save, as the whole job counts them.
    """
    numbers: dict[EntryKind, int] = {}
    kind_of = []
    for fqn, value in state_dict.items():
        kept = _kept(fqn, value, members) if isinstance(fqn, str) else None
        if kept is None:
            return None
        kind_of.append(numbers.setdefault(kept, len(numbers)))
    return Description(list(state_dict), list(numbers), kind_of)


def _kept(fqn: str, value: Any, members: tuple[int, ...]) -> EntryKind | None:
    if not isinstance(value, torch.Tensor):
        return _VALUE
    if is_ordinary(value):
        return EntryKind(WriteItemType.TENSOR, tuple(value.shape), _properties(value))
    if is_dtensor(value):
        return _kept_of_dtensor(fqn, value, members)
    if hasattr(type(value), WRITE_HOOK) or isinstance(value, ShardedTensor) or is_checkpointable(value):
        return None
    refuse_if_it_has_no_bytes(fqn, value)
    return EntryKind(WriteItemType.TENSOR, tuple(value.shape), _properties(value))


def _kept_of_dtensor(fqn: str, tensor: Any, members: tuple[int, ...]) -> EntryKind | None:
    local = local_tensor(tensor)
    if speaks_for_itself(tensor, WRITE_HOOK) or hasattr(local, WRITE_HOOK):
        return None
    if on_this_rank(tensor):
        dtensor_pieces(tensor, key=fqn)  # which refuses what is not as the placements say
        refuse_if_it_has_no_bytes(fqn, local)
    division = dtensor_division(tensor, len(members), members)
    if division is None:
        return None
    return EntryKind(WriteItemType.SHARD, tuple(tensor.shape), _properties(local), division)


def _properties(tensor: torch.Tensor) -> tuple[torch.dtype, torch.layout, bool, bool]:
    described = TensorProperties.create_from_tensor(tensor)
    return described.dtype, described.layout, described.requires_grad, described.pin_memory


@dataclass(frozen=True)
class OwnCopies:
    """What this rank holds that others hold too."""

    share: int
    """What it adds to the sum by which the ranks find out whether all copies are equal."""
    digests: dict[tuple[int, int], bytes]
    """By the number of the key and that of the part."""
    value_bytes: dict[int, int]
    """About how many bytes each value has, by the number of its key."""


class SharedLayout:
    """Who holds what, for all ranks, as it follows from a description."""

    def __init__(self, description: Description, world_size: int, rank: int) -> None:
        self.description = description
        self.world_size = world_size
        self.rank = rank
        known: dict[tuple[Division | None, tuple[int, ...]], HeldParts] = {}
        self._parts = [self._parts_of(kept, known) for kept in description.kinds]
        self._own = [parts.part_of(rank) for parts in self._parts]

    def _parts_of(self, kept: EntryKind, known: dict[tuple[Division | None, tuple[int, ...]], HeldParts]) -> HeldParts:
        which = kept.division, kept.size
        if which not in known:
            known[which] = HeldParts(kept.division, kept.size, self.world_size)
        return known[which]

    def copies(self, state_dict: Mapping[str, Any]) -> OwnCopies:
        """Digests of all that other ranks hold too."""
        shares: list[int] = []
        digests: dict[tuple[int, int], bytes] = {}
        value_bytes: dict[int, int] = {}
        for number, (fqn, kind) in enumerate(zip(self.description.keys, self.description.kind_of, strict=True)):
            parts, own = self._parts[kind], self._own[kind]
            if parts.copies == 1 or own is None:
                continue
            is_value = self.description.kinds[kind].type is WriteItemType.BYTE_IO
            offset = None if is_value else parts.offsets[own].tolist()
            print_ = fingerprint(find_state_dict_object(state_dict, MetadataIndex(fqn, offset)))
            if is_value:
                value_bytes[number] = print_.nbytes
            if not parts.elements[own]:
                continue  # there is nothing to compare, and ranks with other parts may have the same of it
            digests[number, own] = print_.digest
            is_first = bool(parts.holders[own, 0] == self.rank)
            shares.append(share_of_copy(f"{fqn} {own}", print_.digest, copies=parts.copies, is_first=is_first))
        return OwnCopies(added_up(shares), digests, value_bytes)

    def plan(self, value_bytes: Mapping[int, int], *, by_lowest: bool, settled: Settled | None = None) -> ComputedPlan:
        """What each rank writes. ``settled`` are copies that are not equal, and who writes them."""
        tensors = []
        for number, kind in enumerate(self.description.kind_of):
            properties = self.description.kinds[kind].properties
            each = value_bytes.get(number, 1) if properties is None else properties[0].itemsize
            tensors.append(Divided(self._parts[kind], each))
        owned = owned_parts(tensors, self.world_size, by_lowest=by_lowest, settled=settled)
        return ComputedPlan(self, owned, dict(value_bytes))

    def bytes_of(self, number: int, part: int, value_bytes: Mapping[int, int]) -> int:
        """How many bytes a part of a key has."""
        kind = self.description.kind_of[number]
        properties = self.description.kinds[kind].properties
        if properties is None:
            return value_bytes.get(number, 1)
        return int(self._parts[kind].elements[part]) * properties[0].itemsize


class ComputedPlan:
    """What each rank writes."""

    def __init__(self, layout: SharedLayout, owned: list[Owned], value_bytes: dict[int, int]) -> None:
        self.layout = layout
        self.description = layout.description
        self._owned = owned
        self._value_bytes = value_bytes
        self._columns: dict[tuple[int, int], ChunkColumns] = {}
        self._write_data: dict[tuple[int, int], TensorWriteData] = {}

    @cached_property
    def key_numbers(self) -> dict[str, int]:
        """The number of each key."""
        return {fqn: number for number, fqn in enumerate(self.description.keys)}

    def items_of(self, rank: int) -> list[WriteItem]:
        """What a rank writes, in the order of its state."""
        items = []
        places: dict[int, int | None] = {}
        for number, (fqn, kind) in enumerate(zip(self.description.keys, self.description.kind_of, strict=True)):
            owned = self._owned[number]
            if id(owned) not in places:
                at = int(np.searchsorted(owned.ranks, rank))
                places[id(owned)] = at if at < len(owned.ranks) and owned.ranks[at] == rank else None
            hint = places[id(owned)]
            if hint is not None:
                items.append(self._item(fqn, number, kind, hint))
        return items

    def _item(self, fqn: str, number: int, kind: int, hint: int) -> WriteItem:
        kept = self.description.kinds[kind]
        if kept.properties is None:
            nbytes = self._value_bytes.get(number)
            size = None if nbytes is None else BytesIOWriteData(nbytes)
            return WriteItem(MetadataIndex(fqn), kept.type, bytes_io_data=size)
        data = self._data(kind, int(self._owned[number].numbers[hint]))
        return WriteItem(MetadataIndex(fqn, data.chunk.offsets, hint), kept.type, tensor_data=data)

    def _data(self, kind: int, part: int) -> TensorWriteData:
        """What a part is, which is the same object for all keys of one kind."""
        data = self._write_data.get((kind, part))
        if data is None:
            size = torch.Size(self.description.kinds[kind].size)
            data = TensorWriteData(self._chunk(kind, part), self._properties[kind], size)
            self._write_data[kind, part] = data
        return data

    def _chunk(self, kind: int, part: int) -> ChunkStorageMetadata:
        parts = self.layout._parts[kind]
        return ChunkStorageMetadata(torch.Size(parts.offsets[part].tolist()), torch.Size(parts.sizes[part].tolist()))

    @cached_property
    def _properties(self) -> list[TensorProperties]:
        return [
            TensorProperties() if kept.properties is None else _as_record(kept.properties)
            for kept in self.description.kinds
        ]

    def owners(self, number: int) -> Numbers:
        """The ranks that write parts of a key, in the order of its chunks."""
        return self._owned[number].ranks

    def chunks(self, number: int) -> ChunkColumns | None:
        """The chunks of a key, in the order of the index; None for a value. Equal ones are one and the same object."""
        kind = self.description.kind_of[number]
        if self.description.kinds[kind].properties is None:
            return None
        parts, owned = self.layout._parts[kind], self._owned[number]
        which = id(parts), id(owned)
        if which not in self._columns:
            self._columns[which] = ChunkColumns(parts.offsets[owned.numbers], parts.sizes[owned.numbers])
        return self._columns[which]

    def describe(self) -> dict[str, STORAGE_TYPES]:
        """The keys of the checkpoint as the index lists them: those that rank 0 writes something of come first."""
        described: dict[str, STORAGE_TYPES] = {}
        for number in sorted(range(len(self._owned)), key=lambda number: int(self._owned[number].ranks[0])):
            kept = self.description.kinds[self.description.kind_of[number]]
            if kept.properties is None:
                entry: STORAGE_TYPES = BytesStorageMetadata()
            else:
                later = ChunksLater(partial(_chunks_of, self, number))
                entry = TensorStorageMetadata.with_chunks_later(
                    _as_record(kept.properties), torch.Size(kept.size), later
                )
            described[self.description.keys[number]] = entry
        return described


def _chunks_of(plan: ComputedPlan, number: int) -> ChunkColumns:
    chunks = plan.chunks(number)
    assert chunks is not None
    return chunks


def _as_record(properties: tuple[torch.dtype, torch.layout, bool, bool]) -> TensorProperties:
    dtype, layout, requires_grad, pin_memory = properties
    return TensorProperties(dtype, layout, requires_grad, pin_memory=pin_memory)
