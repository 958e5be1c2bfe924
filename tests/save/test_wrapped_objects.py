"""Models and optimizers in the wrappers of trainers are saved and loaded as what is in them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast._background import step_hooks
from holdfast.errors import UnsupportedStateError
from tests.state.memory_checkpoint import difference
from tests.state.trainer_wrappers import (
    AcceleratedOptimizer,
    DeepSpeedEngine,
    LightningOptimizer,
    Lookahead,
    OlderFabricOptimizer,
    Unfinished,
    UnheardOfOptimizer,
    _FabricModule,
    _FabricOptimizer,
)

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "accelerate": AcceleratedOptimizer,
    "fabric": _FabricOptimizer,
    "older fabric": OlderFabricOptimizer,
    "lightning": LightningOptimizer,
    "unknown": UnheardOfOptimizer,
    "two of them": lambda optimizer: AcceleratedOptimizer(_FabricOptimizer(optimizer)),
}
MODELS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fabric": lambda model: _FabricModule(nn.DataParallel(model), model),
    "deepspeed": DeepSpeedEngine,
    "fabric with deepspeed": lambda model: _FabricModule(DeepSpeedEngine(model), model),
}


def trained(seed: int = 0, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3) + torch.arange(2.0)[:, None]).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("wrap", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_wrapped_optimizer_comes_back_and_goes_on(tmp_path: Path, wrap: Callable[[Any], Any], used: bool):
    model, optimizer = trained()
    holdfast.save({"model": model, "optim": wrap(optimizer)}, tmp_path / "saved")
    assert holdfast.open(tmp_path / "saved")["optim.state.0.weight.step"][...] == 2  # by its name in the model

    other, again = trained(seed=5, steps=3 if used else 0)
    wrapped = wrap(again)
    holdfast.load({"model": other, "optim": wrapped}, tmp_path / "saved")
    assert difference(optimizer.state_dict(), again.state_dict()) is None
    assert difference(optimizer.state_dict(), wrapped.state_dict()) is None
    assert wrapped.param_groups is again.param_groups
    assert wrapped.state is again.state
    train(model, optimizer, 2)
    train(other, wrapped, 2)
    assert difference(dict(model.state_dict()), dict(other.state_dict())) is None


@pytest.mark.parametrize("wrap", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_a_wrapped_optimizer_saved_is_what_the_optimizer_would_have_saved(tmp_path: Path, wrap: Any):
    model, optimizer = trained()
    holdfast.save({"model": model, "optim": wrap(optimizer)}, tmp_path / "wrapped")
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "bare")
    assert holdfast.diff(tmp_path / "wrapped", tmp_path / "bare").ok


@pytest.mark.parametrize("wrap", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("managed", [False, True])
def test_steps_of_a_wrapped_optimizer_wait_for_an_overlapped_save(tmp_path: Path, wrap: Any, managed: bool):
    model, optimizer = trained()
    wrapped = wrap(optimizer)
    state = {"model": model, "optim": wrapped}
    expected = []
    if managed:
        with holdfast.CheckpointManager(
            tmp_path, background=holdfast.Background(overlap=True, check_tearing=True)
        ) as manager:
            for step in range(1, 4):
                expected.append(copy.deepcopy(dict(model.state_dict())))
                manager.save(step, state)
                train_without_buffers(model, wrapped)
        places = [tmp_path / f"step-{step:08}" for step in range(1, 4)]
    else:
        places = [tmp_path / str(step) for step in range(3)]
        for place in places:
            expected.append(copy.deepcopy(dict(model.state_dict())))
            pending = holdfast.async_save(state, place, optimizers=wrapped, check_tearing=True)
            train_without_buffers(model, wrapped)
            pending.result()
    for place, values in zip(places, expected, strict=True):
        found, _ = trained(seed=9)
        holdfast.load({"model": found}, place)
        assert difference(dict(found.state_dict()), values) is None


def train_without_buffers(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model.eval()(torch.ones(2, 3)).sum().backward()
    model.train()
    optimizer.step()


@pytest.mark.parametrize("wrap", MODELS.values(), ids=MODELS)
def test_a_wrapped_model_has_the_names_of_the_model(tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]):
    model, optimizer = trained()
    holdfast.save({"model": wrap(model), "optim": AcceleratedOptimizer(optimizer)}, tmp_path / "wrapped")
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "bare")
    assert holdfast.diff(tmp_path / "wrapped", tmp_path / "bare").ok
    for place in ("wrapped", "bare"):
        other, again = trained(seed=5, steps=0)
        holdfast.load({"model": wrap(other), "optim": _FabricOptimizer(again)}, tmp_path / place)
        assert difference(dict(model.state_dict()), dict(other.state_dict())) is None
        assert difference(optimizer.state_dict(), again.state_dict()) is None


def test_keys_that_fabric_lengthened_are_found(tmp_path: Path):
    model, _ = trained()
    stored = {f"_forward_module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": stored}, tmp_path / "saved.pt")
    other, _ = trained(seed=5)
    holdfast.load({"model": other}, tmp_path / "saved.pt")
    assert difference(dict(model.state_dict()), dict(other.state_dict())) is None


def test_a_wrapper_with_a_state_of_its_own_is_not_taken_off(tmp_path: Path):
    model, optimizer = trained()
    ahead = Lookahead(optimizer)
    train(model, optimizer, 1)
    holdfast.save({"model": model, "optim": ahead}, tmp_path / "saved")
    other, again = trained(seed=5, steps=0)
    loaded = Lookahead(again)
    holdfast.load({"model": other, "optim": loaded}, tmp_path / "saved")
    assert all(map(torch.equal, loaded.slow, ahead.slow))
    assert difference(optimizer.state_dict(), again.state_dict()) is None


def test_an_optimizer_that_cannot_be_loaded_is_refused_before_anything_is_changed(tmp_path: Path):
    model = nn.Linear(2, 2)
    holdfast.save({"model": model, "optim": Unfinished(model.parameters())}, tmp_path / "saved")
    other = nn.Linear(2, 2)
    before = copy.deepcopy(dict(other.state_dict()))
    with pytest.raises(UnsupportedStateError, match=r"Unfinished .* does not call its constr.*Nothing was changed"):
        holdfast.load({"model": other, "optim": Unfinished(other.parameters())}, tmp_path / "saved")
    assert difference(dict(other.state_dict()), before) is None


def test_an_optimizer_that_takes_no_hook_is_refused_and_later_saves_are_not_torn(tmp_path: Path):
    model, optimizer = trained()
    ahead = Lookahead(optimizer)
    for _ in range(2):  # the second time as well
        with pytest.raises(UnsupportedStateError, match=r"no hook .* Lookahead .*Leave it out of `optimizers`"):
            holdfast.async_save({"model": model, "optim": ahead}, tmp_path / "refused", optimizers=ahead)
    assert ahead not in step_hooks._awaited
    assert not (tmp_path / "refused").exists()
    pending = holdfast.async_save({"model": model, "optim": ahead}, tmp_path / "saved", check_tearing=True)
    train(model, optimizer, 1)
    pending.result()


def save_in_ddp(folder: Path) -> list[float]:
    rank = torch.distributed.get_rank()
    model, optimizer = trained()
    ddp = DistributedDataParallel(model)
    model[1].running_mean += rank  # DDP's are those of rank 0
    holdfast.save({"model": _FabricModule(ddp, model), "optim": _FabricOptimizer(optimizer)}, folder / "saved")
    other, again = trained(seed=5, steps=0)
    holdfast.load({"model": _FabricModule(DistributedDataParallel(other), other), "optim": again}, folder / "saved")
    assert difference(optimizer.state_dict(), again.state_dict()) is None
    return (model[1].running_mean - other[1].running_mean).tolist()


def test_fabric_around_ddp_is_saved_as_ddp_is(ranks, tmp_path: Path):
    assert ranks(2).run(save_in_ddp, tmp_path) == [[0.0] * 4, [1.0] * 4]
