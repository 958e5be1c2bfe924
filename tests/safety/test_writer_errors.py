"""An error anywhere in a save fails the save on every rank, commits nothing and leaves the old checkpoint as it was."""

from __future__ import annotations

import errno
import itertools
import os
import re
import resource
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future

import holdfast.dcp as dcp
from holdfast.dcp import CheckpointException, FileSystemWriter
from holdfast.errors import IncompleteSaveError
from tests.rank_pool import RankPool
from tests.safety.checkpoints import contents, found_in, needless_files, save, state
from tests.safety.faults import Countdown, FaultyFileSystem

pytestmark = pytest.mark.filterwarnings("ignore:.*holds a checkpoint:UserWarning")

TENSORS = 6


def many(number: int) -> dict[str, Any]:
    return {f"tensor{position}": torch.full((100,), float(number)) for position in range(TENSORS)}


class FailsOnFile:
    """Fails all writes to the data file that was opened as the n-th."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.opened: list[str] = []

    def __call__(self, operation: str, name: str) -> None:
        if operation == "open":
            self.opened.append(name)
        if operation == "write" and self.opened.index(name) == self.number:
            raise OSError(errno.ENOSPC, "No space left on device")


def save_with(hook: Any, folder: Path, state_dict: dict[str, Any], **options: Any) -> None:
    writer = FileSystemWriter(folder, **options)
    writer.fs = FaultyFileSystem(hook)
    dcp.save(state_dict, storage_writer=writer)


@pytest.mark.parametrize("file_number", range(TENSORS))
@pytest.mark.parametrize("options", [{"thread_count": TENSORS}, {"thread_count": 2, "single_file_per_rank": False}])
def test_an_error_in_any_writer_thread_fails_the_save_and_leaves_the_old_checkpoint(tmp_path, options, file_number):
    dcp.save(many(1), checkpoint_id=tmp_path)
    before = contents(tmp_path)
    with pytest.raises(CheckpointException) as caught:
        save_with(FailsOnFile(file_number), tmp_path, many(2), **options)
    (error, _), *others = caught.value.failures.values()
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC
    assert not others
    assert contents(tmp_path) == before


def fail_on_rank(folder: Path, rank: int, file_number: int) -> str:
    hook = FailsOnFile(file_number if dist.get_rank() == rank else -1)
    try:
        save_with(hook, folder, many(2), thread_count=2)
    except CheckpointException as error:
        return f"{list(error.failures)} {[type(cause).__name__ for cause, _ in error.failures.values()]}"
    return "saved"


@pytest.mark.parametrize("file_number", [0, 1])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_error_in_a_thread_of_one_rank_fails_the_save_on_every_rank(ranks: RankPool, tmp_path, rank, file_number):
    dcp.save(many(1), checkpoint_id=tmp_path)
    before = contents(tmp_path)
    outcomes = ranks(3).run(fail_on_rank, tmp_path, rank, file_number)
    assert outcomes == [f"[{rank}] ['OSError']"] * 3
    assert contents(tmp_path) == before


def fill_the_disk(folder: Path, limit: int) -> str:
    """Save where files cannot get larger than `limit`: a real error of a real write, in whatever thread that is."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        state_dict = {**many(2), "large": torch.full((50_000,), 2.0)}
        dcp.save(state_dict, storage_writer=FileSystemWriter(folder, thread_count=3))
    except CheckpointException as error:
        return " ".join(f"{rank}:{cause.errno}" for rank, (cause, _) in error.failures.items())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    return "saved"


def test_a_full_disk_fails_the_save_on_every_rank(ranks: RankPool, tmp_path):
    dcp.save(many(1), checkpoint_id=tmp_path)
    before = contents(tmp_path)
    one, other = ranks(2).run(fill_the_disk, tmp_path, 100_000)
    assert one == other
    assert re.fullmatch(rf"[01]:{errno.EFBIG}", one)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("use_collectives", [True, False])
