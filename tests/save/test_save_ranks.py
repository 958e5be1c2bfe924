"""What ranks hold in common, each for itself, or some of them alone, and what happens where they differ."""

from __future__ import annotations

import collections
import itertools
import json
import os
import random
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import holdfast
from holdfast.errors import ReplicaMismatchError
from tests.dcp.states import distributed
from tests.rank_pool import RankPool

# --- values per rank -------------------------------------------------------------------------------------------------


def save_own_values(path: str) -> dict[str, Any]:
    rank = dist.get_rank()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    loader = holdfast.PerRank(
        {"position": 100 + rank, "buffer": torch.full((rank + 1,), rank), "array": np.arange(rank)}
    )
    state = {"step": 7, "loader": loader, "rng": holdfast.RngState(), "list": [holdfast.PerRank(rank), torch.ones(2)]}
    holdfast.save(state, path)
    return {"after": [random.random(), float(np.random.rand()), float(torch.rand(1))]}


def load_own_values(path: str) -> dict[str, Any]:
    state = {
        "loader": holdfast.PerRank(None),
        "rng": holdfast.RngState(),
        "list": [holdfast.PerRank(None), torch.zeros(2)],
    }
    holdfast.load(state, path)
    return {
        "position": state["loader"].value["position"],
        "buffer": state["loader"].value["buffer"].tolist(),
        "own": state["list"][0].value,
        "after": [random.random(), float(np.random.rand()), float(torch.rand(1))],
    }


def test_every_rank_gets_its_own_values_and_random_streams_back(ranks: RankPool, tmp_path):
    path = str(tmp_path / "x")
    saved = ranks(3).run(save_own_values, path)
    found = ranks(3).run(load_own_values, path)
    assert len({tuple(one["after"]) for one in saved}) == 3
    for rank in range(3):
        assert found[rank] == {
            "position": 100 + rank,
            "buffer": [rank] * (rank + 1),
            "own": rank,
            "after": saved[rank]["after"],
        }
    checkpoint = holdfast.open(path)
    assert [checkpoint[f"loader.{rank}.position"] for rank in range(3)] == [100, 101, 102]
    assert checkpoint["loader.2.buffer"].kind == "per_rank"
    assert [len(array) for array in (one["array"] for one in checkpoint.read("loader")["loader"])] == [0, 1, 2]


