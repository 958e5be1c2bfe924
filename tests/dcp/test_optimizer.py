"""Sharded optimizer state of FSDP1: trained on some ranks, loaded on others, by us and by stock."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.optimizer as stock_optimizer
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

import holdfast.dcp as dcp
from holdfast.dcp import optimizer
from holdfast.dcp.optimizer import load_sharded_optimizer_state_dict
from holdfast.errors import CheckpointException, StateMismatchError
from tests.dcp.states import LIBRARIES, numbered, same_bits, save
from tests.rank_pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LOADERS = {"ours": load_sharded_optimizer_state_dict, "stock": stock_optimizer.load_sharded_optimizer_state_dict}


def load_optimizer(library: str, model_state: dict[str, Any], path: Any, key: str = "optimizer", **options: Any) -> Any:
    reader = LIBRARIES[library].FileSystemReader(path)
    with warnings.catch_warnings():
        if library == "stock":
            warnings.simplefilter("ignore")
        else:
            warnings.simplefilter("error")
        return LOADERS[library](model_state, key, reader, **options)


# --- training ------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Sizes that do not divide evenly, fewer rows than ranks, one element, and a parameter without optimizer state."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 7)
        self.down = nn.Linear(7, 1)
        self.frozen = nn.Parameter(torch.ones(2, 3), requires_grad=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def fresh(seed: int = 1):
    """A model that its ranks share, and an optimizer without state."""
    torch.manual_seed(seed)
    model = FullyShardedDataParallel(Net(), use_orig_params=True, device_id=torch.device("cpu"))
    quiet(
        FullyShardedDataParallel.set_state_dict_type,
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(),
        ShardedOptimStateDictConfig(),
    )
    return model, torch.optim.Adam(model.parameters(), lr=0.05, foreach=False)


def train(model, adam, steps):
    """Every rank sees the same data, so that the number of ranks makes no difference but for rounding."""
    losses = []
    for step in steps:
        data = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


def quiet(function, *args):
    """FSDP1's state dicts warn of the ShardedTensors that they are made of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args)


def whole_moments(model, adam):
    """The optimizer's state as whole tensors, on every rank."""
    FSDP = FullyShardedDataParallel  # noqa: N806
    state = quiet(FSDP.optim_state_dict, model, adam)["state"]
    return {
        f"{name}.{moment}": whole(value) if isinstance(value, ShardedTensor) else value.clone()
        for name, moments in state.items()
        for moment, value in moments.items()
    }


def whole(tensor: ShardedTensor) -> torch.Tensor:
    mine = [(s.metadata.shard_offsets[0], s.tensor) for s in tensor.local_shards()]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return torch.cat([rows for _, rows in sorted(itertools.chain(*gathered), key=lambda part: part[0])])


def train_and_save(paths):
    model, adam = fresh()
    losses = train(model, adam, range(3))
    state = {
        "model": quiet(model.state_dict),
        "optimizer": quiet(FullyShardedDataParallel.optim_state_dict, model, adam),
        "step": 3,
    }
    for library, path in paths.items():
        save(library, state, path)
    moments = whole_moments(model, adam)
    return losses + train(model, adam, range(3, 6)), moments


def load_and_train_on(library, path):
    model, adam = fresh(seed=2)
    state = {"model": quiet(model.state_dict)}
    LIBRARIES[library].load(state, checkpoint_id=path)
    quiet(model.load_state_dict, state["model"])
    loaded = load_optimizer(library, state["model"], path)
    assert list(loaded) == ["optimizer"]
    adam.load_state_dict(quiet(FullyShardedDataParallel.optim_state_dict_to_load, model, adam, loaded["optimizer"]))
    return whole_moments(model, adam), train(model, adam, range(3, 6))


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory):
    """Checkpoints of a training on a number of ranks by both libraries, its losses and its moments."""
    made: dict[int, Any] = {}

    def on(world_size: int):
        if world_size not in made:
            paths = {library: tmp_path_factory.mktemp(library) for library in LIBRARIES}
            made[world_size] = (paths, *ranks(world_size).run(train_and_save, paths)[0])
        return made[world_size]

    return on


@pytest.mark.parametrize("saver", ["ours", "stock"])
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 4), (4, 1), (3, 2), (1, 3)])
def test_training_goes_on_with_the_optimizer_state_on_another_number_of_ranks(
    ranks: RankPool, trained, saver, saved_on, loaded_on
):
    paths, losses, moments = trained(saved_on)
    assert sorted(moments) == [
        f"{layer}.{parameter}.{moment}"
        for layer in ("down", "up")
        for parameter in ("bias", "weight")
        for moment in ("exp_avg", "exp_avg_sq", "step")
    ]

    for found, went_on in ranks(loaded_on).run(load_and_train_on, "ours", paths[saver]):
        assert found.keys() == moments.keys()
        assert [key for key in moments if not same_bits(found[key], moments[key])] == []
        assert went_on == pytest.approx(losses[3:], rel=1e-4)


