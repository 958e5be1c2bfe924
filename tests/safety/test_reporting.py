"""A load applies everything or raises: problems are found before anything is changed, and reported all at once."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import holdfast.dcp as dcp
from holdfast.dcp import CheckpointException, DefaultLoadPlanner
from holdfast.errors import CheckpointNotFoundError, DamagedCheckpointError, StateMismatchError
from tests.rank_pool import RankPool
from tests.safety.checkpoints import found_in, save


class Unknown:
    """Something that only the program knows."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unknown) and other.name == self.name

    __hash__ = None  # type: ignore[assignment]


def saved() -> dict[str, Any]:
    return {
        "model": {"weight": torch.ones(4, 3), "bias": torch.ones(3), "counts": torch.ones(2, dtype=torch.int64)},
        "optimizer": {"state": [{"momentum": torch.ones(4, 3)}, {"momentum": torch.ones(3)}], "lr": 1.0},
        "step": 1,
    }


def wanted(rank: int, odd_rank: int | None) -> dict[str, Any]:
    """A state to load into; on the odd rank it does not fit in several ways."""
    state = {
        "model": {"weight": torch.zeros(4, 3), "bias": torch.zeros(3), "counts": torch.zeros(2, dtype=torch.int64)},
        "optimizer": {"state": [{"momentum": torch.zeros(4, 3)}, {"momentum": torch.zeros(3)}], "lr": 0.0},
        "step": 0,
    }
    if rank == odd_rank:
        state["model"]["wieght"] = torch.zeros(4, 3)
        state["model"]["bias"] = torch.zeros(5)
        state["model"]["counts"] = torch.zeros(2, dtype=torch.bool)
        state["optimizer"]["lr"] = torch.zeros(3)
        state["optimizer"]["state"][1]["momentum"] = Unknown("momentum")
        state["extra"] = {"schedule": [1, 2, 3], "handle": Unknown("handle")}
    return state


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def load_on_an_odd_rank(folder: Path, odd_rank: int) -> tuple[list[int], str, bool]:
    state = wanted(dist.get_rank(), odd_rank)
    before = copy.deepcopy(state)
    objects = [id(state), id(state["model"]), id(state["model"]["weight"]), id(state["optimizer"]["state"])]
    try:
        dcp.load(state, checkpoint_id=folder)
    except CheckpointException as error:
        ((cause, _),) = error.failures.values()
        assert isinstance(cause, StateMismatchError)
        after = [id(state), id(state["model"]), id(state["model"]["weight"]), id(state["optimizer"]["state"])]
        return list(error.failures), str(cause), equal(state, before) and objects == after
    return [], "loaded", False


@pytest.mark.parametrize("use_collectives", [True, False])
@pytest.mark.parametrize("odd_rank", [0, 1, 2])
def test_what_does_not_fit_on_one_rank_is_reported_on_all_and_nothing_is_changed_on_any(
    ranks: RankPool, tmp_path, odd_rank, use_collectives
):
    ranks(3).run(save_state, tmp_path, use_collectives)
    for failed, text, unchanged in ranks(3).run(load_on_an_odd_rank, tmp_path, odd_rank):
        assert failed == [odd_rank]
        assert unchanged
        assert "Missing key in checkpoint state_dict: model.wieght. (did you mean 'model.weight'?)" in text
        assert "Missing key in checkpoint state_dict: extra.schedule." in text
        assert "Missing key in checkpoint state_dict: extra.handle." in text
        assert "Size mismatch between saved torch.Size([3]) and current: torch.Size([5]) for model.bias" in text
        assert (
            "'model.counts' is torch.int64 in the checkpoint and torch.bool in the state (values would be destroyed)"
            in text
        )
        assert "'optimizer.lr' is a tensor in the state but a plain value in the checkpoint" in text
        assert "'optimizer.state.1.momentum' is a Unknown in the state but a tensor of size [3]" in text
        assert "(7 problems)" in text
        assert "Nothing was changed." in text


def save_state(folder: Path, use_collectives: bool) -> None:
    dcp.save(saved(), checkpoint_id=folder, use_collectives=use_collectives)


