"""Optimizers come back bit for bit: all of torch's, in fresh and in used objects, by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from holdfast._formats.native.refs import ANYTHING
from holdfast._state.expanding import Context, adapter_for
from holdfast.errors import OptimizerMismatchError
from tests.state.memory_checkpoint import MemoryCheckpoint, difference, load, save

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ASGD": torch.optim.ASGD,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adagrad, started": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.5, lr_decay=0.1),
    "Adam": torch.optim.Adam,
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1),
    "Adam, fused": lambda p: torch.optim.Adam(p, fused=True),
    "Adam, lr in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
    "Adamax": torch.optim.Adamax,
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
    "LBFGS, wolfe": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": torch.optim.RMSprop,
    "RMSprop, centered": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SparseAdam": torch.optim.SparseAdam,
}
if hasattr(torch.optim, "Muon"):  # since 2.9
    OPTIMIZERS["Muon"] = lambda p: torch.optim.Muon([q for q in p if q.ndim == 2])


def test_every_optimizer_of_torch_is_among_the_examples():
    classes = {name for name, value in vars(torch.optim).items() if isinstance(value, type)} - {"Optimizer"}
    assert classes == {name.partition(",")[0] for name in OPTIMIZERS}


class Net(nn.Module):
    def __init__(self, *, sparse: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 3, sparse=sparse)
        self.hidden = None if sparse else nn.Linear(3, 4)
        self.scale = None if sparse else nn.Parameter(torch.tensor(0.7))
        self.to(dtype)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.embedding(numbers)
        return (x if self.hidden is None else torch.tanh(self.hidden(x)) * self.scale).float().pow(2).mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + steps):
        numbers = torch.tensor([step % 5, (step * 2 + 1) % 5])

        def closure(numbers: torch.Tensor = numbers) -> float:
            optimizer.zero_grad()
            loss = model(numbers)
            loss.backward()
            return loss.item()

        optimizer.step(closure)


def trained(name: str, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(sparse=name == "SparseAdam", **options)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    train(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_comes_back_bit_for_bit_and_goes_on_alike(name: str, used: bool):
    model, optimizer = trained(name)
    checkpoint = save({"model": model, "optimizer": optimizer})

    other = Net(sparse=name == "SparseAdam")
    again = OPTIMIZERS[name](list(other.parameters()))
    if used:
        train(other, again, steps=2, first=1)
    notes = load(checkpoint, {"model": other, "optimizer": again})

    assert notes == []
    assert difference(optimizer.state_dict(), again.state_dict()) is None
    train(model, optimizer, first=3)
    train(other, again, first=3)
    assert difference(optimizer.state_dict(), again.state_dict()) is None
    assert difference(dict(model.state_dict()), dict(other.state_dict())) is None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_alone_is_known_by_numbers_as_torch_knows_it(name: str):
    _, optimizer = trained(name)
    checkpoint = save({"optimizer": optimizer})
    raw = optimizer.state_dict()
    assert checkpoint.tree["optimizer"]["param_groups"][0]["params"] == raw["param_groups"][0]["params"]
    assert list(checkpoint.tree["optimizer"]["state"]) == list(raw["state"])

    other = Net(sparse=name == "SparseAdam")
    again = OPTIMIZERS[name](list(other.parameters()))
    load(checkpoint, {"optimizer": again})
    assert difference(optimizer.state_dict(), again.state_dict()) is None


def test_saving_and_preparing_a_load_do_not_touch_an_optimizer():
    model, optimizer = trained("Adam")
    fresh = torch.optim.Adam(Net().parameters())
    before, fresh_before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(fresh.state_dict())
    checkpoint = save({"model": model, "optimizer": optimizer})
    adapter_for(fresh, (), Context()).template(checkpoint.tree["optimizer"])
    assert difference(optimizer.state_dict(), before) is None
    assert difference(fresh.state_dict(), fresh_before) is None


def test_an_optimizer_without_a_step_is_stored_without_state():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = save({"model": model, "optimizer": optimizer})
    assert checkpoint.tree["optimizer"]["state"] == {}


def test_state_that_was_not_stored_is_gone_after_a_load():
    model = Net()
    checkpoint = save({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    other, optimizer = trained("AdamW")
    load(checkpoint, {"model": other, "optimizer": optimizer})
    assert optimizer.state_dict()["state"] == {}


def test_existing_state_is_loaded_in_place():
    model, optimizer = trained("Adam")
    checkpoint = save({"model": model, "optimizer": optimizer})
    other, again = trained("Adam")
    train(other, again)
    kept = again.state[other.hidden.weight]["exp_avg"]
    load(checkpoint, {"model": other, "optimizer": again})
    assert again.state[other.hidden.weight]["exp_avg"] is kept
    assert kept.equal(optimizer.state[model.hidden.weight]["exp_avg"])


def test_moments_keep_their_dtype_beside_parameters_of_another():
    model, optimizer = trained("Adam", dtype=torch.bfloat16)
    for state in optimizer.state.values():
        state["exp_avg"] = torch.randn(state["exp_avg"].shape)
        state["master"] = {"weights": [torch.randn(3, dtype=torch.float64)]}
        state["step"] = state["step"].double()
    checkpoint = save({"model": model, "optimizer": optimizer})
    for again_steps in (0, 2):
        other = Net(dtype=torch.bfloat16)
        again = torch.optim.Adam(other.parameters())
        train(other, again, steps=again_steps)
        load(checkpoint, {"model": other, "optimizer": again})
        assert difference(optimizer.state_dict(), again.state_dict()) is None


def test_fresh_memory_is_laid_out_like_the_parameter():
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    checkpoint = save({"model": model, "optimizer": optimizer})
    again = torch.optim.Adam(model.parameters())
    template = adapter_for(again, ("optimizer",), Context.of({"model": model})).template(checkpoint.tree["optimizer"])
    assert template["state"]["weight"]["exp_avg"].stride() == model.weight.stride()


class Seen(torch.optim.Adam):
    """Looks at what it is given."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.seen = [entry["exp_avg"].shape for entry in state.get("state", {}).values()]
        super().__setstate__(state)


