"""Background saves that fail: who gets the error, on which rank, when, and what is left."""

from __future__ import annotations

import concurrent.futures
import errno
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast._background.futures import forget_failures
from holdfast._stores.local_store import LocalStore
from holdfast.errors import RankDisagreementError, UnsupportedValueError, WriterProcessError
from tests.rank_pool import RankPool
from tests.save.overlapping import PATIENCE, GatedStore


class FullStore(LocalStore):
    """A folder on a disk that is full, as far as the ranks with these numbers are concerned."""

    def __init__(self, path: Path, full_for: tuple[int, ...] = (0,)) -> None:
        super().__init__(path)
        self.full_for = full_for

    @contextmanager
    def create(self, name: str, size: int | None = None, memory: int | None = None) -> Iterator[Any]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        with super().create(name, size, memory) as sink:
            if rank in self.full_for:
                sink.write(b"some")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path_of(name))
            yield sink


class DeadlyStore(LocalStore):
    """Kills the process that writes to it, unless it is the one that made it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.maker = os.getpid()

    @contextmanager
    def create(self, name: str, size: int | None = None, memory: int | None = None) -> Iterator[Any]:
        with super().create(name, size, memory) as sink:
            if os.getpid() != self.maker:
                os.kill(os.getpid(), signal.SIGKILL)
            yield sink


@pytest.fixture(autouse=True)
def _failures_of_this_test_alone() -> Iterator[None]:
    yield
    forget_failures()


def state() -> dict[str, Any]:
    return {"w": torch.ones(1000)}


def test_a_full_disk_fails_the_save_and_leaves_the_earlier_checkpoint(tmp_path) -> None:
    holdfast.save({"earlier": 1}, tmp_path)
    files = sorted(tmp_path.iterdir())
    pending = holdfast.async_save(state(), FullStore(tmp_path), overwrite=True)
    with pytest.raises(OSError, match="No space left") as caught:
        pending.result()
    assert caught.value.errno == errno.ENOSPC
    assert pending.done()
    assert pending.progress().phase == "failed"
    assert "failed" in repr(pending)
    assert sorted(tmp_path.iterdir()) == files
    assert holdfast.open(tmp_path).read() == {"earlier": 1}


@pytest.mark.parametrize("verb", ["save", "async_save"])
def test_a_failure_that_nobody_saw_is_reported_by_the_next_call(tmp_path, verb: str) -> None:
    failed = holdfast.async_save(state(), FullStore(tmp_path / "full"))
    concurrent.futures.wait([failed.committed], PATIENCE)  # to wait is not to look
    with pytest.warns(RuntimeWarning, match=r"the background save to .*full failed: OSError.*No space left") as told:
        getattr(holdfast, verb)(state(), tmp_path / "x")
    assert told[0].filename == __file__
    assert len(told) == 1
    with pytest.raises(OSError, match="No space left"):
        failed.result()  # and is still there to be asked for


def test_a_failure_that_was_seen_is_not_reported_again(tmp_path, recwarn) -> None:
    failed = holdfast.async_save(state(), FullStore(tmp_path / "full"))
    assert isinstance(failed.exception(PATIENCE), OSError)
    holdfast.save(state(), tmp_path / "x")
    assert not recwarn.list


def test_saves_after_a_failed_one_go_on(tmp_path) -> None:
    gated, full = GatedStore(tmp_path / "0"), FullStore(tmp_path / "1")
    pending = [holdfast.async_save(state(), store, when_busy="copy") for store in (gated, full)]
    gated.gate.set()
    pending.append(holdfast.async_save(state(), tmp_path / "2"))
    assert [type(each.exception(PATIENCE)) for each in pending] == [type(None), OSError, type(None)]


def test_a_wait_ends_in_time_and_the_save_goes_on(tmp_path) -> None:
    store = GatedStore(tmp_path / "x")
    pending = holdfast.async_save(state(), store)
    with pytest.raises(
        TimeoutError, match=r"after 0.01 s the save has not ended: <PendingSave to .*x: .*> *\. It goes"
    ):
        pending.result(0.01)
    with pytest.raises(TimeoutError, match=r"after 0.01 s the save has not ended"):
        pending.exception(0.01)
    assert not pending.done()
    assert not pending.committed.cancel()
    store.gate.set()
    assert pending.result(PATIENCE).tensor_count == 1
    assert pending.exception() is None
    assert pending.done()


# --- over ranks ------------------------------------------------------------------------------------------------------


def save_what_rank_1_cannot(path: str) -> str:
    bad = {"value": (lambda: None) if dist.get_rank() == 1 else 1}
    if dist.get_rank() == 1:
        with pytest.raises(UnsupportedValueError) as caught:
            holdfast.async_save(bad, path)
    else:
        pending = holdfast.async_save(bad, path)
        with pytest.raises(UnsupportedValueError) as caught:
            pending.result(PATIENCE)
    again = holdfast.async_save({"value": 2}, path).result(PATIENCE)
    return f"{caught.value} {again.world_size}"


def test_a_rank_whose_state_cannot_be_saved_does_not_keep_others_waiting(ranks: RankPool, tmp_path) -> None:
    told = ranks(3).run(save_what_rank_1_cannot, str(tmp_path / "x"))
    assert all("value: values of type" in each for each in told)
    assert all(each.endswith("[on rank 1] 3") for each in (told[0], told[2]))
    assert holdfast.open(tmp_path / "x").read() == {"value": 2}


def warn_rank_1_of_a_failure_that_the_others_saw(path: str) -> str:
    failed = holdfast.async_save({"value": 1}, f"{path}/file")
    if dist.get_rank() == 1:
        concurrent.futures.wait([failed.committed], PATIENCE)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning) as caught:
                holdfast.async_save({"value": 2}, f"{path}/x")
        failed.exception()
    else:
        assert failed.exception(PATIENCE) is not None
        with pytest.raises(RuntimeWarning) as caught:
            holdfast.async_save({"value": 2}, f"{path}/x").result(PATIENCE)
    return str(caught.value)


def test_a_warning_that_one_rank_raises_does_not_keep_others_waiting(ranks: RankPool, tmp_path) -> None:
    (tmp_path / "file").touch()
    told = ranks(2).run(warn_rank_1_of_a_failure_that_the_others_saw, str(tmp_path))
    assert all("NotAFolderError" in each for each in told)
    assert not (tmp_path / "x").exists()


def save_to_different_places(path: str) -> list[str]:
    rank = dist.get_rank()
    told = []
    for place, options in (
        (f"{path}/{rank}", {}),
        (f"{path}/x", {"overwrite": rank == 1}),
        (f"{path}/x", {"replica_mismatch": "warn" if rank == 1 else "error"}),
    ):
        pending = holdfast.async_save({"w": torch.ones(3)}, place, **options)
        with pytest.raises(RankDisagreementError) as caught:
            pending.result(PATIENCE)
        told.append(str(caught.value))
    return told


def test_ranks_that_disagree_about_the_call_get_an_error(ranks: RankPool, tmp_path) -> None:
    for told in ranks(2).run(save_to_different_places, str(tmp_path)):
        assert "/0" in told[0]
        assert "/1" in told[0]
        assert "overwrite=True" in told[1]
        assert "replica_mismatch='warn'" in told[2]
    assert not list(tmp_path.iterdir())


def save_to_a_disk_full_for_rank_1(path: str) -> str:
    holdfast.save({"earlier": 1}, path)
    pending = holdfast.async_save(
        {"own": holdfast.PerRank(torch.ones(1000))}, FullStore(Path(path), (1,)), overwrite=True
    )
    error = pending.exception(PATIENCE)
    return f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"


def test_a_full_disk_on_one_rank_fails_the_save_on_all(ranks: RankPool, tmp_path) -> None:
    for told in ranks(2).run(save_to_a_disk_full_for_rank_1, str(tmp_path / "x")):
        assert told.startswith("OSError: [Errno 28] No space left on device")
        assert "on rank 1" in told
    assert holdfast.open(tmp_path / "x").read() == {"earlier": 1}
    assert len(list((tmp_path / "x").iterdir())) <= 2


# --- writer processes ------------------------------------------------------------------------------------------------


def test_a_killed_writer_process_is_reported_and_replaced(tmp_path) -> None:
    holdfast.save({"earlier": 1}, tmp_path)
    pending = holdfast.async_save(state(), DeadlyStore(tmp_path), overwrite=True, writer="process")
    with pytest.raises(WriterProcessError, match=f"killed by signal 9 while it saved to {tmp_path}") as caught:
        pending.result(PATIENCE)
    assert caught.value.exit_code == -signal.SIGKILL
    assert holdfast.open(tmp_path).read() == {"earlier": 1}
    holdfast.async_save(state(), tmp_path, overwrite=True, writer="process").result(PATIENCE)
    assert holdfast.open(tmp_path)["w"][:].eq(1).all()


def test_what_a_writer_process_cannot_have_is_refused_in_the_call(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"memory://x is in the memory of this process"):
        holdfast.async_save(state(), "memory://x", writer="process")
    with pytest.raises(ValueError, match=r"GatedStore\(.*\) cannot be sent to a writer process .*writer='thread'"):
        holdfast.async_save(state(), GatedStore(tmp_path / "x"), writer="process")
    assert not (tmp_path / "x").exists()


def test_an_error_in_a_writer_process_is_the_error_of_the_save(tmp_path) -> None:
    pending = holdfast.async_save(state(), FullStore(tmp_path / "x"), writer="process")
    with pytest.raises(OSError, match="No space left") as caught:
        pending.result(PATIENCE)
    assert caught.value.errno == errno.ENOSPC
    assert not list((tmp_path / "x").iterdir())


def test_a_writer_whose_answer_was_not_awaited_is_not_asked_again(tmp_path) -> None:
    def leave(event: holdfast.Event) -> None:
        if event.name == "save.write":
            raise SystemExit("a callback that ends the thread it is called in")

    with holdfast.subscribe(leave):
        first = holdfast.async_save({"w": torch.ones(2)}, tmp_path / "first", writer="process")
        with pytest.raises(SystemExit):
            first.result()
    second = holdfast.async_save({"w": torch.ones(2)}, tmp_path / "second", writer="process")
    assert second.result().path == str(tmp_path / "second")
    assert holdfast.open(tmp_path / "second").verify().ok
