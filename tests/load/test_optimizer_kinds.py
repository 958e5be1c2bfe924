"""Another optimizer than the stored one is noticed: by its class, by what it keeps, and by its groups."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import holdfast
import holdfast.dcp as dcp
from holdfast.errors import OptimizerMismatchError, StateMismatchError
from tests.state.memory_checkpoint import difference
from tests.state.test_optimizers import OPTIMIZERS, Net
from tests.state.test_optimizers import train as train_net
from tests.state.trainer_wrappers import AcceleratedOptimizer


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def trained(kind: Any = torch.optim.AdamW, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = kind(model.parameters(), **settings)
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def saved(folder: Path, how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """A checkpoint of one of the formats. Only the native one knows classes."""
    path = folder / f"saved-{how}"
    if how == "native":
        holdfast.save({"model": model, "optim": optimizer}, path)
    elif how == "older native":
        state = {"model": model, "optim": optimizer}
        holdfast.save({"model": model.state_dict(), "optim": _plain(state)}, path)
        assert "optimizers" not in holdfast.open(path).provenance
    elif how == "torch":
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, path)
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=how == "flat dcp")
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer, options=options)}
        stock.save(state, checkpoint_id=path)
    return path


def _plain(state: dict[str, Any]) -> Any:
    from holdfast._state.expanding import expand

    return expand(state).tree["optim"]


FORMATS = ["native", "older native", "torch", "dcp", "flat dcp"]


@pytest.mark.parametrize("how", FORMATS)
def test_the_state_of_adamw_is_not_loaded_into_sgd(tmp_path: Path, how: str):
    path = saved(tmp_path, how, *trained())
    model = net()
    again = torch.optim.SGD(model.parameters(), lr=0.5)
    before = copy.deepcopy([dict(model.state_dict()), again.state_dict()])
    with pytest.raises(OptimizerMismatchError, match=r"'exp_avg'.*'momentum_buffer'.*Nothing was changed") as caught:
        holdfast.load({"model": model, "optim": again}, path)
    assert ("torch.optim.adamw.AdamW and is loaded into torch.optim.sgd.SGD" in str(caught.value)) == (how == "native")
    assert difference([dict(model.state_dict()), again.state_dict()], before) is None


@pytest.mark.parametrize("how", FORMATS)
def test_the_momentum_of_sgd_is_not_loaded_into_adam(tmp_path: Path, how: str):
    path = saved(tmp_path, how, *trained(torch.optim.SGD, lr=0.1, momentum=0.9))
    model = net()
    with pytest.raises(OptimizerMismatchError, match="momentum_buffer"):
        holdfast.load({"model": model, "optim": torch.optim.Adam(model.parameters())}, path)


@pytest.mark.parametrize("how", FORMATS)
def test_an_optimizer_that_made_no_step_is_known_by_its_settings(tmp_path: Path, how: str):
    model = net()
    path = saved(tmp_path, how, model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(OptimizerMismatchError, match="'betas'"):
        holdfast.load({"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.5)}, path)


@pytest.mark.parametrize("how", FORMATS)
def test_the_same_optimizer_is_loaded_from_every_format_without_a_remark(tmp_path: Path, how: str):
    model, optimizer = trained()
    path = saved(tmp_path, how, model, optimizer)
    other = net()
    again = torch.optim.AdamW(other.parameters())
    report = holdfast.load({"model": other, "optim": again}, path)
    assert not [note for note in report.notes if "position" not in note]
    assert difference(optimizer.state_dict()["state"], again.state_dict()["state"]) is None


@pytest.mark.parametrize("one", OPTIMIZERS)
def test_every_pair_of_torchs_classes_is_told_apart_and_none_is_refused_for_itself(tmp_path: Path, one: str):
    if one == "SparseAdam":
        pytest.skip("has a model of its own")
    model = Net()
    optimizer = OPTIMIZERS[one](list(model.parameters()))
    train_net(model, optimizer)
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "saved")
    for other, make in OPTIMIZERS.items():
        live = Net()
        try:
            again = make(list(live.parameters()))
        except (ValueError, RuntimeError):
            continue
        answer = holdfast.explain(tmp_path / "saved", {"model": live, "optim": again})
        if {one, other} & {"Muon"} and one != other:  # has fewer parameters
            assert not answer.ok
        else:
            assert answer.ok == (one.partition(",")[0] == other.partition(",")[0]), (one, other, answer.refusal)


@pytest.mark.parametrize("on_mismatch", ["warn", "ignore"])
def test_another_class_may_be_allowed_and_is_in_the_report(tmp_path: Path, on_mismatch: Any, recwarn: Any):
    path = saved(tmp_path, "native", *trained(torch.optim.Adam))
    model = net()
    again = torch.optim.AdamW(model.parameters())
    report = holdfast.load({"model": model, "optim": again}, path, optimizer_mismatch=on_mismatch)
    assert "saved from torch.optim.adam.Adam and is loaded into torch.optim.adamw.AdamW" in report.notes[0]
    assert len(again.state) == 4
    warned = [str(each.message) for each in recwarn if "optimizer_mismatch" in str(each.message)]
    assert len(warned) == (on_mismatch == "warn")


def test_what_is_to_be_done_must_be_one_of_three(tmp_path: Path):
    with pytest.raises(ValueError, match="'error', 'warn' or 'ignore', not 'off'"):
        holdfast.load({}, tmp_path, optimizer_mismatch="off")  # type: ignore[arg-type]


# --- classes that are not torch's ---


class Verbose(torch.optim.AdamW):
    """Does nothing but talk."""


class Decaying(torch.optim.AdamW):
    """Has a setting more."""

    def __init__(self, parameters: Any, decay: float = 0.5, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.defaults["decay"] = decay
        for group in self.param_groups:
            group["decay"] = decay


class Adam8bit(torch.optim.Optimizer):
    """Made anew, with the names of AdamW, but for those that say how it is computed."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {
                        "step": 0,
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
                state["exp_avg"].lerp_(parameter.grad, 0.1)
                parameter.sub_(state["exp_avg"], alpha=group["lr"])


