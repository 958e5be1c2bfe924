"""Parameters that DeepSpeed ZeRO-3 has partitioned are refused by name, since nothing of them is in the model.

DeepSpeed is not installed for the tests: the marks that it leaves on parameters are made by hand.
"""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
import holdfast.dcp as dcp
from holdfast.errors import CheckpointException, PartitionedParameterError, StateMismatchError
from tests.state.trainer_wrappers import DeepSpeedEngine

KEYS = ["model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"]


class Status(enum.Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def partition(model: nn.Module) -> nn.Module:
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id, parameter.ds_shape, parameter.ds_numel = number, parameter.shape, parameter.numel()
        parameter.ds_status, parameter.whole = Status.NOT_AVAILABLE, parameter.data
        parameter.data = torch.empty(0)
    return model


def gather(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data, parameter.ds_status = parameter.whole, Status.AVAILABLE
    return model


class OwnWay(nn.Sequential):
    """A model with a ``state_dict`` of its own."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return super().state_dict(*args, **options)


STATES: dict[str, Any] = {
    "a model": lambda: {"model": partition(net())},
    "a model in the engine": lambda: {"model": DeepSpeedEngine(partition(net()))},
    "a model with its own state_dict": lambda: {"model": partition(OwnWay(*net()))},
    "parameters": lambda: {"model": dict(partition(net()).named_parameters())},
    "a state dict with variables": lambda: {"model": partition(net()).state_dict(keep_vars=True)},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_partitioned_parameters_are_all_named_and_nothing_is_written(tmp_path: Path, state: Any):
    with pytest.raises(PartitionedParameterError, match=r"GatheredParameters.*save_16bit_model") as caught:
        holdfast.save(state(), tmp_path / "saved")
    assert list(caught.value.keys) == KEYS
    assert all(repr(key) in str(caught.value) for key in KEYS)
    with pytest.raises(PartitionedParameterError) as caught:
        holdfast.async_save(state(), tmp_path / "saved").result()
    assert list(caught.value.keys) == KEYS
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("wait", [False, True])
def test_a_manager_refuses_them_too(tmp_path: Path, wait: bool):
    with holdfast.CheckpointManager(tmp_path, background=holdfast.Background(on_failure="error")) as manager:
        with pytest.raises(PartitionedParameterError) as caught:
            manager.save(1, {"model": partition(net())}, wait=wait)
        assert list(caught.value.keys) == KEYS
        assert manager.steps() == []


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
@pytest.mark.parametrize("background", [False, True])
def test_the_drop_in_refuses_them_too(tmp_path: Path, state: Any, background: bool):
    save = dcp.async_save if background else dcp.save
    with pytest.raises((CheckpointException, PartitionedParameterError)) as caught:
        save(state(), checkpoint_id=tmp_path / "saved", no_dist=True)
    for key in KEYS:
        assert key.removeprefix("model.") in str(caught.value)
    assert "GatheredParameters" in str(caught.value)
    assert not list(tmp_path.rglob("*.distcp"))
    assert not list(tmp_path.rglob(".metadata"))


def test_gathered_parameters_are_saved_and_loaded(tmp_path: Path):
    model = gather(partition(net()))
    holdfast.save({"model": model}, tmp_path / "saved")
    other = gather(partition(net()))
    holdfast.load({"model": other}, tmp_path / "saved")
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    dcp.save({"model": model}, checkpoint_id=tmp_path / "dcp", no_dist=True)


def test_what_is_not_saved_may_be_partitioned_and_an_empty_parameter_is_no_part(tmp_path: Path):
    state = {"model": partition(net()), "empty": nn.Parameter(torch.empty(0)), "step": 3}
    assert holdfast.save(state, tmp_path / "saved", exclude="model").tensor_count == 1


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_nothing_is_loaded_into_them(tmp_path: Path, state: Any):
    model = net()
    holdfast.save({"model": model, "step": 3}, tmp_path / "saved")
    given = {**state(), "step": 0}
    with pytest.raises(StateMismatchError, match=r"GatheredParameters.*load_checkpoint") as caught:
        holdfast.load(given, tmp_path / "saved")
    assert list(caught.value.kinds) == KEYS
    assert not caught.value.shapes
    assert given["step"] == 0


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_nothing_is_loaded_into_them_by_the_drop_in(tmp_path: Path, state: Any):
    dcp.save({"model": net().state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises((CheckpointException, PartitionedParameterError), match="GatheredParameters") as caught:
        dcp.load(state(), checkpoint_id=tmp_path / "saved", no_dist=True)
    for key in KEYS:
        assert key.removeprefix("model.") in str(caught.value)


def save_on_ranks(folder: Path) -> list[Any]:
    found = []
    state = {"model": partition(net()) if torch.distributed.get_rank() else net()}
    for save in (
        lambda: holdfast.save(state, folder / "saved"),
        lambda: holdfast.async_save(state, folder / "saved").result(),
        lambda: dcp.save(state, checkpoint_id=folder / "dcp"),
    ):
        try:
            save()
        except Exception as error:
            found.append(str(error))
    return [[key.removeprefix("model.") in text for key in KEYS] for text in found]


def test_all_ranks_get_an_error_if_one_of_them_has_such_parameters(ranks, tmp_path: Path):
    assert ranks(2).run(save_on_ranks, tmp_path) == [[[True] * 4] * 3] * 2
    assert not (tmp_path / "saved").exists() or not os.listdir(tmp_path / "saved")
    assert not list((tmp_path / "dcp").glob("*")) if (tmp_path / "dcp").exists() else True
