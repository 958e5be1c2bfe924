"""Checkpoints that were written when the format was released are read exactly, for ever."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import holdfast
from holdfast._formats.native.refs import PickledValue
from holdfast._load.opening import open_source
from tests.exact import assert_same
from tests.formats.native.specified_reader import SpecifiedReader
from tests.golden import contents
from tests.rank_pool import RankPool
from tests.sharding import dtensor_of
from tests.torches import has_dtype

HERE = Path(__file__).parent
ONE_RANK = HERE / "version-1-one-rank"
FOUR_RANKS = HERE / "version-1-four-ranks"
MANY_FILES = HERE / "version-1-many-files"

DIGESTS = {
    ONE_RANK: "fdde674942feb3cfb248efe817d5cce137161109b020cdb0b54244b879188f2f",
    FOUR_RANKS: "d647b7219a363547cd646cc960ac8179b52ef330ca1f12530d6c7c6b4db2acef",
    MANY_FILES: "db779e44267be1d2e9723ed8139441d7f3e1026e31546924e46c7194d83282a2",
}
"""Of the names and contents of all files. If one of these has to be changed, read README.md first."""


@pytest.mark.parametrize("folder", DIGESTS, ids=lambda folder: folder.name)
def test_the_files_are_those_of_the_release(folder):
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    assert digest.hexdigest() == DIGESTS[folder]


@pytest.mark.parametrize("folder", DIGESTS, ids=lambda folder: folder.name)
def test_they_are_undamaged_and_as_the_specification_says(folder):
    with open_source(folder) as source:
        assert source.verify() > 0
    assert SpecifiedReader(folder).record["version"] == [1, 0]


def test_every_dtype_and_every_type_of_value_of_one_rank():
    lacking = [f"tensors.{name}" for name in set(contents.DTYPES) - set(contents.DTYPES_HERE)]
    with holdfast.open(ONE_RANK, allow_pickle=True) as checkpoint:
        found = checkpoint.read([node.key for node in checkpoint.leaves(exclude=lacking or None)])
    assert_same(found, contents.everything())
    assert found["tied"][0] is found["tied"][1]["again"]
    assert holdfast.open(ONE_RANK).metadata == contents.METADATA


def test_what_is_pickled_is_not_loaded_unless_that_is_allowed():
    assert isinstance(holdfast.open(ONE_RANK)["pickled"], PickledValue)


def emptied(value: Any) -> Any:
    """A state to load into: zeros in the place of all elements."""
    if isinstance(value, torch.Tensor):
        return (
            torch.zeros(value.numel() * value.element_size(), dtype=torch.uint8).view(value.dtype).reshape(value.shape)
        )
    if type(value) is dict:
        return {key: emptied(inner) for key, inner in value.items()}
    return None


def test_tensors_of_every_dtype_are_loaded_in_place():
    expected = {"tensors": contents.tensors()}
    state = emptied({"tensors": {key: tensor for key, tensor in contents.tensors().items() if tensor.numel()}})
    state["tensors"]["no elements"] = torch.empty(3, 0, 2, dtype=torch.bfloat16)
    before = {key: tensor.data_ptr() for key, tensor in state["tensors"].items()}
    unknown = [f"tensors.{name}" for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if not has_dtype(name)]
    holdfast.load(state, ONE_RANK, allow_unexpected=unknown)
    assert_same({key: state["tensors"][key] for key in expected["tensors"]}, expected["tensors"])
    assert {key: tensor.data_ptr() for key, tensor in state["tensors"].items()} == before


def test_many_files():
    assert_same(holdfast.open(MANY_FILES).read(), contents.in_many_files())
    state = emptied(contents.in_many_files())
    holdfast.load(state, MANY_FILES)
    assert_same(state, contents.in_many_files())
    assert_same(holdfast.open(MANY_FILES)["large"][1:3, 2, 1:5], contents.in_many_files()["large"][1:3, 2, 1:5])


def test_four_ranks_read_by_a_program_without_ranks():
    found = holdfast.open(FOUR_RANKS).read()
    assert_same(found, contents.sharded_as_read())
    assert found["model"]["tied"] is found["model"]["rows"]


def load_in_another_layout() -> dict[str, torch.Tensor]:
    """Every rank gets a part of the columns; returns what all of them got."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: dict[str, Any] = {}
    for name, tensor in contents.whole_tensors().items():
        dim = 1 if tensor.ndim > 1 else 0
        model[name] = dtensor_of(torch.zeros_like(tensor), mesh, [Shard(dim)])
    state = {"model": {**model, "tied": model["rows"]}, "plain": torch.zeros(3, dtype=torch.int64), "step": 0}
    holdfast.load(state, FOUR_RANKS)
    assert state["step"] == 12
    assert state["plain"].tolist() == [0, 1, 2]
    return {name: tensor.to_local() for name, tensor in model.items()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_four_ranks_read_by_another_number_of_ranks_in_another_layout(ranks: RankPool, world_size):
    parts = ranks(world_size).run(load_in_another_layout)
    for name, tensor in contents.whole_tensors().items():
        found = torch.cat([part[name] for part in parts], dim=1 if tensor.ndim > 1 else 0)
        assert_same(found, tensor)


def load_own_state() -> Any:
    state = {"own": holdfast.PerRank({"position": 0, "random": None})}
    holdfast.load(state, FOUR_RANKS)
    return state["own"].value


def test_four_ranks_get_what_was_their_own(ranks: RankPool):
    for rank, own in enumerate(ranks(4).run(load_own_state)):
        assert_same(own, contents.own_state(rank))
