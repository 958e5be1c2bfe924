"""Checkpoints that stock DCP of every version since 2.4 wrote are read exactly, with whatever torch is installed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, init_device_mesh

import holdfast
import holdfast.dcp as dcp
from tests.exact import assert_same
from tests.golden.dcp import contents
from tests.rank_pool import RankPool
from tests.sharding import dtensor_of

HERE = Path(__file__).parent
VERSIONS = sorted(
    (path.name for path in HERE.iterdir() if path.name[0].isdigit()), key=lambda v: [*map(int, v.split("."))]
)
ALWAYS = ("dtensor-1d", "dtensor-2d", "fsdp1", "fsdp2", "one-process", "a-file-per-item", "own-keys")
LATER = {"zstd": (2, 7), "hugging-face": (2, 7), "hugging-face-shards": (2, 8), "without-collectives": (2, 9)}


def kinds_of(version: str) -> set[str]:
    """What this version of torch was able to write."""
    minor = tuple(map(int, version.split(".")[:2]))
    return {*ALWAYS, *(kind for kind, since in LATER.items() if minor >= since)}


def folders(*kinds: str) -> Any:
    """Parametrize a test by the folders of these kinds."""
    found = [HERE / version / kind for version in VERSIONS for kind in kinds if kind in kinds_of(version)]
    return pytest.mark.parametrize("folder", found, ids=lambda folder: f"{folder.parent.name}-{folder.name}")


def emptied(value: Any) -> Any:
    """A state to load into: zeros in the place of all elements, the same values in the place of values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: emptied(inner) for key, inner in value.items()}
    return value


def test_every_version_from_2_4_to_2_15_wrote_all_that_it_can():
    assert [version.rsplit(".", 1)[0] for version in VERSIONS] == [f"2.{minor}" for minor in range(4, 16)]
    for version in VERSIONS:
        assert {path.name for path in (HERE / version).iterdir()} == kinds_of(version)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_files_are_those_that_the_version_wrote(version: str):
    """Of the names and contents of all files. If one has to be changed, read README.md first."""
    digest = hashlib.sha256()
    for path in sorted(path for path in (HERE / version).rglob("*") if path.is_file()):
        name = path.relative_to(HERE / version).as_posix()
        digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    assert digest.hexdigest() == json.loads((HERE / "digests.json").read_text())[version]


@folders("dtensor-1d", "dtensor-2d")
def test_dtensors_are_joined(folder: Path):
    full = contents.one_dimension() if folder.name == "dtensor-1d" else contents.two_dimensions()
    found = holdfast.open(folder).read()
    assert_same({key: found["model"][key] for key in full}, full)
    assert found["step"] == 12
    for load in (lambda state: dcp.load(state, checkpoint_id=folder), lambda state: holdfast.load(state, folder)):
        state = {"model": emptied(full), "step": 0}
        load(state)
        assert_same(state, {"model": full, "step": 12})


def load_by_columns(folder: Path) -> dict[str, torch.Tensor]:
    full = {**contents.one_dimension(), **contents.two_dimensions()}
    names = holdfast.open(folder).read("model.*")["model"]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = {name: dtensor_of(emptied(full[name]), mesh, [Shard(full[name].ndim - 1)]) for name in names}
    dcp.load({"model": model}, checkpoint_id=folder)
    return {name: tensor.to_local() for name, tensor in model.items()}


@folders("dtensor-1d", "dtensor-2d")
def test_dtensors_are_loaded_by_three_ranks_in_another_layout(ranks: RankPool, folder: Path):
    parts = ranks(3).run(load_by_columns, folder)
    full = contents.one_dimension() if folder.name == "dtensor-1d" else contents.two_dimensions()
    for name, tensor in full.items():
        assert_same(torch.cat([part[name] for part in parts], dim=-1), tensor)


@folders("fsdp1", "fsdp2")
def test_models_and_optimizers_of_fsdp_are_joined(folder: Path):
    found = holdfast.open(folder).read()
    assert_same({key: found["model"][key] for key in contents.MODEL_SHAPES}, contents.model())
    state = found["optim"]["state"]
    assert_same(
        {key: {kind: state[key][kind] for kind in moments} for key, moments in contents.moments().items()},
        contents.moments(),
    )
    assert found["optim"]["param_groups"][0]["lr"] == contents.LEARNING_RATE


@folders("fsdp1", "fsdp2")
def test_a_model_and_its_optimizer_take_the_state_of_fsdp(folder: Path):
    model = contents.Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    holdfast.load({"model": model, "optim": optimizer}, folder)
    assert_same(dict(model.state_dict()), contents.model())
    found = optimizer.state[model.up.bias]
    assert_same({kind: found[kind] for kind in contents.moments()["up.bias"]}, contents.moments()["up.bias"])
    assert optimizer.param_groups[0]["lr"] == contents.LEARNING_RATE


@folders("one-process", "a-file-per-item", "zstd")
def test_tensors_and_values_of_one_process(folder: Path):
    found = holdfast.open(folder).read()
    tensors = {key: tensor.detach() for key, tensor in contents.odd_tensors().items()}
    assert_same({key: found["tensors"][key].detach() for key in tensors}, tensors)
    state = {"tensors": emptied(tensors), "values": dict.fromkeys(contents.values())}
    state["values"].update({key: value for key, value in contents.values().items() if isinstance(value, (dict, list))})
    dcp.load(state, checkpoint_id=folder)
    assert_same({key: state["tensors"][key].detach() for key in tensors}, tensors)
    assert_same({**state["values"], "dict": None}, {**contents.values(), "dict": None})
    assert_same(state["values"]["dict"], contents.values()["dict"])


@folders("own-keys")
def test_keys_of_single_ranks(folder: Path):
    found = holdfast.open(folder).read()
    assert_same(found["shared"], contents.numbers(5))
    for rank in range(3):
        assert_same(found["own"][f"rank {rank}"], contents.own_of(rank)[f"rank {rank}"])


@folders("without-collectives")
def test_checkpoints_without_collectives(folder: Path):
    state = {"model": emptied(contents.model()), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    assert_same(state, {"model": contents.model(), "step": 12})


@folders("hugging-face", "hugging-face-shards")
def test_hugging_face_folders(folder: Path):
    found = holdfast.open(folder).read()
    assert_same({key: found[key] for key in contents.MODEL_SHAPES}, contents.model())
    state = emptied(contents.model())
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    assert_same(state, contents.model())


@folders(*ALWAYS, *LATER)
def test_they_are_intact(folder: Path):
    report = holdfast.verify(folder)
    assert report.ok, report
