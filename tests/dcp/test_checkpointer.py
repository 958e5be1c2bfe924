"""``_Checkpointer``: every argument of its constructor counts in all of ``save``, ``async_save`` and ``load``."""

from __future__ import annotations

import inspect
import os
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint._checkpointer import _Checkpointer as StockCheckpointer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import holdfast.dcp as dcp
from holdfast.dcp._checkpointer import _Checkpointer
from holdfast.errors import CheckpointException
from tests.dcp.states import numbered, read_index
from tests.rank_pool import RankPool
from tests.sharding import dtensor_of, mesh_of_all_ranks
from tests.torches import ALONE

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

VERBS = ["save", "async_save"]


def checkpointer(path, **options) -> _Checkpointer:
    return _Checkpointer(dcp.FileSystemWriter(path), dcp.FileSystemReader(path), **options)


def save(made: _Checkpointer, verb: str, state: dict[str, Any]) -> Any:
    result = getattr(made, verb)(state)
    return result.result(60) if verb == "async_save" else result


class Counter:
    """A part of the program that has state."""

    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def state(start=0.0) -> dict[str, Any]:
    mesh = mesh_of_all_ranks() if dist.is_initialized() else None
    full = numbered(7, 3) + start
    weights = full if mesh is None else dtensor_of(full, mesh, [Shard(0)])
    return {"weights": weights, "counter": Counter(int(start)), "note": f"from {start}"}


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def save_three_times_and_load(verb, path):
    made = checkpointer(path)
    ids = [save(made, verb, state(start)).storage_meta.save_id for start in (10.0, 20.0, 30.0)]
    target = state()
    made.load(target)
    assert torch.equal(local(target["weights"]), local(state(30.0)["weights"]))
    assert (target["counter"].count, target["note"]) == (30, "from 30.0")
    made.load(target := {"weights": state()["weights"]})
    assert torch.equal(local(target["weights"]), local(state(30.0)["weights"]))
    return ids


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_one_checkpointer_saves_again_and_again(ranks: RankPool, tmp_path, verb, world_size):
    """Stock's cannot save at all: it calls ``save`` with an argument that is not there."""
    results = ranks(world_size).run(save_three_times_and_load, verb, tmp_path)

    assert len(set(results[0])) == 3
    assert results == [results[0]] * world_size
    assert read_index(tmp_path).storage_meta.save_id == results[0][-1]
    loaded = {"weights": torch.zeros(7, 3), "counter": {"count": 0}, "note": ""}
    stock.load(loaded, checkpoint_id=tmp_path, **ALONE)
    assert torch.equal(loaded["weights"], numbered(7, 3) + 30)
    assert (loaded["counter"], loaded["note"]) == ({"count": 30}, "from 30.0")


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("verb", VERBS)
def test_it_works_without_a_process_group(ranks: RankPool, tmp_path, verb):
    ((*_, last),) = ranks(1).run(save_three_times_and_load, verb, tmp_path, process_group=False)

    assert read_index(tmp_path).storage_meta.save_id == last


# --- who coordinates -----------------------------------------------------------------------------------------------


class SaveRecorder(dcp.DefaultSavePlanner):
    def __init__(self):
        super().__init__()
        self.calls: list[str] = []

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self.calls.append(f"set up, coordinator: {is_coordinator}")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_global_plan(self, all_plans):
        self.calls.append(f"plan for {len(all_plans)}")
        return super().create_global_plan(all_plans)


class LoadRecorder(dcp.DefaultLoadPlanner):
    def __init__(self):
        super().__init__()
        self.calls: list[str] = []

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        self.calls.append(f"set up, coordinator: {is_coordinator}")
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_global_plan(self, global_plan):
        self.calls.append(f"plan for {len(global_plan)}")
        return super().create_global_plan(global_plan)


def recorded(verb, path, **options):
    """What the planners of a save and a load were asked on this rank."""
    saving, loading = SaveRecorder(), LoadRecorder()
    made = checkpointer(path, save_planner=saving, load_planner=loading, **options)
    save(made, verb, {"weights": numbered(3)})
    target = {"weights": torch.zeros(3)}
    made.load(target)
    assert torch.equal(target["weights"], numbered(3))
    return saving.calls, loading.calls


COORDINATOR = ["set up, coordinator: True", "plan for {}"]
OTHER = ["set up, coordinator: False"]


def coordinated_by(coordinator, world_size):
    calls = [OTHER] * world_size
    calls[coordinator] = [call.format(world_size) for call in COORDINATOR]
    return [(each, each) for each in calls]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("world_size", "coordinator"), [(1, 0), (2, 1), (4, 2)])
def test_the_given_rank_coordinates_with_the_given_planners(ranks: RankPool, tmp_path, verb, world_size, coordinator):
    found = ranks(world_size).run(recorded, verb, tmp_path, coordinator_rank=coordinator)

    assert found == coordinated_by(coordinator, world_size)


def recorded_in_a_subgroup(verb, path):
    """Ranks 1 and 3 save and load; the second of them coordinates."""
    group = dist.new_group([1, 3])
    return recorded(verb, path, process_group=group, coordinator_rank=1) if dist.get_rank() in (1, 3) else None


@pytest.mark.parametrize("verb", VERBS)
def test_a_subgroup_saves_and_loads_with_its_own_coordinator(ranks: RankPool, tmp_path, verb):
    zero, first, two, second = ranks(4).run(recorded_in_a_subgroup, verb, tmp_path)

    assert (zero, two) == (None, None)
    assert [first, second] == coordinated_by(1, 2)


