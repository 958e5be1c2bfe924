"""An error on one rank, in any step of a save or a load, fails the call on all ranks, and nobody is left waiting.

Every method that a save or a load calls is made to fail on one rank. Afterwards the group must still work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import holdfast.dcp as dcp
from holdfast.dcp import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from tests.rank_pool import RankPool
from tests.safety.checkpoints import contents, found_in, number_of, save, state


class Stubborn(Exception):
    """It can neither be pickled nor unpickled, as many exceptions of libraries."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"stubborn {one} {other}")
        self.handle = lambda: None


def fail(*args: Any, **kwargs: Any) -> Any:
    raise Stubborn(1, 2)


def outcome_of(call: Any) -> str:
    """How a call failed, and that the ranks can still talk to each other."""
    try:
        call()
        outcome = "no error"
    except CheckpointException as error:
        texts = {str(cause) for cause, _ in error.failures.values()}
        assert all("stubborn 1 2" in text for text in texts), texts
        outcome = f"CheckpointException {list(error.failures)}"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, outcome)
    return outcome


def save_and_fail(folder: Path, owner: str, method: str, rank: int, use_collectives: bool) -> str:
    writer, planner = FileSystemWriter(folder), DefaultSavePlanner()
    target = {"writer": writer, "planner": planner}[owner]
    if dist.get_rank() == rank:
        setattr(target, method, fail)
    with mock.patch("warnings.warn"):
        return outcome_of(
            lambda: dcp.save(state(2), storage_writer=writer, planner=planner, use_collectives=use_collectives)
        )


SAVE_STEPS = [
    ("writer", "storage_meta"),
    ("planner", "set_up_planner"),
    ("writer", "set_up_storage_writer"),
    ("planner", "create_local_plan"),
    ("writer", "prepare_local_plan"),
    ("planner", "finish_plan"),
    ("planner", "resolve_data"),
    ("writer", "write_data"),
]
COORDINATOR_SAVE_STEPS = [
    ("planner", "create_global_plan"),
    ("writer", "prepare_global_plan"),
    ("writer", "finish"),
]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("owner", "method"), SAVE_STEPS)
def test_an_error_in_a_step_of_a_save_fails_all_ranks(ranks: RankPool, tmp_path, owner, method, rank):
    check_save(ranks, tmp_path, owner, method, rank, use_collectives=True)


@pytest.mark.parametrize(("owner", "method"), COORDINATOR_SAVE_STEPS)
def test_an_error_in_a_step_of_the_coordinator_fails_all_ranks(ranks: RankPool, tmp_path, owner, method):
    check_save(ranks, tmp_path, owner, method, 0, use_collectives=True)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("owner", "method"), [*SAVE_STEPS, *COORDINATOR_SAVE_STEPS])
def test_an_error_of_a_rank_that_saves_for_itself_fails_all_ranks(ranks: RankPool, tmp_path, owner, method, rank):
    check_save(ranks, tmp_path, owner, method, rank, use_collectives=False)


def check_save(ranks: RankPool, folder: Path, owner: str, method: str, rank: int, *, use_collectives: bool) -> None:
    ranks(2).run(save, 1, folder, use_collectives=use_collectives)
    before = contents(folder)
    outcomes = ranks(2).run(save_and_fail, folder, owner, method, rank, use_collectives)
    assert outcomes == [f"CheckpointException [{rank}]"] * 2
    assert contents(folder) == before
    assert ranks(2).run(found_in, folder) == [1, 1]


def load_and_fail(folder: Path, owner: str, method: str, rank: int) -> str:
    reader, planner = FileSystemReader(folder), DefaultLoadPlanner()
    target = {"reader": reader, "planner": planner}[owner]
    if dist.get_rank() == rank:
        # read_metadata is asked for its parameters first
        setattr(target, method, lambda *args, **kwargs: fail())
    return outcome_of(lambda: dcp.load(state(0), storage_reader=reader, planner=planner))