def described(value: Any) -> Any:
    """A loaded state in a form that can be compared: what each tensor is, where it lies, and its bytes."""
    if isinstance(value, dict):
        return {key: described(child) for key, child in value.items()}
    if isinstance(value, list):
        return [described(child) for child in value]
    if isinstance(value, ShardedTensor):
        shards = [(s.metadata, s.tensor.device, s.tensor.dtype, s.tensor.tolist()) for s in value.local_shards()]
        return "sharded", value.metadata(), value.sharding_spec(), value._process_group is dist.group.WORLD, shards
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, tuple(value.shape), value.tolist(), value.requires_grad
    return value


def both_load(path, model_state=None):
    ours, stock = (described(load_optimizer(library, model_state or {}, path)) for library in LIBRARIES)
    return ours, stock


@pytest.mark.parametrize("saver", ["ours", "stock"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_an_fsdp_checkpoint_loads_as_stock_loads_it(ranks: RankPool, trained, saver, world_size):
    paths, _, _ = trained(3)

    for ours, stock in ranks(world_size).run(both_load, paths[saver]):
        assert ours == stock
        assert ours["optimizer"]["state"]["up.weight"]["exp_avg"][0] == "sharded"


# --- states made by hand -------------------------------------------------------------------------------------------


def optimizer_state() -> dict[str, Any]:
    return {
        "state": {
            "w": {
                "exp_avg": numbered(5, 2),
                "step": torch.tensor(3.0),
                "max": torch.tensor([7.0]),
                "corner": torch.tensor([[8.0]]),
            },
            "row": {"exp_avg": numbered(1, 6, start=50), "seen": numbered(9, dtype=torch.int64)},
            "half": {"exp_avg": numbered(3, 2, 2, dtype=torch.bfloat16)},
            "noted": {"comment": "no tensors here"},
        },
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["w", "row"]}, {"lr": 0.2, "params": ["half"]}],
    }


def save_by_hand(library, path):
    save(library, {"model": {"w": torch.ones(5, 2)}, "optimizer": optimizer_state()}, path)


