"""Saves and loads with default planners: no plans travel, and files and indexes are those that plans lead to."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import holdfast.dcp as dcp
from holdfast._dcp import index_files
from holdfast._ranks.shared_steps import Collectives
from holdfast.errors import CheckpointException, HoldfastError
from tests.rank_pool import RankPool
from tests.sharding import dtensor_of


class ByPlans(dcp.DefaultSavePlanner):
    """Plans as the default planner does. Nobody can know that, so its plans travel."""

    def create_local_plan(self) -> dcp.SavePlan:
        return super().create_local_plan()


def state(offset: int = 0) -> dict[str, Any]:
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    numbers = torch.arange(60, dtype=torch.float32).reshape(10, 6) + offset
    return {
        "model": {
            "even": dtensor_of(numbers[:8], line, [Shard(0)]),
            "uneven": dtensor_of(numbers, line, [Shard(0)]),
            "mostly empty": dtensor_of(numbers[:1], line, [Shard(0)]),
            "hybrid": dtensor_of(numbers, square, [Replicate(), Shard(1)]),
            "twice": dtensor_of(numbers, square, [Shard(0), Shard(0)]),
            "copied": dtensor_of(numbers, line, [Replicate()]),
            "plain": numbers.clone(),
            "half": numbers.to(torch.bfloat16),
        },
        "step": 7 + offset,
        "name": ["some", "values"],
    }


def no_plans() -> Any:
    """Plans of all ranks are handed out in one way only."""
    return mock.patch.object(Collectives, "reduce_scatter", side_effect=AssertionError("plans have travelled"))


def save_in_both_ways(path: Path) -> tuple[dcp.Metadata, dcp.Metadata]:
    with no_plans():
        ours = dcp.save(state(), checkpoint_id=path / "rules")
    by_plans = dcp.save(state(), checkpoint_id=path / "plans", planner=ByPlans())
    ours = pickle.loads(pickle.dumps(ours))  # as a background save does that runs in a process of its own
    ours.storage_data, by_plans.storage_data  # noqa: B018 - make them here, where the files are
    return ours, by_plans


def comparable(metadata: dcp.Metadata) -> Any:
    places = [
        (index, index.index, info.offset, info.length, info.seal, info.relative_path.split("_")[2])
        for index, info in metadata.storage_data.items()
    ]
    return list(metadata.state_dict_metadata.items()), metadata.planner_data, places, metadata.version


def test_every_rank_gets_the_index_that_plans_would_have_led_to(ranks: RankPool, tmp_path: Path) -> None:
    for ours, by_plans in ranks(4).run(save_in_both_ways, tmp_path):
        assert comparable(ours) == comparable(by_plans)
        assert ours.storage_meta.save_id is not None


def load_without_plans(path: Path, library: str) -> list[str]:
    module = {"stock": stock, "ours": dcp}[library]
    target, expected = state(offset=1000), state()
    with no_plans(), mock.patch.object(index_files, "decode_index", wraps=index_files.decode_index) as decode:
        module.load(target, checkpoint_id=path)
    if library == "ours":
        assert decode.call_count == (dist.get_rank() == 0)
    wrong = [key for key in ("step", "name") if target[key] != expected[key]]
    for key, tensor in expected["model"].items():
        found = target["model"][key]
        local = [one.to_local() if hasattr(one, "to_local") else one for one in (found, tensor)]
        wrong += [] if torch.equal(*local) else [key]
    return wrong


@pytest.mark.parametrize("loader", ["ours", "stock"])
@pytest.mark.parametrize("saver", ["ours", "stock"])
def test_both_libraries_load_what_both_have_saved(ranks: RankPool, tmp_path: Path, saver: str, loader: str) -> None:
    ranks(4).run(save_with, tmp_path, saver)
    assert ranks(4).run(load_without_plans, tmp_path, loader) == [[]] * 4


def save_with(path: Path, library: str) -> None:
    module = {"stock": stock, "ours": dcp}[library]
    module.save(state(), checkpoint_id=path)


def save_with_a_difference(path: Path, what: str) -> list[str]:
    mine = state()
    last = dist.get_rank() == 3
    planner = None
    if what == "key" and last:
        mine["only here"] = 3
    if what == "tensor" and last:
        mine["more"] = torch.ones(3)
    if what == "planner" and last:
        planner = ByPlans()
    dcp.save(mine, checkpoint_id=path, planner=planner)
    loaded = state(offset=50)
    dcp.load(loaded, checkpoint_id=path)
    assert loaded["step"] == 7
    return sorted(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)


@pytest.mark.parametrize(("what", "more"), [("key", ["only here"]), ("tensor", ["more"]), ("planner", [])])
def test_a_rank_that_has_something_else_is_heard(ranks: RankPool, tmp_path: Path, what: str, more: list[str]) -> None:
    usual = [f"model.{key}" for key in ("copied", "even", "half", "hybrid", "mostly empty", "plain", "twice", "uneven")]
    for keys in ranks(4).run(save_with_a_difference, tmp_path, what):
        assert keys == sorted([*usual, "name", "step", *more])


def save_different_copies(path: Path, on_mismatch: Any) -> Any:
    mine = {"which": dist.get_rank() // 2, "same": torch.ones(3), **state()}
    try:
        dcp.save(mine, checkpoint_id=path, planner=dcp.DefaultSavePlanner(replica_mismatch=on_mismatch))
    except CheckpointException as error:
        return str(error)
    target = {"which": None}
    dcp.load(target, checkpoint_id=path)
    return target["which"]


@pytest.mark.filterwarnings("ignore:Ranks hold different values")
def test_copies_that_differ_are_noticed_without_plans(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(4).run(save_different_copies, tmp_path / "warn", "warn") == [0] * 4
    for message in ranks(4).run(save_different_copies, tmp_path / "error", "error"):
        assert "'which': ranks 0,1 != ranks 2,3" in message
    assert not (tmp_path / "error" / ".metadata").exists()


def places_after_another_save(path: Path) -> str:
    first = dcp.save(state(), checkpoint_id=path)
    dist.barrier()
    dcp.save(state(), checkpoint_id=path)
    try:
        return str(len(first.storage_data))
    except HoldfastError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:.*holds a checkpoint")
def test_places_that_are_no_longer_there_are_not_replaced_by_others(ranks: RankPool, tmp_path: Path) -> None:
    coordinator, *others = ranks(4).run(places_after_another_save, tmp_path)
    assert int(coordinator) > 10
    assert all("is the index of save" in message for message in others)
