"""Renaming a part of a model renames it everywhere: training goes on bit for bit after a load that renames."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import holdfast
from tests.state.memory_checkpoint import difference


class Net(nn.Module):
    """Whose middle part is called as it is wished."""

    def __init__(self, middle: str = "encoder", inner: tuple[str, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        parts: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        for name in reversed(inner):
            parts = nn.ModuleDict({name: parts})
        self.add_module(middle, parts)
        self.path = (middle, *inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(".".join(self.path))(self.first(x)).pow(2).mean()


def adamw(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "weight_decay": 0.5}, {"params": parameters[2:], "lr": lr / 2}]
    return torch.optim.AdamW(groups, lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + step)).backward()
        optimizer.step()


def values_of(module: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in module.parameters()]


def assert_goes_on_alike(model: nn.Module, optimizer: Any, other: nn.Module, again: Any) -> None:
    assert difference(optimizer.state_dict(), again.state_dict()) is None
    assert all(map(torch.equal, values_of(model), values_of(other)))
    train(model, optimizer, first=3)
    train(other, again, first=3)
    assert all(map(torch.equal, values_of(model), values_of(other)))
    assert difference(optimizer.state_dict(), again.state_dict()) is None


RENAMES: dict[str, Any] = {
    "a part of the model": {"model.encoder": "model.backbone"},
    "a part of the model and the optimizer's state": {
        "model.encoder": "model.backbone",
        "optim.state.encoder": "optim.state.backbone",
    },
    "an expression for all": {re.compile("encoder"): "backbone"},
    "an expression for the model": {re.compile(r"^model\.encoder"): "model.backbone"},
    "a function": lambda key: key.replace("model.encoder", "model.backbone"),
    "a function for all": lambda key: key.replace("encoder", "backbone"),
}


@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES)
def test_training_goes_on_bit_for_bit_after_a_part_of_the_model_was_renamed(tmp_path: Path, rename: Any):
    model = Net()
    optimizer = adamw(model)
    train(model, optimizer)
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "saved")

    other = Net("backbone")
    again = adamw(other, lr=7.0)
    report = holdfast.load({"model": other, "optim": again}, tmp_path / "saved", rename=rename)

    assert report.renamed["optim.state.encoder.0.weight.exp_avg"] == "optim.state.backbone.0.weight.exp_avg"
    assert not report.missing
    assert not report.unexpected
    assert_goes_on_alike(model, optimizer, other, again)


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_a_part_that_moves_further_in_takes_its_optimizer_state_with_it(tmp_path: Path, used: bool):
    model = Net("encoder")
    optimizer = torch.optim.AdamW(model.encoder.parameters(), lr=0.1)
    train(model, optimizer)
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "saved")
    other = Net("outer", ("encoder",))
    again = torch.optim.AdamW(other.outer.parameters(), lr=7.0)
    if used:
        train(other, again)
    holdfast.load({"model": other, "optim": again}, tmp_path / "saved", rename={"model.encoder": "model.outer.encoder"})
    assert_goes_on_alike(model, optimizer, other, again)


def test_a_part_that_becomes_a_model_of_its_own_is_known_by_its_new_place(tmp_path: Path):
    model = Net()
    optimizer = adamw(model)
    train(model, optimizer)
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "saved")
    other = Net()
    again = adamw(other, lr=7.0)
    state = {"nets": {"first": other.first, "rest": other.encoder}, "optim": again}
    holdfast.load(state, tmp_path / "saved", rename={"model.first": "nets.first", "model.encoder": "nets.rest"})
    assert_goes_on_alike(model, optimizer, other, again)


def test_one_part_of_a_model_alone_goes_into_a_model_of_another_name(tmp_path: Path):
    model = Net()
    optimizer = torch.optim.AdamW(model.encoder.parameters(), lr=0.1)
    train(model, optimizer)
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "saved")
    other = Net()
    again = torch.optim.AdamW(other.encoder.parameters(), lr=7.0)
    holdfast.load({"backbone": other.encoder, "optim": again}, tmp_path / "saved", rename={"model.encoder": "backbone"})
    assert difference(optimizer.state_dict(), again.state_dict()) is None


@pytest.mark.parametrize("rename", [{"model": "net"}, {"model": "net", "optim": "opt"}, {"optim": "opt"}])
def test_models_and_optimizers_that_move_as_a_whole_keep_their_names(tmp_path: Path, rename: dict[str, str]):
    model = Net()
    optimizer = adamw(model)
    train(model, optimizer)
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "saved")
    other = Net()
    again = adamw(other, lr=7.0)
    state = {rename.get("model", "model"): other, rename.get("optim", "optim"): again}
    holdfast.load(state, tmp_path / "saved", rename=rename)
    assert_goes_on_alike(model, optimizer, other, again)


def test_parts_of_several_models_are_renamed_in_the_optimizer_that_they_share(tmp_path: Path):
    nets = [Net(), Net()]
    optimizer = torch.optim.AdamW([p for net in nets for p in net.parameters()], lr=0.1)
    for net in nets:
        train(net, optimizer)
    holdfast.save({"a": nets[0], "b": nets[1], "optims": [optimizer]}, tmp_path / "saved")
    others = [Net("backbone"), Net()]
    again = torch.optim.AdamW([p for net in others for p in net.parameters()], lr=7.0)
    holdfast.load(
        {"a": others[0], "b": others[1], "optims": [again]}, tmp_path / "saved", rename={"a.encoder": "a.backbone"}
    )
    assert difference(optimizer.state_dict(), again.state_dict()) is None


@pytest.mark.parametrize("renamed", [("model",), ("average",), ("model", "average")])
def test_a_copy_of_the_model_may_be_renamed_or_not(tmp_path: Path, renamed: tuple[str, ...]):
    model, average = Net(), Net()
    optimizer = adamw(model)
    train(model, optimizer)
    holdfast.save({"average": average, "model": model, "optim": optimizer}, tmp_path / "saved")
    state = {part: Net("backbone" if part in renamed else "encoder") for part in ("average", "model")}
    again = adamw(state["model"], lr=7.0)
    rename = {f"{part}.encoder": f"{part}.backbone" for part in renamed}
    holdfast.load({**state, "optim": again}, tmp_path / "saved", rename=rename)
    assert_goes_on_alike(model, optimizer, state["model"], again)


def test_names_are_renamed_in_groups_that_hold_tensors(tmp_path: Path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    train(model, optimizer)
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "saved")
    other = Net("backbone")
    again = torch.optim.AdamW(other.parameters(), lr=torch.tensor(7.0), foreach=False)
    holdfast.load({"model": other, "optim": again}, tmp_path / "saved", rename={"model.encoder": "model.backbone"})
    assert_goes_on_alike(model, optimizer, other, again)


def test_names_are_swapped_in_one_go(tmp_path: Path):
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (model["a"](torch.ones(2)).sum() * 2 + model["b"](torch.ones(2)).sum()).backward()
    optimizer.step()
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "saved")
    again = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    holdfast.load(
        {"model": model, "optim": again}, tmp_path / "saved", rename={"model.a": "model.b", "model.b": "model.a"}
    )
    momentum = {name: again.state[value]["momentum_buffer"] for name, value in model.named_parameters()}
    assert momentum["a.bias"].tolist() == [1, 1, 1]
    assert momentum["b.bias"].tolist() == [2, 2, 2]


def test_names_that_contradict_each_other_are_refused_and_nothing_is_changed(tmp_path: Path):
    model = Net()
    optimizer = adamw(model)
    train(model, optimizer)
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "saved")
    rename = {"model.encoder": "model.backbone", "optim.state.encoder": "optim.state.spine"}
    with pytest.raises(ValueError, match=r"encoder\.0\.weight.*backbone\.0\.weight.*spine\.0\.weight"):
        holdfast.load({"model": Net("backbone"), "optim": optimizer}, tmp_path / "saved", rename=rename)


def test_the_manager_restores_under_new_names(tmp_path: Path):
    model = Net()
    optimizer = adamw(model)
    train(model, optimizer)
    with holdfast.CheckpointManager(tmp_path) as manager:
        manager.save(3, {"model": model, "optim": optimizer}).result()
    other = Net("backbone")
    again = adamw(other, lr=7.0)
    with holdfast.CheckpointManager(tmp_path) as manager:
        manager.restore({"model": other, "optim": again}, rename={"model.encoder": "model.backbone"})
    assert_goes_on_alike(model, optimizer, other, again)


@pytest.mark.parametrize("to", ["native", "dcp", "torch"])
def test_a_conversion_renames_in_the_optimizer_too(tmp_path: Path, to: str):
    model = Net()
    optimizer = adamw(model)
    train(model, optimizer)
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "saved")
    made = tmp_path / ("made.pt" if to == "torch" else "made")
    report = holdfast.convert(tmp_path / "saved", made, to=to, rename={"model.encoder": "model.backbone"})
    assert report.renamed["optim.state.encoder.0.weight.exp_avg"] == "optim.state.backbone.0.weight.exp_avg"
    other = Net("backbone")
    again = adamw(other, lr=7.0)
    loaded = holdfast.load({"model": other, "optim": again}, made)
    assert not loaded.renamed
    assert_goes_on_alike(model, optimizer, other, again)


def test_a_conversion_to_flat_keys_renames_moments_too(tmp_path: Path):
    model = Net()
    optimizer = adamw(model)
    train(model, optimizer)
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "saved")
    made = tmp_path / "made.safetensors"
    holdfast.convert(
        tmp_path / "saved", made, to="safetensors", rename={"model.encoder": "model.backbone"}, only_tensors=True
    )
    assert torch.equal(
        holdfast.open(made)["optim.state.backbone.0.weight.exp_avg"][...],
        optimizer.state[model.encoder[0].weight]["exp_avg"],
    )


def test_a_difference_of_names_alone_is_none_after_renaming(tmp_path: Path):
    for name in ("encoder", "backbone"):
        model = Net(name)
        optimizer = adamw(model)
        train(model, optimizer)
        holdfast.save({"model": model, "optim": optimizer}, tmp_path / name)
    report = holdfast.diff(tmp_path / "encoder", tmp_path / "backbone", rename={"model.encoder": "model.backbone"})
    assert report.ok


@pytest.mark.parametrize("flat", [False, True])
def test_checkpoints_of_dcp_are_renamed_alike(tmp_path: Path, flat: bool):
    model = Net()
    optimizer = adamw(model)
    train(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }
    stock.save(state, checkpoint_id=tmp_path / "saved")
    other = Net("backbone")
    again = adamw(other, lr=7.0)
    holdfast.load({"model": other, "optim": again}, tmp_path / "saved", rename={"model.encoder": "model.backbone"})
    assert_goes_on_alike(model, optimizer, other, again)


def sharded(middle: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(middle)
    for part in (model.first, *model.get_submodule(middle)):
        if list(part.parameters()):
            fully_shard(part)
    fully_shard(model)
    return model, adamw(model)


def renaming_load_on_ranks(folder: Path, background: bool) -> None:
    model, optimizer = sharded("encoder")
    train(model, optimizer)
    state = {"model": model, "optim": optimizer}
    if background:
        holdfast.async_save(state, folder / "saved", optimizers=optimizer).result()
    else:
        holdfast.save(state, folder / "saved")
    other, again = sharded("backbone")
    holdfast.load({"model": other, "optim": again}, folder / "saved", rename={"model.encoder": "model.backbone"})
    assert difference(optimizer.state_dict(), again.state_dict()) is None
    train(model, optimizer, first=3)
    train(other, again, first=3)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local())
    assert difference(optimizer.state_dict(), again.state_dict()) is None


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_models_are_renamed_with_their_optimizers(ranks, tmp_path: Path, world_size: int, background: bool):
    ranks(world_size).run(renaming_load_on_ranks, tmp_path, background)
