"""Local tensors that say by attributes which parts of a larger tensor they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock

import holdfast.dcp as dcp
from holdfast.dcp import planner_helpers, protocol, utils
from holdfast.dcp.metadata import ChunkStorageMetadata, MetadataIndex
from holdfast.dcp.state_dict_saver import AsyncCheckpointerType
from tests.dcp.states import numbered
from tests.rank_pool import RankPool
from tests.torches import ALONE

STOCK_KNOWS = importlib.util.find_spec("torch.distributed.checkpoint.protocol") is not None


def described(local: torch.Tensor, shape: Any, parts: list[tuple[Any, Any, Any]]) -> torch.Tensor:
    """``local`` with the fields; ``parts`` are (offset in the whole, offset in ``local``, size)."""
    local.global_shape = shape
    local.global_offsets, local.local_offsets, local.local_sizes = (tuple(field) for field in zip(*parts, strict=True))
    return local


def of_rank(whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Two of eight rows per rank, one from each half, in a local tensor with a row of padding between them."""
    local = torch.full((3, whole.shape[1]), -1.0)
    local[0], local[2] = whole[rank], whole[4 + rank]
    width = whole.shape[1]
    return described(local, tuple(whole.shape), [((rank, 0), (0, 0), (1, width)), ((4 + rank, 0), (2, 0), (1, width))])


def save_parts(path: Path, library: str) -> None:
    whole = numbered(8, 5)
    namespace = dcp if library == "ours" else stock
    namespace.save({"model": {"w": of_rank(whole, dist.get_rank())}, "step": 3}, checkpoint_id=path)


def load_parts(path: Path, library: str) -> None:
    whole, rank = numbered(8, 5), dist.get_rank()
    namespace = dcp if library == "ours" else stock
    expected = of_rank(whole, rank)
    target = of_rank(torch.zeros(8, 5), rank)
    state = {"model": {"w": target}, "step": 0}
    namespace.load(state, checkpoint_id=path)
    assert state["step"] == 3
    assert state["model"]["w"] is target
    assert torch.equal(target, expected)  # the padding is as it was


def load_rows(path: Path) -> None:
    """Another layout: two contiguous halves on two ranks."""
    rank = dist.get_rank()
    target = described(torch.zeros(4, 5), (8, 5), [((4 * rank, 0), (0, 0), (4, 5))])
    dcp.load({"model": {"w": target}}, checkpoint_id=path)
    assert torch.equal(target, numbered(8, 5)[4 * rank : 4 * rank + 4])


def test_parts_are_saved_as_one_tensor_and_loaded_into_any_layout(ranks: RankPool, tmp_path: Path) -> None:
    ranks(4).run(save_parts, tmp_path, "ours")

    ranks(4).run(load_parts, tmp_path, "ours")
    ranks(2).run(load_rows, tmp_path)
    state = {"model": {"w": torch.zeros(8, 5)}}
    dcp.load(state, checkpoint_id=tmp_path)
    assert torch.equal(state["model"]["w"], numbered(8, 5))
    theirs = {"model": {"w": torch.zeros(8, 5)}}
    stock.load(theirs, checkpoint_id=tmp_path, **ALONE)
    assert torch.equal(theirs["model"]["w"], numbered(8, 5))


@pytest.mark.skipif(not STOCK_KNOWS, reason="the installed torch does not know such tensors")
@pytest.mark.parametrize(("saver", "loader"), [("ours", "stock"), ("stock", "ours")])
def test_stock_and_we_load_each_others_parts(ranks: RankPool, tmp_path: Path, saver: str, loader: str) -> None:
    ranks(4).run(save_parts, tmp_path, saver)

    ranks(4).run(load_parts, tmp_path, loader)


def save_in_background(path: Path, where: str) -> None:
    state = {"model": {"w": of_rank(numbered(8, 5), dist.get_rank())}, "step": 3}
    saved = dcp.async_save(state, checkpoint_id=path, async_checkpointer_type=AsyncCheckpointerType(where))
    state["model"]["w"].zero_()
    saved.result()


@pytest.mark.parametrize("where", ["thread", "process"])
def test_a_background_save_knows_the_parts_too(ranks: RankPool, tmp_path: Path, where: str) -> None:
    ranks(4).run(save_in_background, tmp_path, where)

    ranks(4).run(load_parts, tmp_path, "ours")


