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
from tests.golden import contents, divided
from tests.rank_pool import RankPool
from tests.sharding import dtensor_of
from tests.torches import has_dtype

HERE = Path(__file__).parent
ONE_RANK = [HERE / f"version-{version}-one-rank" for version in (1, 2)]
FOUR_RANKS = [HERE / f"version-{version}-four-ranks" for version in (1, 2)]
MANY_FILES = [HERE / f"version-{version}-many-files" for version in (1, 2)]
DIVIDED = HERE / "version-2-divided"

DIGESTS = {
    ONE_RANK[0]: "fdde674942feb3cfb248efe817d5cce137161109b020cdb0b54244b879188f2f",
    FOUR_RANKS[0]: "d647b7219a363547cd646cc960ac8179b52ef330ca1f12530d6c7c6b4db2acef",
    MANY_FILES[0]: "db779e44267be1d2e9723ed8139441d7f3e1026e31546924e46c7194d83282a2",
    ONE_RANK[1]: "74a1335037e734a0310e80b1affda208b38dc6d7eec20ff9f6f88323138b0a67",
    FOUR_RANKS[1]: "52b8ba81d61b7158f56898959b6a1e900a72775dd1dc294e7fc095904927dfc5",
    MANY_FILES[1]: "a1398dd8a5aacb87806b8b0270eeda1f51491a23ebd2e1a615d99cb806d0e550",
    DIVIDED: "44e15f9ecff24b4982ef6e71fc572bdbec9e9d369736eff9d04f5f00e2fffe30",
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
    assert SpecifiedReader(folder).record["version"] == [int(folder.name.split("-")[1]), 0]


@pytest.mark.parametrize("folder", ONE_RANK, ids=lambda folder: folder.name)
def test_every_dtype_and_every_type_of_value_of_one_rank(folder):
    lacking = [f"tensors.{name}" for name in set(contents.DTYPES) - set(contents.DTYPES_HERE)]
    with holdfast.open(folder, allow_pickle=True) as checkpoint:
        found = checkpoint.read([node.key for node in checkpoint.leaves(exclude=lacking or None)])
    assert_same(found, contents.everything())
    assert found["tied"][0] is found["tied"][1]["again"]
    assert holdfast.open(folder).metadata == contents.METADATA


@pytest.mark.parametrize("folder", ONE_RANK, ids=lambda folder: folder.name)
def test_what_is_pickled_is_not_loaded_unless_that_is_allowed(folder):
    assert isinstance(holdfast.open(folder)["pickled"], PickledValue)


def emptied(value: Any) -> Any:
    """A state to load into: zeros in the place of all elements."""
    if isinstance(value, torch.Tensor):
        return (
            torch.zeros(value.numel() * value.element_size(), dtype=torch.uint8).view(value.dtype).reshape(value.shape)
        )
    if type(value) is dict:
        return {key: emptied(inner) for key, inner in value.items()}
    return None


@pytest.mark.parametrize("folder", ONE_RANK, ids=lambda folder: folder.name)
def test_tensors_of_every_dtype_are_loaded_in_place(folder):
    expected = {"tensors": contents.tensors()}
    state = emptied({"tensors": {key: tensor for key, tensor in contents.tensors().items() if tensor.numel()}})
    state["tensors"]["no elements"] = torch.empty(3, 0, 2, dtype=torch.bfloat16)
    before = {key: tensor.data_ptr() for key, tensor in state["tensors"].items()}
    unknown = [f"tensors.{name}" for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if not has_dtype(name)]
    holdfast.load(state, folder, allow_unexpected=unknown)
    assert_same({key: state["tensors"][key] for key in expected["tensors"]}, expected["tensors"])
    assert {key: tensor.data_ptr() for key, tensor in state["tensors"].items()} == before


@pytest.mark.parametrize("folder", MANY_FILES, ids=lambda folder: folder.name)
def test_many_files(folder):
    assert_same(holdfast.open(folder).read(), contents.in_many_files())
    state = emptied(contents.in_many_files())
    holdfast.load(state, folder)
    assert_same(state, contents.in_many_files())
    assert_same(holdfast.open(folder)["large"][1:3, 2, 1:5], contents.in_many_files()["large"][1:3, 2, 1:5])


@pytest.mark.parametrize("folder", FOUR_RANKS, ids=lambda folder: folder.name)
def test_four_ranks_read_by_a_program_without_ranks(folder):
    found = holdfast.open(folder).read()
    assert_same(found, contents.sharded_as_read())
    assert found["model"]["tied"] is found["model"]["rows"]


def load_in_another_layout(folder: Path) -> dict[str, torch.Tensor]:
    """Every rank gets a part of the columns; returns what all of them got."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: dict[str, Any] = {}
    for name, tensor in contents.whole_tensors().items():
        dim = 1 if tensor.ndim > 1 else 0
        model[name] = dtensor_of(torch.zeros_like(tensor), mesh, [Shard(dim)])
    state = {"model": {**model, "tied": model["rows"]}, "plain": torch.zeros(3, dtype=torch.int64), "step": 0}
    holdfast.load(state, folder)
    assert state["step"] == 12
    assert state["plain"].tolist() == [0, 1, 2]
    return {name: tensor.to_local() for name, tensor in model.items()}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("folder", FOUR_RANKS, ids=lambda folder: folder.name)
def test_four_ranks_read_by_another_number_of_ranks_in_another_layout(ranks: RankPool, world_size, folder):
    parts = ranks(world_size).run(load_in_another_layout, folder)
    for name, tensor in contents.whole_tensors().items():
        found = torch.cat([part[name] for part in parts], dim=1 if tensor.ndim > 1 else 0)
        assert_same(found, tensor)


def load_own_state(folder: Path) -> Any:
    state = {"own": holdfast.PerRank({"position": 0, "random": None})}
    holdfast.load(state, folder)
    return state["own"].value


@pytest.mark.parametrize("folder", FOUR_RANKS, ids=lambda folder: folder.name)
def test_four_ranks_get_what_was_their_own(ranks: RankPool, folder):
    for rank, own in enumerate(ranks(4).run(load_own_state, folder)):
        assert_same(own, contents.own_state(rank))


def test_tensors_that_are_divided_in_every_way():
    """By rules with several cuts, uneven and empty parts, other ranks first, some ranks alone; and by none."""
    arrays = divided.arrays()
    found = holdfast.read(DIVIDED)
    specified = SpecifiedReader(DIVIDED)
    for key, array in arrays.items():
        assert found[key].numpy().tobytes() == array.tobytes() == specified.tensors[key].raw.tobytes()
        assert tuple(found[key].shape) == array.shape
    checkpoint = holdfast.open(DIVIDED)
    assert checkpoint["blocks"][2:5, 1:6].numpy().tolist() == arrays["blocks"][2:5, 1:6].tolist()
    assert checkpoint["by no rule"][0:3, 1:4].numpy().tolist() == arrays["by no rule"][0:3, 1:4].tolist()
    record = specified.record
    assert len(record["divisions"]) == 5
    assert record["rank_lists"] == [list(divided.EVENS)]
    assert "index" in record