def test_the_error_has_every_problem_as_a_field(tmp_path):
    dcp.save(saved(), checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(wanted(0, 0), checkpoint_id=tmp_path)
    error = caught.value.failures[0][0]
    assert isinstance(error, StateMismatchError)
    assert sorted(error.missing) == ["extra.handle", "extra.schedule", "model.wieght"]
    assert error.shapes == {"model.bias": (torch.Size([3]), torch.Size([5]))}
    assert error.dtypes == {"model.counts": (torch.int64, torch.bool)}
    assert sorted(error.kinds) == ["optimizer.lr", "optimizer.state.1.momentum"]


def test_meta_tensors_stay_meta_tensors_when_nothing_is_loaded(tmp_path):
    dcp.save(saved(), checkpoint_id=tmp_path)
    state = {"model": {"weight": torch.zeros(4, 3, device="meta"), "absent": torch.zeros(1)}}
    with pytest.raises(CheckpointException):
        dcp.load(state, checkpoint_id=tmp_path)
    assert state["model"]["weight"].is_meta


def test_objects_that_the_checkpoint_does_not_know_stay_as_they_are(tmp_path):
    dcp.save({"model": {"weight": torch.ones(2)}, "array": np.ones(3)}, checkpoint_id=tmp_path)
    strangers = {"handle": Unknown("handle"), "array": np.zeros(2), "set": {1, 2}, "shape": torch.Size([2, 3])}
    state = {"model": {"weight": torch.zeros(2), **strangers}, "array": np.zeros(3), "none": None}
    dcp.load(state, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert state["model"]["weight"].tolist() == [1.0, 1.0]
    assert state["array"].tolist() == [1.0, 1.0, 1.0]
    assert state["none"] is None
    for key, value in strangers.items():
        assert state["model"][key] is value


def test_values_come_back_under_the_keys_that_they_were_saved_under(tmp_path):
    dcp.save({"groups": {1: {"lr": 0.5}, (2, 3): "x"}, "list": [{"a": 1}]}, checkpoint_id=tmp_path)
    state = {"groups": {1: {"lr": 0.0}, (2, 3): ""}, "list": [{"a": 0}]}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state == {"groups": {1: {"lr": 0.5}, (2, 3): "x"}, "list": [{"a": 1}]}


def test_a_lossless_change_of_dtype_is_reported_and_one_that_destroys_values_refused(tmp_path):
    dcp.save({"tensor": torch.full((3,), 1.5)}, checkpoint_id=tmp_path)
    state: dict[str, Any] = {"tensor": torch.zeros(3, dtype=torch.float64)}
    with pytest.warns(UserWarning, match=r"'tensor' is torch\.float32 in .* and torch\.float64 in the state"):
        dcp.load(state, checkpoint_id=tmp_path)
    assert state["tensor"].tolist() == [1.5] * 3
    state = {"tensor": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(CheckpointException, match="values would be destroyed"):
        dcp.load(state, checkpoint_id=tmp_path)
    assert state["tensor"].tolist() == [0] * 3
    strict = DefaultLoadPlanner(dtype_change="error")
    with pytest.raises(CheckpointException, match=r"and torch\.float64 in the state"):
        dcp.load({"tensor": torch.zeros(3, dtype=torch.float64)}, checkpoint_id=tmp_path, planner=strict)


def damage_the_last_file(folder: Path) -> Path:
    file = max(folder.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file


def test_a_failure_while_reading_tells_that_the_state_is_a_mix(tmp_path):
    state = {f"tensor{number}": torch.full((3,), float(number)) for number in range(4)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, single_file_per_rank=False))
    damage_the_last_file(tmp_path)
    target = {key: torch.full((3,), -1.0) for key in state}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, checkpoint_id=tmp_path)
    error = caught.value.failures[0][0]
    assert isinstance(error, DamagedCheckpointError)
    told = re.search(r"(\d) of 4 item\(s\) of this rank had been loaded already: the state is a mix", str(error))
    assert told is not None, str(error)
    assert int(told[1]) == sum(not torch.equal(value, torch.full((3,), -1.0)) for value in target.values())


def test_a_failure_at_the_first_item_tells_that_nothing_was_loaded(tmp_path):
    dcp.save({"tensor": torch.ones(3)}, checkpoint_id=tmp_path)
    damage_the_last_file(tmp_path)
    target = {"tensor": torch.zeros(3)}
    with pytest.raises(CheckpointException, match=r"None of the 1 item\(s\) of this rank had been loaded\."):
        dcp.load(target, checkpoint_id=tmp_path)
    assert target["tensor"].tolist() == [0.0] * 3


class FailsOnce(DefaultLoadPlanner):
    """Cannot take the second part of a stored chunk."""

    taken = 0

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.taken += 1
        if self.taken == 2:
            raise RuntimeError("no more")

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        (item,) = plan.items
        parts = [[0], [2]]
        halves = [
            type(item)(
                item.type,
                item.dest_index,
                torch.Size(offset),
                item.storage_index,
                torch.Size(offset),
                torch.Size([2]),
            )
            for offset in parts
        ]
        return type(plan)(halves)


def test_parts_of_one_chunk_that_were_loaded_before_a_failure_count_as_loaded(tmp_path):
    dcp.save({"tensor": torch.ones(4)}, checkpoint_id=tmp_path)
    target = {"tensor": torch.zeros(4)}
    with pytest.raises(CheckpointException, match="the state is a mix of old and new"):
        dcp.load(target, checkpoint_id=tmp_path, planner=FailsOnce())
    assert target["tensor"].tolist() != [0.0] * 4


def not_found(folder: Path | str) -> str:
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"tensor": torch.zeros(3)}, checkpoint_id=folder)
    error = caught.value.failures[0][0]
    assert isinstance(error, CheckpointNotFoundError)
    assert isinstance(error, FileNotFoundError)
    assert error.path == str(folder)
    return str(error)


def test_a_path_without_a_checkpoint_is_described_by_what_is_there(tmp_path):
    assert "the path does not exist" in not_found(tmp_path / "nowhere")
    assert "the path does not exist" in not_found(str(tmp_path / "nowhere"))

    (tmp_path / "empty").mkdir()
    assert "there is no .metadata in it (0 other file(s))" in not_found(tmp_path / "empty")

    for step in (10, 20):
        save(1, tmp_path / "run" / f"step-{step}")
    text = not_found(tmp_path / "run")
    assert "there are checkpoints inside of it: step-10, step-20. Give one of those paths." in text

    save(1, tmp_path / "unfinished")
    (tmp_path / "unfinished" / ".metadata").unlink()
    text = not_found(tmp_path / "unfinished")
    assert "it has 1 data file(s) but no .metadata, so the save was not finished" in text

    (tmp_path / "file").write_text("a file")
    assert "it is not a folder" in not_found(tmp_path / "file")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_damaged_index_of_a_rank_is_reported_and_not_that_there_is_no_checkpoint(
    ranks: RankPool, tmp_path, world_size
):
    ranks(world_size).run(save, 1, tmp_path, use_collectives=False)
    file = tmp_path / f"__{world_size - 1}.metadata"
    file.write_bytes(file.read_bytes()[:-20])
    for found in ranks(world_size).run(found_in, tmp_path):
        assert found.startswith(f"DamagedCheckpointError: {file}")