@pytest.mark.parametrize("how", ["method", "hook", "none"])
def test_who_looks_at_a_loaded_state_sees_all_of_it_and_torch_is_spared_the_copies(how: str, monkeypatch):
    model, optimizer = trained("Adam", dtype=torch.bfloat16)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].double()
    checkpoint = save({"model": model, "optimizer": optimizer})
    other = Net(dtype=torch.bfloat16)
    again = (Seen if how == "method" else torch.optim.Adam)(other.parameters())
    seen: list[Any] = []
    if how == "hook":
        again.register_load_state_dict_pre_hook(
            lambda _, state: seen.extend(entry["exp_avg"].shape for entry in state["state"].values())
        )
    copied: list[int] = []
    policy = torch.optim.Optimizer._process_value_according_to_param_policy

    def watched(parameter: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        copied.append(value.numel() if value.dtype == torch.float64 else 0)
        return policy(parameter, value, *args, **options)

    monkeypatch.setattr(torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(watched))
    load(checkpoint, {"model": other, "optimizer": again})
    assert difference(optimizer.state_dict(), again.state_dict()) is None
    if how == "none":
        assert max(copied) <= 1
    else:
        assert (seen or again.seen) == [parameter.shape for parameter in other.parameters()]


# --- names ---------------------------------------------------------------------------------------------------------


def test_parameters_are_matched_by_name_whatever_their_order_and_groups():
    model, optimizer = trained("Adam")
    checkpoint = save({"model": model, "optimizer": optimizer})
    other = Net()
    again = torch.optim.Adam([{"params": [other.scale, other.hidden.bias]}, {"params": [other.embedding.weight]}])
    again.add_param_group({"params": [other.hidden.weight]})
    notes = load(checkpoint, {"model": other, "optimizer": again}, optimizer_mismatch="ignore")
    assert notes == ["optimizer: the parameters of its group 0 are in 3 groups here: 0, 1, 2"]
    for name, parameter in other.named_parameters():
        assert difference(again.state[parameter], optimizer.state[model.get_parameter(name)]) is None


def groups_of(model: Net, **second: Any) -> list[dict[str, Any]]:
    return [
        {"params": list(model.hidden.parameters()), "lr": 0.5, "initial_lr": 0.25, "name": "hidden"},
        {"params": []},
        {"params": [model.embedding.weight, model.scale], **second},
    ]


def test_settings_of_groups_win_over_live_ones_and_own_settings_stay():
    model = Net()
    optimizer = torch.optim.SGD(groups_of(model, lr=0.125), lr=0.1, momentum=0.9)
    optimizer.param_groups[1]["lr"] = 77.0
    optimizer.param_groups[2]["betas"] = (0.5, 0.25)
    train(model, optimizer)
    checkpoint = save({"model": model, "optimizer": optimizer})
    other = Net()
    again = torch.optim.SGD(groups_of(other, lr=3.0, mine="stays"), lr=2.0)
    load(checkpoint, {"model": other, "optimizer": again})
    expected = copy.deepcopy(optimizer.state_dict())
    expected["param_groups"][2]["mine"] = "stays"
    found = again.state_dict()
    for group in (*expected["param_groups"], *found["param_groups"]):
        group.update({key: group.pop(key) for key in sorted(group)})
    assert difference(expected, found) is None


def test_groups_in_another_order_keep_their_settings():
    model = Net()
    optimizer = torch.optim.SGD(groups_of(model, lr=0.125), lr=0.1)
    checkpoint = save({"model": model, "optimizer": optimizer})
    other = Net()
    again = torch.optim.SGD(list(reversed(groups_of(other))), lr=9.0)
    load(checkpoint, {"model": other, "optimizer": again})
    assert [group["lr"] for group in again.param_groups] == [0.125, 0.1, 0.5]


def test_parameters_of_groups_with_different_settings_cannot_be_put_together():
    model = Net()
    optimizer = torch.optim.SGD(groups_of(model), lr=0.1)
    checkpoint = save({"model": model, "optimizer": optimizer})
    again = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptimizerMismatchError, match=r"group 0 .* stored groups 0 and 2, which differ in 'lr'"):
        load(checkpoint, {"model": model, "optimizer": again})