def save_sharded_as_own(path: str) -> str:
    weight = distributed(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(holdfast.errors.UnsupportedTensorError) as caught:
        holdfast.save({"w": holdfast.PerRank(weight)}, path)
    return str(caught.value)


def test_a_sharded_tensor_is_not_per_rank(ranks: RankPool, tmp_path):
    for rank, told in enumerate(ranks(2).run(save_sharded_as_own, str(tmp_path / "x"))):
        assert "'w.0' is spread over ranks" in told, rank
        assert "[on rank 0; rank(s) [1] failed too]" in told


def test_per_rank_in_per_rank_is_refused(tmp_path):
    with pytest.raises(ValueError, match="per rank again"):
        holdfast.save({"a": holdfast.PerRank({"b": holdfast.PerRank(1)})}, tmp_path / "x")


def save_some_own(path: str) -> None:
    rank = dist.get_rank()
    holdfast.save({"all": 1, **({"some": holdfast.PerRank(rank)} if rank != 1 else {})}, path)


def test_a_rank_without_a_value_of_its_own_has_none(ranks: RankPool, tmp_path):
    ranks(3).run(save_some_own, str(tmp_path / "x"))
    assert holdfast.open(tmp_path / "x").read() == {"all": 1, "some": [0, None, 2]}


def test_two_tensors_never_share_a_key(tmp_path):
    state = {"a": holdfast.PerRank({"w": torch.ones(1)}), "a.0.w": torch.zeros(1)}
    with pytest.raises(
        holdfast.errors.UnsupportedValueError, match=r"'a.0.w' is the key of tensors at two different places"
    ):
        holdfast.save(state, tmp_path / "x")


def save_colliding(path: str) -> str:
    state = {"a.b": torch.zeros(1)} if dist.get_rank() == 0 else {"a": {"b": torch.zeros(1)}}
    with pytest.raises(holdfast.errors.UnsupportedValueError) as caught:
        holdfast.save(state, path, replica_mismatch="ignore")
    return caught.value.key


def test_keys_that_collide_between_ranks_are_refused(ranks: RankPool, tmp_path):
    assert ranks(2).run(save_colliding, str(tmp_path / "x")) == ["a.b"] * 2


# --- copies that differ ----------------------------------------------------------------------------------------------


def differing_state() -> dict[str, Any]:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (3,))
    replicated = distributed(torch.ones(3), mesh, [Replicate()])
    if rank == 1:
        replicated.to_local().add_(1)
    return {
        "same": torch.arange(3.0),
        "tensor": torch.full((2,), float(rank // 2)),
        "array": np.full(2, rank),
        "replicated": replicated,
        "value": 1 if rank else 1.0,
        "nested": [{"lr": 0.1 * (rank + 1), "eps": 1e-8}],
        "structure": [torch.zeros(1)] * (2 if rank == 2 else 1),
        "tensor or not": torch.zeros(1) if rank else 5,
    }


def save_differing(path: str, check: Any) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            holdfast.save(differing_state(), path, replica_mismatch=check)
        except ReplicaMismatchError as error:
            return error.keys, str(error)
    return [(str(warning.message), Path(warning.filename).name) for warning in caught]


DIFFERENCES = {
    "tensor": "ranks 0,1 != ranks 2",
    "array": "ranks 0 != ranks 1 != ranks 2",
    "replicated": "ranks 0,2 != ranks 1",
    "value": "ranks 0 != ranks 1,2",
    "nested.0.lr": "ranks 0 != ranks 1 != ranks 2",
    "structure": "ranks 0,1 != ranks 2",
    "tensor or not": "ranks 0 != ranks 1,2",
}


def test_copies_that_differ_are_an_error_on_all_ranks_that_names_them(ranks: RankPool, tmp_path):
    for keys, told in ranks(3).run(save_differing, str(tmp_path / "x"), "error"):
        assert keys == DIFFERENCES
        assert "holdfast.PerRank" in told
        assert all(f"'{key}': {who}" in told for key, who in DIFFERENCES.items())
    assert not (tmp_path / "x").exists()


def check_lowest_ranks_copies(path: Path) -> None:
    found = holdfast.open(path).read()
    assert found["tensor"].tolist() == [0, 0]
    assert found["array"].tolist() == [0, 0]
    assert found["replicated"].tolist() == [1, 1, 1]
    assert (found["value"], type(found["value"])) == (1, float)
    assert found["nested"] == [{"lr": 0.1, "eps": 1e-8}]
    assert len(found["structure"]) == 1
    assert found["tensor or not"] == 5
    assert set(holdfast.open(path)) == {*found, "structure.0"} - {"structure"}
    stored = [entry["key"] for entry in json.loads((path / "holdfast.json").read_text())["tensors"]]
    assert stored == ["same", "tensor", "array", "replicated", "structure.0"]  # nothing that has no place in the state


def test_copies_that_differ_can_be_a_warning(ranks: RankPool, tmp_path):
    told = ranks(3).run(save_differing, str(tmp_path / "x"), "warn")
    assert [len(warned) for warned in told] == [1, 0, 0]
    ((text, file),) = told[0]
    assert all(f"'{key}': {who}" in text for key, who in DIFFERENCES.items())
    assert "copies of the lowest ranks are saved" in text
    assert file == "test_save_ranks.py"
    check_lowest_ranks_copies(tmp_path / "x")


def test_copies_can_be_taken_for_equal(ranks: RankPool, tmp_path):
    assert ranks(3).run(save_differing, str(tmp_path / "x"), "ignore") == [[]] * 3
    found = holdfast.open(tmp_path / "x").read()
    assert found["tensor"].tolist() in ([0, 0], [1, 1])
    assert (found["value"], found["tensor or not"]) == (1.0, 5)


def save_different_kinds(path: str, check: Any) -> Any:
    rank = dist.get_rank()
    state = {
        "shape": torch.zeros(rank + 1),
        "dtype": torch.zeros(1, dtype=torch.float32 if rank else torch.float64),
        "numpy": np.zeros(2, np.float32) if rank else torch.zeros(2),
    }
    with pytest.raises(ReplicaMismatchError) as caught:
        holdfast.save(state, path, replica_mismatch=check)
    return sorted(caught.value.keys)


@pytest.mark.parametrize("check", ["error", "warn", "ignore"])
def test_a_key_must_be_the_same_kind_of_tensor_everywhere(ranks: RankPool, tmp_path, check):
    assert ranks(2).run(save_different_kinds, str(tmp_path / "x"), check) == [["dtype", "numpy", "shape"]] * 2


def save_batch_norm(path: str) -> tuple[float, float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(dist.get_rank())
    wrapped(torch.randn(8, 2)).sum().backward()
    holdfast.save({"model": wrapped}, path)
    return model[1].running_mean[0].item(), model[1].running_mean[1].item()


def test_buffers_of_data_parallel_models_are_those_of_the_first_rank(ranks: RankPool, tmp_path):
    means = ranks(3).run(save_batch_norm, str(tmp_path / "x"))
    assert len(set(means)) == 3
    assert tuple(holdfast.open(tmp_path / "x")["model.1.running_mean"].torch().tolist()) == means[0]


# --- ranks with different parts --------------------------------------------------------------------------------------


class Stage(torch.nn.Module):
    """One stage of a pipeline: its layers are called as in the whole model."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.layers = torch.nn.ModuleDict({str(stage): torch.nn.Linear(3, 3)})

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            values = layer(values)
        return values


def trained_stage() -> tuple[Stage, torch.optim.Optimizer]:
    stage = Stage(dist.get_rank())
    weights = [parameter for name, parameter in stage.named_parameters() if name.endswith("weight")]
    biases = [parameter for name, parameter in stage.named_parameters() if name.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.1)
    stage(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return stage, optimizer


def save_pipeline(path: str) -> None:
    stage, optimizer = trained_stage()
    holdfast.save({"model": stage, "optimizer": optimizer, "step": 3}, path)


def load_pipeline(path: str) -> list[str]:
    expected_stage, expected = trained_stage()
    stage = Stage(dist.get_rank())
    for parameter in stage.parameters():
        torch.nn.init.zeros_(parameter)
    weights = [parameter for name, parameter in stage.named_parameters() if name.endswith("weight")]
    biases = [parameter for name, parameter in stage.named_parameters() if name.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases}], lr=0.5)
    holdfast.load({"model": stage, "optimizer": optimizer}, path, allow_unexpected="*")
    wrong = [name for name, tensor in stage.state_dict().items() if not tensor.equal(expected_stage.state_dict()[name])]
    mine, theirs = optimizer.state_dict(), expected.state_dict()
    for number, entry in theirs["state"].items():
        wrong += [] if mine["state"][number]["exp_avg"].equal(entry["exp_avg"]) else [f"state {number}"]
    wrong += [f"group {n}" for n, group in enumerate(theirs["param_groups"]) if mine["param_groups"][n] != group]
    return wrong


def test_stages_of_a_pipeline_are_one_checkpoint(ranks: RankPool, tmp_path):
    path = str(tmp_path / "x")
    ranks(3).run(save_pipeline, path)
    found = holdfast.open(path).read()
    assert sorted(found["model"]) == sorted(f"layers.{n}.{kind}" for n in range(3) for kind in ("weight", "bias"))
    groups = found["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [
        [f"layers.{n}.weight" for n in range(3)],
        [f"layers.{n}.bias" for n in range(3)],
    ]
    assert len(found["optimizer"]["state"]) == 6
    assert ranks(3).run(load_pipeline, path) == [[]] * 3


def save_unnamed_optimizers(path: str) -> Any:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(dist.get_rank() + 1)]
    with pytest.raises(ReplicaMismatchError) as caught:
        holdfast.save({"optimizer": torch.optim.SGD(parameters)}, path)
    return sorted(caught.value.keys)


def test_optimizers_without_names_that_differ_are_refused(ranks: RankPool, tmp_path):
    """Numbers do not say which parameters are meant."""
    found = ranks(2).run(save_unnamed_optimizers, str(tmp_path / "x"))
    assert found == [["optimizer.param_groups.0.params"]] * 2


# --- groups of ranks -------------------------------------------------------------------------------------------------


def save_in_subgroups(folder: str) -> Any:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    mine = groups[rank % 2]
    state = {"own": holdfast.PerRank(rank), "parity": rank % 2, "w": torch.full((2,), rank % 2)}
    holdfast.save(state, f"{folder}/{rank % 2}", process_group=mine)
    if rank == 1:
        with pytest.raises(ValueError, match="rank 1 is not in the process group"):
            holdfast.save(state, f"{folder}/outside", process_group=groups[0])
    return holdfast.open(f"{folder}/{rank % 2}").read()["own"]


def test_groups_of_ranks_save_for_themselves(ranks: RankPool, tmp_path):
    assert ranks(3).run(save_in_subgroups, str(tmp_path)) == [[0, 2], [1], [0, 2]]
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]
    assert holdfast.open(tmp_path / "0").provenance["world_size"] == 2


def save_slowly_on_one_rank(path: str) -> Any:
    """One rank's clock jumps after the save has begun, so that nobody has to wait for it."""
    real = time.perf_counter
    jumps = itertools.chain([0], itertools.repeat(1000 if dist.get_rank() == 1 else 0))

    def clock() -> float:
        return real() + next(jumps)

    with mock.patch.object(time, "perf_counter", clock):
        return holdfast.save({"own": holdfast.PerRank(torch.ones(dist.get_rank()))}, path)


def test_all_ranks_report_the_same_with_the_seconds_of_the_slowest(ranks: RankPool, tmp_path):
    reports = ranks(2).run(save_slowly_on_one_rank, str(tmp_path / "x"))
    assert reports[0] == reports[1]
    assert reports[0].seconds >= 1000
    assert (reports[0].world_size, reports[0].tensor_count) == (2, 2)
    assert reports[0].bytes_written == sum(file.stat().st_size for file in (tmp_path / "x").glob("data-*"))


def save_with_gaps(path: str) -> None:
    dtype = np.dtype([("flag", "u1"), ("number", "<i8")], align=True)
    array = np.full(3 * dtype.itemsize, dist.get_rank(), np.uint8).view(dtype)
    array["flag"], array["number"] = 1, [1, 2, 3]
    holdfast.save({"array": array, "element": array[0], "closed": collections.deque([array])}, path)


def test_bytes_that_belong_to_no_field_do_not_make_copies_differ(ranks: RankPool, tmp_path):
    ranks(2).run(save_with_gaps, str(tmp_path / "x"))
    found = holdfast.open(tmp_path / "x").read()
    assert found["array"]["number"].tolist() == [1, 2, 3]
    assert (found["element"]["flag"], found["element"]["number"]) == (1, 1)
    assert found["closed"][0]["number"].tolist() == [1, 2, 3]


def save_alone(path: str) -> int:
    saved = holdfast.save({"model": torch.nn.Linear(2, 2), "own": holdfast.PerRank(5)}, path)
    return saved.tensor_count


@pytest.mark.parametrize("process_group", [True, False])
def test_a_single_process_saves_with_and_without_a_group(ranks: RankPool, tmp_path, process_group):
    assert ranks(1).run(save_alone, str(tmp_path / "x"), process_group=process_group) == [2]
    assert holdfast.open(tmp_path / "x").read("own") == {"own": [5]}


def save_fully_sharded(path: str) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    holdfast.save({"model": model, "optimizer": optimizer, "step": 1}, path)
    return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}


def test_a_fully_sharded_model_is_saved_by_the_object_itself(ranks: RankPool, tmp_path):
    expected, *_ = ranks(3).run(save_fully_sharded, str(tmp_path / "x"))
    single = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.Adam(single.parameters(), lr=0.5)
    holdfast.load({"model": single, "optimizer": optimizer, "step": None}, tmp_path / "x")
    assert all(tensor.equal(expected[name]) for name, tensor in single.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert holdfast.open(tmp_path / "x")["model.0.weight"].kind == "sharded"
