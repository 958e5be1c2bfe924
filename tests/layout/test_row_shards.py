"""Tensors that are split by rows over a group: who holds which, and memory for the own ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast._formats.dcp.metadata import TensorProperties
from holdfast._layout.materialize import empty_row_shards, empty_tensor, group_device_type, rank_device, split_rows
from tests.rank_pool import RankPool


@given(count=st.integers(1, 200), ways=st.integers(1, 40))
@example(count=1, ways=4)
@example(count=5, ways=4)
@example(count=8, ways=4)
def test_rows_are_split_as_torch_chunk_splits_them(count, ways):
    expected = [(holder, int(part[0]), len(part)) for holder, part in enumerate(torch.arange(count).chunk(ways))]

    assert [tuple(rows) for rows in split_rows(count, ways)] == expected


def test_no_rows_are_nobodys():
    assert split_rows(0, 3) == []


def shards_on_a_subgroup(sizes):
    """Whole and local sizes, and who holds what, as every member of a group sees it."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    seen = []
    for size in sizes:
        tensor = empty_row_shards(torch.Size(size), TensorProperties(torch.float16), group)
        assert tensor._process_group is group
        seen.append(
            (
                tuple(tensor.metadata().size),
                [
                    (s.metadata.shard_offsets, tuple(s.tensor.shape), s.tensor.dtype, s.tensor.is_contiguous())
                    for s in tensor.local_shards()
                ],
                [str(s.placement) for s in tensor.metadata().shards_metadata],
            )
        )
    return seen


def test_every_member_of_a_group_has_memory_for_its_own_rows(ranks: RankPool):
    _, first, _, second = ranks(4).run(shards_on_a_subgroup, [(5, 2), (1, 3), (4,)])

    assert first == [
        ((5, 2), [([0, 0], (3, 2), torch.float16, True)], ["rank:1/cpu", "rank:3/cpu"]),
        ((1, 3), [([0, 0], (1, 3), torch.float16, True)], ["rank:1/cpu"]),
        ((4,), [([0], (2,), torch.float16, True)], ["rank:1/cpu", "rank:3/cpu"]),
    ]
    assert second == [
        ((5, 2), [([3, 0], (2, 2), torch.float16, True)], ["rank:1/cpu", "rank:3/cpu"]),
        ((1, 3), [], ["rank:1/cpu"]),
        ((4,), [([2], (2,), torch.float16, True)], ["rank:1/cpu", "rank:3/cpu"]),
    ]


@pytest.mark.parametrize("requires_grad", [True, False])
def test_memory_is_like_that_of_the_stored_tensor(requires_grad):
    made = empty_tensor(TensorProperties(torch.float64, requires_grad=requires_grad), [2, 0, 3], "cpu")

    assert (made.shape, made.dtype, made.requires_grad) == ((2, 0, 3), torch.float64, requires_grad)


def test_without_a_group_tensors_live_in_main_memory():
    assert not dist.is_initialized()
    assert group_device_type() == "cpu"


def test_ranks_are_dealt_out_to_the_accelerators_of_a_machine(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)

    assert [rank_device(rank, "xpu") for rank in (0, 3, 4, 9)] == ["xpu:0", "xpu:3", "xpu:0", "xpu:1"]
    assert rank_device(3, "cpu") == "cpu"
