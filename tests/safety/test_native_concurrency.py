"""Several programs that save to one place at once: one wins, the others get an error, and nobody gets a mixture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast._formats.native.writing import inspect_destination
from holdfast._save import save as save_module
from holdfast._stores.local_store import LocalStore
from holdfast.errors import (
    CheckpointExistsError,
    CommitConflictError,
    HoldfastError,
    IncompleteSaveError,
    ReplacedCheckpointError,
)
from tests.rank_pool import RankPool
from tests.safety.native_checkpoints import CUT_OFF, NOTHING, found_in, loaded_from, needless_files, save

LOST = (CheckpointExistsError, CommitConflictError, IncompleteSaveError)


def try_to_save(number: int, place: Any, **options: Any) -> str:
    try:
        save(number, place, **options)
    except LOST as error:
        return type(error).__name__
    return "saved"


def read_again_and_again(folder: Path, times: int) -> list[Any]:
    return [loaded_from(folder) for _ in range(times)]


def save_or_read(folder: Path, times: int, counter: Path) -> tuple[str, list[Any]]:
    """The first two processes save, the third one reads."""
    for role in ("one", "other", "reader"):
        try:
            (counter / role).touch(exist_ok=False)
        except FileExistsError:
            continue
        if role == "reader":
            return role, read_again_and_again(folder, times)
        first = 10 if role == "one" else 110  # all of them are numbers that bfloat16 has
        return role, [try_to_save(first + number % 100, folder, max_file_size=200) for number in range(times)]
    raise AssertionError


@pytest.mark.parametrize("times", [25, pytest.param(400, marks=pytest.mark.long)])
def test_two_that_overwrite_and_one_that_reads_see_whole_checkpoints(ranks: RankPool, tmp_path, times):
    (tmp_path / "roles").mkdir()
    save(5, tmp_path / "c")
    found = dict(
        ranks(3).run(save_or_read, tmp_path / "c", times, tmp_path / "roles", process_group=False, deadline=250)
    )
    saved = [outcome for role in ("one", "other") for outcome in found[role]]
    assert saved.count("saved") >= 1
    for seen in found["reader"]:
        replaced = isinstance(seen, str) and "another save has replaced the checkpoint" in seen
        assert isinstance(seen, int) or replaced, seen
    last = found_in(tmp_path / "c")
    assert isinstance(last, int)
    save(7, tmp_path / "c")
    assert needless_files(tmp_path / "c") == set()


def save_first(folder: Path, counter: Path) -> tuple[str, str]:
    role = "one"
    try:
        (counter / role).touch(exist_ok=False)
    except FileExistsError:
        role = "other"
    return role, try_to_save(1 if role == "one" else 2, folder, overwrite=False)


def test_of_two_first_saves_at_once_exactly_one_wins(ranks: RankPool, tmp_path):
    for attempt in range(10):
        (tmp_path / f"roles-{attempt}").mkdir()
        folder = tmp_path / f"c-{attempt}"
        found = dict(ranks(2).run(save_first, folder, tmp_path / f"roles-{attempt}", process_group=False))
        assert sorted(found.values())[-1] == "saved"
        assert list(found.values()).count("saved") == 1, found
        assert found_in(folder) == (1 if found["one"] == "saved" else 2)
        assert needless_files(folder) == set()


class Interrupted(LocalStore):
    """Lets another save happen in the middle of its own work."""

    def __init__(self, folder: Path, before: str, meanwhile: Any) -> None:
        super().__init__(folder)
        self.before = before
        self.meanwhile = meanwhile

    def _now(self, call: str) -> None:
        if call == self.before and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()

    def create(self, name: str, size: int | None = None, memory: int | None = None) -> Any:
        self._now("create " + name.partition("-")[0])
        return super().create(name, size, memory)

    def list(self) -> Any:
        self._now("list")
        return super().list()

    def commit(self, name: str, content: bytes, *, replaces: bytes | None) -> None:
        self._now("commit")
        super().commit(name, content, replaces=replaces)

    def delete(self, names: Any) -> None:
        names = list(names)
        self._now("delete old files" if any(name.startswith("data-") for name in names) else "delete")
        super().delete(names)


@pytest.mark.parametrize("before", ["list", "create data", "commit"])
@pytest.mark.parametrize("with_old", [False, True], ids=["first", "overwrite"])
def test_a_save_during_which_another_one_committed_leaves_that_one_whole(tmp_path, before, with_old):
    if with_old:
        save(1, tmp_path)
    store = Interrupted(tmp_path, before, lambda: save(2, tmp_path))
    with pytest.raises(LOST):
        save(3, store)
    assert found_in(tmp_path) == 2
    assert needless_files(tmp_path) == set()


def test_a_save_after_whose_commit_another_one_commits_leaves_that_one_whole(tmp_path):
    save(1, tmp_path)
    save(3, Interrupted(tmp_path, "delete old files", lambda: save(2, tmp_path)))
    assert found_in(tmp_path) == 2
    assert needless_files(tmp_path) == set()


def test_a_first_save_that_meets_a_checkpoint_leaves_it_alone(tmp_path):
    save(1, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        save(2, tmp_path, overwrite=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_damaged_checkpoint_is_replaced_only_on_demand(tmp_path):
    save(1, tmp_path)
    (tmp_path / "holdfast.json").write_bytes(b"broken")
    with pytest.raises(CheckpointExistsError, match="which is damaged"):
        save(2, tmp_path, overwrite=False)
    save(2, tmp_path)
    assert found_in(tmp_path) == 2
    assert needless_files(tmp_path) == set()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_checkpoint_of_another_kind_is_never_saved_over(tmp_path, name, overwrite):
    (tmp_path / name).write_bytes(b"of somebody else")
    with pytest.raises(CheckpointExistsError, match="of another kind"):
        save(1, tmp_path, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == b"of somebody else"


def test_files_that_are_gone_before_the_commit_are_missed(tmp_path, monkeypatch):
    def lose_a_file() -> None:
        next(tmp_path.glob("data-*")).unlink()

    store = Interrupted(tmp_path, "", None)
    write = save_module.write_chunks

    def write_and_lose(*args: Any, **options: Any) -> Any:
        written = write(*args, **options)
        lose_a_file()
        return written

    monkeypatch.setattr(save_module, "write_chunks", write_and_lose)
    with pytest.raises(IncompleteSaveError, match="Do all ranks see the same disk"):
        save(1, store)
    assert found_in(tmp_path) in (NOTHING, CUT_OFF)


class Unreadable(LocalStore):
    """A disk that fails after the commit, when the save looks what has become of it."""

    broken = False

    def commit(self, name: str, content: bytes, *, replaces: bytes | None) -> None:
        super().commit(name, content, replaces=replaces)
        self.broken = True
        raise OSError(5, "Input/output error")

    def reader(self, name: str) -> Any:
        if self.broken:
            raise OSError(5, "Input/output error")
        return super().reader(name)


def test_an_error_after_the_commit_removes_nothing_that_the_checkpoint_needs(tmp_path):
    with pytest.raises(OSError, match="Input/output"):
        save(1, Unreadable(tmp_path))
    assert found_in(tmp_path) == 1


def test_what_was_there_before_is_looked_at_record_first(tmp_path):
    """If the other order were taken, files of a save that commits in between would stay behind for ever."""
    save(1, tmp_path)
    before = inspect_destination(Interrupted(tmp_path, "list", lambda: save(2, tmp_path)), overwrite=True)
    assert b'"step":1' in before.record


def test_readers_of_a_replaced_checkpoint_get_what_they_opened_or_an_error(tmp_path):
    save(1, tmp_path)
    opened = holdfast.open(tmp_path)
    save(2, tmp_path)
    assert opened["step"] == 1
    with pytest.raises(ReplacedCheckpointError, match="open it again") as caught:
        opened["model.weight"][0]
    assert isinstance(caught.value, HoldfastError)
