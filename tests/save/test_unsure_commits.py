"""Whether a save is committed is for the rank to say that commits: what others see may be old, and answers get lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast._formats.native.names import RECORD
from holdfast._stores.local_store import LocalStore
from holdfast.errors import CommitConflictError
from tests.rank_pool import RankPool

PATIENCE = 60.0
WAYS = ["now", "thread", "process"]


class FailsOnceCommitted(LocalStore):
    """The first rank cannot flush the folder once the record is in place. The others see what was there before."""

    def __init__(self, path: Any, rank: int) -> None:
        super().__init__(path)
        self.rank = rank
        self.old = self._record()

    def sync(self) -> None:
        super().sync()
        if self.rank == 0 and self._record() != self.old:
            raise OSError(errno.EIO, os.strerror(errno.EIO), self.location)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        if self.rank == 0 or name != RECORD:
            return super().read(name, begin, end)
        if self.old is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return self.old[begin:end]

    def _record(self) -> bytes | None:
        path = Path(self.location) / RECORD
        return path.read_bytes() if path.exists() else None


class AnswersInItsOwnWords(LocalStore):
    """Fails after the commit, with an error that no other rank can rebuild."""

    def commit(self, name: str, content: bytes, *, replaces: bytes | None) -> None:
        class LostError(Exception):
            pass

        super().commit(name, content, replaces=replaces)
        raise LostError("no answer")


class Refuses(LocalStore):
    """Does not commit, and says so."""

    def __init__(self, path: Any, error: BaseException) -> None:
        super().__init__(path)
        self.error = error

    def commit(self, name: str, content: bytes, *, replaces: bytes | None) -> None:
        raise self.error


class CommitsLate(LocalStore):
    """Has sent what is to be committed and got no answer. It arrives later."""

    def __init__(self, path: Any, error: BaseException) -> None:
        super().__init__(path)
        self.error = error
        self.sent: Any = None

    def commit(self, name: str, content: bytes, *, replaces: bytes | None) -> None:
        self.sent = (name, content, replaces)
        raise self.error

    def arrive(self) -> None:
        name, content, replaces = self.sent
        super().commit(name, content, replaces=replaces)


def state_of(number: int) -> dict[str, Any]:
    """Something that every rank writes a file for."""
    return {"step": number, "own": holdfast.PerRank(torch.full((50,), float(number)))}


def cause_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__} {getattr(error, 'errno', '')}".strip()
    return "saved"


def save(way: str, path: Any, number: int, overwrite: bool) -> None:
    if way == "now":
        holdfast.save(state_of(number), path, overwrite=overwrite)
    else:
        holdfast.async_save(state_of(number), path, overwrite=overwrite, writer=way).result(PATIENCE)  # type: ignore[arg-type]


def assert_holds(path: Any, number: int, world_size: int) -> None:
    found = holdfast.open(path).read()
    assert found["step"] == number
    assert holdfast.verify(path).ok
    for own in range(world_size):
        assert torch.equal(holdfast.open(path)[f"own.{own}"][:], torch.full((50,), float(number)))


def save_and_fail_once_committed(path: str, way: str, overwrite: bool) -> str:
    if overwrite:
        holdfast.save(state_of(1), path)
    store = FailsOnceCommitted(path, dist.get_rank())
    dist.barrier()
    return cause_of(lambda: save(way, store, 2, overwrite))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_sees_an_old_record_removes_nothing_of_what_is_committed(
    ranks: RankPool, tmp_path, way, overwrite, world_size
):
    path = tmp_path / "x"
    found = ranks(world_size).run(save_and_fail_once_committed, str(path), way, overwrite)
    assert found == [f"OSError {errno.EIO}"] * world_size
    assert_holds(path, 2, world_size)


def save_with_lost_words(path: str) -> str:
    return cause_of(lambda: holdfast.save(state_of(2), AnswersInItsOwnWords(path)))


def test_an_error_that_cannot_be_sent_takes_nothing_from_what_is_committed(ranks: RankPool, tmp_path):
    assert ranks(2).run(save_with_lost_words, str(tmp_path / "x")) == ["RemoteError"] * 2
    assert_holds(tmp_path / "x", 2, 2)


def test_a_process_alone_gets_the_very_error(tmp_path):
    with pytest.raises(Exception, match="no answer") as caught:
        holdfast.save(state_of(2), AnswersInItsOwnWords(tmp_path / "x"))
    assert caught.type.__name__ == "LostError"
    assert_holds(tmp_path / "x", 2, 1)


def save_refused(path: str, error: BaseException) -> str:
    holdfast.save(state_of(1), path)
    dist.barrier()
    return cause_of(lambda: holdfast.save(state_of(2), Refuses(path, error), overwrite=True))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
        CommitConflictError("another save was faster", path="x"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_remove_what_was_surely_not_committed(ranks: RankPool, tmp_path, error, world_size):
    path = tmp_path / "x"
    found = ranks(world_size).run(save_refused, str(path), error)
    assert found == [f"{type(error).__name__} {getattr(error, 'errno', '')}".strip()] * world_size
    assert_holds(path, 1, world_size)
    indexes = [name for name in os.listdir(path) if name.startswith("index-")]
    assert len(indexes) <= 1
    assert len(os.listdir(path)) == 1 + len(indexes) + world_size


@pytest.mark.parametrize(
    "error",
    [TimeoutError("no answer"), ConnectionResetError("gone"), KeyboardInterrupt()],
    ids=lambda error: repr(error),
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_that_arrives_after_its_error_finds_all_its_files(tmp_path, error, overwrite):
    if overwrite:
        holdfast.save(state_of(1), tmp_path / "x")
    store = CommitsLate(tmp_path / "x", error)
    with pytest.raises(type(error)):
        holdfast.save(state_of(2), store, overwrite=overwrite)
    if overwrite:
        assert_holds(tmp_path / "x", 1, 1)
    store.arrive()
    assert_holds(tmp_path / "x", 2, 1)


def test_what_an_unsure_commit_left_goes_with_the_next_save(tmp_path):
    holdfast.save(state_of(1), tmp_path / "x")
    with pytest.raises(TimeoutError):
        holdfast.save(state_of(2), CommitsLate(tmp_path / "x", TimeoutError("no answer")), overwrite=True)
    assert len(os.listdir(tmp_path / "x")) == 3
    holdfast.save(state_of(3), tmp_path / "x", overwrite=True)
    assert_holds(tmp_path / "x", 3, 1)
    assert len(os.listdir(tmp_path / "x")) == 2


def test_a_conversion_that_is_committed_keeps_its_files_whatever_it_raises(tmp_path):
    holdfast.save(state_of(1), tmp_path / "x")
    holdfast.save(state_of(2), tmp_path / "source")
    store = FailsOnceCommitted(tmp_path / "x", 0)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        holdfast.convert(tmp_path / "source", store, to="native", overwrite=True)
    assert_holds(tmp_path / "x", 2, 1)