def sharded_in_a_subgroup(verb, path):
    group, members = dist.new_group([1, 2]), [1, 2]
    mesh = DeviceMesh("cpu", members)
    if dist.get_rank() not in members:
        return None
    made = checkpointer(path, process_group=group, coordinator_rank=1)
    save(made, verb, {"weights": dtensor_of(numbered(5), mesh, [Shard(0)])})
    target = {"weights": dtensor_of(torch.zeros(5), mesh, [Shard(0)])}
    made.load(target)
    return target["weights"].to_local().tolist()


@pytest.mark.parametrize("verb", VERBS)
def test_a_subgroup_saves_and_loads_its_shards(ranks: RankPool, tmp_path, verb):
    assert ranks(3).run(sharded_in_a_subgroup, verb, tmp_path) == [None, [0, 1, 2], [3, 4]]


def alone_in_a_group(verb, path):
    """Only rank 1 saves and loads; anything collective would wait for rank 0 for ever."""
    if dist.get_rank() == 0:
        return None
    return recorded(verb, path, no_dist=True)


@pytest.mark.parametrize("verb", VERBS)
def test_without_distribution_a_rank_of_a_group_saves_and_loads_alone(ranks: RankPool, tmp_path, verb):
    """Stock's drops ``no_dist`` and waits for the others."""
    found = ranks(2).run(alone_in_a_group, verb, tmp_path, group_timeout=30.0)

    assert found == [None, coordinated_by(0, 1)[0]]
    assert os.listdir(tmp_path)


def coordinator_outside(verb, path):
    with pytest.raises(ValueError, match="coordinator rank 2 is not in a group of 2 ranks"):
        save(checkpointer(path, coordinator_rank=2), verb, {})
    with pytest.raises(ValueError, match="coordinator rank 2 is not in a group of 2 ranks"):
        checkpointer(path, coordinator_rank=2).load({})


@pytest.mark.parametrize("verb", VERBS)
def test_a_coordinator_that_is_not_in_the_group_is_refused(ranks: RankPool, tmp_path, verb):
    assert ranks(2).run(coordinator_outside, verb, tmp_path) == [None, None]


# --- the rest ------------------------------------------------------------------------------------------------------


def change_while_saving(path):
    made = checkpointer(path)
    weights = numbered(1000, 100)
    future = made.async_save({"weights": weights})
    weights.zero_()
    future.result(60)
    target = {"weights": torch.zeros(1000, 100)}
    made.load(target)
    return torch.equal(target["weights"], numbered(1000, 100))


def test_a_background_save_does_not_see_later_changes(ranks: RankPool, tmp_path):
    assert ranks(2).run(change_while_saving, tmp_path) == [True, True]


class StagingInTheBackground(dcp.FileSystemWriter):
    """Takes the copy in the background, and counts the saves that it is told of."""

    resets = 0

    def reset(self, checkpoint_id=None):
        self.resets += 1
        super().reset(checkpoint_id)

    def stage(self, state_dict):
        staged: Future[Any] = Future()
        staged.set_result({key: value.clone() for key, value in state_dict.items()})
        return staged


def save_with_background_staging(path):
    writer = StagingInTheBackground(path)
    made = _Checkpointer(writer, dcp.FileSystemReader(path))
    futures = [made.async_save({"weights": numbered(3)}), made.async_save({"weights": numbered(4)})]
    sizes = [future.result(60).state_dict_metadata["weights"].size for future in futures]
    made.save({"weights": numbered(5)})
    made.load(target := {"weights": torch.zeros(5)})
    return [tuple(size) for size in sizes], target["weights"].tolist(), writer.resets


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_a_future_is_of_the_index_and_every_save_is_a_new_one_to_the_writer(ranks: RankPool, tmp_path):
    expected = ([(3,), (4,)], [0, 1, 2, 3, 4], 3)
    assert ranks(2).run(save_with_background_staging, tmp_path) == [expected, expected]


class FailingPlanner(dcp.DefaultSavePlanner):
    def create_local_plan(self):
        if dist.get_rank() == 1:
            raise OSError("no more room on this rank")
        return super().create_local_plan()


def fail_and_save_again(verb, path):
    made = checkpointer(path, save_planner=FailingPlanner())
    with pytest.raises(CheckpointException, match="no more room") as raised:
        save(made, verb, {"weights": numbered(3)})
    made.save_planner = None
    save(made, verb, {"weights": numbered(4)})
    made.load(target := {"weights": torch.zeros(4)})
    return list(raised.value.failures), target["weights"].tolist()


@pytest.mark.parametrize("verb", VERBS)
def test_a_save_that_failed_on_one_rank_fails_on_all_and_the_next_one_works(ranks: RankPool, tmp_path, verb):
    assert ranks(2).run(fail_and_save_again, verb, tmp_path) == [([1], [0, 1, 2, 3])] * 2


def test_it_takes_the_arguments_that_stock_takes():
    for method in ("__init__", "save", "async_save", "load"):
        ours, theirs = (inspect.signature(getattr(cls, method)) for cls in (_Checkpointer, StockCheckpointer))
        assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
            (p.name, p.kind, p.default) for p in theirs.parameters.values()
        ]


def test_storages_of_stock_are_refused(tmp_path):
    made = _Checkpointer(stock.FileSystemWriter(tmp_path), stock.FileSystemReader(tmp_path))

    for call in (made.save, made.async_save, made.load):
        with pytest.raises(TypeError, match="which does not go with holdfast"):
            call({})
