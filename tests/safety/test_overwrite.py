"""Overwriting never mixes two checkpoints, leaves nothing of the old one behind, and touches nobody else's files."""

from __future__ import annotations

import fcntl
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast.dcp as dcp
from holdfast.dcp import CheckpointException, FileSystemWriter
from holdfast.errors import CheckpointExistsError
from tests.rank_pool import RankPool
from tests.safety.checkpoints import contents, found_in, needless_files, save, state
from tests.safety.faults import FaultyFileSystem

FOREIGN = {
    "README.md": b"ours",
    ".metadata.backup": b"a copy",
    "__0_0.distcp.bak": b"a copy",
    "model.safetensors": b"weights",
    "0.distcp": b"?",
    "sub/__0_0.distcp": b"in a folder of its own",
}


def put_foreign_files(folder: Path) -> None:
    for name, content in FOREIGN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def foreign_files(folder: Path) -> dict[str, bytes]:
    present = contents(folder)
    return {name: present[name] for name in FOREIGN if name in present}


SINGLE_SAVES: dict[str, dict[str, Any]] = {
    "one file": {},
    "many threads": {"thread_count": 4},
    "many files": {"single_file_per_rank": False},
    "rank by rank": {"use_collectives": False},
    "rank by rank, many threads": {"use_collectives": False, "thread_count": 4},
}


@pytest.mark.parametrize("new", SINGLE_SAVES)
@pytest.mark.parametrize("old", SINGLE_SAVES)
def test_after_an_overwrite_only_the_new_checkpoint_and_other_peoples_files_are_left(tmp_path, old, new):
    put_foreign_files(tmp_path)
    save(1, tmp_path, **SINGLE_SAVES[old])
    save(2, tmp_path, **SINGLE_SAVES[new])
    assert found_in(tmp_path) == 2
    assert needless_files(tmp_path) == {Path(name).parts[0] for name in FOREIGN}
    assert foreign_files(tmp_path) == FOREIGN


def save_number(number: int, folder: Path, use_collectives: bool) -> None:
    save(number, folder, use_collectives=use_collectives)


@pytest.mark.parametrize("new_flavour", [True, False])
@pytest.mark.parametrize("old_flavour", [True, False])
@pytest.mark.parametrize(("old_size", "new_size"), [(3, 1), (3, 2), (2, 3)])
def test_after_an_overwrite_by_another_number_of_ranks_nothing_of_the_old_checkpoint_is_left(
    ranks: RankPool, tmp_path, old_size, new_size, old_flavour, new_flavour
):
    put_foreign_files(tmp_path)
    ranks(old_size).run(save_number, 1, tmp_path, old_flavour)
    ranks(new_size).run(save_number, 2, tmp_path, new_flavour)
    assert ranks(new_size).run(found_in, tmp_path) == [2] * new_size
    assert needless_files(tmp_path) == {Path(name).parts[0] for name in FOREIGN}
    assert foreign_files(tmp_path) == FOREIGN


def try_to_overwrite(folder: Path, use_collectives: bool) -> str:
    try:
        dcp.save(state(2), storage_writer=FileSystemWriter(folder, overwrite=False), use_collectives=use_collectives)
    except CheckpointException as error:
        causes = {type(cause) for cause, _ in error.failures.values()}
        assert causes == {CheckpointExistsError}
        return str(error)
    return "saved"


@pytest.mark.parametrize("new_flavour", [True, False])
@pytest.mark.parametrize("old_flavour", [True, False])
def test_a_save_that_must_not_overwrite_changes_nothing(ranks: RankPool, tmp_path, old_flavour, new_flavour):
    ranks(2).run(save_number, 1, tmp_path, old_flavour)
    before = contents(tmp_path)
    for world_size in (1, 2, 3):
        for text in ranks(world_size).run(try_to_overwrite, tmp_path, new_flavour):
            assert "Checkpoint already exists and self.overwrite=False." in text
        assert contents(tmp_path) == before
    assert ranks(2).run(found_in, tmp_path) == [1, 1]


def test_remains_of_a_save_that_died_are_no_checkpoint_to_protect(tmp_path):
    save(1, tmp_path)
    (tmp_path / ".metadata").unlink()
    assert try_to_overwrite(tmp_path, True) == "saved"
    assert found_in(tmp_path) == 2
    assert needless_files(tmp_path) == set()


def test_overwriting_is_announced(tmp_path):
    save(1, tmp_path)
    with pytest.warns(UserWarning, match=r"holds a checkpoint \(\.metadata\), which this save will replace"):
        dcp.save(state(2), checkpoint_id=tmp_path)


