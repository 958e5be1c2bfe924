"""ShardedTensors: the local shards of one, nested ones included, and their flattened form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors as stock_flatten

from holdfast._layout.sharded_tensors import flatten_sharded_tensors, local_shards
from tests.rank_pool import RankPool


def full_tensor() -> torch.Tensor:
    return torch.arange(48.0).reshape(8, 6)


def cut(offsets, sizes) -> torch.Tensor:
    return full_tensor()[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].clone()


def described(*boxes) -> ShardedTensorMetadata:
    """What all ranks know of a tensor: ``(rank, offsets, sizes)`` of every shard."""
    shards = [ShardMetadata(list(offsets), list(sizes), f"rank:{rank}/cpu") for rank, offsets, sizes in boxes]
    size = [max(o + s for o, s in sides) for sides in zip(*(zip(o, s, strict=True) for _, o, s in boxes), strict=True)]
    return ShardedTensorMetadata(shards, torch.Size(size), TensorProperties(dtype=torch.float32))


def sharded(local: dict[tuple[int, ...], torch.Tensor], *boxes) -> ShardedTensor:
    metadata = described(*boxes)
    mine = [
        Shard(local[tuple(md.shard_offsets)], md)
        for md in metadata.shards_metadata
        if md.placement.rank() == dist.get_rank()
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(mine, sharded_tensor_metadata=metadata)


def nested() -> ShardedTensor:
    """Rows over pairs of ranks, columns within a pair: what FSDP1 over tensor parallelism makes on 4 ranks."""
    pair, place = divmod(dist.get_rank(), 2)
    rows, columns = 4 * pair, 3 * place
    inner_boxes = [(2 * pair + p, (0, 3 * p), (4, 3)) for p in range(2)]
    inner = sharded({(0, columns): cut((rows, columns), (4, 3))}, *inner_boxes)
    outer_boxes = [(2 * p + place, (4 * p, 0), (4, 6)) for p in range(2)]
    return sharded({(rows, 0): inner}, *outer_boxes)


def several_shards() -> ShardedTensor:
    """Two shards on each of 2 ranks."""
    rank = dist.get_rank()
    mine = [(4 * half + 2 * rank, 0) for half in range(2)]
    shards = [Shard.from_tensor_and_offsets(cut(offsets, (2, 6)), list(offsets), rank) for offsets in mine]
    return init_from_local_shards(shards, [8, 6])


def all_on_rank_0() -> ShardedTensor:
    shards = [Shard.from_tensor_and_offsets(full_tensor(), [0, 0], 0)] if dist.get_rank() == 0 else []
    return init_from_local_shards(shards, [8, 6])


def as_plain(shards) -> list[Any]:
    """Shards as offsets, sizes and whether the data is that of this box."""
    return [
        (tuple(offsets), tuple(sizes), torch.equal(tensor, cut(offsets, sizes))) for offsets, sizes, tensor in shards
    ]


def shards_of(make):
    return as_plain(local_shards(make()))


def test_every_local_shard_is_seen_with_its_box_and_its_data(ranks: RankPool):
    assert ranks(2).run(shards_of, several_shards) == [
        [((0, 0), (2, 6), True), ((4, 0), (2, 6), True)],
        [((2, 0), (2, 6), True), ((6, 0), (2, 6), True)],
    ]


def test_a_rank_without_shards_sees_none(ranks: RankPool):
    assert ranks(2).run(shards_of, all_on_rank_0) == [[((0, 0), (8, 6), True)], []]


def test_nested_shards_are_seen_at_the_sum_of_their_offsets(ranks: RankPool):
    assert ranks(4).run(shards_of, nested) == [
        [((4 * pair, 3 * place), (4, 3), True)] for pair in range(2) for place in range(2)
    ]


def flat_as_stock(make):
    """The shards of a flattened state by us and by stock, and which of its leaves are still the same objects."""
    tensor, other = make(), torch.zeros(1)
    state = {"a": {"b": [tensor, other], 1: "x"}}
    results = []
    for flatten in (flatten_sharded_tensors, stock_flatten):
        flat = flatten(state)
        leaves = flat["a"]["b"]
        found = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
        shards = [
            (tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes), s.tensor)
            for leaf in found
            for s in leaf.local_shards()
            if not isinstance(s.tensor, ShardedTensor)
        ]
        results.append(
            {
                "shards": as_plain(shards),
                "same": [leaf is tensor for leaf in leaves],
                "others": (leaves[1] is other, flat["a"]["1"]),
                "size": [tuple(leaf.size()) for leaf in found],
                "dtype": [leaf.dtype for leaf in found],
                "placements": [str(s.metadata.placement) for leaf in found for s in leaf.local_shards()],
            }
        )
    untouched = state["a"]["b"][0] is tensor
    return results, untouched


@pytest.mark.parametrize(("world_size", "make"), [(4, nested), (2, several_shards), (2, all_on_rank_0)])
def test_a_state_is_flattened_as_stock_flattens_it(ranks: RankPool, world_size, make):
    for (ours, stock), untouched in ranks(world_size).run(flat_as_stock, make):
        assert ours == stock
        assert untouched


def memory_of_flat_and_nested():
    tensor = nested()
    inner = tensor.local_shards()[0].tensor.local_shards()[0].tensor
    flat = flatten_sharded_tensors({"t": tensor})["t"]
    return flat.local_shards()[0].tensor is inner


def test_a_flattened_tensor_shares_the_data_of_the_nested_one(ranks: RankPool):
    assert ranks(4).run(memory_of_flat_and_nested) == [True] * 4


def nested_with_two_inner_shards(flatten):
    inner = sharded(
        {(0, 0): cut((0, 0), (8, 3)), (0, 3): cut((0, 3), (8, 3))}, (0, (0, 0), (8, 3)), (0, (0, 3), (8, 3))
    )
    outer = sharded({(0, 0): inner}, (0, (0, 0), (8, 6)))
    seen = as_plain(local_shards(outer))
    try:
        flatten({"t": outer})
    except ValueError:
        return seen, "refused"
    return seen, "flattened"


@pytest.mark.parametrize("flatten", [flatten_sharded_tensors, stock_flatten])
def test_nested_tensors_of_several_inner_shards_are_seen_but_not_flattened(ranks: RankPool, flatten):
    assert ranks(1).run(nested_with_two_inner_shards, flatten) == [
        ([((0, 0), (8, 3), True), ((0, 3), (8, 3), True)], "refused")
    ]
