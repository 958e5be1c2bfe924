"""torch's helpers for the state of models and optimizers, and training that goes on after a load with them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as stock
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast.dcp as dcp
from holdfast.dcp import state_dict as ours
from holdfast.dcp.state_dict import StateDictOptions, get_state_dict, set_state_dict
from tests.sharding import mesh_of_all_ranks


def test_every_public_name_is_torchs_own_object():
    for name in stock.__all__:
        assert getattr(ours, name) is getattr(stock, name)
        assert name in ours.__all__


def test_functions_and_classes_that_programs_import_by_their_private_names_are_here_too():
    own = {
        name
        for name, value in vars(stock).items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == stock.__name__
    }
    assert own
    assert [name for name in own if getattr(ours, name, None) is not getattr(stock, name)] == []


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.last = nn.Linear(10, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(batch)).relu())


def new_training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    mesh = mesh_of_all_ranks()
    for layer in (model.first, model.last):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 + seed)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))  # the same on all ranks
    optimizer.zero_grad()
    (model(batch).square().sum() / sums_of_gradients()).backward()
    optimizer.step()


def sums_of_gradients() -> float:
    """How often the same gradient counts that all ranks have: with gloo, FSDP2 takes no average before torch 2.9."""
    model = nn.Linear(1, 1, bias=False)
    fully_shard(model, mesh=mesh_of_all_ranks())
    model(torch.ones(1)).sum().backward()
    return float(model.weight.grad.full_tensor())


def whole(value: Any) -> Any:
    return value.full_tensor().detach().clone() if isinstance(value, DTensor) else value


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All numbers of a training, as whole tensors."""
    found = {name: whole(value) for name, value in model.state_dict().items()}
    for (name, _), state in zip(model.named_parameters(), optimizer.state.values(), strict=True):
        found |= {f"{name}.{part}": whole(value) for part, value in state.items()}
    return found | {"lr": optimizer.param_groups[0]["lr"]}


def train_and_save(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was saved, and what it becomes by two more steps."""
    model, optimizer = new_training(0)
    for number in range(3):
        step(model, optimizer, number)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=path)
    saved = snapshot(model, optimizer)
    for number in (3, 4):
        step(model, optimizer, number)
    return saved, snapshot(model, optimizer)


def load_and_train(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same after a load into a new model and an optimizer that has never made a step."""
    model, optimizer = new_training(7)
    assert not optimizer.state
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    loaded = snapshot(model, optimizer)
    for number in (3, 4):
        step(model, optimizer, number)
    return loaded, snapshot(model, optimizer)


def assert_same(found: dict[str, Any], expected: dict[str, Any], exact: bool) -> None:
    assert found.keys() == expected.keys()
    assert any(key.endswith("exp_avg_sq") for key in found)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[key], value, **({"rtol": 0, "atol": 0} if exact else {}), msg=key)
        else:
            assert found[key] == value, key


@pytest.mark.parametrize("loaders", [2, 3])
def test_training_goes_on_where_it_was_with_a_fresh_optimizer(ranks, tmp_path, loaders):
    (saved, later), _ = ranks(2).run(train_and_save, tmp_path)
    for found, found_later in ranks(loaders).run(load_and_train, tmp_path):
        assert_same(found, saved, exact=True)
        assert_same(found_later, later, exact=loaders == 2)  # another number of ranks sums in another order


class Training:
    """The usual wrapper: an object that gives and takes its state."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model_state, "optim": optimizer_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=options,
        )


def save_and_load_as_stateful(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizer = new_training(0)
    step(model, optimizer, 0)
    dcp.save({"app": Training(model, optimizer)}, checkpoint_id=path)
    fresh = new_training(7)
    dcp.load({"app": Training(*fresh)}, checkpoint_id=path)
    return snapshot(model, optimizer), snapshot(*fresh)


def test_a_stateful_wrapper_around_the_helpers_is_restored(ranks, tmp_path):
    for saved, loaded in ranks(2).run(save_and_load_as_stateful, tmp_path):
        assert_same(loaded, saved, exact=True)
