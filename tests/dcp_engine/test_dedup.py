"""Who writes an item that several ranks hold: exactly one rank, and by bytes a fair one."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as stock_metadata
from torch.distributed.checkpoint import planner as stock_planner
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans as stock_dedup

from holdfast._dcp.replicas import dedup_save_plans
from holdfast._formats.dcp.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from holdfast._formats.dcp.plan import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    written_bytes,
)
from tests.properties import examples


def tensor_item(key: str, sizes=(4,), offsets=None, full=None, dtype=torch.float32) -> WriteItem:
    offsets = torch.Size(offsets if offsets is not None else [0] * len(sizes))
    chunk = ChunkStorageMetadata(offsets, torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(full or sizes))
    return WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)


def value_item(key: str, nbytes: int | None = None) -> WriteItem:
    size = None if nbytes is None else BytesIOWriteData(nbytes)
    return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, bytes_io_data=size)


def as_stock(plan: SavePlan) -> stock_planner.SavePlan:
    return stock_planner.SavePlan([as_stock_item(item) for item in plan.items])


def as_stock_item(item: WriteItem) -> stock_planner.WriteItem:
    index = stock_metadata.MetadataIndex(item.index.fqn, item.index.offset)
    if item.tensor_data is None:
        return stock_planner.WriteItem(index, stock_planner.WriteItemType.BYTE_IO)
    chunk = stock_metadata.ChunkStorageMetadata(item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes)
    properties = stock_metadata.TensorProperties(dtype=item.tensor_data.properties.dtype)
    data = stock_planner.TensorWriteData(chunk, properties, item.tensor_data.size)
    return stock_planner.WriteItem(index, stock_planner.WriteItemType.SHARD, tensor_data=data)


@st.composite
def items(draw, number: int) -> WriteItem:
    key = f"key{number}"
    if draw(st.booleans()):
        return value_item(key, draw(st.none() | st.integers(0, 2000)))
    sizes = draw(st.lists(st.integers(0, 9), max_size=3))
    offsets = [draw(st.integers(0, 9)) for _ in sizes]
    full = [size + offset for size, offset in zip(sizes, offsets, strict=True)]
    dtype = draw(st.sampled_from([torch.int8, torch.float32, torch.complex128]))
    return tensor_item(key, sizes, offsets, full, dtype)


@st.composite
def plans(draw, max_ranks: int = 4, max_items: int = 12) -> list[SavePlan]:
    """Items, each held by some ranks, in another order on each rank."""
    ranks = draw(st.integers(1, max_ranks))
    held: list[list[WriteItem]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(0, max_items))):
        item = draw(items(number))
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            held[rank].append(item)
    return [SavePlan(draw(st.permutations(mine))) for mine in held]


def indices(plan) -> list[tuple[str, tuple[int, ...] | None]]:
    return [(item.index.fqn, item.index.offset and tuple(item.index.offset)) for item in plan.items]


def bytes_of(plan: SavePlan) -> int:
    return sum(written_bytes(item) for item in plan.items)


@settings(max_examples=examples(60))
@given(plans(), st.booleans())
def test_every_item_stays_with_exactly_one_rank_that_holds_it_in_its_order(all_plans, lowest):
    result = dedup_save_plans(all_plans, lowest)
    assert len(result) == len(all_plans)
    kept = [index for plan in result for index in indices(plan)]
    assert len(kept) == len(set(kept))
    assert set(kept) == {index for plan in all_plans for index in indices(plan)}
    for before, after in zip(all_plans, result, strict=True):
        mine = set(indices(after))
        assert after.items == [item for item in before.items if indices(SavePlan([item]))[0] in mine]


@settings(max_examples=examples(60))
@given(plans(), st.booleans())
def test_the_set_of_items_that_is_written_is_that_of_stock(all_plans, lowest):
    stock = stock_dedup([as_stock(plan) for plan in all_plans], lowest)
    ours = dedup_save_plans(all_plans, lowest)
    assert {i for plan in ours for i in indices(plan)} == {i for plan in stock for i in indices(plan)}
    if lowest:
        assert [indices(plan) for plan in ours] == [indices(plan) for plan in stock]


@settings(max_examples=examples(30))
@given(plans())
def test_the_lowest_rank_writes_what_it_holds_if_asked_to(all_plans):
    result = dedup_save_plans(all_plans, save_to_lowest_rank=True)
    for rank, plan in enumerate(result):
        below = {index for lower in all_plans[:rank] for index in indices(lower)}
        assert indices(plan) == [index for index in indices(all_plans[rank]) if index not in below]


def best_possible(sizes: list[int], ranks: int) -> int:
    """The smallest maximal load over all ways to share the items out."""
    return min(
        max(sum(size for size, rank in zip(sizes, owners, strict=True) if rank == r) for r in range(ranks))
        for owners in itertools.product(range(ranks), repeat=len(sizes))
    )


@settings(max_examples=examples(50))
@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(1, 3))
def test_what_all_ranks_hold_is_shared_out_within_a_third_of_the_best_possible(sizes, ranks):
    shared = [tensor_item(f"key{number}", [size], dtype=torch.int8) for number, size in enumerate(sizes)]
    loads = [bytes_of(plan) for plan in dedup_save_plans([SavePlan(shared)] * ranks)]
    assert sum(loads) == sum(sizes)
    # What is known of placing the largest first (Graham 1969).
    assert 3 * ranks * max(loads) <= (4 * ranks - 1) * best_possible(sizes, ranks)


@settings(max_examples=examples(60))
@given(st.data(), st.integers(2, 4))
def test_what_ranks_hold_alone_is_counted_before_the_rest_is_shared_out(data, ranks):
    own = [data.draw(st.integers(1, 100)) for _ in range(ranks)]
    shared = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=10))
    assume(sum(shared) > 0)
    common = [tensor_item(f"shared{number}", [size], dtype=torch.int8) for number, size in enumerate(shared)]
    all_plans = [SavePlan([tensor_item(f"own{rank}", [own[rank]], dtype=torch.int8), *common]) for rank in range(ranks)]
    loads = [bytes_of(plan) for plan in dedup_save_plans(all_plans)]
    average = (sum(own) + sum(shared)) / ranks
    assert max(loads) <= max(max(own), average + (1 - 1 / ranks) * max(shared))


def test_the_bytes_of_the_chunk_count_and_not_those_of_the_full_tensor():
    # Both ranks hold all of it: one chunk of 60 bytes in a small tensor, six of 10 bytes in huge ones.
    large = tensor_item("large", [60], full=[60], dtype=torch.int8)
    small = [tensor_item(f"small{n}", [10], offsets=[0], full=[10_000], dtype=torch.int8) for n in range(6)]
    first, second = dedup_save_plans([SavePlan([*small, large])] * 2)
    assert (bytes_of(first), bytes_of(second)) == (60, 60)


def test_values_count_by_their_size_if_it_is_known():
    large, small = value_item("large", 1000), [value_item(f"small{n}", 10) for n in range(5)]
    first, second = dedup_save_plans([SavePlan([*small, large])] * 2)
    assert [item.index.fqn for item in first.items] == ["large"]
    assert len(second.items) == 5


def test_items_without_bytes_are_spread_too():
    empty = [tensor_item(f"empty{n}", [0, 5]) for n in range(6)]
    assert [len(plan.items) for plan in dedup_save_plans([SavePlan(empty)] * 3)] == [2, 2, 2]


def test_a_rank_that_lists_an_item_twice_writes_it_once():
    item, other = tensor_item("a"), tensor_item("b")
    first, second = dedup_save_plans([SavePlan([item, other, item]), SavePlan([other])])
    assert sorted(i.index.fqn for i in [*first.items, *second.items]) == ["a", "b"]


@settings(max_examples=examples(30))
@given(plans())
def test_plans_are_not_changed_but_copied(all_plans):
    before = [list(plan.items) for plan in all_plans]
    with_data = [SavePlan(plan.items, storage_data=f"s{n}", planner_data=f"p{n}") for n, plan in enumerate(all_plans)]
    result = dedup_save_plans(with_data)
    assert [list(plan.items) for plan in all_plans] == before
    assert [(plan.storage_data, plan.planner_data) for plan in result] == [
        (f"s{n}", f"p{n}") for n in range(len(all_plans))
    ]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float64, torch.complex128])
def test_written_bytes_are_elements_times_their_size(dtype):
    item = tensor_item("a", [3, 5], offsets=[1, 1], full=[10, 10], dtype=dtype)
    assert written_bytes(item) == prod([3, 5]) * torch.zeros(1, dtype=dtype).element_size()
    assert item.tensor_storage_size() == 100 * torch.zeros(1, dtype=dtype).element_size()
    assert value_item("v").tensor_storage_size() is None
