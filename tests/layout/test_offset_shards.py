"""Shards of a part of a tensor, found at their place in the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

from holdfast._dcp.read_items import create_read_items_for_chunk_list
from holdfast._formats.dcp.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from holdfast._formats.dcp.metadata import TensorProperties as StoredProperties
from holdfast._layout.offset_shards import OffsetShards
from holdfast._layout.tensor_items import create_chunk_list, find_tensor_shard, size_and_dtype
from holdfast.errors import StateMismatchError
from tests.properties import examples
from tests.rank_pool import RankPool


def sharded(sizes, cut) -> ShardedTensor:
    """A ShardedTensor of zeros, all of it on this rank, in two shards of rows if there is a cut inside."""
    edges = [0, cut, sizes[0]] if 0 < cut < sizes[0] else [0, sizes[0]]
    boxes = [
        ShardMetadata([first, *[0] * (len(sizes) - 1)], [last - first, *sizes[1:]], "rank:0/cpu")
        for first, last in itertools.pairwise(edges)
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(torch.zeros(box.shard_sizes), box) for box in boxes],
        ShardedTensorMetadata(boxes, torch.Size(sizes), TensorProperties(dtype=torch.float32)),
    )


@st.composite
def parts_of_a_whole(draw):
    """Per dimension: how long the whole is, where the part begins, how long it is. And where either is cut."""
    dims = draw(st.integers(1, 3))
    sides = []
    for _ in range(dims):
        start, length, rest = draw(st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(0, 4)))
        sides.append((start + length + rest, start, length))
    return sides, draw(st.integers(0, 4)), draw(st.integers(0, 12))


def fill_examples(count):
    """Load parts of all kinds out of stored tensors in one or two chunks; they must equal a slice of the whole."""

    @given(parts_of_a_whole())
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def check(example):
        sides, cut, stored_cut = example
        whole = torch.arange(float(torch.Size([size for size, _, _ in sides]).numel())).reshape(
            [s for s, _, _ in sides]
        )
        part = sharded([length for _, _, length in sides], cut)
        view = OffsetShards(part, [start for _, start, _ in sides], whole.size(), "w")
        edges = [0, stored_cut, whole.shape[0]] if 0 < stored_cut < whole.shape[0] else [0, whole.shape[0]]
        chunks = [
            ChunkStorageMetadata(torch.Size([a, *[0] * (whole.dim() - 1)]), torch.Size([b - a, *whole.shape[1:]]))
            for a, b in itertools.pairwise(edges)
        ]
        stored = TensorStorageMetadata(StoredProperties(torch.float32), whole.size(), chunks)
        for item in create_read_items_for_chunk_list("w", stored, create_chunk_list(view)):
            source = whole[item.storage_index.offset[0] :]
            target = find_tensor_shard(view, item.dest_index)
            for dim, length in enumerate(item.lengths):
                source = source.narrow(dim, item.storage_offsets[dim], length)
                target = target.narrow(dim, item.dest_offsets[dim], length)
            target.copy_(source)
        found = torch.cat([shard.tensor for shard in part.local_shards()])
        assert torch.equal(found, whole[tuple(slice(start, start + length) for _, start, length in sides)])

    check()


@pytest.mark.hypothesis
def test_a_part_is_filled_with_what_is_at_its_place_in_the_whole(ranks: RankPool):
    assert ranks(1).run(fill_examples, examples(150)) == [None]


def look_at_a_view():
    view = OffsetShards(sharded((2, 3), 0), [4, 0], torch.Size([6, 3]), "w")
    assert size_and_dtype(view) == (torch.Size([6, 3]), torch.float32)
    assert find_tensor_shard(view, MetadataIndex("w", [4, 0])).shape == (2, 3)
    with pytest.raises(ValueError, match=r"'w' has shards at offsets \[\(4, 0\)\] on this rank, none at"):
        find_tensor_shard(view, MetadataIndex("w", [0, 0]))
    with pytest.raises(NotImplementedError, match="needs data"):
        view + 1


def test_a_view_looks_like_the_whole_and_gives_the_memory_of_its_shards(ranks: RankPool):
    assert ranks(1).run(look_at_a_view) == [None]


def refused(offset, whole):
    with pytest.raises(StateMismatchError, match="w: the model's part at offsets") as raised:
        OffsetShards(sharded((2, 3), 0), offset, torch.Size(whole), "w")
    return raised.value.shapes


@pytest.mark.parametrize(("offset", "whole"), [([5, 0], [6, 3]), ([0, 1], [6, 3]), ([-1, 0], [6, 3]), ([0], [6])])
def test_a_part_that_reaches_out_of_the_stored_tensor_is_refused(ranks: RankPool, offset, whole):
    assert ranks(1).run(refused, offset, whole) == [{"w": (torch.Size(whole), torch.Size([2, 3]))}]
