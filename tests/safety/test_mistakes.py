"""Mistakes of callers that stock torch turns into a lost or scattered checkpoint."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock

import holdfast.dcp as dcp
from holdfast.dcp.filesystem import FileSystemWriter
from holdfast.errors import CheckpointException, IncompleteSaveError, RankDisagreementError, UnsupportedValueError


def failure_of(call) -> str:
    try:
        call()
    except CheckpointException as error:
        ((cause, _),) = error.failures.values()
        return type(cause).__name__ + ": " + str(cause)
    return "no failure"


def save_to_a_path_of_its_own(folder: Path) -> str:
    path = folder / f"step-{dist.get_rank()}"
    return failure_of(lambda: dcp.save({f"k{dist.get_rank()}": torch.ones(2)}, checkpoint_id=path))


def test_ranks_that_save_to_different_paths_get_an_error(ranks, tmp_path):
    for failure in ranks(2).run(save_to_a_path_of_its_own, tmp_path):
        assert failure.startswith(RankDisagreementError.__name__)
        assert "step-0" in failure
        assert "step-1" in failure
    assert not list(tmp_path.rglob(".metadata"))


class LosesFilesOfRankOne(FileSystemWriter):
    """Stands in for another job, or a cleaner, that removes files before the commit."""

    def finish(self, metadata, results):
        for result in results[1]:
            (Path(self.path) / result.storage_data.relative_path).unlink(missing_ok=True)
        super().finish(metadata, results)


def save_while_files_of_another_rank_vanish(folder: Path) -> str:
    state = {f"k{dist.get_rank()}": torch.full((2,), 2.0)}
    return failure_of(lambda: dcp.save(state, storage_writer=LosesFilesOfRankOne(folder)))


def save_plainly(folder: Path) -> None:
    dcp.save({f"k{dist.get_rank()}": torch.ones(2)}, checkpoint_id=folder)


def test_a_save_that_lost_all_files_of_another_rank_is_not_committed(ranks, tmp_path):
    ranks(2).run(save_plainly, tmp_path)

    for failure in ranks(2).run(save_while_files_of_another_rank_vanish, tmp_path):
        assert failure.startswith(IncompleteSaveError.__name__)

    state = {"k0": torch.zeros(2), "k1": torch.zeros(2)}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state["k0"].tolist() == state["k1"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("save", {"storage_writer": stock.FileSystemWriter}),
        ("save", {"planner": stock.DefaultSavePlanner}),
        ("load", {"storage_reader": stock.FileSystemReader}),
        ("load", {"planner": stock.DefaultLoadPlanner}),
    ],
)
def test_planners_and_storages_of_stock_torch_are_refused_with_the_right_import(tmp_path, verb, arguments):
    ((name, kind),) = arguments.items()
    given = {name: kind() if name == "planner" else kind(tmp_path)}

    with pytest.raises(TypeError, match=r"Import .* from holdfast\.dcp.* instead") as raised:
        getattr(dcp, verb)({"a": torch.ones(1)}, checkpoint_id=tmp_path, **given)

    assert kind.__name__ in str(raised.value)


def test_a_refused_value_leaves_all_tensors_as_they_were(tmp_path):
    class Local:
        pass

    globals()["Local"] = Local
    Local.__qualname__ = "Local"
    with pytest.warns(UserWarning, match="only pickle can rebuild"):
        dcp.save({"a": torch.ones(2), "z": Local()}, checkpoint_id=tmp_path)
    state = {"a": torch.zeros(2), "z": None}

    with pytest.raises(CheckpointException, match="None of the 2 item"):
        dcp.load(state, checkpoint_id=tmp_path)

    assert state["a"].tolist() == [0, 0]


def test_a_value_that_cannot_be_stored_is_named(tmp_path):
    with pytest.raises(CheckpointException) as raised:
        dcp.save({"a": {"lock": [threading.Lock()]}}, checkpoint_id=tmp_path)

    (error, _) = raised.value.failures[0]
    assert isinstance(error, UnsupportedValueError)
    assert error.key == "a.lock"


def test_streams_in_memory_are_plain_data(tmp_path):
    stream = io.BytesIO(b"hello")
    stream.seek(2)
    dcp.save({"extra": stream}, checkpoint_id=tmp_path)
    state = {"extra": None}

    dcp.load(state, checkpoint_id=tmp_path)

    assert state["extra"].read() == b"llo"
