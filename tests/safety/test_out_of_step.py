"""A rank that leaves out calls, is late or makes others has no part in those; in the next common one it has again.

All in one process group, and without anything that the program would have to do.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
import holdfast.dcp as dcp
from holdfast._ranks.meeting import meeting
from holdfast.errors import HoldfastError, MissingRanksError, RankDisagreementError
from tests.many_ranks import run_forked

TIMEOUT = 2.0
SIZE = 3
CULPRIT = 1
PATIENCE = 300.0
"""Of the process group: longer than a test may take."""


def state_of(number: int) -> dict[str, Any]:
    return {"weights": torch.full((8,), float(number)), "rank": holdfast.PerRank(dist.get_rank())}


def save(folder: Path, number: int, timeout: float) -> Any:
    return holdfast.save(state_of(number), folder / f"{number}", timeout=timeout)


def save_to_the_same(folder: Path, number: int, timeout: float) -> Any:
    return holdfast.save(state_of(number), folder / "0", overwrite=True, timeout=timeout)


def async_save(folder: Path, number: int, timeout: float) -> Any:
    return holdfast.async_save(state_of(number), folder / f"{number}", timeout=timeout).result()


def dcp_save(folder: Path, number: int, timeout: float) -> Any:
    os.environ["HOLDFAST_TIMEOUT"] = str(timeout)
    return dcp.save({"weights": torch.full((8,), float(number))}, checkpoint_id=folder / f"{number}")


def mixed(folder: Path, number: int, timeout: float) -> Any:
    return (async_save if number % 2 else save)(folder, number, timeout)


Verb = Callable[[Path, int, float], Any]
VERBS: dict[str, Verb] = {each.__name__: each for each in (save, save_to_the_same, async_save, dcp_save, mixed)}


def outcome_of(call: Callable[[], Any]) -> Any:
    """None, or what it raised."""
    try:
        call()
    except HoldfastError as error:
        return error
    return None


def leave_out(verb_name: str, left_out: Sequence[int], culprits: Sequence[int], folder: Path) -> list[Any]:
    """All ranks make calls 0 to 5, except for the culprits, which leave out some of them."""
    verb, outcomes = VERBS[verb_name], []
    dist.barrier()  # ranks that begin at different times would wait for each other as well
    for number in range(6):
        is_common = number not in left_out
        if is_common or dist.get_rank() not in culprits:
            outcomes.append(outcome_of(lambda: verb(folder, number, 60.0 if is_common else TIMEOUT)))  # noqa: B023
        else:
            outcomes.append("left out")
        dist.barrier()
    return outcomes


QUICK = [*((verb, (1, 2), 1) for verb in VERBS), ("save", (0, 2), 0), ("save", (1,), 1)]
LONG = list(product(VERBS, [(1,), (0,), (1, 2), (0, 2)], [0, 1]))


@pytest.mark.parametrize(
    ("verb", "left_out", "culprit"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG if case not in QUICK)],
)
def test_a_rank_that_leaves_out_calls_has_part_in_the_next(verb, left_out, culprit, tmp_path: Path):
    found = run_forked(SIZE, leave_out, verb, left_out, [culprit], tmp_path, group_timeout=PATIENCE)
    for rank, outcomes in enumerate(found):
        for number, outcome in enumerate(outcomes):
            if number not in left_out:
                assert outcome is None, (rank, number, outcome)
            elif rank == culprit:
                assert outcome == "left out"
            else:
                assert isinstance(outcome, MissingRanksError), (rank, number, outcome)
                assert outcome.ranks == [culprit], str(outcome)


LATER = ("async_save", "mixed")


def come_late(verb_name: str, calls: int, others_wait: bool, folder: Path) -> list[Any]:
    """A rank makes calls when the others have given up on all of these."""
    verb, is_late = VERBS[verb_name], dist.get_rank() == CULPRIT
    dist.barrier()
    if is_late:
        dist.barrier()
    outcomes = [outcome_of(lambda: verb(folder, number, TIMEOUT)) for number in range(calls)]  # noqa: B023
    if not is_late:
        dist.barrier()
    if others_wait:
        dist.barrier()  # outside of Holdfast
    return [*outcomes, *(outcome_of(lambda: verb(folder, number, 60.0)) for number in (7, 8))]  # noqa: B023


@pytest.mark.parametrize("others_wait", [True, False])
@pytest.mark.parametrize("calls", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("verb", ["save", "dcp_save", *(pytest.param(x, marks=pytest.mark.long) for x in LATER)])
def test_a_rank_that_is_late_has_part_in_the_next_call(verb, calls, others_wait, tmp_path: Path):
    found = run_forked(SIZE, come_late, verb, calls, others_wait, tmp_path, group_timeout=PATIENCE)
    for rank, (*missed, first, second) in enumerate(found):
        assert (first, second) == (None, None), (rank, missed, first, second)
        for outcome in missed:
            assert isinstance(outcome, MissingRanksError)
            assert outcome.ranks == [CULPRIT]
            assert ("gave up on this call before this rank (1) joined" in str(outcome)) == (rank == CULPRIT)


def be_late_to_a_call_like_the_next(folder: Path) -> list[Any]:
    """The others wait outside of Holdfast, so that there is nobody to say whether the call is the old one."""
    save_to_the_same(folder, 0, 60.0)
    return come_late("save_to_the_same", 1, True, folder)


def test_a_rank_that_is_late_to_a_call_that_looks_like_the_next_does_not_wait_for_that(tmp_path: Path):
    for missed, *common in run_forked(SIZE, be_late_to_a_call_like_the_next, tmp_path, group_timeout=PATIENCE):
        assert isinstance(missed, MissingRanksError)
        assert common == [None, None]


def try_again(folder: Path) -> list[Any]:
    dist.barrier()
    is_late = dist.get_rank() == CULPRIT
    if is_late:
        dist.barrier()
    else:
        assert isinstance(outcome_of(lambda: save(folder, 0, TIMEOUT)), MissingRanksError)
        dist.barrier()
    return [outcome_of(lambda: save(folder, number, 60.0)) for number in range(2)]  # noqa: B023


def test_a_call_that_is_tried_again_meets_the_rank_that_was_late_to_it(tmp_path: Path):
    assert run_forked(SIZE, try_again, tmp_path, group_timeout=PATIENCE) == [[None, None]] * SIZE
    assert holdfast.open(tmp_path / "0")["weights"][0] == 0


def fail_before_the_call(folder: Path) -> list[Any]:
    outcomes = []
    for number in range(3):
        wrong = number == 1 and dist.get_rank() == CULPRIT
        try:
            outcomes.append(outcome_of(lambda: save(folder, number, -1.0 if wrong else TIMEOUT)))  # noqa: B023
        except ValueError as error:
            outcomes.append(error)
        dist.barrier()
    return outcomes


def test_a_rank_that_raises_before_it_joins_has_part_in_the_next_call(tmp_path: Path):
    for rank, outcomes in enumerate(run_forked(SIZE, fail_before_the_call, tmp_path, group_timeout=PATIENCE)):
        kind = ValueError if rank == CULPRIT else MissingRanksError
        assert [type(each) for each in outcomes] == [type(None), kind, type(None)]


def call_something_else(folder: Path) -> list[Any]:
    """On the same connection, on the other one, and elsewhere."""
    is_culprit = dist.get_rank() == CULPRIT
    outcomes = []
    for number, other in enumerate((lambda: save(folder, 99, TIMEOUT), lambda: async_save(folder, 1, TIMEOUT))):
        outcomes.append(outcome_of(other if is_culprit else lambda: save(folder, number, TIMEOUT)))  # noqa: B023
        dist.barrier()
        outcomes.append(outcome_of(lambda: async_save(folder, number + 10, 60.0)))  # noqa: B023
        outcomes.append(outcome_of(lambda: save(folder, number + 20, 60.0)))  # noqa: B023
    return outcomes


def test_a_rank_that_makes_another_call_has_part_in_the_next(tmp_path: Path):
    for rank, outcomes in enumerate(run_forked(SIZE, call_something_else, tmp_path, group_timeout=PATIENCE)):
        kinds = [type(each) for each in outcomes]
        assert kinds[::3] == [RankDisagreementError, MissingRanksError], outcomes
        assert kinds[1:3] == kinds[4:] == [type(None)] * 2, outcomes
        assert outcomes[3].ranks == ([0] if rank == CULPRIT else [CULPRIT])  # it waits for its leader


def be_stopped_between_calls(folder: Path) -> list[Any]:
    """For two calls of the others; the second of them finds it in the first one, which it is late to."""
    rank = dist.get_rank()
    save(folder, 0, 60.0)
    pids: list[Any] = [None] * SIZE
    dist.all_gather_object(pids, os.getpid())
    if rank == CULPRIT:
        os.kill(os.getpid(), signal.SIGSTOP)
    outcomes = [outcome_of(lambda: save(folder, number, TIMEOUT)) for number in (1, 2)]  # noqa: B023
    if rank != CULPRIT:
        (folder / f"over-{rank}").touch()
    if rank == 0:
        while not (folder / "over-2").exists():
            time.sleep(0.01)
        os.kill(pids[CULPRIT], signal.SIGCONT)
    return [*outcomes, outcome_of(lambda: save(folder, 3, 60.0))]


def test_a_rank_that_was_stopped_has_part_in_the_next_call(tmp_path: Path):
    for *missed, common in run_forked(SIZE, be_stopped_between_calls, tmp_path, group_timeout=PATIENCE):
        assert [each.ranks for each in missed] == [[CULPRIT]] * 2
        assert common is None


def leave_out_in_a_tree(culprits: Sequence[int]) -> list[Any]:
    """The ranks of several groups."""
    outcomes = []
    for number in range(5):
        is_common = number not in (1, 2)
        if is_common or dist.get_rank() not in culprits:

            def call() -> None:
                with meeting(f"call {number}", timeout=60.0 if is_common else TIMEOUT) as ranks:  # noqa: B023
                    ranks.barrier()

            outcomes.append(outcome_of(call))
        else:
            outcomes.append("left out")
        dist.barrier()
    return outcomes


@pytest.mark.parametrize(
    ("size", "culprits"),
    [
        pytest.param(33, [32], id="the only one of its group"),
        pytest.param(40, [0, 35], id="the root and a leaf of another group"),
        pytest.param(40, [32, 33], id="a leader and one that it leads", marks=pytest.mark.long),
        pytest.param(40, list(range(20)), id="half of them", marks=pytest.mark.long),
    ],
)
def test_ranks_of_a_tree_that_leave_out_calls_have_part_in_the_next(size, culprits):
    found = run_forked(size, leave_out_in_a_tree, culprits, group_timeout=PATIENCE, deadline=200)
    for rank, outcomes in enumerate(found):
        assert outcomes[::3] + outcomes[4:] == [None] * 3, (rank, outcomes)
        for outcome in outcomes[1:3]:
            if rank in culprits:
                assert outcome == "left out"
            else:
                assert isinstance(outcome, MissingRanksError), (rank, outcome)
                assert set(outcome.ranks) <= set(culprits), (rank, str(outcome))