@pytest.mark.parametrize("old_is_rank_by_rank", [None, False, True])
def test_an_error_in_any_single_file_operation_leaves_the_old_or_the_new_checkpoint(
    tmp_path, old_is_rank_by_rank, use_collectives
):
    outcomes = set()
    for number in itertools.count():
        folder = tmp_path / str(number)
        if old_is_rank_by_rank is not None:
            save(1, folder, use_collectives=not old_is_rank_by_rank)
        before = contents(folder) if folder.exists() else {}
        countdown = Countdown(number)
        writer = FileSystemWriter(folder, thread_count=2)
        writer.fs = FaultyFileSystem(countdown)
        raised = None
        try:
            with countdown.in_fsync():
                dcp.save(state(2), storage_writer=writer, use_collectives=use_collectives)
        except CheckpointException as error:
            ((raised, _),) = error.failures.values()
        if countdown.failed is None:
            assert raised is None
            break
        found = found_in(folder)
        if found == 2:
            # Tidying up is all that may fail without a word.
            tidied = not countdown.failed.startswith(("rm_file", "ls"))
            assert raised is not None or not tidied or needless_files(folder) == set(), countdown.failed
        else:
            assert isinstance(raised, OSError), countdown.failed
            assert found == (1 if before else "nothing"), countdown.failed
            # Rank 0's own index may be in place while that of all ranks still counts, and needs its data then.
            renamed = any(operation.startswith("rename") for operation in countdown.operations)
            in_place = renamed and not countdown.failed.startswith("rename")
            assert contents(folder) == before or in_place, countdown.failed
        outcomes.add((found, raised is not None))
        save(3, folder)
        assert found_in(folder) == 3
        assert needless_files(folder) == set(), countdown.failed
    assert {("nothing" if old_is_rank_by_rank is None else 1, True), (2, True)} <= outcomes


class ForgetsAnItem(FileSystemWriter):
    """Writes all items and reports all but one of them."""

    def write_data(self, plan: Any, planner: Any) -> Future[Any]:
        written = super().write_data(plan, planner).value()
        future: Future[Any] = Future()
        future.set_result([result for result in written if result.index.fqn != "tensor3"])
        return future


def forget_an_item(folder: Path) -> str:
    try:
        dcp.save(many(2), storage_writer=ForgetsAnItem(folder))
    except CheckpointException as error:
        (cause,) = [cause for cause, _ in error.failures.values()]
        assert isinstance(cause, IncompleteSaveError)
        return " ".join(cause.missing)
    return "saved"


def test_a_save_that_lacks_a_planned_item_is_not_committed(ranks: RankPool, tmp_path):
    dcp.save(many(1), checkpoint_id=tmp_path)
    before = contents(tmp_path)
    one, other = ranks(2).run(forget_an_item, tmp_path)
    assert one == other
    assert "tensor3" in one
    assert "tensor2" not in one
    assert contents(tmp_path) == before


def fail_in_finish(folder: Path, operation: str, name: str) -> str:
    def hook(current: str, file: str) -> None:
        if current == operation and re.fullmatch(name, file):
            raise OSError(errno.EIO, "Input/output error")

    try:
        save_with(hook, folder, many(2))
    except CheckpointException as error:
        return " ".join(f"{rank}:{cause.errno}" for rank, (cause, _) in error.failures.items())
    return "saved"


@pytest.mark.parametrize("operation", ["open", "write", "flush", "close"])
def test_an_error_while_the_index_is_written_fails_every_rank_and_leaves_the_old_checkpoint(
    ranks: RankPool, tmp_path, operation
):
    dcp.save(many(1), checkpoint_id=tmp_path)
    before = contents(tmp_path)
    assert ranks(2).run(fail_in_finish, tmp_path, operation, r"\.metadata\..*") == [f"0:{errno.EIO}"] * 2
    assert contents(tmp_path) == before


class FailsOnceCommitted:
    def __init__(self) -> None:
        self.committed = False

    def __call__(self, operation: str, name: str) -> None:
        if self.committed:
            raise OSError(errno.EIO, "Input/output error")
        self.committed = operation == "rename" and name.endswith(".metadata")


def fail_once_committed(folder: Path) -> str:
    try:
        save_with(FailsOnceCommitted(), folder, many(2))
    except CheckpointException as error:
        return f"failed on {list(error.failures)}"
    return "saved"


def test_what_fails_after_the_commit_never_removes_what_was_committed(ranks: RankPool, tmp_path):
    dcp.save(many(1), checkpoint_id=tmp_path)
    assert ranks(2).run(fail_once_committed, tmp_path) == ["failed on [0]"] * 2
    loaded = many(0)
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert all(torch.equal(loaded[key], value) for key, value in many(2).items())


class CannotBeDescribed(FileSystemWriter):
    """After the commit, makes the result something that cannot be sent to the other ranks."""

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        metadata.planner_data = lambda: None


