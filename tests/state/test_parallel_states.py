"""Models and optimizers of real parallel training, on live ranks: saved from one layout, loaded into another."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from holdfast._state.expanding import Context, adapter_for
from holdfast.errors import UnsupportedStateError
from tests.models import ddp, fsdp2, plain, tensor_parallel
from tests.rank_pool import RankPool
from tests.sharding import mesh_of_all_ranks
from tests.state.memory_checkpoint import MemoryCheckpoint, difference, load, save


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 12)
        self.down = nn.Linear(12, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.ones(5, 1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.relu(self.up(x)))) * self.frozen.sum()


def compiled_ddp(net: nn.Module) -> nn.Module:
    net.up = checkpoint_wrapper(net.up)
    return torch.compile(DistributedDataParallel(torch.compile(net, backend="eager")), backend="eager")


def wrapped_fsdp2(net: nn.Module) -> nn.Module:
    net.up = checkpoint_wrapper(net.up)
    return torch.compile(fsdp2(net), backend="eager")


LAYOUTS = [plain, ddp, compiled_ddp, fsdp2, wrapped_fsdp2, tensor_parallel]


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    torch.manual_seed(step)  # the same data on all ranks, so that all layouts compute the same
    with torch.compiler.set_stance("force_eager"):  # compilation takes long and is not what matters here
        return model(torch.rand(6, 4)).pow(2).mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def fresh(layout: Any, seed: int | None = None) -> dict[str, Any]:
    net = Net()
    if seed is not None:
        torch.manual_seed(seed)
        for value in net.state_dict().values():
            value.copy_(torch.rand(value.shape) * 10)
    model = layout(net)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


def names_and_exact_continuation(layout: Any, steps_before: int) -> dict[str, Any]:
    state = fresh(layout)
    train(**state, steps=3)
    checkpoint = save(state)
    other = fresh(layout, seed=9)
    train(**other, steps=steps_before)
    notes = load(checkpoint, other)
    differences = [difference(*pair) for pair in zip(live_states(state), live_states(other), strict=True)]
    train(**state, steps=2, first=3)
    train(**other, steps=2, first=3)
    differences += [difference(*pair) for pair in zip(live_states(state), live_states(other), strict=True)]
    return {
        "model": list(checkpoint.tree["model"]),
        "optimizer": checkpoint.tree["optimizer"]["param_groups"][0]["params"],
        "state": list(checkpoint.tree["optimizer"]["state"]),
        "differences": [found for found in differences if found],
        "notes": notes,
    }


def live_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(state["model"].state_dict()), state["optimizer"].state_dict()]


@pytest.mark.parametrize("steps_before", [0, 1], ids=["fresh", "used"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_comes_back_into_its_layout_bit_for_bit(ranks: RankPool, layout, steps_before):
    names = [name for name, _ in Net().named_parameters()]
    for result in ranks(2).run(names_and_exact_continuation, layout, steps_before):
        assert result["differences"] == []
        assert result["notes"] == []
        assert result["model"] == list(Net().state_dict())
        assert sorted(result["optimizer"]) == sorted(names)  # parallelize_module does not keep the order
        assert set(result["state"]) == set(names) - {"frozen"}


def whole_checkpoint(layout: Any) -> MemoryCheckpoint:
    state = fresh(layout)
    train(**state, steps=3)
    return save(state)


def load_whole(layout: Any, checkpoint: MemoryCheckpoint) -> str | None:
    other = fresh(layout, seed=9)
    load(checkpoint, other)
    again = save(other)
    return difference(dict(sorted(again.tensors.items())), dict(sorted(checkpoint.tensors.items())))


@pytest.mark.parametrize(
    ("saving", "loading", "world_size"),
    [(fsdp2, plain, 1), (tensor_parallel, wrapped_fsdp2, 3), (compiled_ddp, tensor_parallel, 2), (plain, fsdp2, 4)],
)
def test_a_state_loads_into_another_layout(ranks: RankPool, saving, loading, world_size):
    checkpoint = ranks(2).run(whole_checkpoint, saving)[0]
    assert ranks(world_size).run(load_whole, loading, checkpoint) == [None] * world_size


# --- FSDP2 ---------------------------------------------------------------------------------------------------------


def names_while_gathered() -> list[Any]:
    state = fresh(fsdp2)
    loss_of(state["model"], 0)  # without a backward pass FSDP2 leaves the root's parameters gathered
    adapter = adapter_for(state["optimizer"], ("optimizer",), Context.of(state))
    return adapter.saved()["param_groups"][0]["params"]


def test_parameters_that_fsdp2_has_gathered_are_recognised(ranks: RankPool):
    for names in ranks(2).run(names_while_gathered):
        assert names == [name for name, _ in Net().named_parameters()]


def load_into_meta(checkpoint: MemoryCheckpoint) -> str | None:
    with torch.device("meta"):
        net = Net()
    model = fsdp2(net)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}
    load(checkpoint, state)
    found = difference(dict(sorted(save(state).tensors.items())), dict(sorted(checkpoint.tensors.items())))
    ready = fresh(fsdp2)
    load(checkpoint, ready)
    train(**state, steps=2, first=3)
    train(**ready, steps=2, first=3)
    return found or difference(live_states(ready), live_states(state))


def test_a_sharded_model_on_the_meta_device_is_loaded_and_trains_on(ranks: RankPool):
    checkpoint = ranks(2).run(whole_checkpoint, fsdp2)[0]
    assert ranks(2).run(load_into_meta, checkpoint) == [None] * 2


# --- DDP -----------------------------------------------------------------------------------------------------------


def first_rank_keys() -> list[frozenset[str]]:
    silent = DistributedDataParallel(Net(), broadcast_buffers=False)
    inside = nn.ModuleDict({"a": DistributedDataParallel(Net()), "b": Net()})
    picky = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(picky, ["norm.running_mean"])
    picky = nn.ModuleDict({"c": DistributedDataParallel(picky)})
    models = [DistributedDataParallel(torch.compile(Net(), backend="eager")), silent, inside, picky, Net()]
    return [adapter_for(model).from_first_rank for model in models]


def test_buffers_of_ddp_are_those_of_the_first_rank(ranks: RankPool):
    buffers = {name for name, _ in Net().named_buffers()}
    for wrapped, silent, inside, picky, net in ranks(2).run(first_rank_keys):
        assert wrapped == buffers
        assert silent == net == frozenset()
        assert picky == {f"c.{name}" for name in buffers} - {"c.norm.running_mean"}
        assert inside == {f"a.{name}" for name in buffers}


# --- FSDP1 ---------------------------------------------------------------------------------------------------------


def fsdp1(net: nn.Module) -> nn.Module:
    net.frozen.requires_grad_(True)  # flat parameters need all of a kind
    net.up = FullyShardedDataParallel(net.up, device_id=torch.device("cpu"))
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"))


def fsdp1_with_views(net: nn.Module) -> nn.Module:
    net.up = FullyShardedDataParallel(checkpoint_wrapper(net.up), device_id=torch.device("cpu"), use_orig_params=True)
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp1_with_mesh(net: nn.Module) -> nn.Module:
    mesh = mesh_of_all_ranks()
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True, device_mesh=mesh)


def quietly(function: Any, *args: Any) -> Any:
    """FSDP1 warns that it is to go some day, and of the ShardedTensors that its states are made of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "Please use DTensor|.*FSDP.*")
        return function(*args)


