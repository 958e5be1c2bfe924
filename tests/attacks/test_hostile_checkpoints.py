"""Checkpoints made to do harm when they are loaded, and what must happen instead."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import holdfast.dcp as dcp
from holdfast import _settings as settings
from holdfast.errors import CheckpointException, RefusedPickleError, StateMismatchError, UnsafePathError


class Harm:
    """Pickles into a call that leaves a file behind."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.witness),)


def cause_of(error: CheckpointException) -> BaseException:
    return error.failures[0][0]


def save_stock(path: Path, **values: Any) -> stock.metadata.Metadata:
    """A checkpoint of stock torch, whose metadata is returned for tampering."""
    stock.save({"w": torch.arange(4.0), **values}, checkpoint_id=path)
    return pickle.loads((path / ".metadata").read_bytes())


def write_index(path: Path, metadata: Any) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def load(path: Path, **more: Any) -> dict[str, Any]:
    state = {"w": torch.zeros(4), **more}
    dcp.load(state, checkpoint_id=path)
    return state


@pytest.mark.parametrize("place", ["planner_data", "storage_data", "version", "storage_meta"])
def test_an_index_that_calls_something_is_refused_and_nothing_is_called(tmp_path, place):
    metadata = save_stock(tmp_path / "c")
    setattr(metadata, place, Harm(tmp_path / "harm"))
    write_index(tmp_path / "c", metadata)

    with pytest.raises(CheckpointException) as raised:
        load(tmp_path / "c")

    assert isinstance(cause_of(raised.value), RefusedPickleError)
    assert "mkdir" in str(raised.value)
    assert not (tmp_path / "harm").exists()


def test_the_attack_works_on_stock_torch(tmp_path):
    metadata = save_stock(tmp_path / "c")
    metadata.planner_data = Harm(tmp_path / "harm")
    write_index(tmp_path / "c", metadata)

    stock.load({"w": torch.zeros(4)}, checkpoint_id=tmp_path / "c")

    assert (tmp_path / "harm").exists()


def test_a_value_that_calls_something_is_refused_and_nothing_is_called(tmp_path):
    save_stock(tmp_path / "c", value=Harm(tmp_path / "harm"))

    with pytest.raises(CheckpointException) as raised:
        load(tmp_path / "c", value=None)

    error = cause_of(raised.value)
    assert isinstance(error, RefusedPickleError)
    assert error.key == "value"
    assert "allow_pickle=True" in str(error)
    assert not (tmp_path / "harm").exists()


def test_a_tensor_blob_that_calls_something_is_refused_and_nothing_is_called(tmp_path):
    metadata = save_stock(tmp_path / "c")
    ((_, info),) = metadata.storage_data.items()
    blob = io.BytesIO()
    torch.save(Harm(tmp_path / "harm"), blob)
    (tmp_path / "c" / info.relative_path).write_bytes(blob.getvalue())
    info.length = len(blob.getvalue())
    write_index(tmp_path / "c", metadata)

    with pytest.raises(CheckpointException):
        load(tmp_path / "c")

    assert not (tmp_path / "harm").exists()


def test_whoever_trusts_the_author_can_let_values_run(tmp_path):
    save_stock(tmp_path / "c", value=Harm(tmp_path / "harm"))

    with settings.override(allow_pickle=True):
        load(tmp_path / "c", value=None)

    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["/etc/hostname", "../other/__0_0.distcp", "a/../../other/__0_0.distcp", ""])
def test_names_in_the_index_cannot_lead_out_of_the_folder(tmp_path, name):
    metadata = save_stock(tmp_path / "c")
    shutil.copytree(tmp_path / "c", tmp_path / "other")
    for info in metadata.storage_data.values():
        info.relative_path = name
    write_index(tmp_path / "c", metadata)

    with pytest.raises(CheckpointException) as raised:
        load(tmp_path / "c")

    assert isinstance(cause_of(raised.value), UnsafePathError)


def test_an_index_that_claims_fewer_chunks_than_the_tensor_has_does_not_load(tmp_path):
    metadata = save_stock(tmp_path / "c")
    metadata.state_dict_metadata["w"].chunks.clear()
    write_index(tmp_path / "c", metadata)

    with pytest.raises(CheckpointException) as raised:
        load(tmp_path / "c")

    assert isinstance(cause_of(raised.value), StateMismatchError)
    assert "w" in cause_of(raised.value).uncovered
