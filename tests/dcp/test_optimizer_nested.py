"""Optimizer state of FSDP1 over tensor parallelism: parameters are ShardedTensors whose shards are ShardedTensors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.optimizer as stock_optimizer
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import holdfast.dcp as dcp
from holdfast.dcp import optimizer
from holdfast.dcp.optimizer import load_sharded_optimizer_state_dict
from holdfast.errors import CheckpointException, StateMismatchError, UnsupportedTensorError
from tests.dcp.states import LIBRARIES, numbered, save
from tests.rank_pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Grid:
    """The ranks as a grid: tensor parallelism within a row, FSDP within a column."""

    def __init__(self, rows: int, columns: int) -> None:
        row, column = divmod(dist.get_rank(), columns)
        tensor_parallel = [[r * columns + c for c in range(columns)] for r in range(rows)]
        sharded = [[r * columns + c for r in range(rows)] for c in range(columns)]
        row_groups = [dist.new_group(members) for members in tensor_parallel]
        column_groups = [dist.new_group(members) for members in sharded]
        self.tensor_parallel, self.sharded = tensor_parallel[row], sharded[column]
        self.tensor_parallel_group, self.sharded_group = row_groups[row], column_groups[column]

    def part(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        """What this rank's column has of a parameter that tensor parallelism splits along ``dim``."""
        return full.chunk(len(self.tensor_parallel), dim)[self.tensor_parallel.index(dist.get_rank())]

    def nested(self, full: torch.Tensor, dim: int) -> ShardedTensor:
        inner = sharded(self.part(full, dim), 0, self.sharded, self.sharded_group)
        return sharded(full, dim, self.tensor_parallel, self.tensor_parallel_group, inner)


def sharded(full, dim, members, group, local=None) -> ShardedTensor:
    """``full`` cut along ``dim`` over a group. ``local`` takes the place of this rank's data."""
    offset, boxes, mine = 0, [], []
    for rank, cut in zip(members, full.chunk(len(members), dim), strict=False):
        box = ShardMetadata([offset if d == dim else 0 for d in range(full.dim())], list(cut.shape), f"rank:{rank}/cpu")
        offset += cut.shape[dim]
        boxes.append(box)
        if rank == dist.get_rank():
            mine.append(Shard(cut.clone() if local is None else local, box))
    metadata = ShardedTensorMetadata(boxes, full.size(), TensorProperties(dtype=full.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(mine, metadata, process_group=group)


MOMENTS = {
    "columns": (numbered(7, 5), 1),
    "rows": (numbered(7, 4, start=100), 0),
    "cube": (numbered(3, 2, 6, start=200), 2),
}
"""Parameters that tensor parallelism splits: a moment of each, and the dimension that is split."""


def model_of(grid: Grid) -> dict[str, Any]:
    """The norm is not split by tensor parallelism. A model's state may hold other things than tensors."""
    split = {name: grid.nested(torch.zeros(moment.shape), dim) for name, (moment, dim) in MOMENTS.items()}
    return {**split, "norm": sharded(torch.zeros(5), 0, grid.sharded, grid.sharded_group), "_extra_state": {"a": 1}}


def state_of(grid: Grid) -> dict[str, Any]:
    state: dict[str, Any] = {
        name: {"exp_avg": grid.nested(moment, dim), "step": torch.tensor(4.0)}
        for name, (moment, dim) in MOMENTS.items()
    }
    state["norm"] = {"exp_avg": numbered(5, start=300), "step": torch.tensor(4.0)}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": [*MOMENTS, "norm"]}], "scales": numbered(6)}


def save_from_a_grid(library, path):
    grid = Grid(2, 2)
    save(library, {"model": {}, "optimizer": state_of(grid)}, path)


def save_whole(path):
    state = {name: {"exp_avg": moment} for name, (moment, _) in MOMENTS.items()}
    dcp.save({"optimizer": {"state": {**state, "norm": {"exp_avg": numbered(5, start=300)}}}}, checkpoint_id=path)


def load(model, path, planner=None):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_sharded_optimizer_state_dict(model, "optimizer", dcp.FileSystemReader(path), planner)


def wrong_moments(grid, state, factor=1):
    """The moments of which this rank did not get its own rows of its own part."""
    wrong = []
    for name, (moment, dim) in {**MOMENTS, "norm": (numbered(5, start=300), None)}.items():
        found = state[name]["exp_avg"]
        part = moment if dim is None else grid.part(moment, dim)
        rows = dict(zip(grid.sharded, part.chunk(len(grid.sharded)), strict=False)).get(dist.get_rank())
        held = [shard.tensor for shard in found.local_shards()]
        is_right = (
            isinstance(found, ShardedTensor)
            and found.metadata().size == part.shape
            and found._process_group is grid.sharded_group
            and (held == [] if rows is None else len(held) == 1 and torch.equal(held[0], factor * rows))
        )
        wrong += [] if is_right else [name]
    return wrong


def load_on_a_grid(path, rows, columns):
    grid = Grid(rows, columns)
    loaded = load(model_of(grid), path)["optimizer"]
    others = {name: moments["step"].item() for name, moments in loaded["state"].items() if "step" in moments}
    return wrong_moments(grid, loaded["state"]), others, loaded.get("param_groups")


@pytest.mark.parametrize("saver", ["ours", "stock"])
@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 1), (4, 1), (1, 3)])
def test_every_rank_gets_its_rows_of_its_part(ranks: RankPool, tmp_path, saver, shape):
    """Stock loads none of these: it takes a rank's number in the group for its number in the job."""
    ranks(4).run(save_from_a_grid, saver, tmp_path)

    for wrong, others, groups in ranks(shape[0] * shape[1]).run(load_on_a_grid, tmp_path, *shape):
        assert wrong == []
        assert others == dict.fromkeys([*MOMENTS, "norm"], 4.0)
        assert groups == [{"lr": 0.1, "params": [*MOMENTS, "norm"]}]


