"""A save that fails: the same error on all ranks, nobody waits, nothing is left on the disk, the next save works."""

from __future__ import annotations

import errno
import os
import re
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.errors import (
    CheckpointExistsError,
    IncompleteSaveError,
    MissingRanksError,
    NotAFolderError,
    RankDisagreementError,
    RankLeftError,
    UnsupportedTensorError,
    UnsupportedValueError,
)
from tests.rank_pool import RankPool


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def outcome(path: str, state: Any, given: Any = ..., **options: Any) -> tuple[str, str]:
    """How a save to a path (or what is given instead) failed here; then all ranks save again, with success."""
    try:
        holdfast.save(state, path if given is ... else given, **options)
        found = ("", "")
    except BaseException as error:
        notes = " ".join(getattr(error, "__notes__", []))
        found = (type(error).__name__, f"{error} {notes}")
    holdfast.save({"again": torch.ones(2)}, f"{path}-again")
    assert holdfast.open(f"{path}-again").read()["again"].tolist() == [1, 1]
    return found


# --- mistakes of one rank --------------------------------------------------------------------------------------------


class Broken:
    """Its state cannot be had on one rank."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"a": 1}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


class Stubborn(Exception):
    """It cannot be sent to other ranks."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"stubborn {one} {other}")
        self.handle = lambda: None


def fail_on_one_rank(path: str, what: str) -> tuple[str, str]:
    mine = dist.get_rank() == 1
    state: dict[str, Any] = {"w": torch.ones(3)}
    options: dict[str, Any] = {}
    if mine and what in ("state_dict", "stubborn", "interrupt"):
        errors = {"state_dict": RuntimeError("no state"), "stubborn": Stubborn(1, 2), "interrupt": KeyboardInterrupt()}
        state["object"] = Broken(errors[what])
    elif mine and what == "value":
        state["bad"] = object()
    elif mine and what == "tensor":
        state["bad"] = torch.eye(2).to_sparse()
    elif mine and what == "metadata":
        options["metadata"] = {"model": object()}
    elif mine and what == "cast":
        options["cast"] = {"*": "int8"}
    elif mine and what == "include":
        options["include"] = 5
    elif mine and what == "max_file_size":
        options["max_file_size"] = -1
    elif mine and what == "pattern":
        options["exclude"] = lambda key: 1 // 0
    elif mine and what in ("other path", "no path"):
        options["given"] = f"{path}-other" if what == "other path" else None
    elif mine and what == "overwrite":
        options["overwrite"] = True
    return outcome(path, state, **options)


