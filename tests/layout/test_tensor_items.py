"""Tensor kinds: what each holds on a rank, as items to write, chunks to fill and data, compared with stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor import Shard as LocalShardOf
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint import metadata as stock_metadata
from torch.distributed.checkpoint import planner as stock_planner
from torch.distributed.checkpoint import planner_helpers as stock_helpers
from torch.distributed.checkpoint import utils as stock_utils
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

from holdfast._dcp.state_objects import find_state_dict_object
from holdfast._formats.dcp.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from holdfast._formats.dcp.plan import TensorWriteData, WriteItem, WriteItemType
from holdfast._layout.tensor_items import (
    create_chunk_list,
    create_write_items,
    find_tensor_shard,
    local_tensor,
    may_be_replicated,
    on_this_rank,
)
from holdfast.errors import UnsupportedTensorError
from tests.properties import examples
from tests.rank_pool import RankPool
from tests.sharding import dtensor_of


def as_plain(item: Any) -> Any:
    """A write item of ours or of stock as plain data."""
    offset = item.index.offset
    named = (item.index.fqn, None if offset is None else tuple(offset), item.index.index, item.type.name)
    if item.tensor_data is None:
        return named
    chunk, properties = item.tensor_data.chunk, item.tensor_data.properties
    return (
        *named,
        (tuple(chunk.offsets), tuple(chunk.sizes), tuple(item.tensor_data.size)),
        (properties.dtype, properties.layout, properties.requires_grad, properties.pin_memory),
    )


def box(chunk: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(chunk.offsets), tuple(chunk.sizes)


def seen_by_both(value: Any) -> tuple[Any, Any]:
    """Items and chunks of a value, by us and by stock."""
    is_tensor = isinstance(value, torch.Tensor)
    return (
        (
            [as_plain(item) for item in create_write_items("key", value)],
            [box(chunk) for chunk in create_chunk_list(value)] if is_tensor else None,
        ),
        (
            [as_plain(item) for item in stock_helpers._create_write_items("key", value)],
            [box(chunk) for chunk in stock_helpers._create_chunk_list(value)] if is_tensor else None,
        ),
    )


# --- plain tensors and values ------------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 4), max_size=4)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2])


@settings(max_examples=examples(60))
@given(shapes, dtypes, st.sampled_from([lambda t: t, torch.nn.Parameter, lambda t: t.t() if t.dim() == 2 else t]))
def test_a_plain_tensor_is_one_item_and_one_chunk_as_in_stock(shape, dtype, wrap):
    tensor = torch.empty(shape, dtype=dtype)
    if wrap is not torch.nn.Parameter or dtype.is_floating_point or dtype.is_complex:
        tensor = wrap(tensor)
    ours, stock = seen_by_both(tensor)
    assert ours == stock
    assert len(ours[0]) == len(ours[1]) == 1


@pytest.mark.parametrize("value", [1, "text", None, [1], (torch.zeros(1),), {}, object()])
def test_anything_else_is_one_value_as_in_stock(value):
    ours, stock = seen_by_both(value)
    assert ours == stock == ([("key", None, None, "BYTE_IO")], None)


class Tagged(torch.Tensor):
    """A subclass with data of its own."""


def test_a_subclass_with_data_of_its_own_is_a_plain_tensor():
    ours, stock = seen_by_both(torch.zeros(2, 3).as_subclass(Tagged))
    assert ours == stock


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.empty(2, device="meta"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        TwoTensor(torch.zeros(2), torch.zeros(2)),
        torch.nn.UninitializedParameter(),
    ],
    ids=["sparse", "meta", "nested", "wrapper", "lazy"],
)
def test_a_tensor_without_bytes_is_refused_by_name_and_with_advice(tensor):
    with pytest.raises(UnsupportedTensorError, match=r"'some\.key'.*Convert it") as error:
        create_write_items("some.key", tensor)
    assert error.value.key == "some.key"


def test_a_plain_tensor_is_found_without_an_offset_or_at_the_origin_only():
    tensor = torch.zeros(2, 3)
    for index in (MetadataIndex("key"), MetadataIndex("key", [0, 0]), MetadataIndex("key", [0, 0], 5)):
        assert find_tensor_shard(tensor, index) is tensor
        assert stock_utils.find_tensor_shard(tensor, index) is tensor
    with pytest.raises(ValueError, match=r"'key'.*\(1, 0\)"):
        find_tensor_shard(tensor, MetadataIndex("key", [1, 0]))


def test_things_are_found_in_a_state_by_name():
    tensor, value = torch.zeros(2), object()
    state = {"tensor": tensor, "value": value}
    assert find_state_dict_object(state, MetadataIndex("tensor", [0])) is tensor
    assert find_state_dict_object(state, MetadataIndex("value")) is value
    with pytest.raises(ValueError, match=r"^Could not find FQN: 'gone'$"):
        find_state_dict_object(state, MetadataIndex("gone"))
    with pytest.raises(ValueError, match=r"'value' is not a ShardedTensor.* It is a object, which has no chunks"):
        find_state_dict_object(state, MetadataIndex("value", [0]))


# --- tensors that speak for themselves ---------------------------------------------------------------------------


class Halves(torch.Tensor):
    """Stores itself as two chunks; speaks in our terms, or in those of stock."""

    stock = False

    def __create_write_items__(self, fqn, object):
        assert object is self
        return [self._item(fqn, start) for start in (0, 2)]

    def __create_chunk_list__(self):
        return [self._item("", start).tensor_data.chunk for start in (0, 2)]

    def __get_tensor_shard__(self, index):
        return self.as_subclass(torch.Tensor)[index.offset[0] : index.offset[0] + 2]

    def _item(self, fqn, start):
        offsets, sizes = torch.Size([start]), torch.Size([2])
        if self.stock:
            m, p = stock_metadata, stock_planner
            data = p.TensorWriteData(m.ChunkStorageMetadata(offsets, sizes), m.TensorProperties(), torch.Size([4]))
            return p.WriteItem(m.MetadataIndex(fqn, offsets), p.WriteItemType.SHARD, tensor_data=data)
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(), torch.Size([4]))
        return WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)


class StockHalves(Halves):
    stock = True


@pytest.mark.parametrize("kind", [Halves, StockHalves])
def test_a_tensor_that_speaks_for_itself_is_asked_whatever_terms_it_uses(kind):
    tensor = torch.arange(4.0).as_subclass(kind)
    items, chunks = create_write_items("key", tensor), create_chunk_list(tensor)
    assert [type(item) for item in items] == [WriteItem, WriteItem]
    assert [type(chunk) for chunk in chunks] == [ChunkStorageMetadata, ChunkStorageMetadata]
    assert all(isinstance(item.tensor_data, TensorWriteData) for item in items)
    assert all(isinstance(item.tensor_data.properties, TensorProperties) for item in items)
    assert [type(item.index) for item in items] == [MetadataIndex, MetadataIndex]
    assert [box(item.tensor_data.chunk) for item in items] == [((0,), (2,)), ((2,), (2,))]
    assert [box(chunk) for chunk in chunks] == [((0,), (2,)), ((2,), (2,))]
    assert find_tensor_shard(tensor, items[1].index).tolist() == [2.0, 3.0]


# --- DTensor -----------------------------------------------------------------------------------------------------

placements = st.one_of(st.just(None), st.integers(0, 2))


@st.composite
def layouts(draw) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int | None, ...]]:
    """A shape, the shape of a mesh of 4 ranks, and the dimension that each mesh dimension splits, if any."""
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=3, max_size=3)))
    mesh = draw(st.sampled_from([(4,), (2, 2), (1, 4), (4, 1)]))
    return shape, mesh, tuple(draw(placements) for _ in mesh)


def made(shape, mesh_shape, dims) -> tuple[DTensor, torch.Tensor]:
    full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    mesh = init_device_mesh("cpu", mesh_shape)
    how = [Replicate() if dim is None else Shard(dim) for dim in dims]
    return dtensor_of(full, mesh, how), full


def items_chunks_and_data(cases):
    """Per layout: what we and stock see of a DTensor, and whether the data of each item is that of its box."""
    seen = []
    for case in cases:
        tensor, full = made(*case)
        ours, stock = seen_by_both(tensor)
        right = []
        for item in create_write_items("key", tensor):
            offsets, sizes = box(item.tensor_data.chunk)
            cut = full[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            right.append(torch.equal(find_tensor_shard(tensor, item.index), cut))
            right.append(torch.equal(find_tensor_shard(tensor, MetadataIndex("key")), local_tensor(tensor)))
        seen.append((ours, stock, all(right), may_be_replicated(tensor)))
    return seen


@settings(max_examples=examples(4))
@given(cases=st.lists(layouts(), min_size=6, max_size=12))
def test_a_dtensor_is_seen_as_stock_sees_it_and_every_item_has_its_data(ranks: RankPool, cases):
    per_rank = ranks(4).run(items_chunks_and_data, cases)
    for seen in per_rank:
        for ours, stock, right, _ in seen:
            assert ours == stock
            assert right
    for number, (shape, _, _) in enumerate(cases):
        held = [seen[number][0][0][0][1] for seen in per_rank if torch.Size(shape).numel()]
        if any(held.count(offset) > 1 for offset in held):
            assert all(seen[number][3] for seen in per_rank) or 0 in {
                size for seen in per_rank for size in seen[number][0][1][0][1]
            }


def interleaved():
    """Each rank holds a share of both halves, as a flattened view of a sharded dimension does."""
    full, rank = torch.arange(8.0), dist.get_rank()
    local = torch.cat([full[2 * rank : 2 * rank + 2], full[4 + 2 * rank : 6 + 2 * rank]])
    tensor = DTensor.from_local(
        local,
        init_device_mesh("cpu", (2,)),
        [_StridedShard(0, split_factor=2)],
        run_check=False,
        shape=torch.Size([8]),
        stride=(1,),
    )
    items = create_write_items("key", tensor)
    boxes = [box(chunk) for chunk in create_chunk_list(tensor)]
    return boxes, [find_tensor_shard(tensor, item.index).tolist() for item in items]


def test_each_of_several_chunks_of_a_local_tensor_has_its_own_part_of_it(ranks: RankPool):
    assert ranks(2).run(interleaved) == [
        ([((0,), (2,)), ((4,), (2,))], [[0.0, 1.0], [4.0, 5.0]]),
        ([((2,), (2,)), ((6,), (2,))], [[2.0, 3.0], [6.0, 7.0]]),
    ]


def outside_of_a_mesh():
    mesh = DeviceMesh("cpu", [0, 1])
    local = torch.zeros(2) if dist.get_rank() < 2 else torch.zeros(0)
    tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,))
    return on_this_rank(tensor), seen_by_both(tensor)


def test_a_rank_outside_of_the_mesh_has_nothing_to_write_or_fill(ranks: RankPool):
    *inside, outside = ranks(3).run(outside_of_a_mesh)
    for on_rank, (ours, stock) in inside:
        assert on_rank
        assert ours == stock
    assert outside[0] is False
    assert outside[1][0] == ([], [])


def partial():
    tensor = DTensor.from_local(torch.zeros(2), init_device_mesh("cpu", (2,)), [Partial()])
    errors = []
    for attempt in (lambda: create_write_items("some.key", tensor), lambda: create_chunk_list(tensor, key="some.key")):
        try:
            attempt()
        except ValueError as error:
            errors.append((type(error).__name__, str(error)))
    return errors


def test_a_dtensor_with_sums_to_be_made_is_refused_by_name(ranks: RankPool):
    for errors in ranks(2).run(partial):
        assert [name for name, _ in errors] == ["UnsupportedTensorError"] * 2
        for _, text in errors:
            assert "some.key" in text
            assert "not supported for DTensor with partial placements" in text


def data_of_a_gather_that_is_under_way():
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).redistribute(mesh, [Replicate()], async_op=True)
    found = find_tensor_shard(tensor, MetadataIndex("key", [0]))
    return type(found).__name__, found.tolist()


def test_data_that_is_still_under_way_is_waited_for(ranks: RankPool):
    assert ranks(2).run(data_of_a_gather_that_is_under_way) == [("Tensor", [0.0, 1.0, 2.0, 3.0])] * 2


def lookups_that_fail():
    tensor, _ = made((4, 1, 1), (2,), (0,))
    try:
        find_tensor_shard(tensor, MetadataIndex("some.key", [3, 0, 0]))
    except ValueError as error:
        return str(error)
    return None


def test_a_chunk_that_this_rank_does_not_hold_is_named(ranks: RankPool):
    first, second = ranks(2).run(lookups_that_fail)
    assert "'some.key' has chunks at offsets [(0, 0, 0)]" in first
    assert "'some.key' has chunks at offsets [(2, 0, 0)]" in second


class Mirrored(torch.Tensor):
    """Local data that speaks for the DTensor around it."""

    def __create_write_items__(self, fqn, object):
        assert isinstance(object, DTensor)
        data = TensorWriteData(self.__create_chunk_list__()[0], TensorProperties(), object.size())
        return [WriteItem(MetadataIndex(f"{fqn}.mirrored", [0]), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))]

    def __get_tensor_shard__(self, index):
        return torch.tensor([42.0])


def speaking_local_data():
    local = torch.zeros(2).as_subclass(Mirrored)
    tensor = DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)])
    return (
        [item.index.fqn for item in create_write_items("key", tensor)],
        [box(chunk) for chunk in create_chunk_list(tensor)],
        find_tensor_shard(tensor, MetadataIndex("key", [0])).tolist(),
    )


def test_local_data_that_speaks_for_itself_is_asked(ranks: RankPool):
    assert ranks(2).run(speaking_local_data) == [(["key.mirrored"], [((0,), (1,))], [42.0])] * 2


# --- ShardedTensor -----------------------------------------------------------------------------------------------


def sharded_tensor_seen():
    rank = dist.get_rank()
    full = torch.arange(24.0).reshape(8, 3)
    rows = {0: [(0, 2), (4, 1)], 1: [(2, 2), (5, 3)], 2: []}[rank]
    shards = [
        LocalShardOf.from_tensor_and_offsets(full[start : start + length].clone(), [start, 0], rank)
        for start, length in rows
    ]
    tensor = init_from_local_shards(shards, [8, 3])
    right = []
    for item in create_write_items("key", tensor):
        (row, _), (length, _) = box(item.tensor_data.chunk)
        for hint in (None, 0, 1, 9):
            found = find_tensor_shard(tensor, MetadataIndex("key", [row, 0], hint))
            right.append(torch.equal(found, full[row : row + length]))
    errors = []
    for index in (MetadataIndex("key"), MetadataIndex("key", [7, 0])):
        try:
            find_tensor_shard(tensor, index)
        except ValueError as error:
            errors.append("'key'" in str(error))
    return seen_by_both(tensor), right, errors, may_be_replicated(tensor)


def test_a_sharded_tensor_is_seen_as_stock_sees_it_and_every_item_has_its_data(ranks: RankPool):
    for (ours, stock), right, errors, replicated in ranks(3).run(sharded_tensor_seen):
        assert ours == stock
        assert all(right)
        assert errors == [True, True]
        assert not replicated


def replicated_or_not():
    results = []
    for mesh, dims in [((4,), (0,)), ((4,), (None,)), ((2, 2), (None, 0)), ((2, 2), (0, 1)), ((4, 1), (0, None))]:
        tensor, _ = made((8, 8, 1), mesh, dims)
        results.append(may_be_replicated(tensor))
    return results


def test_what_other_ranks_may_hold_too_is_known_from_the_layout(ranks: RankPool):
    assert ranks(4).run(replicated_or_not) == [[False, True, True, False, False]] * 4
    assert may_be_replicated(torch.zeros(1))
    assert may_be_replicated("value")