LOAD_STEPS = [
    ("reader", "read_metadata"),
    ("planner", "set_up_planner"),
    ("reader", "set_up_storage_reader"),
    ("planner", "create_local_plan"),
    ("reader", "prepare_local_plan"),
    ("planner", "finish_plan"),
    ("reader", "read_data"),
    ("planner", "load_bytes"),
    ("planner", "resolve_tensor"),
    ("planner", "commit_tensor"),
]
COORDINATOR_LOAD_STEPS = [("planner", "create_global_plan"), ("reader", "prepare_global_plan")]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("owner", "method"), LOAD_STEPS)
def test_an_error_in_a_step_of_a_load_fails_all_ranks(ranks: RankPool, tmp_path, owner, method, rank):
    ranks(2).run(save, 1, tmp_path)
    assert ranks(2).run(load_and_fail, tmp_path, owner, method, rank) == [f"CheckpointException [{rank}]"] * 2


@pytest.mark.parametrize(("owner", "method"), COORDINATOR_LOAD_STEPS)
def test_an_error_in_a_step_of_the_loading_coordinator_fails_all_ranks(ranks: RankPool, tmp_path, owner, method):
    ranks(2).run(save, 1, tmp_path)
    assert ranks(2).run(load_and_fail, tmp_path, owner, method, 0) == ["CheckpointException [0]"] * 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("owner", "method"), [*LOAD_STEPS, *COORDINATOR_LOAD_STEPS])
def test_an_error_of_a_rank_that_loads_its_own_part_fails_all_ranks(ranks: RankPool, tmp_path, owner, method, rank):
    ranks(2).run(save, 1, tmp_path, use_collectives=False)
    assert ranks(2).run(load_and_fail, tmp_path, owner, method, rank) == [f"CheckpointException [{rank}]"] * 2


class FailingStateful:
    def __init__(self, method: str) -> None:
        self.method = method
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        if self.method == "state_dict":
            fail()
        return {"tensor": torch.ones(2)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.method == "load_state_dict":
            fail()
        self.loaded = state_dict


def fail_in_user_code(folder: Path, method: str, rank: int) -> list[str]:
    stateful = FailingStateful(method if dist.get_rank() == rank else "")
    saved = outcome_of(lambda: dcp.save({"app": stateful}, checkpoint_id=folder / "new"))
    loaded = outcome_of(lambda: dcp.load({"app": stateful}, checkpoint_id=folder / "old"))
    return [saved, loaded]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_the_users_code_of_one_rank_fails_all_ranks(ranks: RankPool, tmp_path, rank):
    dcp.save({"app": FailingStateful("")}, checkpoint_id=tmp_path / "old")
    own, others = "Stubborn: stubborn 1 2", f"CheckpointException [{rank}]"
    everybody = [own if number == rank else others for number in range(2)]
    outcomes = ranks(2).run(fail_in_user_code, tmp_path, "state_dict", rank)
    assert [list(calls) for calls in zip(*outcomes, strict=True)] == [everybody, everybody]
    outcomes = ranks(2).run(fail_in_user_code, tmp_path, "load_state_dict", rank)
    assert [list(calls) for calls in zip(*outcomes, strict=True)] == [["no error"] * 2, everybody]


def use_a_wrong_path(folder: Path, rank: int) -> str:
    path = "nonsense://somewhere" if dist.get_rank() == rank else folder
    outcome = "saved"
    try:
        dcp.save(state(1), checkpoint_id=path)
    except Exception as error:
        outcome = type(error).__name__
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, outcome)
    return outcome


@pytest.mark.parametrize("rank", [0, 1])
def test_a_path_that_one_rank_cannot_use_fails_all_ranks(ranks: RankPool, tmp_path, rank):
    outcomes = ranks(2).run(use_a_wrong_path, tmp_path / "checkpoint", rank)
    assert outcomes[rank] == "RuntimeError"
    assert outcomes[1 - rank] == "CheckpointException"
    assert not (tmp_path / "checkpoint").exists()


def load_number(folder: Path) -> Any:
    loaded = state(0)
    dcp.load(loaded, checkpoint_id=folder)
    return number_of(loaded)


def test_a_save_works_after_one_that_failed(ranks: RankPool, tmp_path):
    ranks(2).run(save_and_fail, tmp_path, "planner", "create_global_plan", 0, True)
    ranks(2).run(save, 2, tmp_path)
    assert ranks(2).run(load_number, tmp_path) == [2, 2]