def test_frozen_parameters_have_no_state_before_and_after():
    model = Net()
    model.embedding.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    checkpoint = save({"model": model, "optimizer": optimizer})
    assert "embedding.weight" not in checkpoint.tree["optimizer"]["state"]
    assert "embedding.weight" in checkpoint.tree["optimizer"]["param_groups"][0]["params"]
    other = Net()
    again = torch.optim.Adam(other.parameters())
    load(checkpoint, {"model": other, "optimizer": again})
    assert difference(optimizer.state_dict(), again.state_dict()) is None


def test_parameters_of_several_models_are_named_by_the_place_of_the_model():
    nets = {"a": Net(), "b": [Net()]}
    optimizer = torch.optim.SGD([*nets["a"].parameters(), nets["b"][0].scale], lr=0.1)
    saved = adapter_for(optimizer, ("optimizer",), Context.of({"nets": nets, "optimizer": optimizer})).saved()
    names = saved["param_groups"][0]["params"]
    assert names[-1] == "nets.b.0.scale"
    assert set(names[:-1]) == {f"nets.a.{name}" for name, _ in nets["a"].named_parameters()}


def test_names_that_torch_knows_are_used_if_there_is_no_model():
    model = Net()
    wrapped = nn.DataParallel(model)
    optimizer = torch.optim.Adam(wrapped.named_parameters())
    train(model, optimizer)
    checkpoint = save({"optimizer": optimizer})
    assert list(checkpoint.tree["optimizer"]["state"]) == [name for name, _ in model.named_parameters()]
    other = Net()
    again = torch.optim.Adam(list(reversed(list(other.named_parameters()))))
    assert load(checkpoint, {"optimizer": again}) == []
    assert difference(again.state[other.scale], optimizer.state[model.scale]) is None
    assert again.param_groups[0]["param_names"] == [name for name, _ in reversed(list(other.named_parameters()))]