class Lion(torch.optim.Optimizer):
    """Keeps something of its own."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("exp_lion", torch.ones_like(parameter))


@pytest.mark.parametrize(("one", "other"), [(torch.optim.AdamW, Verbose), (Verbose, torch.optim.AdamW)])
def test_a_subclass_that_keeps_the_same_is_taken_with_a_note(tmp_path: Path, one: Any, other: Any):
    path = saved(tmp_path, "native", *trained(one))
    model, again = trained(other)
    report = holdfast.load({"model": model, "optim": again}, path)
    assert "which keeps the same things" in report.notes[0]


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(("one", "other"), [(torch.optim.AdamW, Adam8bit), (Adam8bit, torch.optim.AdamW)])
def test_a_variant_with_the_same_names_is_taken_with_a_note(tmp_path: Path, one: Any, other: Any, used: bool):
    path = saved(tmp_path, "native", *trained(one))
    model = net()
    again = other(model.parameters())
    if used:
        train(model, again)
    report = holdfast.load({"model": model, "optim": again}, path)
    assert "which keeps the same things" in report.notes[0]
    train(model, again)


def test_a_subclass_takes_over_what_its_base_class_saved_and_keeps_its_own_settings(tmp_path: Path):
    path = saved(tmp_path, "native", *trained())
    model = net()
    again = Decaying(model.parameters(), decay=0.25)
    holdfast.load({"model": model, "optim": again}, path)
    assert again.param_groups[0]["decay"] == 0.25


@pytest.mark.parametrize(("one", "other"), [(torch.optim.AdamW, Lion), (Lion, torch.optim.AdamW)])
def test_a_class_of_another_library_that_keeps_something_else_is_refused(tmp_path: Path, one: Any, other: Any):
    path = saved(tmp_path, "native", *trained(one))
    model, again = trained(other)
    with pytest.raises(OptimizerMismatchError, match="is loaded into"):
        holdfast.load({"model": model, "optim": again}, path)


def test_a_wrapped_optimizer_is_noted_as_what_is_in_the_wrapper(tmp_path: Path):
    model, optimizer = trained()
    holdfast.save({"model": model, "optim": AcceleratedOptimizer(optimizer)}, tmp_path / "saved")
    assert holdfast.open(tmp_path / "saved").provenance["optimizers"] == {"optim": "torch.optim.adamw.AdamW"}


# --- groups ---


def grouped(model: nn.Module, count: int, **settings: Any) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    step = len(parameters) // count
    groups = [{"params": parameters[begin : begin + step]} for begin in range(0, len(parameters), step)]
    for number, group in enumerate(groups):
        group |= {name: value / (number + 1) for name, value in settings.items()}
    return torch.optim.AdamW(groups)


@pytest.mark.parametrize("how", ["native", "older native", "dcp"])
@pytest.mark.parametrize(("stored", "live"), [(1, 2), (2, 1), (4, 2)])
def test_groups_that_were_divided_or_joined_are_refused(tmp_path: Path, stored: int, live: int, how: str):
    model = net()
    optimizer = grouped(model, stored)
    train(model, optimizer)
    path = saved(tmp_path, how, model, optimizer)
    other = net()
    again = grouped(other, live, lr=0.5)
    said = r"group 0 are in 2 groups here: 0, 1" if stored < live else r"groups 0, 1 are in one group here: 0"
    with pytest.raises(OptimizerMismatchError, match=said):
        holdfast.load({"model": other, "optim": again}, path)
    assert again.param_groups[0]["lr"] == 0.5
    report = holdfast.load({"model": other, "optim": again}, path, optimizer_mismatch="ignore")
    assert any("groups" in note for note in report.notes)


def test_a_flat_state_of_dcp_says_nothing_about_groups(tmp_path: Path):
    model, optimizer = trained()
    other = net()
    again = torch.optim.AdamW(other.parameters())
    holdfast.load({"model": other, "optim": again}, saved(tmp_path, "flat dcp", model, optimizer))
    assert difference(optimizer.state_dict()["state"], again.state_dict()["state"]) is None


# --- settings ---


def test_settings_that_a_load_changes_are_listed(tmp_path: Path):
    model, optimizer = trained(lr=0.5, betas=(0.5, 0.75))
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    holdfast.save({"model": model, "optims": [optimizer]}, tmp_path / "saved")
    other = net()
    report = holdfast.load(
        {"model": other, "optims": [torch.optim.AdamW(other.parameters(), lr=0.25)]}, tmp_path / "saved"
    )
    assert report.changed_settings == {
        "optims.0.param_groups.0.lr": (0.25, 0.5),
        "optims.0.param_groups.0.betas": ((0.9, 0.999), (0.5, 0.75)),
        "optims.0.param_groups.0.initial_lr": (None, 0.5),
    }
    assert "optims.0.param_groups.0.lr (0.25 -> 0.5)" in str(report)
    again = holdfast.load({"model": other, "optims": [optimizer]}, tmp_path / "saved")
    assert again.changed_settings == {}


def test_a_setting_that_is_not_loaded_is_not_listed(tmp_path: Path):
    model, optimizer = trained(lr=0.5)
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "saved")
    other = net()
    again = torch.optim.AdamW(other.parameters(), lr=0.25)
    report = holdfast.load({"model": other, "optim": again}, tmp_path / "saved", exclude="optim.param_groups")
    assert report.changed_settings == {}
    assert again.param_groups[0]["lr"] == 0.25


# --- other ways ---


def test_the_note_is_kept_by_conversions_and_follows_renames(tmp_path: Path):
    path = saved(tmp_path, "native", *trained())
    holdfast.convert(path, tmp_path / "made", to="native", rename={"optim": "opt.adam"})
    assert holdfast.open(tmp_path / "made").provenance["optimizers"] == {"opt.adam": "torch.optim.adamw.AdamW"}
    holdfast.convert(path, tmp_path / "model", to="native", include="model")
    assert "optimizers" not in holdfast.open(tmp_path / "model").provenance
    model = net()
    with pytest.raises(OptimizerMismatchError, match=r"AdamW and is loaded into torch\.optim\.adam\.Adam"):
        holdfast.load({"o": torch.optim.Adam(model.parameters()), "model": model}, path, rename={"optim": "o"})


def test_what_is_not_saved_is_not_noted(tmp_path: Path):
    model, optimizer = trained()
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "saved", exclude="optim")
    assert "optimizers" not in holdfast.open(tmp_path / "saved").provenance


def test_another_optimizer_and_other_problems_are_reported_together(tmp_path: Path):
    path = saved(tmp_path, "native", *trained())
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    with pytest.raises(StateMismatchError, match=r"has shape[\s\S]*loaded into torch\.optim\.sgd\.SGD"):
        holdfast.load({"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}, path)


def test_the_manager_raises_and_does_not_set_a_good_step_aside(tmp_path: Path):
    model, optimizer = trained()
    with holdfast.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": model, "optim": optimizer}).result()
    with holdfast.CheckpointManager(tmp_path) as manager:
        state = {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}
        with pytest.raises(OptimizerMismatchError):
            manager.restore(state)
        assert [info.set_aside for info in manager.steps()] == [None]
        assert manager.restore(state, optimizer_mismatch="ignore") is not None


def test_the_drop_in_loads_what_stock_loads(tmp_path: Path):
    model, optimizer = trained()
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / "saved", no_dist=True)
    again = torch.optim.AdamW(grouped(model, 1).param_groups, lr=0.5)
    train(model, again)
    dcp.load({"model": model, "optim": again}, checkpoint_id=tmp_path / "saved", no_dist=True)


def compare_on_ranks(folder: Path, background: bool) -> list[str]:
    model = fully_shard(net())
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    state = {"model": model, "optim": optimizer}
    if background:
        holdfast.async_save(state, folder / "saved").result()
    else:
        holdfast.save(state, folder / "saved")
    other = fully_shard(net())
    said = []
    for make in (torch.optim.Adam, torch.optim.SGD):
        try:
            holdfast.load({"model": other, "optim": make(other.parameters())}, folder / "saved")
        except OptimizerMismatchError as error:
            said.append(str(error).partition(" and is")[0])
    again = torch.optim.AdamW(other.parameters(), lr=0.5)
    report = holdfast.load({"model": other, "optim": again}, folder / "saved")
    assert report.changed_settings == {"optim.param_groups.0.lr": (0.5, 0.001)}
    assert difference(optimizer.state_dict(), again.state_dict()) is None
    return said


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_optimizers_are_compared_alike(ranks, tmp_path: Path, world_size: int, background: bool):
    said = ranks(world_size).run(compare_on_ranks, tmp_path, background)
    text = "The stored optimizer is not like this one: it was saved from torch.optim.adamw.AdamW"
    assert said == [[text, text]] * world_size


def save_different_classes(folder: Path) -> Any:
    model = net()
    kind = torch.optim.Adam if torch.distributed.get_rank() else torch.optim.AdamW
    holdfast.save({"model": model, "optim": holdfast.PerRank(kind(model.parameters()))}, folder / "saved")
    return dict(holdfast.open(folder / "saved").provenance).get("optimizers")


def test_classes_that_differ_between_ranks_are_not_noted(ranks, tmp_path: Path):
    assert ranks(2).run(save_different_classes, tmp_path) == [None, None]