def test_a_checkpoint_of_one_process_loads_on_a_grid(ranks: RankPool, tmp_path):
    ranks(1).run(save_whole, tmp_path)

    assert ranks(4).run(load_on_a_grid, tmp_path, 2, 2) == [([], {}, None)] * 4


class Doubling(dcp.DefaultLoadPlanner):
    """Doubles what it loads."""

    def commit_tensor(self, read_item, tensor):
        tensor.mul_(2)


def load_on_a_grid_with_a_planner(path):
    grid, planner = Grid(2, 2), Doubling()
    state = load(model_of(grid), path, planner)["optimizer"]["state"]
    return wrong_moments(grid, state, factor=2), planner.metadata is not None


def test_a_given_planner_is_honoured(ranks: RankPool, tmp_path):
    """Stock drops it."""
    ranks(1).run(save_whole, tmp_path)

    assert ranks(4).run(load_on_a_grid_with_a_planner, tmp_path) == [([], True)] * 4


# --- beside stock, where stock can load: all ranks in one column ---------------------------------------------------


def beside_another_column(full: torch.Tensor, dim: int) -> ShardedTensor:
    """A parameter of which this column of all ranks has the second half, and other machines the first."""
    members = list(range(dist.get_world_size()))
    first, second = full.chunk(2, dim)
    start = [first.shape[dim] if d == dim else 0 for d in range(full.dim())]
    elsewhere = ShardMetadata([0] * full.dim(), list(first.shape), f"rank:{(dist.get_rank() + 1) % len(members)}/cpu")
    here = ShardMetadata(start, list(second.shape), f"rank:{dist.get_rank()}/cpu")
    metadata = ShardedTensorMetadata([elsewhere, here], full.size(), TensorProperties(dtype=full.dtype))
    mine = [Shard(sharded(second, 0, members, dist.group.WORLD), here)]
    return ShardedTensor._init_from_local_shards_and_global_metadata(mine, metadata)


