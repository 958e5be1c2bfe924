"""Plans that every rank computes are those that the coordinator would have made of all ranks' plans."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard

from holdfast._dcp.replicas import fingerprint
from holdfast._dcp.save_planner import DefaultSavePlanner
from holdfast._dcp.shared_plan import ComputedPlan, Description, EntryKind, SharedLayout
from holdfast._dcp.storage import WriteResult
from holdfast._dcp.stored_columns import StoredColumns, planned_places
from holdfast._dcp.writer import refuse_incomplete
from holdfast._formats.dcp.index import decode_index, encode_index
from holdfast._formats.dcp.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    Seal,
    TensorProperties,
    _StorageInfo,
)
from holdfast._formats.dcp.plan import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType
from holdfast._layout.mesh_divisions import _among, division_of_mesh
from holdfast._layout.placements import local_pieces
from holdfast._ranks.copies import added_up, share_of_copy
from holdfast.errors import IncompleteSaveError

DTYPES = [torch.float32, torch.float16, torch.int64]


class Tensor:
    """A tensor on a mesh, without processes."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, mesh: tuple[int, ...], placements: list[Placement], first: int
    ) -> None:
        self.shape, self.dtype, self.mesh, self.placements = shape, dtype, mesh, placements
        self.ranks = range(first, first + math.prod(mesh))

    def __repr__(self) -> str:
        return f"Tensor({self.shape}, {self.dtype}, {self.mesh}, {self.placements}, {self.ranks[0]})"

    def item(self, key: str, rank: int) -> WriteItem | None:
        if rank not in self.ranks:
            return None
        place = rank - self.ranks[0]
        coordinate = []
        for size in reversed(self.mesh):
            coordinate.insert(0, place % size)
            place //= size
        (piece,) = local_pieces(self.shape, self.mesh, coordinate, self.placements)
        return write_item(key, WriteItemType.SHARD, piece.offsets, piece.sizes, self.shape, self.dtype)

    def kept(self, world_size: int) -> EntryKind:
        division = division_of_mesh(len(self.shape), self.mesh, self.placements, self.ranks)
        division = _among(division, world_size, None)
        assert division is not None
        return EntryKind(WriteItemType.SHARD, self.shape, (self.dtype, torch.strided, False, False), division)


class Whole:
    """A tensor that every rank has."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def __repr__(self) -> str:
        return f"Whole({self.shape}, {self.dtype})"

    def item(self, key: str, rank: int) -> WriteItem:
        return write_item(key, WriteItemType.TENSOR, (0,) * len(self.shape), self.shape, self.shape, self.dtype)

    def kept(self, world_size: int) -> EntryKind:
        return EntryKind(WriteItemType.TENSOR, self.shape, (self.dtype, torch.strided, False, False))


class Value:
    """A value of so many bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __repr__(self) -> str:
        return f"Value({self.nbytes})"

    def item(self, key: str, rank: int) -> WriteItem:
        return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, BytesIOWriteData(self.nbytes))

    def kept(self, world_size: int) -> EntryKind:
        return EntryKind(WriteItemType.BYTE_IO)


def write_item(key: str, kind: WriteItemType, offsets: Any, sizes: Any, shape: Any, dtype: torch.dtype) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(key, offsets), kind, tensor_data=data)