def test_a_meta_tensor_keeps_its_fields_when_it_gets_memory(tmp_path: Path) -> None:
    dcp.save({"w": numbered(4, 2)}, checkpoint_id=tmp_path)
    state = {"w": described(torch.empty(2, 2, device="meta"), (4, 2), [((2, 0), (0, 0), (2, 2))])}

    dcp.load(state, checkpoint_id=tmp_path)

    assert torch.equal(state["w"], numbered(4, 2)[2:])
    assert state["w"].global_shape == (4, 2)


def test_a_tensor_of_another_global_shape_is_refused(tmp_path: Path) -> None:
    dcp.save({"w": numbered(4, 2)}, checkpoint_id=tmp_path)
    state = {"w": described(torch.zeros(4, 2), (8, 2), [((0, 0), (0, 0), (4, 2))])}

    with pytest.raises(dcp.CheckpointException, match=r"Size mismatch between saved .*4, 2.*8, 2.* for w"):
        dcp.load(state, checkpoint_id=tmp_path)


def test_plain_tensors_are_not_checkpointable_and_attributes_make_them_so() -> None:
    tensor = torch.zeros(2)
    assert not protocol._is_checkpointable_tensor(tensor)
    assert not protocol._is_checkpointable_tensor("text")
    tensor.global_shape = (4,)
    assert not protocol._is_checkpointable_tensor(tensor)  # one field is not enough

    described(tensor, (4,), [((2,), (0,), (2,))])
    assert protocol._is_checkpointable_tensor(tensor)
    assert isinstance(tensor, dcp.CheckpointableTensor)
    other = torch.zeros(2)
    protocol._copy_checkpointable_tensor_metadata(tensor, other)
    assert protocol._get_checkpointable_tensor_chunks(other) == [ChunkStorageMetadata(torch.Size([2]), torch.Size([2]))]
    assert planner_helpers._create_chunk_list(other) == protocol._get_checkpointable_tensor_chunks(other)


def test_parts_are_views_of_the_local_tensor() -> None:
    tensor = of_rank(numbered(8, 5), 1)

    part = utils.find_tensor_shard(tensor, MetadataIndex("w", [5, 0]))
    assert torch.equal(part, numbered(8, 5)[5:6])
    assert part.data_ptr() == tensor[2].data_ptr()
    by_hint = protocol._get_checkpointable_tensor_shard(tensor, MetadataIndex("w", [5, 0], 1))
    assert by_hint.data_ptr() == part.data_ptr()
    with pytest.raises(ValueError, match=r"w.*multiple checkpointable shards.*no offset"):
        utils.find_tensor_shard(tensor, MetadataIndex("w"))
    with pytest.raises(ValueError, match=r"Could not find checkpointable tensor shard at .*'w'"):
        utils.find_tensor_shard(tensor, MetadataIndex("w", [2, 0]))
    scalar = described(torch.tensor(7.0), (), [((), (), ())])
    assert utils.find_tensor_shard(scalar, MetadataIndex("s", [])) == 7
    assert utils.find_tensor_shard(scalar, MetadataIndex("s")) == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"local_offsets": ()}, "global_offsets and local_offsets must have the same length"),
        ({"local_sizes": ((2,), (2,))}, "global_offsets and local_sizes must have the same length"),
        ({"global_offsets": ((2, 0),)}, r"global_offsets\[0\] must have 1 dimensions"),
        ({"local_offsets": ((0, 0),)}, r"local_offsets\[0\] must have 1 dimensions"),
        ({"local_sizes": ((2, 1),)}, r"local_sizes\[0\] must have 1 dimensions"),
        ({"global_offsets": ((3,),)}, "global shard 0 dimension 0 is outside global_shape"),
        ({"local_offsets": ((1,),)}, "local shard 0 dimension 0 is outside tensor shape"),
        ({"global_offsets": ((-1,),)}, "outside global_shape"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    tensor = described(torch.zeros(2), (4,), [((2,), (0,), (2,))])
    for name, value in change.items():
        setattr(tensor, name, value)

    with pytest.raises(ValueError, match=message):
        protocol._validate_checkpointable_tensor_metadata(tensor)
    with pytest.raises(dcp.CheckpointException, match=message):
        dcp.save({"w": tensor}, checkpoint_id=tmp_path / "checkpoint")
    if STOCK_KNOWS:
        from torch.distributed.checkpoint.protocol import _validate_checkpointable_tensor_metadata

        with pytest.raises(ValueError, match=message):
            _validate_checkpointable_tensor_metadata(tensor)