def fsdp1_continuation(layout: Any, steps_before: int) -> dict[str, Any]:
    state = fresh(layout)
    train(**state, steps=3)
    checkpoint = save(state)
    other = fresh(layout, seed=9)
    train(**other, steps=steps_before)
    load(checkpoint, other)
    loaded = save(other)
    train(**state, steps=2, first=3)
    train(**other, steps=2, first=3)
    return {
        "names": sorted(checkpoint.tree["model"]),
        "parameters": sorted(checkpoint.tree["optimizer"]["param_groups"][0]["params"]),
        "at once": difference(loaded.tensors, checkpoint.tensors),
        "later": difference(save(other).tensors, save(state).tensors),
    }


@pytest.mark.parametrize("steps_before", [0, 1], ids=["fresh", "used"])
@pytest.mark.parametrize("layout", [fsdp1, fsdp1_with_views, fsdp1_with_mesh])
def test_states_of_fsdp1_come_back_by_the_names_of_their_parameters(ranks: RankPool, layout, steps_before):
    for result in ranks(2).run(quietly, fsdp1_continuation, layout, steps_before):
        assert result == {
            "names": sorted(Net().state_dict()),
            "parameters": sorted(name for name, _ in Net().named_parameters()),
            "at once": None,
            "later": None,
        }


@pytest.mark.parametrize(("saving", "loading"), [(fsdp1_with_views, fsdp2), (fsdp2, fsdp1_with_views)])
def test_states_go_from_one_generation_of_fsdp_to_the_other(ranks: RankPool, saving, loading):
    checkpoint = ranks(2).run(quietly, whole_checkpoint, saving)[0]
    assert ranks(3).run(quietly, load_whole, loading, checkpoint) == [None] * 3


def save_flat_optimizer_alone() -> str:
    model = fsdp1(Net())
    with pytest.raises(UnsupportedStateError) as raised:
        save({"optimizer": torch.optim.Adam(model.parameters())})
    return str(raised.value)


def test_an_optimizer_of_flat_parameters_is_refused_without_its_model(ranks: RankPool):
    for message in ranks(2).run(quietly, save_flat_optimizer_alone):
        assert message.startswith("'optimizer' is an optimizer of flat parameters")
        assert message.endswith("Put the model into the state beside its optimizer")