def both_load(path):
    model = {name: beside_another_column(torch.zeros(moment.shape), dim) for name, (moment, dim) in MOMENTS.items()}
    layouts = [module._get_state_dict_2d_layout(model) for module in (optimizer, stock_optimizer)]
    assert layouts[0] == layouts[1]
    results = []
    for library, module in (("ours", optimizer), ("stock", stock_optimizer)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = module.load_sharded_optimizer_state_dict(
                model, "optimizer", LIBRARIES[library].FileSystemReader(path)
            )["optimizer"]["state"]
        results.append(
            {
                name: (
                    type(moments["exp_avg"]),
                    moments["exp_avg"].metadata().size,
                    moments["exp_avg"]._process_group,
                    [
                        (s.metadata.shard_offsets, s.tensor.dtype, s.tensor.tolist())
                        for s in moments["exp_avg"].local_shards()
                    ],
                )
                for name, moments in state.items()
            }
        )
    return results[0] == results[1], {name: shards for name, (*_, shards) in results[0].items()}


def test_where_stock_can_load_the_result_is_the_same(ranks: RankPool, tmp_path):
    ranks(1).run(save_whole, tmp_path)

    for same, shards in ranks(2).run(both_load, tmp_path):
        assert same
        assert all(shards.values())


def fill_with_offsets(path):
    """One part of a stored tensor, filled by each library's planner that knows offsets."""
    found = []
    for library, module in (("ours", optimizer), ("stock", stock_optimizer)):
        part = sharded(torch.zeros(3, 5), 0, range(dist.get_world_size()), dist.group.WORLD)
        planner = module._ReaderWithOffset({"optimizer.state.columns.exp_avg": [4, 0], "not.there": [1]})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            LIBRARIES[library].load({"optimizer.state.columns.exp_avg": part}, checkpoint_id=path, planner=planner)
        found.append([shard.tensor.tolist() for shard in part.local_shards()])
    return found


def test_the_planner_with_offsets_fills_what_that_of_stock_fills(ranks: RankPool, tmp_path):
    ranks(1).run(save_whole, tmp_path)

    (ours, stock_result), (ours_too, stock_too) = ranks(2).run(fill_with_offsets, tmp_path)

    assert ours == stock_result == [MOMENTS["columns"][0][4:6].tolist()]
    assert ours_too == stock_too == [MOMENTS["columns"][0][6:].tolist()]


# --- what is refused -----------------------------------------------------------------------------------------------


def failures_of(model, path):
    """The exception of this rank, and those of all ranks that failed by what is told to this one."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 - the tests look at it
        load(model, path)
    failures = getattr(raised.value, "failures", {})
    return type(raised.value), str(raised.value), {rank: type(error) for rank, (error, _) in failures.items()}


def load_with_two_nested_shards(path):
    """Rank 1 has a parameter in two nested shards."""
    everyone = [dist.new_group([rank]) for rank in range(2)]
    full, own = torch.zeros(4, 2), [dist.get_rank()]
    group = everyone[dist.get_rank()]
    halves = [sharded(half, 0, own, group) for half in full.chunk(2)]
    boxes = [ShardMetadata([start, 0], [2, 2], f"rank:{dist.get_rank()}/cpu") for start in (0, 2)]
    metadata = ShardedTensorMetadata(boxes, full.size(), TensorProperties(dtype=full.dtype))
    shards = [Shard(half, box) for half, box in zip(halves, boxes, strict=True)]
    nested = ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata, process_group=group)
    return failures_of({"columns": nested} if dist.get_rank() else {}, path)


def test_a_parameter_in_several_nested_shards_is_refused_on_all_ranks(ranks: RankPool, tmp_path):
    ranks(1).run(save_whole, tmp_path)

    other, own = ranks(2).run(load_with_two_nested_shards, tmp_path)

    assert own[0] is UnsupportedTensorError
    assert "'columns' has 2 shards on this rank" in own[1]
    assert (other[0], other[2]) == (CheckpointException, {1: UnsupportedTensorError})


def load_with_a_dtensor_inside(path):
    mesh = init_device_mesh("cpu", (1,))
    inner = DTensor.from_local(torch.zeros(7, 5), mesh, [Replicate()])
    outer = sharded(torch.zeros(7, 5), 0, [0], dist.group.WORLD)
    outer._local_shards = [Shard(inner, outer.local_shards()[0].metadata)]
    for module in (optimizer, stock_optimizer):
        with pytest.raises(ValueError, match="DTensor"):
            module._is_nested_tensor(outer)
    return failures_of({"columns": outer}, path)


def test_a_dtensor_in_a_shardedtensor_is_refused(ranks: RankPool, tmp_path):
    ranks(1).run(save_whole, tmp_path)

    ((kind, text, _),) = ranks(1).run(load_with_a_dtensor_inside, tmp_path)

    assert kind is UnsupportedTensorError
    assert "'columns' is a DTensor in a ShardedTensor" in text


def load_into_another_model(path):
    grid = Grid(2, 1)
    return failures_of({**model_of(grid), "columns": grid.nested(torch.zeros(8, 5), 1)}, path)


def test_a_part_of_a_parameter_of_another_size_is_refused(ranks: RankPool, tmp_path):
    """Stock fills what it can and leaves the rest as it was in memory."""
    ranks(1).run(save_whole, tmp_path)

    for kind, text, failures in ranks(2).run(load_into_another_model, tmp_path):
        assert kind is CheckpointException
        assert failures == dict.fromkeys(range(2), StateMismatchError)
        assert "optimizer.state.columns.exp_avg: a tensor of size [7, 5] is stored" in text
        assert "of size [8, 5]" in text