class Turns:
    """Two saves that take turns: the first does some operations, then the second some, then each the rest."""

    def __init__(self, folder: Path, first_share: int, second_share: int) -> None:
        self._folder = folder
        self._left = {1: first_share, 2: second_share}
        self._turn = 1
        self._finished: set[int] = set()
        self._changed = threading.Condition()

    def hook(self, number: int) -> Callable[[str, str], None]:
        def wait_for_turn(operation: str, name: str) -> None:
            with self._changed:
                if self._left[number] == 0:
                    self._left[number] = -1
                    self._pass_on(number)
                self._changed.wait_for(lambda: self._turn == number)
                while operation == "lock" and is_locked(self._folder):
                    self._pass_on(number)  # or else both would wait for each other
                    self._changed.wait_for(lambda: self._turn == number)
                self._left[number] -= 1

        return wait_for_turn

    def start(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == number)

    def finish(self, number: int) -> None:
        with self._changed:
            self._finished.add(number)
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if 3 - number not in self._finished:
            self._turn = 3 - number
            self._changed.notify_all()


def is_locked(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


# Operations at which it makes a difference who is first.
MOMENTS = ("ls", "open", "lock", "exists", "rename", "rm_file", "unlock")


def small(number: int) -> dict[str, int]:
    return {"number": number}


def found_small(folder: Path) -> int:
    loaded = small(-1)
    dcp.load(loaded, checkpoint_id=folder)
    return loaded["number"]


def save_small(number: int, folder: Path, hook: Callable[[str, str], None]) -> None:
    def at_moments(operation: str, name: str) -> None:
        if operation in MOMENTS:
            hook(operation, name)

    writer = FileSystemWriter(folder, sync_files=False)
    writer.fs = FaultyFileSystem(at_moments)
    dcp.save(small(number), storage_writer=writer)


def two_saves_at_once(folder: Path, first_share: int, second_share: int) -> dict[int, str]:
    turns = Turns(folder, first_share, second_share)
    outcomes: dict[int, str] = {}

    def run(number: int) -> None:
        turns.start(number)
        try:
            save_small(number, folder, turns.hook(number))
            outcomes[number] = "saved"
        except CheckpointException as error:
            outcomes[number] = str(error.failures[0][0])
        finally:
            turns.finish(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


@pytest.mark.filterwarnings("ignore:.*holds a checkpoint:UserWarning")
def test_two_saves_into_one_folder_at_a_time_leave_one_whole_checkpoint(tmp_path):
    operations: list[str] = []
    save_small(0, tmp_path / "count", lambda operation, name: operations.append(operation))
    losers = 0
    for number, (first, second) in enumerate(itertools.product(range(len(operations) + 2), repeat=2)):
        folder = tmp_path / str(number)
        save_small(0, folder, lambda operation, name: None)
        outcomes = two_saves_at_once(folder, first, second)
        moment = f"after {first} operations of the first save and {second} of the second: {outcomes}"
        winners = [saved for saved, outcome in outcomes.items() if outcome == "saved"]
        losers += 2 - len(winners)
        assert winners, moment
        assert found_small(folder) in winners, moment
    assert losers  # some of these were close


def save_while_another_save_runs(folder: Path) -> str:
    """Another save from start to end, just before ours would commit."""

    def hook(operation: str, name: str) -> None:
        if operation == "lock":
            dcp.save(state(2), checkpoint_id=folder, no_dist=True)

    writer = FileSystemWriter(folder)
    writer.fs = FaultyFileSystem(hook)
    try:
        dcp.save(state(1), storage_writer=writer)
    except CheckpointException as error:
        return " ".join(type(cause).__name__ for cause, _ in error.failures.values())
    return "saved"


@pytest.mark.filterwarnings("ignore:.*holds a checkpoint:UserWarning")
def test_a_save_of_several_ranks_fails_if_another_one_has_removed_its_files(ranks: RankPool, tmp_path):
    assert ranks(2).run(save_while_another_save_runs, tmp_path) == ["IncompleteSaveError"] * 2
    assert found_in(tmp_path) == 2
    assert needless_files(tmp_path) == set()


def save_while_a_rank_is_slow(folder: Path) -> str:
    """Another save begins when rank 1 has written its file and rank 0 has not, and ends when it has."""
    other = FileSystemWriter(folder)
    ours = FileSystemWriter(folder)
    begun = threading.Event()
    go_on = threading.Event()

    def other_hook(operation: str, name: str) -> None:
        if operation == "open":
            begun.set()
            go_on.wait()

    def our_hook(operation: str, name: str) -> None:
        if operation == "open" and name.endswith(".distcp") and dist.get_rank() == 0:
            dist.recv(torch.zeros(1), src=1)
            thread.start()
            begun.wait()
        if operation == "lock":
            go_on.set()
            thread.join()
        if operation == "close" and dist.get_rank() == 1:
            dist.send(torch.zeros(1), dst=0)

    other.fs, ours.fs = FaultyFileSystem(other_hook), FaultyFileSystem(our_hook)
    thread = threading.Thread(target=dcp.save, args=(state(2),), kwargs={"storage_writer": other, "no_dist": True})
    dcp.save(state(1), storage_writer=ours)
    return "saved"


@pytest.mark.filterwarnings("ignore:.*holds a checkpoint:UserWarning")
def test_files_of_a_save_that_has_gone_on_since_are_left_alone(ranks: RankPool, tmp_path):
    assert ranks(2).run(save_while_a_rank_is_slow, tmp_path) == ["saved"] * 2
    assert found_in(tmp_path) == 1
