"""A save in our own format that is killed leaves the old checkpoint or the new one, intact.

The SIGKILL comes just before the n-th system call by which the save changes the disk, for every n; a power cut may keep
or lose whatever was not synced. Every folder also holds files of somebody else, some with names like ours: they must be
there in the end, and nothing else that the checkpoint does not need.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from holdfast._ranks.meeting import LinkedCollectives
from holdfast._save.save import SaveRun
from holdfast._stores.local_store import LocalStore
from holdfast.errors import ConnectionLostError
from tests.rank_pool import RankPool
from tests.safety.forked_ranks import Failure, run_on_forked_ranks
from tests.safety.native_checkpoints import (
    CUT_OFF,
    NOTHING,
    foreign_files_are_there,
    found_in,
    needless_files,
    put_foreign_files,
    save,
)
from tests.safety.power_loss import PowerCuts, write_disk
from tests.safety.syscalls import require_tracing, watch

STEP = Path("runs", "step")


@pytest.fixture(autouse=True, scope="module")
def _tracing() -> None:
    require_tracing()


@dataclass(frozen=True)
class Moment:
    """One kill, and what was in the folder after it."""

    before: str
    """The change that the process died at."""
    found: Any
    found_after_next_save: Any
    needless: set[str]
    """What the next save left in the folder."""
    survivors: tuple[Any, ...] = ()


def first(folder: Path) -> None:
    save(2, folder, overwrite=False)


def over(folder: Path) -> None:
    save(2, folder)


def over_in_many_files(folder: Path) -> None:
    save(2, folder, max_file_size=200)


def prepared(folder: Path, *, with_old: bool) -> Iterator[Path]:
    """Any number of folders with somebody's files, and perhaps a checkpoint."""
    original = folder / "original"
    original.mkdir()
    if with_old:
        save(1, original / STEP)
        put_foreign_files(original / STEP)
    for number in itertools.count():
        yield Path(shutil.copytree(original, folder / str(number)))


def next_save(folder: Path, found: Any) -> tuple[Any, set[str]]:
    """A save that follows a kill: it need not overwrite anything unless there is a checkpoint."""
    save(3, folder, overwrite=found not in (NOTHING, CUT_OFF))
    return found_in(folder), needless_files(folder)


def kill_everywhere(folder: Path, new: Callable[[Path], None], with_old: bool) -> list[Moment]:
    moments: list[Moment] = []
    for number, place in enumerate(prepared(folder, with_old=with_old)):
        watched = watch([partial(new, place / STEP)], place, kill_at=number)
        found = found_in(place / STEP)
        assert not with_old or foreign_files_are_there(place / STEP), watched.killed_before
        if watched.killed_before is None:
            assert watched.exit_codes == {0: 0}
            assert found == 2
            assert needless_files(place / STEP) == set()
            return moments
        moments.append(Moment(watched.killed_before, found, *next_save(place / STEP, found)))
        assert not with_old or foreign_files_are_there(place / STEP), watched.killed_before
        shutil.rmtree(place)
    raise AssertionError


def check(moments: list[Moment], allowed: list[Any]) -> None:
    """`allowed` in this order: once a save is committed it stays so."""
    story = "\n".join(f"killed before {moment.before}: {moment.found}" for moment in moments)
    assert list(dict.fromkeys(moment.found for moment in moments)) == allowed, story
    assert {moment.found_after_next_save for moment in moments} == {3}, story
    assert [moment.before for moment in moments if moment.needless] == [], story


def test_a_kill_at_any_system_call_of_a_first_save_leaves_nothing_or_a_whole_checkpoint(ranks: RankPool, tmp_path):
    (moments,) = ranks(1).run(kill_everywhere, tmp_path, first, False, process_group=False)
    check(moments, [NOTHING, CUT_OFF, 2])
    assert len(moments) >= 15


@pytest.mark.parametrize("new", [over, over_in_many_files])
def test_a_kill_at_any_system_call_of_an_overwrite_leaves_the_old_or_the_new_checkpoint(ranks: RankPool, tmp_path, new):
    (moments,) = ranks(1).run(kill_everywhere, tmp_path, new, True, process_group=False)
    check(moments, [1, 2])
    assert len(moments) >= 10


def cut_the_power_everywhere(folder: Path, new: Callable[[Path], None], with_old: bool) -> tuple[set[Any], set[Any]]:
    """What could be found after a cut during the save, and after a cut just after it returned."""
    place = next(prepared(folder, with_old=with_old))
    before = PowerCuts(place)
    watched = watch([partial(new, place / STEP)], place)
    assert watched.exit_codes == {0: 0}
    seen: dict[Any, Any] = {}

    def look(disks: set[Any]) -> set[Any]:
        for disk in disks - seen.keys():
            cut = folder / f"cut-{len(seen)}"
            write_disk(disk, cut)
            seen[disk] = found_in(cut / STEP)
            assert not with_old or foreign_files_are_there(cut / STEP)
            shutil.rmtree(cut)
        return {seen[disk] for disk in disks}

    moments = list(before.during(watched.changes))
    return look(set().union(*moments)), look(moments[-1])


