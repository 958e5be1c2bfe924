"""What `load` does to the state it is given: what it fills, what it replaces, what it leaves alone, what it refuses."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import holdfast.dcp as dcp
from holdfast import _settings as settings
from holdfast.errors import StateMismatchError
from tests.rank_pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")  # stock says so on every call


def refused(target: Any, path: Path, **options: Any) -> StateMismatchError:
    """The error that tells what does not fit."""
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.load(target, checkpoint_id=path, **options)
    (cause, _) = raised.value.failures[0]
    assert isinstance(cause, StateMismatchError)
    assert isinstance(cause, (RuntimeError, ValueError))
    return cause


# What is filled, replaced, left alone


def test_tensors_are_filled_in_place_and_values_replaced(tmp_path: Path) -> None:
    dcp.save({"t": torch.ones(2), "n": {"l": [1, 2], "s": "new"}}, checkpoint_id=tmp_path)
    tensor, inner = torch.zeros(2), {"l": [0], "s": "old"}
    target = {"t": tensor, "n": inner}

    dcp.load(target, checkpoint_id=tmp_path)

    assert target["t"] is tensor
    assert tensor.tolist() == [1, 1]
    assert target["n"] is inner
    assert inner == {"l": [1, 2], "s": "new"}


class Thing:
    """An object that no checkpoint format knows."""


@dataclass
class Options:
    depth: int = 1


def test_unknown_objects_of_the_state_are_left_alone(tmp_path: Path) -> None:
    dcp.save({"t": torch.ones(2), "n": {"x": 1}}, checkpoint_id=tmp_path)
    strangers: dict[str, Any] = {
        "array": np.arange(3),
        "set": {1, 2},
        "thing": Thing(),
        "options": Options(),
        "lock": threading.Lock(),
        "size": torch.Size([2]),
        "dtype": torch.float16,
        "list": [Thing()],
    }
    target = {"t": torch.zeros(2), "n": {"x": 0, **strangers}, **strangers}

    dcp.load(target, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))

    assert target["n"]["x"] == 1
    for key, value in strangers.items():
        assert target[key] is value, key
        assert target["n"][key] is value, key


def test_unknown_objects_survive_a_load_that_fails(tmp_path: Path) -> None:
    dcp.save({"t": torch.ones(2)}, checkpoint_id=tmp_path)
    thing, array = Thing(), np.arange(3)
    target = {"t": torch.zeros(2), "deep": [{"thing": thing, "array": array}]}

    error = refused(target, tmp_path)

    assert error.missing == ["deep.0.thing", "deep.0.array"]
    assert target["deep"][0]["thing"] is thing
    assert target["deep"][0]["array"] is array
    assert target["t"].tolist() == [0, 0]


def test_numpy_arrays_sets_and_tuples_come_back_as_what_they_were(tmp_path: Path) -> None:
    state = {"array": np.arange(6).reshape(2, 3), "set": {1, 2}, "tuple": (1, "a"), "size": torch.Size([4])}
    dcp.save(state, checkpoint_id=tmp_path)
    target: dict[str, Any] = {"array": np.zeros(1), "set": set(), "tuple": (), "size": None}

    dcp.load(target, checkpoint_id=tmp_path)

    assert np.array_equal(target.pop("array"), state["array"])
    assert target == {"set": {1, 2}, "tuple": (1, "a"), "size": torch.Size([4])}
    assert type(target["size"]) is torch.Size


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_values_go_back_under_the_keys_that_the_state_uses(tmp_path: Path, kind: type) -> None:
    def state(step: int, fill: float) -> dict[str, Any]:
        inner = kind({1: kind(step=step), "name": f"s{step}", (2, 3): step, None: step})
        return {"state": inner, "params": [{"lr": step}, {"w": torch.full((2,), fill)}], 7: step}

    dcp.save(state(3, 1.0), checkpoint_id=tmp_path)
    target = state(0, 0.0)
    dcp.load(target, checkpoint_id=tmp_path)

    assert target["state"] == state(3, 1.0)["state"]
    assert type(target["state"]) is kind
    assert target[7] == 3
    assert target["params"][0] == {"lr": 3}
    assert target["params"][1]["w"].tolist() == [1, 1]


def test_top_level_keys_of_different_types_are_saved_and_loaded(tmp_path: Path) -> None:
    dcp.save({"b": 1, 2: torch.ones(1), (3, "x"): {"y": 2}, None: 4}, checkpoint_id=tmp_path)
    target: dict[Any, Any] = {"b": 0, 2: torch.zeros(1), (3, "x"): {"y": 0}, None: 0}

    dcp.load(target, checkpoint_id=tmp_path)

    assert (target["b"], target[2].item(), target[3, "x"], target[None]) == (1, 1, {"y": 2}, 4)
    assert len(target) == 4


def test_a_checkpoint_may_hold_more_than_is_asked_for(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    dcp.save({"model": {"w": torch.ones(1)}, "optim": {"m": torch.ones(1)}, "step": 3}, checkpoint_id=tmp_path)
    target = {"model": {"w": torch.zeros(1)}}

    dcp.load(target, checkpoint_id=tmp_path)

    assert target["model"]["w"].item() == 1
    assert list(recwarn) == []


class ReadOnly(Mapping[str, Any]):
    """A state that is a mapping, but not a dict."""

    def __init__(self, **content: Any) -> None:
        self.content = content

    def __getitem__(self, key: str) -> Any:
        return self.content[key]

    def __iter__(self) -> Any:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


def test_tensors_in_a_mapping_that_cannot_be_written_to_are_filled(tmp_path: Path) -> None:
    dcp.save({"m": ReadOnly(w=torch.ones(2))}, checkpoint_id=tmp_path)
    target = {"m": ReadOnly(w=torch.zeros(2))}

    dcp.load(target, checkpoint_id=tmp_path)

    assert target["m"]["w"].tolist() == [1, 1]


# Without flattening


def test_without_flattening_values_and_tensors_come_back(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(2), "nested": {"x": 1, "t": torch.arange(2)}, "list": [1, 2], "n": 5}
    dcp.save(state, checkpoint_id=tmp_path, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    target: dict[str, Any] = {"a.b": torch.zeros(2), "nested": {}, "list": [], "n": 0}

    dcp.load(target, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False))

    assert repr(target) == repr(state)


def test_without_flattening_equal_names_at_different_depths_do_not_collide(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(1), "a": {"b": 2}}
    dcp.save(state, checkpoint_id=tmp_path, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    target: dict[str, Any] = {"a.b": torch.zeros(1), "a": {"b": 0}}

    dcp.load(target, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False))

    assert repr(target) == repr(state)


def test_without_flattening_keys_must_be_texts(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match="key 7 is a int"):
        dcp.save({7: 1}, checkpoint_id=tmp_path, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))


# What does not fit


def test_everything_that_does_not_fit_is_reported_at_once_and_nothing_is_changed(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "size": torch.ones(4), "kind": torch.ones(3), "int": torch.ones(1), "value": "text"}
    dcp.save({"model": {**state, "layer.weight": torch.ones(1)}}, checkpoint_id=tmp_path)
    target = {
        "model": {
            "w": torch.zeros(2),
            "size": torch.zeros(5),
            "kind": "not a tensor",
            "int": torch.zeros(1, dtype=torch.int64),
            "value": torch.zeros(3),
            "layer.wieght": torch.zeros(1),
            "absent": 0,
        }
    }

    error = refused(target, tmp_path)

    assert error.missing == ["model.layer.wieght", "model.absent"]
    assert error.shapes == {"model.size": (torch.Size([4]), torch.Size([5]))}
    assert error.dtypes == {"model.int": (torch.float32, torch.int64)}
    assert set(error.kinds) == {"model.kind", "model.value"}
    text = str(error)
    assert "Missing key in checkpoint state_dict: model.absent." in text
    assert "Missing key in checkpoint state_dict: model.layer.wieght. (did you mean 'model.layer.weight'?)" in text
    assert "Size mismatch between saved torch.Size([4]) and current: torch.Size([5]) for model.size" in text
    assert "Nothing was changed." in text
    assert target["model"]["w"].tolist() == [0, 0]


def test_the_wrappers_of_compiled_and_parallel_models_are_seen_through_in_suggestions(tmp_path: Path) -> None:
    dcp.save({"model": {"_orig_mod.layers.0.weight": torch.ones(1)}}, checkpoint_id=tmp_path)

    error = refused({"model": {"module.layers.0.weight": torch.zeros(1)}}, tmp_path)

    assert "did you mean 'model._orig_mod.layers.0.weight'?" in str(error)


def test_partial_load_allows_missing_keys_and_nothing_else(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "v": 1}, checkpoint_id=tmp_path)
    target = {"w": torch.zeros(2), "v": 0, "new": torch.zeros(3), "also": {"new": 5}}

    dcp.load(target, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))

    assert target["w"].tolist() == [1, 1]
    assert target["v"] == 1
    assert target["new"].tolist() == [0, 0, 0]
    assert target["also"] == {"new": 5}
    wrong = {"w": torch.zeros(1, 2), "new": 0}
    error = refused(wrong, tmp_path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert list(error.shapes) == ["w"]


# Kinds


def test_a_stored_number_fills_a_tensor_of_one_element(tmp_path: Path) -> None:
    dcp.save({"step": 7, "lr": 0.5, "flag": True, "deep": {"n": 3}}, checkpoint_id=tmp_path)
    step = torch.tensor(0.0)
    target = {
        "step": step,
        "lr": torch.zeros(1, dtype=torch.float64),
        "flag": torch.tensor(False),
        "deep": {"n": torch.tensor([[0]])},
    }

    dcp.load(target, checkpoint_id=tmp_path)

    assert target["step"] is step
    assert (step.item(), target["lr"].item(), target["flag"].item()) == (7, 0.5, True)
    assert target["deep"]["n"].tolist() == [[3]]


@pytest.mark.parametrize(
    ("number", "dtype"), [(0.5, torch.int64), (3, torch.bool), (1j, torch.float32)], ids=["float", "int", "complex"]
)
def test_a_stored_number_is_not_squeezed_into_a_tensor_that_cannot_hold_it(
    tmp_path: Path, number: complex, dtype: torch.dtype
) -> None:
    dcp.save({"n": number}, checkpoint_id=tmp_path)
    target = {"n": torch.zeros((), dtype=dtype)}

    error = refused(target, tmp_path)

    assert list(error.dtypes) == ["n"]
    assert target["n"].item() == 0


def test_a_value_does_not_take_the_place_of_a_tensor(tmp_path: Path) -> None:
    dcp.save({"t": [1, 2, 3]}, checkpoint_id=tmp_path)

    error = refused({"t": torch.zeros(3)}, tmp_path)

    assert error.kinds == {"t": "is a tensor in the state but a plain value in the checkpoint"}


def test_a_stored_tensor_needs_a_tensor_to_go_to(tmp_path: Path) -> None:
    dcp.save({"t": torch.ones(3)}, checkpoint_id=tmp_path)

    error = refused({"t": None}, tmp_path)

    assert "a tensor of size [3]" in error.kinds["t"]
    assert "NoneType" in error.kinds["t"]


# dtypes


def save_floats(path: Path) -> None:
    dcp.save({"a": torch.tensor([1.5]), "b": torch.tensor([2])}, checkpoint_id=path)


def test_another_dtype_of_the_same_kind_is_converted_with_one_warning(tmp_path: Path) -> None:
    save_floats(tmp_path)
    target = {"a": torch.zeros(1, dtype=torch.bfloat16), "b": torch.zeros(1)}

    with pytest.warns(UserWarning, match="2 tensor") as caught:
        dcp.load(target, checkpoint_id=tmp_path)

    assert len(caught) == 1
    text = str(caught[0].message)
    assert "'a' is torch.float32 in the checkpoint and torch.bfloat16 in the state" in text
    assert "'b' is torch.int64 in the checkpoint and torch.float32 in the state" in text
    assert (target["a"].item(), target["b"].item()) == (1.5, 2)


def test_a_conversion_that_destroys_values_is_refused(tmp_path: Path) -> None:
    save_floats(tmp_path)

    error = refused({"a": torch.zeros(1, dtype=torch.int32)}, tmp_path)

    assert error.dtypes == {"a": (torch.float32, torch.int32)}


@pytest.mark.parametrize("how", ["argument", "setting"])
def test_dtype_changes_can_be_forbidden_or_passed_over(tmp_path: Path, how: str, recwarn: Any) -> None:
    save_floats(tmp_path)

    def load(target: Any, choice: Any) -> None:
        if how == "argument":
            dcp.load(target, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(dtype_change=choice))
            return
        with settings.override(dtype_change=choice):
            dcp.load(target, checkpoint_id=tmp_path)

    with pytest.raises(dcp.CheckpointException, match="'a' is torch"):
        load({"a": torch.zeros(1, dtype=torch.float64)}, "error")
    cut = {"a": torch.zeros(1, dtype=torch.int32)}
    load(cut, "ignore")
    assert cut["a"].item() == 1
    assert list(recwarn) == []


# Memory for meta tensors


@pytest.mark.filterwarnings("ignore:`_get_pg_default_device`")  # stock's own use of what torch gives up
def test_meta_tensors_are_given_memory_without_a_process_group(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(3.0), "deep": [{"b": torch.ones(2, dtype=torch.bool)}]}, checkpoint_id=tmp_path)
    with torch.device("meta"):
        target = {"w": nn.Parameter(torch.empty(3)), "deep": [{"b": torch.empty(2, dtype=torch.bool)}]}

    dcp.load(target, checkpoint_id=tmp_path)

    assert target["w"].tolist() == [0, 1, 2]
    assert isinstance(target["w"], nn.Parameter)
    assert target["deep"][0]["b"].tolist() == [True, True]
    with pytest.raises(stock.CheckpointException):
        stock.load({"w": torch.empty(3, device="meta")}, checkpoint_id=tmp_path)  # stock needs a group for this


def test_a_model_made_on_the_meta_device_is_loaded_with_assign(tmp_path: Path) -> None:
    trained = nn.Linear(2, 2)
    dcp.save({"model": trained.state_dict()}, checkpoint_id=tmp_path)
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    state = {"model": model.state_dict()}

    dcp.load(state, checkpoint_id=tmp_path)
    model.load_state_dict(state["model"], assign=True)

    assert torch.equal(model.weight, trained.weight)


def load_meta_dtensor(folder: Path) -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    dcp.save({"d": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])}, checkpoint_id=folder)
    local = torch.empty(3 if dist.get_rank() == 0 else 2, device="meta")
    target = {"d": DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size([5]), stride=(1,))}
    dcp.load(target, checkpoint_id=folder)
    return target["d"].full_tensor().tolist()


def test_a_dtensor_on_the_meta_device_is_given_memory(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(load_meta_dtensor, tmp_path) == [[0, 1, 2, 3, 4]] * 2


def load_plain_meta_tensor(folder: Path) -> tuple[list[float], str, list[str]]:
    dcp.save({"w": torch.arange(2.0)}, checkpoint_id=folder)
    target = {"w": torch.empty(2, device="meta")}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.load(target, checkpoint_id=folder)
    return target["w"].tolist(), target["w"].device.type, [str(warning.message) for warning in caught]


def test_in_a_group_meta_tensors_are_given_memory_on_the_groups_device(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(load_plain_meta_tensor, tmp_path) == [([0, 1], "cpu", [])] * 2


# State that stays behind


def test_a_fresh_optimizer_warns_that_its_state_stays_behind(tmp_path: Path) -> None:
    def made(steps: int) -> dict[str, Any]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
        return {"model": model, "optim": optimizer}

    dcp.save(made(1), checkpoint_id=tmp_path)

    with pytest.warns(UserWarning, match=r"have no place in the state.*optim\.state\.0\.") as caught:
        dcp.load(made(0), checkpoint_id=tmp_path)

    assert len(caught) == 1
    assert "the optimizer must have state tensors before loading" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_a_complete_state_leaves_nothing_behind(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    dcp.save({"m": {"a": 1, "b": {"c": torch.ones(1)}}, "other": 1}, checkpoint_id=tmp_path)

    dcp.load({"m": {"a": 0, "b": {"c": torch.zeros(1)}}}, checkpoint_id=tmp_path)

    assert list(recwarn) == []


def warn_on_ranks(folder: Path) -> int:
    dcp.save({"m": {"a": 1, "b": 2}}, checkpoint_id=folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.load({"m": {"a": 0}}, checkpoint_id=folder)
    return len(caught)


def test_one_rank_speaks_for_all(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(warn_on_ranks, tmp_path) == [1, 0]