@pytest.mark.parametrize("saver", ["ours", "stock"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_kind_of_entry_loads_as_stock_loads_it(ranks: RankPool, tmp_path, saver, world_size):
    """Some ranks have no shard of some tensors; one-element tensors are whole; containers are as they were."""
    ranks(1).run(save_by_hand, saver, tmp_path)

    results = ranks(world_size).run(both_load, tmp_path, {"w": torch.ones(5, 2)})

    for ours, stock in results:
        assert ours == stock
    assert results[-1][0]["optimizer"]["state"]["row"]["exp_avg"][-1] == []
    assert results[-1][0]["optimizer"]["param_groups"] == optimizer_state()["param_groups"]


def load_alone(path, process_group_expected=False):
    assert dist.is_initialized() == process_group_expected
    return load_optimizer("ours", {"w": torch.ones(5, 2)}, path)


def test_a_process_without_a_group_gets_whole_tensors(ranks: RankPool, tmp_path):
    ranks(2).run(save_by_hand, "ours", tmp_path)

    (found,) = ranks(1).run(load_alone, tmp_path, process_group=False)

    assert described(found) == described({"optimizer": optimizer_state()})


def save_own_parts(path, **options):
    """Every rank has moments that no other rank has, and shares of others."""
    state, rank = optimizer_state(), dist.get_rank()
    state["state"][f"only on {rank}"] = {"exp_avg": numbered(3, start=rank)}
    dcp.save({"model": {}, "optimizer": state}, checkpoint_id=path, **options)


def load_described(path):
    return described(load_optimizer("ours", {}, path))


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_checkpoint_that_was_saved_rank_by_rank_loads_too(ranks: RankPool, tmp_path, world_size):
    ranks(2).run(save_own_parts, tmp_path / "parts", use_collectives=False)
    ranks(2).run(save_own_parts, tmp_path / "whole")

    found = ranks(world_size).run(load_described, tmp_path / "parts")

    assert found == ranks(world_size).run(load_described, tmp_path / "whole")
    assert {"only on 0", "only on 1"} <= found[0]["optimizer"]["state"].keys()


def save_empty_tensors(path):
    dcp.save(
        {"optimizer": {"state": {"w": {"none": torch.empty(0, 3), "wide": torch.empty(4, 0)}}}}, checkpoint_id=path
    )


def test_tensors_without_elements_come_back_plain(ranks: RankPool, tmp_path):
    ranks(1).run(save_empty_tensors, tmp_path)

    for found in ranks(2).run(load_described, tmp_path):
        assert {k: (v[0], v[2]) for k, v in found["optimizer"]["state"]["w"].items()} == {
            "none": (torch.Tensor, (0, 3)),
            "wide": (torch.Tensor, (4, 0)),
        }


def memory_taken_for_a_shard(path):
    sizes: list[int] = []
    real = torch.empty

    def counting(*size, **options):
        made = real(*size, **options)
        sizes.append(made.numel())
        return made

    torch.empty = counting
    try:
        load_optimizer("ours", {}, path)
    finally:
        torch.empty = real
    return max(sizes)


def save_large(path):
    dcp.save({"optimizer": {"state": {"w": {"exp_avg": torch.zeros(4000, 10)}}}}, checkpoint_id=path)


def test_only_the_own_rows_are_allocated(ranks: RankPool, tmp_path):
    ranks(1).run(save_large, tmp_path)

    assert ranks(4).run(memory_taken_for_a_shard, tmp_path) == [10_000] * 4


# --- errors --------------------------------------------------------------------------------------------------------


def error_of(function, *args, **options):
    """What a call raised, in words: the exception, and for a collective one that of every failing rank."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 - the tests look at it
        function(*args, **options)
    error = raised.value
    failures = getattr(error, "failures", {})
    return type(error), {rank: (type(e), str(e), getattr(e, "missing", None)) for rank, (e, _) in failures.items()}


def load_unknown_key(path, key):
    return error_of(load_optimizer, "ours", {}, path, key=key)


@pytest.mark.parametrize("key", ["optim", "optimizer.state", ""])
def test_an_unknown_key_is_an_error_that_names_the_keys_there_are(ranks: RankPool, tmp_path, key):
    ranks(1).run(save_by_hand, "ours", tmp_path)

    for kind, failures in ranks(2).run(load_unknown_key, tmp_path, key):
        assert kind is CheckpointException
        assert failures.keys() == {0, 1}
        for cause, text, missing in failures.values():
            assert cause is StateMismatchError
            assert missing == [key]
            assert repr(key) in text
            assert "model, optimizer" in text


class ReaderWithoutPaths(dcp.FileSystemReader):
    """Reads a format that keeps no paths, as Hugging Face files."""

    def read_metadata(self, *args, **kwargs):
        metadata = super().read_metadata(*args, **kwargs)
        metadata.planner_data = None
        return metadata


def load_without_paths(path):
    return error_of(load_sharded_optimizer_state_dict, {}, "optimizer", ReaderWithoutPaths(path))


def test_a_checkpoint_without_paths_is_refused_with_the_reason(ranks: RankPool, tmp_path):
    ranks(1).run(save_by_hand, "ours", tmp_path)

    for kind, failures in ranks(2).run(load_without_paths, tmp_path):
        assert kind is CheckpointException
        assert all(cause is StateMismatchError and "nested" in text for cause, text, _ in failures.values())


def load_with_bad_model_on_one_rank(path):
    model: Any = {"w": torch.ones(5, 2)} if dist.get_rank() else None
    return error_of(load_optimizer, "ours", model, path)


def test_an_error_on_one_rank_ends_the_call_on_all(ranks: RankPool, tmp_path):
    ranks(1).run(save_by_hand, "ours", tmp_path)

    first, second = ranks(2).run(load_with_bad_model_on_one_rank, tmp_path)

    assert first[0] is AttributeError
    assert second[0] is CheckpointException
    assert second[1][0][0] is AttributeError


def load_with_objects_of_stock(path):
    reader, planner = stock_optimizer.StorageReader, LIBRARIES["stock"].DefaultLoadPlanner()
    stock_reader = LIBRARIES["stock"].FileSystemReader(path)
    assert isinstance(stock_reader, reader)
    return (
        error_of(load_sharded_optimizer_state_dict, {}, "optimizer", stock_reader)[0],
        error_of(load_sharded_optimizer_state_dict, {}, "optimizer", dcp.FileSystemReader(path), planner)[0],
    )


def test_readers_and_planners_of_stock_are_refused(ranks: RankPool, tmp_path):
    assert ranks(1).run(load_with_objects_of_stock, tmp_path) == [(TypeError, TypeError)]


# --- planners ------------------------------------------------------------------------------------------------------


class Recorder(dcp.DefaultLoadPlanner):
    """Writes down what it is asked, and doubles what it loads."""

    def __init__(self):
        super().__init__()
        self.calls: set[str] = set()

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        self.calls.add("set_up_planner")
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self):
        self.calls.add("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, global_plan):
        self.calls.add("create_global_plan")
        return super().create_global_plan(global_plan)

    def finish_plan(self, new_plan):
        self.calls.add("finish_plan")
        return super().finish_plan(new_plan)

    def load_bytes(self, read_item, value):
        self.calls.add("load_bytes")
        super().load_bytes(read_item, value)

    def commit_tensor(self, read_item, tensor):
        self.calls.add("commit_tensor")
        tensor.mul_(2)


ALL_CALLS = {"set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "load_bytes", "commit_tensor"}


def load_with_a_planner(path):
    planner = Recorder()
    state = load_optimizer("ours", {}, path, planner=planner)["optimizer"]["state"]
    rows = state["w"]["exp_avg"].local_shards()
    return planner.calls, [shard.tensor.tolist() for shard in rows], state["w"]["step"].item()


def test_a_given_planner_does_the_loading(ranks: RankPool, tmp_path):
    ranks(1).run(save_by_hand, "ours", tmp_path)

    first, second = ranks(2).run(load_with_a_planner, tmp_path)

    assert first == (ALL_CALLS, [[[0, 2], [4, 6], [8, 10]]], 6)
    assert second == (ALL_CALLS - {"create_global_plan"}, [[[12, 14], [16, 18]]], 6)


class FailingPlanner(dcp.DefaultLoadPlanner):
    """Cannot plan, and counts how often it is told to give up."""

    given_up = 0

    def create_local_plan(self):
        raise OSError("no plan today")

    def undo_set_up(self):
        self.given_up += 1


class CountingReader(dcp.FileSystemReader):
    resets = 0

    def reset(self, checkpoint_id=None):
        self.resets += 1
        super().reset(checkpoint_id)


def fail_to_plan(path):
    planner, reader = FailingPlanner(), CountingReader(path)
    with pytest.raises(CheckpointException, match="no plan today"):
        load_sharded_optimizer_state_dict({}, "optimizer", reader, planner)
    return planner.given_up, reader.resets


def test_reader_and_planner_are_notified_of_beginning_and_failure(ranks: RankPool, tmp_path):
    ranks(1).run(save_by_hand, "ours", tmp_path)

    assert ranks(2).run(fail_to_plan, tmp_path) == [(1, 1), (1, 1)]


# --- private helpers that programs import --------------------------------------------------------------------------


def helpers_like_stock():
    for module in (optimizer, stock_optimizer):
        props = (dcp if module is optimizer else LIBRARIES["stock"]).metadata.TensorProperties
        made = module._alloc_tensor(props(dtype=torch.float16, requires_grad=True), [2, 3], "cpu")
        yield (
            module._create_colwise_spec(),
            module._gen_rank_device(3, "cpu"),
            module._gen_rank_device(3),
            module._is_nested_tensor(torch.ones(2)),
            module._get_state_dict_2d_layout({"w": torch.ones(3, 2)}),
            (made.dtype, made.shape, made.device, made.requires_grad, made.layout, made.is_pinned()),
        )


def compare_helpers():
    ours, stock = helpers_like_stock()
    assert isinstance(ours[0], ChunkShardingSpec)
    assert (ours[4][0]["w"][0], tuple(ours[4][0]["w"][1]), ours[4][1]) == (None, (3, 2), None)
    return [str(value) for value in (*ours[:4], *ours[5])] == [str(value) for value in (*stock[:4], *stock[5])]


def test_the_helpers_do_what_those_of_stock_do(ranks: RankPool):
    assert ranks(3).run(compare_helpers) == [True] * 3


def spec_of_a_subgroup():
    group = dist.new_group([1, 2])
    return optimizer._create_colwise_spec(group).placements if dist.get_rank() else None


def test_a_spec_names_the_ranks_of_a_subgroup_by_their_numbers_in_the_job(ranks: RankPool):
    """Stock counts them from 0, which torch then refuses: rank 0 is not in the group."""
    for placements in ranks(3).run(spec_of_a_subgroup)[1:]:
        assert [str(placement) for placement in placements] == ["rank:1/cpu", "rank:2/cpu"]


def test_memory_that_cannot_be_pinned_here_is_ordinary_memory():
    if torch.accelerator.is_available():
        pytest.skip("it can be pinned here")
    properties = dcp.metadata.TensorProperties(dtype=torch.float32, pin_memory=True)

    assert optimizer._alloc_tensor(properties, [2], "cpu").shape == (2,)
