"""Anything with `state_dict` and `load_state_dict` is saved and loaded: schedulers of torch, classes of users."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.refs import ANYTHING, TensorRef
from holdfast._state.expanding import adapter_for
from holdfast._state.stateful import merged
from tests.state.memory_checkpoint import MemoryCheckpoint, difference, load, save

SCHEDULERS = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, 3, mode="triangular2"),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 7]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], [4]
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
}


def test_every_scheduler_of_torch_is_among_the_examples():
    assert set(SCHEDULERS) == set(lr_scheduler.__all__) - {"LRScheduler"}


def with_scheduler(name: str) -> dict[str, Any]:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}


def rates(state: dict[str, Any], steps: int) -> list[float]:
    found = []
    for step in range(steps):
        state["optimizer"].step()
        state["scheduler"].step(
            *([3.0 + step] if isinstance(state["scheduler"], lr_scheduler.ReduceLROnPlateau) else [])
        )
        found.append(state["optimizer"].param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_alike(name: str):
    state, other = with_scheduler(name), with_scheduler(name)
    rates(state, 3)
    checkpoint = save(state)
    load(checkpoint, other)
    assert difference(state["scheduler"].state_dict(), other["scheduler"].state_dict()) is None
    assert rates(state, 6) == rates(other, 6)


class Keeper:
    """Keeps whatever it is given."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def state_dict(self) -> Any:
        return self.kept

    def load_state_dict(self, state: Any) -> None:
        self.kept = state


NESTED = {
    "counts": Counter({"a": 2, 3: 1}),
    "ordered": OrderedDict(b=1, a=torch.arange(3)),
    "tensors": [torch.ones(2), (torch.zeros(1), "text")],
    "none": None,
    5: {"deep": {"er": 1.5}},
    "empty": [],
}


@pytest.mark.parametrize(
    "before", [{}, {"counts": 3}, {"tensors": [1], "ordered": {"a": torch.zeros(3, dtype=torch.int64)}}]
)
def test_a_state_comes_back_with_all_its_types(before: Any):
    keeper = Keeper(before)
    load(save({"keeper": Keeper(NESTED)}), {"keeper": keeper})
    assert difference(keeper.kept, NESTED) is None


def test_tensors_of_the_object_are_read_into_if_they_fit():
    mine = {"fits": torch.zeros(3), "shape": torch.zeros(2), "dtype": torch.zeros(3, dtype=torch.float64)}
    stored = MemoryCheckpoint.of({key: torch.ones(3) for key in mine}).tree
    template = merged(mine, stored)
    assert template["fits"] is mine["fits"]
    assert template["shape"] is template["dtype"] is ANYTHING


def test_entries_that_were_not_stored_are_reported_missing():
    checkpoint = save({"keeper": Keeper({"a": 1, "d": {}})})
    keeper = Keeper({"a": 2, "b": 3, "d": {"e": 4}})
    load(checkpoint, {"keeper": keeper}, strict=False)
    assert keeper.kept == {"a": 1, "b": 3, "d": {"e": 4}}
    assert checkpoint.missing == [".keeper.d.e", ".keeper.b"]


def test_defaults_of_dicts_stay():
    stored = defaultdict(list, {"a": TensorRef("a", dtype_named("float32"), (2,))})
    template = merged({}, stored)
    assert type(template) is defaultdict
    assert template.default_factory is list
    assert template["a"] is ANYTHING
    assert isinstance(stored["a"], TensorRef)


def test_live_objects_inside_of_a_state_stay_for_the_flow_to_open():
    inner = torch.nn.Linear(1, 1)
    assert adapter_for(Keeper({"model": inner})).saved()["model"] is inner
    assert adapter_for(Keeper({"model": inner})).template({"model": {"weight": 1}})["model"] is inner


def test_only_objects_with_both_methods_are_stateful():
    class Half:
        def state_dict(self) -> Any:
            return {}

    assert adapter_for(Keeper) is None
    assert adapter_for(torch.optim.Adam) is None
    assert adapter_for(Half()) is None
    assert adapter_for({"a": 1}) is None
    assert adapter_for(torch.ones(1)) is None
    assert adapter_for(Keeper(1)) is not None


def test_tensors_without_memory_are_no_destination():
    stored = MemoryCheckpoint.of({"a": torch.ones(3)}).tree
    assert merged({"a": torch.ones(3, device="meta")}, stored)["a"] is ANYTHING