def test_names_that_are_the_same_without_wrappers_are_not_used():
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([("layer.a", a), ("module.layer.a", b)], lr=0.1)
    assert adapter_for(optimizer).saved()["param_groups"][0]["params"] == [0, 1]


def test_where_a_counter_is_kept_is_left_to_torch():
    model, optimizer = trained("Adam")
    checkpoint = save({"model": model, "optimizer": optimizer})
    fresh = torch.optim.Adam(model.parameters())
    template = adapter_for(fresh, (), Context.of(model)).template(checkpoint.tree["optimizer"])
    assert template["state"]["scale"]["step"] is ANYTHING
    assert isinstance(template["state"]["scale"]["exp_avg"], torch.Tensor)


@pytest.mark.parametrize("named", ["stored", "live"])
def test_names_on_one_side_only_are_matched_by_position(named: str):
    model, optimizer = trained("Adam")
    checkpoint = save({"model": model, "optimizer": optimizer} if named == "stored" else {"optimizer": optimizer})
    checkpoint.tree.pop("model", None)
    other = Net()
    again = torch.optim.Adam(other.parameters())
    context = Context.of({"model": other}) if named == "live" else Context()
    adapter = adapter_for(again, ("optimizer",), context)
    template = adapter.template(checkpoint.tree["optimizer"])
    adapter.apply(checkpoint.fill({"optimizer": template})["optimizer"])
    assert difference(optimizer.state_dict(), again.state_dict()) is None
    assert "by position" in adapter.notes()[0]


def test_numbers_are_not_matched_if_the_groups_have_other_sizes():
    _, optimizer = trained("Adam")
    checkpoint = save({"optimizer": optimizer})
    again = torch.optim.Adam(nn.Linear(2, 2).parameters())
    with pytest.raises(OptimizerMismatchError, match=r"groups of \[4\] parameters and this one has groups of \[2\]"):
        load(checkpoint, {"optimizer": again})


def test_stored_names_with_wrappers_in_them_are_recognised():
    model, optimizer = trained("Adam")
    saved = adapter_for(optimizer, (), Context.of(model)).saved()
    saved["state"] = {f"module._orig_mod.{name}": entry for name, entry in saved["state"].items()}
    saved["param_groups"][0]["params"] = [f"module._orig_mod.{name}" for name in saved["param_groups"][0]["params"]]
    checkpoint = MemoryCheckpoint.of({"optimizer": saved})
    other = Net()
    again = torch.optim.Adam(other.parameters())
    adapter = adapter_for(again, (), Context.of(other))
    adapter.apply(checkpoint.fill({"optimizer": adapter.template(checkpoint.tree["optimizer"])})["optimizer"])
    assert difference(optimizer.state_dict(), again.state_dict()) is None
    assert "without wrappers" in adapter.notes()[0]


# --- what does not fit ---------------------------------------------------------------------------------------------


def test_a_parameter_that_is_new_is_reported_missing_and_keeps_what_it_has():
    model = Net()
    optimizer = torch.optim.Adam(list(model.hidden.parameters()), lr=0.5)
    train(model, optimizer)
    checkpoint = save({"model": model, "optimizer": optimizer})
    other, again = trained("Adam")
    kept = again.state[other.scale]["exp_avg"].clone()
    load(checkpoint, {"model": other, "optimizer": again}, strict=False)
    assert sorted(checkpoint.missing) == [".optimizer.state.embedding.weight", ".optimizer.state.scale"]
    assert again.state[other.scale]["exp_avg"].equal(kept)
    assert difference(again.state[other.hidden.weight], optimizer.state[model.hidden.weight]) is None


