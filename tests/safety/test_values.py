"""A checkpoint is data: nothing in it runs, nothing in it leads outside, unless its reader asked for that."""

from __future__ import annotations

import os
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as stock

import holdfast.dcp as dcp
from holdfast import _settings as settings
from holdfast.dcp import CheckpointException, DefaultLoadPlanner, FileSystemReader
from holdfast.errors import RefusedPickleError, UnsafePathError

pytestmark = pytest.mark.filterwarnings("ignore:.*only pickle can rebuild:UserWarning")


@dataclass
class Config:
    """A class of the program."""

    name: str


class Touch:
    """Makes a file when it is unpickled: what an attacker would do, with less restraint."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def cause_of(caught: Any) -> Exception:
    ((cause, _),) = caught.value.failures.values()
    return cause


def save_stock(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.save(state, checkpoint_id=folder)


def save_ours(state: dict[str, Any], folder: Path) -> None:
    dcp.save(state, checkpoint_id=folder)


WRITERS = pytest.mark.parametrize("save", [save_ours, save_stock], ids=["ours", "stock"])


@WRITERS
def test_a_value_that_would_run_code_does_not_run_it(tmp_path, save):
    canary = tmp_path / "canary"
    save({"value": Touch(canary), "step": 1}, tmp_path / "checkpoint")
    assert not canary.exists()
    state = {"value": "as before", "step": 0}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    error = cause_of(caught)
    assert isinstance(error, RefusedPickleError)
    assert (error.key, error.global_name) == ("value", "posix.mkdir")
    assert state["value"] == "as before"
    assert not canary.exists()
    for way in ("add_safe_globals", "DefaultLoadPlanner(allow_pickle=True)", "HOLDFAST_ALLOW_PICKLE=1"):
        assert way in str(error)


def poison_the_index(folder: Path, canary: Path) -> None:
    metadata = stock.FileSystemReader(folder).read_metadata()
    metadata.planner_data["extra"] = Touch(canary)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@WRITERS
def test_an_index_that_would_run_code_does_not_run_it(tmp_path, save):
    canary = tmp_path / "canary"
    save({"step": 1}, tmp_path / "checkpoint")
    poison_the_index(tmp_path / "checkpoint", canary)
    state = {"step": 0}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    error = cause_of(caught)
    assert isinstance(error, RefusedPickleError)
    assert error.global_name == "posix.mkdir"
    assert state == {"step": 0}
    assert not canary.exists()


def test_an_index_is_trusted_by_the_reader_that_says_so(tmp_path):
    canary = tmp_path / "canary"
    save_stock({"step": 1}, tmp_path / "checkpoint")
    poison_the_index(tmp_path / "checkpoint", canary)
    state = {"step": 0}
    trusting_values = DefaultLoadPlanner(allow_pickle=True)
    with pytest.raises(CheckpointException):
        dcp.load(state, checkpoint_id=tmp_path / "checkpoint", planner=trusting_values)
    assert not canary.exists()
    dcp.load(state, storage_reader=FileSystemReader(tmp_path / "checkpoint", allow_pickle=True))
    assert state == {"step": 1}
    assert canary.exists()


def by_planner(state: dict[str, Any], folder: Path) -> None:
    dcp.load(state, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_pickle=True))


def by_environment(state: dict[str, Any], folder: Path) -> None:
    with mock.patch.dict(os.environ, {"HOLDFAST_ALLOW_PICKLE": "1"}):
        dcp.load(state, checkpoint_id=folder)


def by_setting(state: dict[str, Any], folder: Path) -> None:
    with settings.override(allow_pickle=True):
        dcp.load(state, checkpoint_id=folder)


def by_class(state: dict[str, Any], folder: Path) -> None:
    with torch.serialization.safe_globals([Config]):
        dcp.load(state, checkpoint_id=folder)


@WRITERS
@pytest.mark.parametrize("opt_in", [by_planner, by_environment, by_setting, by_class])
def test_a_class_of_the_program_is_loaded_by_those_who_say_so_and_by_no_others(tmp_path, save, opt_in):
    save({"config": Config("small")}, tmp_path)
    state: dict[str, Any] = {"config": None}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, checkpoint_id=tmp_path)
    error = cause_of(caught)
    assert isinstance(error, RefusedPickleError)
    assert error.key == "config"
    assert error.global_name.endswith("test_values.Config")
    assert state == {"config": None}
    opt_in(state, tmp_path)
    assert state == {"config": Config("small")}


def test_one_class_that_is_allowed_does_not_allow_others(tmp_path):
    canary = tmp_path / "canary"
    dcp.save({"config": Config("small"), "value": Touch(canary)}, checkpoint_id=tmp_path / "checkpoint")
    with torch.serialization.safe_globals([Config]), pytest.raises(CheckpointException) as caught:
        dcp.load({"config": None, "value": None}, checkpoint_id=tmp_path / "checkpoint")
    assert isinstance(cause_of(caught), RefusedPickleError)
    assert not canary.exists()


@pytest.mark.filterwarnings("default:.*only pickle can rebuild:UserWarning")
def test_saving_a_value_that_needs_pickle_says_so_at_once(tmp_path):
    with pytest.warns(UserWarning, match=r"'config' \(.*test_values\.Config\).*add_safe_globals.*allow_pickle=True"):
        dcp.save({"config": Config("small"), "plain": {"a": [1, 2.5, "x"]}}, checkpoint_id=tmp_path)


def test_saving_plain_values_says_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dcp.save(
            {"plain": {"a": [1, 2.5, "x", None, (True, b"x")]}, "tensors": (torch.ones(2),)}, checkpoint_id=tmp_path
        )


def lead_outside(folder: Path, name: str) -> None:
    metadata = stock.FileSystemReader(folder).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = name
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("trusting", [False, True])
@pytest.mark.parametrize("name", ["{outside}", "../outside/{file}", "sub/../../outside/{file}", "./../outside/{file}"])
def test_names_in_the_index_cannot_lead_outside_of_the_checkpoint(tmp_path, name, trusting):
    """The file that they lead to is there and has the right content, so that only the check stands in the way."""
    for place in ("outside", "checkpoint"):
        save_stock({"secret": torch.ones(3)}, tmp_path / place)
    (file,) = (tmp_path / "outside").glob("*.distcp")
    lead_outside(tmp_path / "checkpoint", name.format(outside=file, file=file.name))
    (tmp_path / "checkpoint" / "sub").mkdir()
    state = {"secret": torch.zeros(3)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=FileSystemReader(tmp_path / "checkpoint", allow_pickle=trusting))
    assert isinstance(cause_of(caught), UnsafePathError)
    assert state["secret"].tolist() == [0.0] * 3


def test_names_of_files_in_folders_of_the_checkpoint_are_fine(tmp_path):
    save_stock({"tensor": torch.ones(3)}, tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    (tmp_path / "sub").mkdir()
    file.rename(tmp_path / "sub" / file.name)
    lead_outside(tmp_path, f"sub/{file.name}")
    state = {"tensor": torch.zeros(3)}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state["tensor"].tolist() == [1.0] * 3