@pytest.mark.parametrize("new", [over, pytest.param(over_in_many_files, marks=pytest.mark.long)])
@pytest.mark.parametrize("with_old", [False, True], ids=["first", "overwrite"])
def test_a_power_cut_at_any_moment_leaves_the_old_or_the_new_checkpoint(ranks: RankPool, tmp_path, with_old, new):
    ((during, after),) = ranks(1).run(cut_the_power_everywhere, tmp_path, new, with_old, process_group=False)
    assert during == ({1, 2} if with_old else {NOTHING, CUT_OFF, 2})
    assert after == {2}


def kill_a_rank(folder: Path, with_old: bool, victim: int, every: int) -> list[Moment]:
    moments: list[Moment] = []
    places = prepared(folder, with_old=with_old)
    for number in itertools.count(0, every):
        place = next(places)
        (place / STEP).mkdir(parents=True, exist_ok=True)  # the ranks would race for it, and change n be another one
        body = partial(over, place / STEP)
        outcomes, watched = run_on_forked_ranks(body, 2, below=place, victim=victim, kill_at=number)
        found = found_in(place / STEP)
        assert not with_old or foreign_files_are_there(place / STEP), watched.killed_before
        if watched.killed_before is None:
            assert not any(isinstance(outcome, Failure) for outcome in outcomes), outcomes
            assert found == 2
            assert needless_files(place / STEP) == set()
            return moments
        survivors = tuple(outcome for rank, outcome in enumerate(outcomes) if rank != victim)
        moments.append(Moment(watched.killed_before, found, *next_save(place / STEP, found), survivors))
        assert not with_old or foreign_files_are_there(place / STEP), watched.killed_before
    raise AssertionError


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)], ids=["sampled", "everywhere"])
def test_a_kill_of_either_of_two_ranks_leaves_the_old_or_the_new_checkpoint(ranks: RankPool, tmp_path, victim, every):
    (moments,) = ranks(1).run(kill_a_rank, tmp_path, True, victim, every, process_group=False, deadline=250)
    # Only the coordinator commits, and it does so after rank 1 has done its part.
    check(moments, [1, 2] if victim == 0 else [1])
    assert all(isinstance(outcome, Failure) for moment in moments for outcome in moment.survivors)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_of_either_of_two_ranks_in_a_first_save_leaves_nothing_or_a_whole_checkpoint(
    ranks: RankPool, tmp_path, victim
):
    (moments,) = ranks(1).run(kill_a_rank, tmp_path, False, victim, 1, process_group=False, deadline=250)
    # The survivor may or may not have begun a file when it hears of it.
    alike = [replace(moment, found=NOTHING) if moment.found == CUT_OFF else moment for moment in moments]
    check(alike, [NOTHING, 2] if victim == 0 else [NOTHING])


class SlowToCommit(LocalStore):
    """Its commit takes until the other rank has given up."""

    def commit(self, name: str, content: bytes, *, replaces: bytes | None) -> None:
        while not (self.folder / "rank 1 is gone").exists():
            pass
        super().commit(name, content, replaces=replaces)


def save_while_rank_1_gives_up(folder: Path) -> None:
    if dist.get_rank() == 1:
        commit = SaveRun.commit

        def lose_connection(*_: Any) -> None:
            raise ConnectionLostError("the network is down")

        def give_up(*args: Any) -> None:
            LinkedCollectives.broadcast_object = lose_connection  # by which rank 1 would hear of the commit
            try:
                commit(*args)
            finally:
                (folder / "rank 1 is gone").touch()

        SaveRun.commit = give_up
    save(2, SlowToCommit(folder))


def two_ranks_of_which_one_gives_up(folder: Path) -> tuple[list[Any], Any, set[str]]:
    save(1, folder)
    outcomes, _ = run_on_forked_ranks(partial(save_while_rank_1_gives_up, folder), 2, below=folder)
    return outcomes, found_in(folder), needless_files(folder)


def test_a_rank_that_gives_up_while_the_coordinator_commits_leaves_its_files(ranks: RankPool, tmp_path):
    ((outcomes, found, needless),) = ranks(1).run(two_ranks_of_which_one_gives_up, tmp_path, process_group=False)
    assert found == 2
    assert needless == {"rank 1 is gone"}
    assert isinstance(outcomes[1], Failure)


class Full(LocalStore):
    """A disk that is full when it comes to the named kind of file."""

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__(folder)
        self.kind = kind

    def create(self, name: str, size: int | None = None, memory: int | None = None) -> Any:
        if name.startswith(self.kind):
            raise OSError(28, "No space left on device", name)
        return super().create(name, size, memory)


def save_to_a_full_disk(folder: Path, kind: str, rank: int) -> str:
    store = Full(folder, kind) if dist.get_rank() == rank else LocalStore(folder)
    try:
        save(2, store)
    except OSError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(("kind", "rank"), [("data", 0), ("data", 1), (".holdfast.json", 0)])
def test_an_error_on_one_rank_leaves_the_old_checkpoint_and_no_trace(ranks: RankPool, tmp_path, kind, rank):
    save(1, tmp_path)
    put_foreign_files(tmp_path)
    told = ranks(2).run(save_to_a_full_disk, tmp_path, kind, rank)
    assert all("No space left" in text for text in told)
    assert found_in(tmp_path) == 1
    assert needless_files(tmp_path) == set()
    assert foreign_files_are_there(tmp_path)