MESHES = {
    1: [(1,)],
    2: [(2,), (2, 1), (1, 2)],
    3: [(3,)],
    4: [(4,), (2, 2)],
    5: [(5,)],
    6: [(6,), (2, 3), (3, 2)],
    7: [(7,)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
}


@st.composite
def tensors(draw: st.DrawFn, world_size: int) -> Tensor:
    mesh = draw(st.sampled_from(MESHES[draw(st.sampled_from([world_size, max(1, world_size // 2)]))]))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 13]), min_size=1, max_size=3)))
    placement = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
    placements = [draw(placement) for _ in mesh]
    first = draw(st.sampled_from([0, world_size - math.prod(mesh)]))
    return Tensor(shape, draw(st.sampled_from(DTYPES)), mesh, placements, first)


@st.composite
def states(draw: st.DrawFn) -> tuple[int, list[Any]]:
    world_size = draw(st.integers(2, 8))
    whole = st.builds(Whole, st.lists(st.sampled_from([0, 1, 5]), max_size=2).map(tuple), st.sampled_from(DTYPES))
    member = st.one_of(tensors(world_size), tensors(world_size), whole, st.builds(Value, st.integers(0, 40)))
    return world_size, draw(st.lists(member, min_size=1, max_size=12))


def by_plans(world_size: int, members: list[Any], *, lowest: bool = False) -> tuple[list[SavePlan], Metadata]:
    plans = []
    for rank in range(world_size):
        items = [member.item(f"k{number}", rank) for number, member in enumerate(members)]
        plans.append(SavePlan([item for item in items if item is not None]))
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=lowest)
    return planner._create_global_plan(plans)


def by_rules(world_size: int, members: list[Any], *, lowest: bool = False, settled: Any = None) -> ComputedPlan:
    numbers: dict[EntryKind, int] = {}
    kind_of = [numbers.setdefault(member.kept(world_size), len(numbers)) for member in members]
    description = Description([f"k{number}" for number in range(len(members))], list(numbers), kind_of)
    sizes = {number: member.nbytes for number, member in enumerate(members) if isinstance(member, Value)}
    return SharedLayout(description, world_size, 0).plan(sizes, by_lowest=lowest, settled=settled)


def written(plan: SavePlan, rank: int) -> list[WriteResult]:
    """What writing a plan results in; values come first, and each rank has two files."""
    ordered = sorted(plan.items, key=lambda item: item.type is not WriteItemType.BYTE_IO)
    return [
        WriteResult(
            item.index, 7, _StorageInfo(f"__{rank}_{at % 2}", 300 * at, 300, None, Seal(64, at, 5**at, 1 << 31))
        )
        for at, item in enumerate(ordered)
    ]


def same(ours: Metadata, expected: Metadata) -> None:
    assert list(ours.state_dict_metadata) == list(expected.state_dict_metadata)
    assert ours.state_dict_metadata == expected.state_dict_metadata
    assert list(ours.storage_data.items()) == list(expected.storage_data.items())
    assert [index.index for index in ours.storage_data] == [index.index for index in expected.storage_data]


@given(states(), st.booleans())
@example((4, [Tensor((4,), torch.float32, (2, 2), [Shard(0), Shard(0)], 0), Value(3)]), False)
@example((6, [Tensor((4,), torch.float32, (2, 3), [Shard(0), Shard(0)], 0)] * 3), False)
def test_rules_lead_to_the_same_plans_and_the_same_index(state: tuple[int, list[Any]], lowest: bool) -> None:
    world_size, members = state
    plans, expected = by_plans(world_size, members, lowest=lowest)
    plan = by_rules(world_size, members, lowest=lowest)

    for rank in range(world_size):
        ours = plan.items_of(rank)
        assert ours == plans[rank].items
        assert [item.index.index for item in ours] == [item.index.index for item in plans[rank].items]

    results = [written(own, rank) for rank, own in enumerate(plans)]
    expected.storage_data = {result.index: result.storage_data for part in results for result in part}
    refuse_incomplete(expected)
    metadata = Metadata(plan.describe())
    metadata.leave_places(planned_places(plan, [StoredColumns.of(part, plan.key_numbers) for part in results]))
    encoded = encode_index(metadata)
    same(decode_index(encoded, source="rules"), decode_index(encode_index(expected), source="plans"))
    same(metadata, expected)


@given(states(), st.data())
def test_what_is_settled_is_written_by_the_rank_that_was_named(
    state: tuple[int, list[Any]], data: st.DataObject
) -> None:
    world_size, members = state
    values = [number for number, member in enumerate(members) if isinstance(member, Value)]
    owners = {number: data.draw(st.integers(0, world_size - 1)) for number in values}
    settled = {(number, 0): (owner, members[number].nbytes) for number, owner in owners.items()}
    plans = []
    for rank in range(world_size):
        items = [member.item(f"k{number}", rank) for number, member in enumerate(members)]
        own = [item for number, item in enumerate(items) if item is not None and owners.get(number, rank) == rank]
        plans.append(SavePlan(own))
    plans, _ = DefaultSavePlanner(flatten_state_dict=False)._create_global_plan(plans)

    plan = by_rules(world_size, members, settled=settled)
    assert [plan.items_of(rank) for rank in range(world_size)] == [own.items for own in plans]


def test_an_item_that_was_not_written_is_named() -> None:
    members = [Tensor((4,), torch.float32, (2,), [Shard(0)], 0), Value(3)]
    plans, _ = by_plans(2, members)
    plan = by_rules(2, members)
    results = [written(own, rank) for rank, own in enumerate(plans)]
    results[1] = [result for result in results[1] if result.index.fqn != "k0"]

    with pytest.raises(IncompleteSaveError, match=r"1 planned item.*fqn='k0', offset=torch.Size\(\[2\]\)"):
        planned_places(plan, [StoredColumns.of(part, plan.key_numbers) for part in results])


@given(st.lists(st.integers(0, 2), min_size=2, max_size=9), st.lists(st.integers(0, 2), min_size=2, max_size=9))
def test_shares_of_copies_add_up_to_nothing_only_if_all_are_equal(first: list[int], second: list[int]) -> None:
    shares = [
        share_of_copy(name, fingerprint(value).digest, copies=len(values), is_first=not at)
        for name, values in (("a", first), ("b", second))
        for at, value in enumerate(values)
    ]
    halves = [added_up(shares[:3]), added_up(shares[3:])]
    assert (added_up(halves) == 0) == (len(set(first)) == len(set(second)) == 1)