@pytest.mark.parametrize("empty", ["stored", "live"])
def test_an_optimizer_without_parameters_matches_none(empty: str):
    model, optimizer = trained("Adam")
    nothing = torch.optim.Adam([{"params": []}], lr=0.5)
    saved, loaded = (nothing, optimizer) if empty == "stored" else (optimizer, nothing)
    checkpoint = save({"model": model, "optimizer": saved})
    load(checkpoint, {"model": model, "optimizer": loaded}, strict=False)
    found = checkpoint.missing if empty == "stored" else checkpoint.unexpected
    assert sorted(found) == sorted(f".optimizer.state.{name}" for name, _ in model.named_parameters())


def test_a_parameter_that_is_gone_is_reported_unexpected():
    model, optimizer = trained("Adam")
    checkpoint = save({"model": model, "optimizer": optimizer})
    other = Net()
    again = torch.optim.Adam(other.hidden.parameters())
    load(checkpoint, {"model": other, "optimizer": again}, strict=False)
    assert sorted(checkpoint.unexpected) == [".optimizer.state.embedding.weight", ".optimizer.state.scale"]
    assert difference(again.state[other.hidden.weight], optimizer.state[model.hidden.weight]) is None


def test_state_of_another_shape_than_the_parameter_is_found():
    model, optimizer = trained("Adam")
    checkpoint = save({"model": model, "optimizer": optimizer})
    other = Net()
    other.hidden = nn.Linear(3, 6)
    again = torch.optim.Adam(other.parameters())
    template = adapter_for(again, ("optimizer",), Context.of({"model": other})).template(checkpoint.tree["optimizer"])
    checkpoint.fill({"optimizer": template})
    assert sorted(checkpoint.misfits) == [
        f".optimizer.state.hidden.{name}.{key}" for name in ("bias", "weight") for key in ("exp_avg", "exp_avg_sq")
    ]


def test_nothing_stored_makes_everything_missing():
    model, optimizer = trained("Adam")
    checkpoint = MemoryCheckpoint.of({})
    template = {"optimizer": adapter_for(optimizer, (), Context.of(model)).template(None)}
    checkpoint.fill(template)
    assert checkpoint.missing == [".optimizer"]
    assert set(template["optimizer"]["state"]) == {name for name, _ in model.named_parameters()}


# --- optimizers of others ------------------------------------------------------------------------------------------


