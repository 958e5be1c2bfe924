"""A killed save leaves the old checkpoint or the new one, intact, and nothing that the next save does not remove.

The processes are real and so is the SIGKILL: it comes just before the n-th system call by which a save changes the
disk, for every n. Every folder also holds a file of somebody else, which must be there in the end.
"""

from __future__ import annotations

import itertools
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as stock

from tests.rank_pool import RankPool
from tests.safety.checkpoints import found_in, needless_files, save, state
from tests.safety.forked_ranks import Failure, run_on_forked_ranks
from tests.safety.syscalls import require_tracing, watch


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


CHECKPOINT = Path("checkpoints", "step")


def prepare(folder: Path, old: Callable[[Path], Any] | None) -> Iterator[Path]:
    """Any number of folders with the old checkpoint in it."""
    original = folder / "original"
    original.mkdir()
    if old is not None:
        old(original / CHECKPOINT)
        (original / CHECKPOINT / "notes.txt").write_text("do not touch")
    for number in itertools.count():
        yield Path(shutil.copytree(original, folder / str(number)))


def kill_everywhere(folder: Path, old: Callable[[Path], None] | None, new: Callable[[Path], None]) -> list[Moment]:
    moments: list[Moment] = []
    for number, place in enumerate(prepare(folder, old)):
        checkpoint = place / CHECKPOINT
        watched = watch([partial(new, checkpoint)], place, kill_at=number)
        if watched.killed_before is None:
            assert watched.exit_codes == {0: 0}
            assert found_in(checkpoint) == 2
            assert needless_files(checkpoint) <= {"notes.txt"}
            return moments
        found = found_in(checkpoint)
        save(3, checkpoint, use_collectives=new is not new_rank_by_rank)
        moments.append(Moment(watched.killed_before, found, found_in(checkpoint), needless_files(checkpoint)))
    raise AssertionError


def old_plain(checkpoint: Path) -> None:
    save(1, checkpoint)


def old_from_stock_torch(checkpoint: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.save(state(1), checkpoint_id=checkpoint)


def old_rank_by_rank(checkpoint: Path) -> None:
    save(1, checkpoint, use_collectives=False)


def new_plain(checkpoint: Path) -> None:
    save(2, checkpoint)


def new_in_many_files(checkpoint: Path) -> None:
    save(2, checkpoint, thread_count=3, single_file_per_rank=False)


def new_rank_by_rank(checkpoint: Path) -> None:
    save(2, checkpoint, use_collectives=False)


@pytest.mark.parametrize("new", [new_plain, new_in_many_files, new_rank_by_rank])
def test_a_kill_at_any_system_call_of_a_first_save_leaves_no_checkpoint_or_a_whole_one(ranks: RankPool, tmp_path, new):
    (moments,) = ranks(1).run(kill_everywhere, tmp_path, None, new, process_group=False)
    check_moments(moments, before="nothing")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (old_plain, new_plain),
        (old_plain, new_in_many_files),
        (old_from_stock_torch, new_plain),
        (old_plain, new_rank_by_rank),
        (old_rank_by_rank, new_plain),
        (old_rank_by_rank, new_rank_by_rank),
    ],
)
def test_a_kill_at_any_system_call_of_an_overwrite_leaves_the_old_or_the_new_checkpoint(
    ranks: RankPool, tmp_path, old, new
):
    (moments,) = ranks(1).run(kill_everywhere, tmp_path, old, new, process_group=False)
    check_moments(moments, before=1)


def check_moments(moments: list[Moment], *, before: Any) -> None:
    story = "\n".join(f"killed before {moment.before}: {moment.found}" for moment in moments)
    assert {moment.found for moment in moments} == {before, 2}, story
    assert {moment.found_after_next_save for moment in moments} == {3}, story
    for moment in moments:
        assert moment.needless <= {"notes.txt"}, f"after a kill before {moment.before} and another save"


def kill_a_rank_everywhere(
    folder: Path, old: Callable[[Path], None] | None, new: Callable[[Path], None], victim: int
) -> list[Moment]:
    moments: list[Moment] = []
    for number, place in enumerate(prepare(folder, old and partial(on_two_ranks, old))):
        checkpoint = place / CHECKPOINT
        checkpoint.mkdir(parents=True, exist_ok=True)  # the ranks would race for it, and change n be another each time
        outcomes, watched = run_on_forked_ranks(partial(new, checkpoint), 2, below=place, victim=victim, kill_at=number)
        by_rank = {old, new} & {old_rank_by_rank, new_rank_by_rank}
        found = found_on_two_ranks(checkpoint) if by_rank else found_in(checkpoint)
        if watched.killed_before is None:
            assert not any(isinstance(outcome, Failure) for outcome in outcomes), outcomes
            assert found == 2
            assert needless_files(checkpoint) <= {"notes.txt"}
            return moments
        save(3, checkpoint, use_collectives=new is not new_rank_by_rank)
        survivors = tuple(outcome for rank, outcome in enumerate(outcomes) if rank != victim)
        moments.append(
            Moment(watched.killed_before, found, found_in(checkpoint), needless_files(checkpoint), survivors)
        )
    raise AssertionError


def on_two_ranks(function: Callable[[Path], Any], checkpoint: Path) -> list[Any]:
    return run_on_forked_ranks(partial(function, checkpoint), 2, below=checkpoint)[0]


def found_on_two_ranks(checkpoint: Path) -> Any:
    """What both ranks of a job load."""
    one, other = on_two_ranks(found_in, checkpoint)
    return one if one == other else f"rank 0 loads {one}, rank 1 loads {other}"


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("old", [None, old_plain])
def test_a_kill_of_either_of_two_ranks_leaves_the_old_or_the_new_checkpoint(ranks: RankPool, tmp_path, old, victim):
    (moments,) = ranks(1).run(kill_a_rank_everywhere, tmp_path, old, new_plain, victim, process_group=False)
    before = "nothing" if old is None else 1
    if victim == 0:
        check_moments(moments, before=before)
        return
    # Only the coordinator commits, and it does so after rank 1 has done its part.
    assert {moment.found for moment in moments} == {before}
    assert all(isinstance(outcome, Failure) for moment in moments for outcome in moment.survivors)
    assert all(moment.needless <= {"notes.txt"} for moment in moments)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (old_rank_by_rank, new_rank_by_rank),
        pytest.param(old_plain, new_rank_by_rank, marks=pytest.mark.long),
        pytest.param(old_rank_by_rank, new_plain, marks=pytest.mark.long),
    ],
)
def test_a_kill_of_either_of_two_ranks_that_save_for_themselves_leaves_the_old_or_the_new_checkpoint(
    ranks: RankPool, tmp_path, old, new, victim
):
    (moments,) = ranks(1).run(kill_a_rank_everywhere, tmp_path, old, new, victim, process_group=False)
    if new is new_plain and victim == 1:
        assert {moment.found for moment in moments} == {1}
    else:
        check_moments(moments, before=1)
