"""Names of parameters do not depend on wrappers, and parameters find their names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from holdfast._state.contract import Context
from holdfast._state.parameter_names import canonical_name, parameter_names, strip_wrapper_names
from holdfast._state.per_rank import PerRank
from tests.properties import examples

WRAPPERS = {
    "parallel": nn.DataParallel,
    "checkpointed": checkpoint_wrapper,
    "compiled": lambda module: torch.compile(module, backend="eager"),
}
CHAINS = st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=3, unique=True)  # nothing is compiled twice


def wrap(module: nn.Module, chain: list[str]) -> nn.Module:
    for name in chain:
        module = WRAPPERS[name](module)
    return module


@settings(max_examples=examples(40))
@given(CHAINS, CHAINS, CHAINS)
def test_wrappers_leave_no_trace_wherever_they_nest(outside, middle, inside):
    leaf = wrap(nn.Linear(1, 1), inside)
    model = wrap(nn.ModuleDict({"module": wrap(nn.Sequential(leaf), middle)}), outside)
    names = [canonical_name(model, name) for name in model.state_dict()]
    assert names == ["module.0.weight", "module.0.bias"]
    assert list(parameter_names(model).values()) == names


@pytest.mark.parametrize("name", ["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_a_child_that_is_called_like_that_of_a_wrapper_keeps_its_name(name):
    model = nn.Module()
    model.add_module(name, nn.Linear(1, 1))
    assert canonical_name(model, f"{name}.weight") == f"{name}.weight"


def test_names_that_are_not_of_the_model_stay():
    assert canonical_name(nn.Linear(1, 1), "some.thing") == "some.thing"
    assert canonical_name(nn.DataParallel(nn.Linear(1, 1)), "module.lora.A") == "lora.A"


def test_an_averaged_model_is_no_wrapper_since_it_has_something_of_its_own():
    model = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))
    assert [canonical_name(model, name) for name in model.state_dict()] == list(model.state_dict())


@pytest.mark.parametrize(
    ("key", "bare"),
    [
        ("module.layer.weight", "layer.weight"),
        ("model._orig_mod.layer._checkpoint_wrapped_module.weight", "model.layer.weight"),
        ("_fsdp_wrapped_module.layer._fsdp_wrapped_module.bias", "layer.bias"),
        ("layer.module", "layer.module"),  # the last part is the tensor itself
        ("module", "module"),
        ("my_module.weight", "my_module.weight"),
        ("", ""),
    ],
)
def test_names_of_wrappers_are_taken_out_of_foreign_keys(key, bare):
    assert strip_wrapper_names(key) == bare


# --- the models of a state -----------------------------------------------------------------------------------------


def test_the_first_model_with_all_parameters_names_them():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    parameters = list(model[1].parameters())
    assert Context.of({"whole": model, "part": model[1]}).names_of(parameters) == ["1.weight", "1.bias"]
    assert Context.of({"part": model[1], "whole": model}).names_of(parameters) == ["weight", "bias"]


def test_models_are_found_wherever_they_are():
    models = [nn.Linear(1, 1) for _ in range(4)]
    state = {"a": models[0], "b": [1, (models[1],)], "c": {2: PerRank({"d": models[2]})}, "e": models[3]}
    assert Context.of(state).modules == (
        (("a",), models[0]),
        (("b", 1, 0), models[1]),
        (("c", 2, "d"), models[2]),
        (("e",), models[3]),
    )


def test_a_state_that_contains_itself_is_no_problem():
    state: dict = {"a": nn.Linear(1, 1)}
    state["b"] = [state]
    assert len(Context.of(state).modules) == 1


def test_parameters_of_no_model_have_no_name():
    model, stranger = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    assert Context.of({"m": model}).names_of([model.weight, stranger]) == ["m.weight", None]
    assert Context().names_of([stranger]) == [None]


def test_tied_parameters_go_by_their_first_name():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[1].weight = model[0].weight
    assert Context.of(model).names_of([model[1].weight]) == ["0.weight"]
