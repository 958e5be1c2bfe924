"""Meta tensors in a state get memory: of the same kind, on the right device, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.planner_helpers import _init_state_dict as stock_init_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast._layout.materialize import materialize
from tests.properties import examples
from tests.rank_pool import RankPool


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@settings(max_examples=examples(40))
@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.uint16]),
)
def test_a_meta_tensor_becomes_one_of_the_same_shape_and_dtype_in_memory(shape, dtype):
    state = {"t": meta(*shape, dtype=dtype)}
    materialize(state)
    tensor = state["t"]
    assert type(tensor) is torch.Tensor
    assert tensor.device == torch.device("cpu")
    assert (tensor.shape, tensor.dtype) == (torch.Size(shape), dtype)
    tensor.zero_()


def test_it_is_found_at_any_depth_and_under_any_key():
    state: dict[Any, Any] = {
        "list": [{"a": meta(1)}, [meta(2)]],
        1: {2: meta(3)},
        (4, 5): meta(4),
        "nested": {"dict": {"t": meta(5)}},
    }
    materialize(state)
    found = [state["list"][0]["a"], state["list"][1][0], state[1][2], state[(4, 5)], state["nested"]["dict"]["t"]]
    assert [(tensor.numel(), tensor.is_meta) for tensor in found] == [(n, False) for n in (1, 2, 3, 4, 5)]
    assert list(state) == ["list", 1, (4, 5), "nested"]
    assert len(state[1]) == 1


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_stays_a_parameter(requires_grad):
    state = {"p": torch.nn.Parameter(meta(2, 3), requires_grad=requires_grad)}
    materialize(state)
    assert type(state["p"]) is torch.nn.Parameter
    assert state["p"].requires_grad is requires_grad
    assert not state["p"].is_meta


def test_nothing_else_is_touched():
    tensor, array, opaque = torch.zeros(2), [1, 2], (meta(1), "tuple")
    state = {"t": tensor, "array": array, "opaque": opaque, "n": None, "nested": {"t": tensor, "set": {1}}, "empty": {}}
    containers = [state["nested"], state["array"], state["opaque"], state["empty"]]
    materialize(state)
    assert state["t"] is tensor
    assert state["nested"]["t"] is tensor
    assert [state["nested"], state["array"], state["opaque"], state["empty"]] == containers
    assert state["opaque"] is opaque
    assert state["array"] is array
    assert opaque[0].is_meta
    assert list(state) == ["t", "array", "opaque", "n", "nested", "empty"]


def test_keys_that_look_alike_are_no_obstacle():
    # As keys of a checkpoint these collide, which is for the planner to tell.
    state = {"a": {"b": meta(1)}, "a.b": meta(2)}
    materialize(state)
    assert (state["a"]["b"].numel(), state["a.b"].numel()) == (1, 2)


def a_module_on_meta():
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = {"model": module.state_dict()}
    materialize(state)
    return {key: (str(t.device), tuple(t.shape), str(t.dtype)) for key, t in state["model"].items()}


def test_a_module_on_meta_gets_memory_with_and_without_a_process_group(ranks: RankPool):
    expected = {
        key: ("cpu", tuple(tensor.shape), str(tensor.dtype))
        for key, tensor in torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).state_dict().items()
    }
    assert a_module_on_meta() == expected
    assert ranks(2).run(a_module_on_meta) == [expected] * 2


def meta_dtensor(mesh: DeviceMesh, full: tuple[int, ...], local: tuple[int, ...], placements) -> DTensor:
    stride = torch.empty(full).stride()
    return DTensor.from_local(meta(*local), mesh, placements, run_check=False, shape=torch.Size(full), stride=stride)


def described(tensor: Any) -> Any:
    return (
        type(tensor).__name__,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.placements,
        str(tensor.to_local().device),
        tuple(tensor.to_local().shape),
        tensor.dtype,
    )


def dtensors():
    mesh = init_device_mesh("cpu", (2, 2))
    row, column = mesh.get_coordinate()
    return {
        "even": meta_dtensor(mesh, (4, 6), (2, 3), [Shard(0), Shard(1)]),
        "uneven": meta_dtensor(mesh, (3, 2), (2 if row == 0 else 1, 2), [Shard(0), Replicate()]),
        "empty": meta_dtensor(mesh, (1,), (1 if column == 0 else 0,), [Replicate(), Shard(0)]),
        "replicated": meta_dtensor(mesh, (2,), (2,), [Replicate(), Replicate()]),
    }


def materialized_by_both():
    ours, stock = dtensors(), dtensors()
    materialize(ours)
    stock_init_state_dict(stock)
    return [(described(ours[key]), described(stock[key])) for key in ours]


def test_a_dtensor_keeps_mesh_placements_and_local_shape_as_in_stock(ranks: RankPool):
    for pairs in ranks(4).run(materialized_by_both):
        assert len(pairs) == 4
        for ours, stock in pairs:
            assert ours == stock
            assert ours[0] == "DTensor"
            assert ours[4] == "cpu"


def dtensor_parameters():
    mesh = init_device_mesh("cpu", (2,))
    state = {
        str(grad): torch.nn.Parameter(meta_dtensor(mesh, (4,), (2,), [Shard(0)]), requires_grad=grad)
        for grad in (True, False)
    }
    materialize(state)
    return [
        (isinstance(p, torch.nn.Parameter), isinstance(p, DTensor), p.requires_grad, p.is_meta, p.placements)
        for p in state.values()
    ]


def test_a_parameter_that_is_a_dtensor_stays_both(ranks: RankPool):
    expected = [(True, True, grad, False, (Shard(0),)) for grad in (True, False)]
    assert ranks(2).run(dtensor_parameters) == [expected] * 2


def outside_of_the_mesh():
    mesh = DeviceMesh("cpu", [0])
    local = (4,) if dist.get_rank() == 0 else (0,)
    state = {"t": meta_dtensor(mesh, (4,), local, [Replicate()])}
    materialize(state)
    return state["t"]._local_tensor.is_meta, tuple(state["t"].shape)


def test_a_rank_outside_of_the_mesh_is_no_obstacle(ranks: RankPool):
    assert ranks(2).run(outside_of_the_mesh) == [(False, (4,))] * 2


def sharded_tensors():
    rank = dist.get_rank()

    def made(rows, device):
        tensors = [torch.zeros(length, device=device) for _, length in rows]
        shards = [
            LocalShard.from_tensor_and_offsets(tensor, [start], rank)
            for tensor, (start, _) in zip(tensors, rows, strict=True)
        ]
        return init_from_local_shards(shards, [4])

    two_or_none = {"t": made([(0, 2), (2, 2)] if rank == 0 else [], "cpu")}
    before = two_or_none["t"]
    materialize(two_or_none)
    on_meta = {"some": {"key": made([(2 * rank, 2)], "meta")}}
    try:
        materialize(on_meta)
    except RuntimeError as error:
        return two_or_none["t"] is before, str(error)
    return None


def test_a_sharded_tensor_on_meta_is_refused_by_name_and_others_are_left_alone(ranks: RankPool):
    for same, message in ranks(2).run(sharded_tensors):
        assert same
        assert "'some.key' is a ShardedTensor on the meta device" in message