class WithMore(torch.optim.Adam):
    """Keeps something beside the usual parts."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.scaling = torch.tensor(1.0)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scaling": self.scaling}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scaling = state_dict["scaling"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "scaling"})


def test_an_overridden_state_dict_of_the_usual_shape_is_stored_by_name_with_all_it_has():
    model = Net()
    optimizer = WithMore(model.parameters())
    optimizer.scaling = torch.tensor(7.0)
    train(model, optimizer)
    checkpoint = save({"model": model, "optimizer": optimizer})
    assert "hidden.weight" in checkpoint.tree["optimizer"]["state"]
    other = Net()
    again = WithMore(other.parameters())
    load(checkpoint, {"model": other, "optimizer": again})
    assert difference(optimizer.state_dict(), again.state_dict()) is None


class OfAnotherShape(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"speed": self.param_groups[0]["lr"], "memory": torch.full((2,), 4.0)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.param_groups[0]["lr"] = state_dict["speed"]
        self.seen = state_dict["memory"]


def test_a_state_dict_of_another_shape_goes_through_as_it_is():
    model = Net()
    checkpoint = save({"model": model, "optimizer": OfAnotherShape(model.parameters(), lr=0.5)})
    assert checkpoint.tree["optimizer"]["speed"] == 0.5
    again = OfAnotherShape(model.parameters(), lr=1.0)
    load(checkpoint, {"model": model, "optimizer": again})
    assert again.param_groups[0]["lr"] == 0.5
    assert again.seen.tolist() == [4.0, 4.0]


def test_hooks_of_an_optimizer_run():
    model, optimizer = trained("Adam")
    checkpoint = save({"model": model, "optimizer": optimizer})
    again = torch.optim.Adam(model.parameters())
    seen: list[str] = []
    again.register_load_state_dict_pre_hook(lambda _, state: seen.append(f"before {len(state['state'])}"))
    again.register_load_state_dict_post_hook(lambda _: seen.append("after"))
    load(checkpoint, {"model": model, "optimizer": again})
    assert seen == ["before 4", "after"]


def test_texts_and_arrays_in_a_state_survive():
    """torch itself turns texts into the text of a generator object, and fails with arrays."""
    model, optimizer = trained("Adam")
    optimizer.state[model.scale]["kind"] = "scalar"
    optimizer.state[model.scale]["history"] = np.arange(3)
    checkpoint = save({"model": model, "optimizer": optimizer})
    again = torch.optim.Adam(model.parameters())
    load(checkpoint, {"model": model, "optimizer": again})
    assert again.state[model.scale]["kind"] == "scalar"
    assert again.state[model.scale]["history"].tolist() == [0, 1, 2]


# --- what stock DCP makes of optimizers ----------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_states_made_by_helpers_of_dcp_are_understood(flat: bool):
    model = Net()
    optimizer = torch.optim.Adam(groups_of(model, lr=0.25)[::2])
    train(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    checkpoint = MemoryCheckpoint.of({"optimizer": get_optimizer_state_dict(model, optimizer, options=options)})
    other = Net()
    again = torch.optim.Adam(groups_of(other)[::2])
    adapter = adapter_for(again, ("optimizer",), Context.of({"model": other}))
    adapter.apply(checkpoint.fill({"optimizer": adapter.template(checkpoint.tree["optimizer"])})["optimizer"])
    assert (checkpoint.missing, checkpoint.unexpected, checkpoint.misfits) == ([], [], [])
    assert difference(optimizer.state_dict()["state"], again.state_dict()["state"]) is None
    assert [group["lr"] for group in again.param_groups] == [0.5, 0.25]


def test_a_flat_state_is_compared_like_a_nested_one():
    model = Net()
    optimizer = torch.optim.Adam([model.scale, model.hidden.weight])
    train(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    checkpoint = MemoryCheckpoint.of({"optimizer": get_optimizer_state_dict(model, optimizer, options=options)})
    other, again = trained("Adam")
    again = torch.optim.Adam([other.scale, other.hidden.bias])
    adapter = adapter_for(again, ("optimizer",), Context.of({"model": other}))
    adapter.apply(checkpoint.fill({"optimizer": adapter.template(checkpoint.tree["optimizer"])})["optimizer"])
    assert checkpoint.missing == [".optimizer.state.hidden.bias"]
    assert checkpoint.unexpected == [
        f".optimizer.state.hidden.weight.{key}" for key in ("step", "exp_avg", "exp_avg_sq")
    ]
    assert difference(again.state[other.scale], optimizer.state[model.scale]) is None
    assert other.hidden.bias not in again.state


def test_the_numbers_of_a_raw_state_dict_saved_by_dcp_are_understood():
    """DCP stores the keys of dicts as texts: the numbers of parameters too, but not those in the groups."""
    _, optimizer = trained("Adam")
    raw = optimizer.state_dict()
    raw["state"] = {str(number): entry for number, entry in raw["state"].items()}
    checkpoint = MemoryCheckpoint.of({"optimizer": raw})
    other = Net()
    again = torch.optim.Adam(other.parameters())
    load(checkpoint, {"optimizer": again})
    assert difference(optimizer.state_dict(), again.state_dict()) is None


def test_state_under_the_name_of_a_parameter_that_no_group_has_is_refused():
    model, optimizer = trained("Adam")
    checkpoint = save({"model": model, "optimizer": optimizer})
    groups = checkpoint.tree["optimizer"]["param_groups"]
    groups[0]["params"] = [f"old.{name}" for name in groups[0]["params"]]
    other = Net()
    again = torch.optim.Adam(other.parameters())
    with pytest.raises(OptimizerMismatchError, match=r"state for embedding\.weight, .* none of its groups has them"):
        load(checkpoint, {"model": other, "optimizer": again})