def commit_and_fail_to_tell(folder: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.save(many(2), storage_writer=CannotBeDescribed(folder))
        except CheckpointException:
            return "failed"
    return "saved"


def test_a_commit_that_cannot_be_sent_to_the_other_ranks_is_still_a_commit(ranks: RankPool, tmp_path):
    dcp.save(many(1), checkpoint_id=tmp_path)
    assert ranks(2).run(commit_and_fail_to_tell, tmp_path) == ["failed"] * 2
    loaded = many(0)
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert all(torch.equal(loaded[key], value) for key, value in many(2).items())


def test_a_file_that_disappears_before_the_commit_fails_the_save(tmp_path):
    def hook(operation: str, name: str) -> None:
        if operation == "exists" and name.endswith(".distcp"):
            (tmp_path / name).unlink()

    dcp.save(many(1), checkpoint_id=tmp_path)
    before = contents(tmp_path)
    with pytest.raises(CheckpointException) as caught:
        save_with(hook, tmp_path, many(2))
    assert isinstance(caught.value.failures[0][0], IncompleteSaveError)
    assert contents(tmp_path) == before


def fail_on_a_disk_of_its_own(folder: Path, rank: int) -> list[str]:
    """Every rank writes to a disk that the others do not see."""
    own = folder / str(dist.get_rank())
    hook = FailsOnFile(1 if dist.get_rank() == rank else -1)
    with pytest.raises(CheckpointException):
        save_with(hook, own, many(2), single_file_per_rank=False)
    return sorted(os.listdir(own))


def test_a_rank_that_fails_removes_what_it_wrote_where_nobody_else_can(ranks: RankPool, tmp_path):
    outcomes = ranks(2).run(fail_on_a_disk_of_its_own, tmp_path, 1)
    assert outcomes[1] == []


class LosesTheAnswer(FaultyFileSystem):
    """Renames the index, and fails after that."""

    def __init__(self) -> None:
        super().__init__(lambda operation, name: None)

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        if Path(new_path).name.endswith((".metadata", "commit.json")):
            raise OSError(errno.EIO, "Input/output error")


def fail_to_rename(folder: Path, use_collectives: bool, loses_answer: bool) -> str:
    def hook(operation: str, file: str) -> None:
        if operation == "rename" and dist.get_rank() == 0:
            raise OSError(errno.EIO, "Input/output error")

    writer = FileSystemWriter(folder)
    writer.fs = LosesTheAnswer() if loses_answer and dist.get_rank() == 0 else FaultyFileSystem(hook)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.save(many(2), storage_writer=writer, use_collectives=use_collectives)
        except CheckpointException as error:
            return " ".join(f"{rank}:{cause.errno}" for rank, (cause, _) in error.failures.items())
    return "saved"


def save_many(folder: Path, number: int, use_collectives: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(many(number), checkpoint_id=folder, use_collectives=use_collectives)


@pytest.mark.parametrize("use_collectives", [True, False])
@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_commit_that_surely_has_not_happened_leaves_no_files(
    ranks: RankPool, tmp_path, use_collectives, has_old, world_size
):
    folder = tmp_path / "x"
    if has_old:
        ranks(world_size).run(save_many, folder, 1, use_collectives)
    before = contents(folder) if has_old else {}
    found = ranks(world_size).run(fail_to_rename, folder, use_collectives, False)
    assert found == [f"0:{errno.EIO}"] * world_size
    assert contents(folder) == before


@pytest.mark.parametrize("use_collectives", [True, False])
@pytest.mark.parametrize("has_old", [True, False])
def test_a_commit_whose_answer_was_lost_keeps_its_files(ranks: RankPool, tmp_path, use_collectives, has_old):
    folder = tmp_path / "x"
    if has_old:
        ranks(2).run(save_many, folder, 1, use_collectives)
    assert ranks(2).run(fail_to_rename, folder, use_collectives, True) == [f"0:{errno.EIO}"] * 2
    loaded = many(0)
    dcp.load(loaded, checkpoint_id=folder)
    assert all(torch.equal(loaded[key], value) for key, value in many(2).items())


class FailsBeside(FileSystemWriter):
    """Another rank than the one that commits fails in the same step."""

    def commit_rank_local(self, world_size: int) -> None:
        super().commit_rank_local(world_size)
        if dist.get_rank() == 1:
            raise OSError(errno.EIO, "Input/output error")


def fail_beside_the_commit(folder: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.save(many(2), storage_writer=FailsBeside(folder), use_collectives=False)
        except CheckpointException as error:
            return f"failed on {list(error.failures)}"
    return "saved"


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_fails_beside_the_commit_takes_nothing_from_it(ranks: RankPool, tmp_path, world_size):
    folder = tmp_path / "x"
    ranks(world_size).run(save_many, folder, 1, False)
    assert ranks(world_size).run(fail_beside_the_commit, folder) == ["failed on [1]"] * world_size
    loaded = many(0)
    dcp.load(loaded, checkpoint_id=folder)
    assert all(torch.equal(loaded[key], value) for key, value in many(2).items())