MISTAKES = {
    "state_dict": ("RuntimeError", "no state"),
    "stubborn": ("RemoteError", "stubborn 1 2"),
    "value": ("UnsupportedValueError", "bad: values of type builtins.object are not stored"),
    "tensor": ("UnsupportedTensorError", "'bad' is a tensor of layout torch.sparse_coo"),
    "metadata": ("ValueError", "metadata must be what JSON can hold"),
    "cast": ("ValueError", "torch.int8 is not one"),
    "include": ("TypeError", "5 does not say which keys are meant"),
    "max_file_size": ("ValueError", "max_file_size: -1 is not a size"),
    "pattern": ("ZeroDivisionError", ""),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_of_one_rank_is_the_same_error_on_all(ranks: RankPool, tmp_path, what):
    kind, text = MISTAKES[what]
    outcomes = ranks(3).run(fail_on_one_rank, str(tmp_path / "x"), what)
    assert [found[0] for found in outcomes] == [kind] * 3
    assert all(text in found[1] and "on rank 1" in found[1] for found in outcomes), outcomes
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("what", ["other path", "no path", "overwrite"])
def test_ranks_in_different_calls_get_an_error(ranks: RankPool, tmp_path, what):
    outcomes = ranks(3).run(fail_on_one_rank, str(tmp_path / "x"), what)
    assert [found[0] for found in outcomes] == [RankDisagreementError.__name__] * 3
    assert all(str(tmp_path / "x") in found[1] for found in outcomes)
    assert not (tmp_path / "x").exists()


def test_an_interruption_ends_the_call_on_the_other_ranks_as_an_error(ranks: RankPool, tmp_path):
    outcomes = ranks(3).run(fail_on_one_rank, str(tmp_path / "x"), "interrupt")
    assert [found[0] for found in outcomes] == [RankLeftError.__name__, "KeyboardInterrupt", RankLeftError.__name__]
    assert "rank 1 was interrupted (KeyboardInterrupt())" in outcomes[0][1]


def save_or_load(path: str) -> str:
    holdfast.save({"w": torch.ones(2)}, path)
    call = holdfast.save if dist.get_rank() == 0 else holdfast.load
    with pytest.raises(RankDisagreementError) as caught:
        call({"w": torch.zeros(2)}, path)
    assert sorted(caught.value.views) == [0, 1]
    return str(caught.value)


def test_saving_and_loading_at_once_is_reported(ranks: RankPool, tmp_path):
    for told in ranks(2).run(save_or_load, str(tmp_path / "x")):
        assert "holdfast.save to" in told
        assert "holdfast.load from" in told
    assert holdfast.open(tmp_path / "x").read()["w"].tolist() == [1, 1]


def save_relative(folder: str) -> str:
    os.makedirs(f"{folder}/{dist.get_rank()}", exist_ok=True)
    before = os.getcwd()
    os.chdir(f"{folder}/{dist.get_rank()}")
    try:
        with pytest.raises(RankDisagreementError) as caught:
            holdfast.save({"w": torch.ones(2)}, "x")
    finally:
        os.chdir(before)
    return str(caught.value)


def test_a_relative_path_that_means_different_folders_is_reported(ranks: RankPool, tmp_path):
    for told in ranks(2).run(save_relative, str(tmp_path)):
        assert f"{tmp_path}/0/x" in told
        assert f"{tmp_path}/1/x" in told


# --- what cannot be stored -------------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


@pytest.mark.filterwarnings("ignore")
def test_all_tensors_that_cannot_be_stored_are_named_at_once(tmp_path):
    bad = {
        "sparse": torch.eye(2).to_sparse(),
        "rows": torch.eye(2).to_sparse_csr(),
        "meta": torch.empty(2, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "jagged": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        "lazy": torch.nn.LazyLinear(3).weight,
        "subclass": Wrapped(torch.ones(2)),
        "deep": torch.zeros([1] * 65),
    }
    with pytest.raises(UnsupportedTensorError) as caught:
        holdfast.save({"good": torch.ones(2), "bad": bad}, tmp_path / "x")
    assert caught.value.keys == [f"bad.{name}" for name in bad]
    assert caught.value.key == "bad.sparse"
    assert all(f"'bad.{name}'" in str(caught.value) for name in bad)
    with pytest.raises(UnsupportedTensorError, match="'meta' is a tensor on the meta device"):
        holdfast.save({"meta": bad["meta"]}, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_all_values_that_cannot_be_stored_are_named_at_once(tmp_path):
    state = {"a": object(), "b": [1, {"c": lambda: 0}], 3: {"d": {torch.ones(1)}}, "fine": 1}
    with pytest.raises(UnsupportedValueError) as caught:
        holdfast.save(state, tmp_path / "x")
    assert caught.value.keys == ["a", "b.1.c", "3.d.0"]
    assert not (tmp_path / "x").exists()


def test_a_state_that_contains_itself_is_refused_in_no_time(tmp_path):
    state: dict[str, Any] = {}
    state.update(one=state, two=[state, state], three=(state,))
    with pytest.raises(UnsupportedValueError, match="contains itself"):
        holdfast.save(state, tmp_path / "x")


def test_a_state_that_is_too_deep_is_refused(tmp_path):
    state: Any = 1
    for _ in range(500):
        state = [state]
    with pytest.raises(UnsupportedValueError, match="less deep"):
        holdfast.save(state, tmp_path / "x")


def test_pickles_need_permission(tmp_path):
    state = {"path": complex, "w": torch.ones(1)}
    with pytest.raises(UnsupportedValueError, match="allow_pickle=True"):
        holdfast.save(state, tmp_path / "x")
    holdfast.save(state, tmp_path / "x", allow_pickle=True)
    assert holdfast.open(tmp_path / "x", allow_pickle=True)["path"] is complex
    assert holdfast.open(tmp_path / "x")["w"].torch().tolist() == [1]


# --- disks -----------------------------------------------------------------------------------------------------------


def save_to_full_disk(path: str, rank: int, file: str) -> tuple[str, str]:
    """The disk is full when this rank writes that file."""
    original = os.write

    def write(descriptor: int, data: Any) -> int:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and file in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(descriptor, data)

    os.write = write if dist.get_rank() == rank else original
    try:
        holdfast.save({"own": holdfast.PerRank(torch.zeros(300))}, path, overwrite=True, max_file_size=400)
    except OSError as error:
        return f"{type(error).__name__} {error.errno}", f"{error} {' '.join(getattr(error, '__notes__', []))}"
    finally:
        os.write = original
    return "", ""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs to know the names of open files")
@pytest.mark.parametrize(("rank", "file"), [(0, "-0-0."), (1, "-1-0."), (1, "-1-2."), (0, "holdfast.json")])
def test_a_full_disk_ends_the_save_on_all_ranks_and_leaves_what_was_there(ranks: RankPool, tmp_path, rank, file):
    path = tmp_path / "x"
    holdfast.save({"old": torch.arange(5)}, path)
    before = {name: (path / name).read_bytes() for name in files_in(path)}
    outcomes = ranks(2).run(save_to_full_disk, str(path), rank, file)
    assert [kind for kind, _ in outcomes] == [f"OSError {errno.ENOSPC}"] * 2
    assert all(f"on rank {rank}" in text and str(path) in text for _, text in outcomes)
    assert {name: (path / name).read_bytes() for name in files_in(path)} == before


def test_a_file_in_the_way_is_an_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotAFolderError, match=f"a checkpoint is a folder, and {tmp_path}/file is a file") as caught:
            holdfast.save({"w": torch.ones(2)}, path)
        assert caught.value.path == str(tmp_path / "file")
        assert isinstance(caught.value, NotADirectoryError)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        holdfast.save({"w": torch.ones(2)}, tmp_path / "x")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that even root cannot write to")
def test_a_folder_that_nobody_can_write_to_is_an_error():
    with pytest.raises(OSError, match="/proc/self/x"):
        holdfast.save({"w": torch.ones(2)}, "/proc/self/x")


def test_a_checkpoint_in_the_way_is_an_error_unless_it_shall_be_replaced(tmp_path):
    path = tmp_path / "x"
    holdfast.save({"step": 1, "w": torch.ones(5)}, path)
    old = files_in(path)
    with pytest.raises(CheckpointExistsError, match="overwrite=True") as caught:
        holdfast.save({"step": 2}, path)
    assert caught.value.path == str(path)
    assert files_in(path) == old
    holdfast.save({"step": 2}, path, overwrite=True)
    assert holdfast.open(path).read() == {"step": 2}
    assert not set(files_in(path)) & (set(old) - {"holdfast.json"})


def save_where_there_is_one(path: str) -> tuple[str, str]:
    return outcome(path, {"w": torch.zeros(2)})


def test_all_ranks_hear_of_a_checkpoint_in_the_way(ranks: RankPool, tmp_path):
    holdfast.save({"w": torch.ones(2)}, tmp_path / "x")
    outcomes = ranks(2).run(save_where_there_is_one, str(tmp_path / "x"))
    assert [kind for kind, _ in outcomes] == [CheckpointExistsError.__name__] * 2


def lose_a_file(path: str) -> tuple[str, str]:
    from holdfast._stores.local_store import LocalStore

    class Forgetful(LocalStore):
        def sync(self) -> None:
            super().sync()
            if dist.get_rank() == 1:
                for file in Path(path).glob("data-*-1-0.safetensors"):
                    file.unlink()

    return outcome(path, {"own": holdfast.PerRank(torch.ones(3))}, given=Forgetful(path))


def test_a_file_that_is_not_there_any_more_prevents_the_commit(ranks: RankPool, tmp_path):
    outcomes = ranks(2).run(lose_a_file, str(tmp_path / "x"))
    assert [kind for kind, _ in outcomes] == [IncompleteSaveError.__name__] * 2
    assert files_in(tmp_path / "x") == []


# --- ranks that do not come ------------------------------------------------------------------------------------------


def all_but_one(path: str, calls_before: int) -> Any:
    for number in range(calls_before):
        holdfast.save({"w": torch.ones(2)}, f"{path}-{number}")
    if dist.get_rank() == 1:
        return None
    with pytest.raises(MissingRanksError) as caught:
        holdfast.save({"w": torch.ones(2)}, path)
    with pytest.raises(holdfast.errors.ConnectionLostError):
        holdfast.save({"w": torch.ones(2)}, path)
    return caught.value.ranks, str(caught.value)


@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_rank_that_does_not_come_is_named(ranks: RankPool, tmp_path, calls_before):
    outcomes = ranks(3).run(all_but_one, str(tmp_path / "x"), calls_before, group_timeout=2)
    for missing, told in (outcomes[0], outcomes[2]):
        assert missing == [1]
        # Which of both depends on whether the call before took long enough for the rank to leave a note.
        assert re.search(r"rank 1 \(it has not (joined this call|called Holdfast again since)", told)
    assert not (tmp_path / "x").exists()


class Deadly:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def die(path: str, rank: int) -> Any:
    with pytest.raises(MissingRanksError) as caught:
        holdfast.save({"w": torch.ones(2), "deadly": Deadly(rank)}, path)
    return caught.value.ranks, str(caught.value)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_dies_is_named_by_the_others_at_once(ranks: RankPool, tmp_path, rank):
    outcomes = ranks(3).run_raw(die, str(tmp_path / "x"), rank)
    for outcome in outcomes:
        if outcome.rank == rank:
            assert outcome.error is not None
            assert outcome.error.type_name == "RankDied"
        else:
            assert outcome.error is None, outcome.error
            missing, told = outcome.value
            assert missing == [rank]
            assert f"rank {rank} (its connection ended while it was waited for in holdfast.save to {tmp_path}/x" in told
    assert not (tmp_path / "x").exists()
