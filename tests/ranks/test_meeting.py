"""The ranks of a call: they are in the same one, one's failure is everybody's, and who is missing is known."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from holdfast._ranks import private_group as roll_call
from holdfast._ranks.meeting import meeting
from holdfast._ranks.private_group import RollCall, private_group_of
from holdfast.errors import CheckpointNotFoundError, HoldfastError, MissingRanksError, RankDisagreementError
from tests.rank_pool import RankPool


def test_without_a_group_a_process_is_alone():
    with meeting("anything") as ranks:
        assert (ranks.rank, ranks.world_size, ranks.is_coordinator) == (0, 1, True)
        assert ranks.all_gather("step", lambda: 5) == [5]


def test_alone_the_very_error_is_raised():
    mine = CheckpointNotFoundError("nothing here", path="x")
    with pytest.raises(CheckpointNotFoundError) as caught, meeting("anything") as ranks:
        ranks.all_gather("step", lambda: _raise(mine))
    assert caught.value is mine


def _raise(error: BaseException) -> Any:
    raise error


def meet() -> Any:
    with meeting("one") as ranks:
        first = ranks.all_gather("step", lambda: ranks.rank)
    with meeting("two") as ranks:
        return first, ranks.all_reduce("step", lambda: ranks.rank, sum)


def test_ranks_meet_again_and_again(ranks: RankPool):
    assert ranks(3).run(meet) == [([0, 1, 2], 3)] * 3


def fail(failing: list[int], error: Exception) -> Any:
    rank = dist.get_rank()
    with pytest.raises(type(error)) as caught, meeting("call") as ranks:
        ranks.all_gather("step", lambda: _raise(error) if rank in failing else None)
    with meeting("next") as ranks:
        assert ranks.all_gather("step", lambda: 1) == [1] * 3
    notes = " ".join(getattr(caught.value, "__notes__", []))
    fields = (caught.value.fields, caught.value.path) if isinstance(caught.value, HoldfastError) else None
    return f"{caught.value} {notes}", fields, type(caught.value.__cause__).__name__


@pytest.mark.parametrize("error", [CheckpointNotFoundError("gone", path="p"), ValueError("gone"), OSError(28, "gone")])
def test_all_ranks_raise_what_the_lowest_failing_rank_raised(ranks: RankPool, error):
    for text, fields, cause in ranks(3).run(fail, [1, 2], error):
        assert "gone" in text
        assert "[on rank 1; rank(s) [2] failed too]" in text
        assert fields == (({"rank": 1, "path": "p"}, "p") if isinstance(error, HoldfastError) else None)
        assert cause == "CheckpointException"


def meet_differently() -> Any:
    with pytest.raises(RankDisagreementError) as caught, meeting(f"call {dist.get_rank() // 2}"):
        raise AssertionError
    with meeting("next") as ranks:
        ranks.barrier()
    return caught.value.views


def test_ranks_in_different_calls_are_reported(ranks: RankPool):
    assert ranks(3).run(meet_differently) == [{0: "call 0", 1: "call 0", 2: "call 1"}] * 3


def be_an_outsider() -> str:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        with meeting("call", group) as ranks:
            return f"{ranks.world_size}"
    with pytest.raises(ValueError, match="rank 1 is not in the process group") as caught, meeting("call", group):
        raise AssertionError
    return str(caught.value)


def test_ranks_outside_of_the_group_are_reported_and_nobody_waits_for_them(ranks: RankPool):
    assert ranks(2).run(be_an_outsider)[0] == "1"


# --- the roll --------------------------------------------------------------------------------------------------------


def test_the_roll_knows_how_far_everybody_is():
    store = dist.HashStore()
    rolls = [RollCall(store, rank, 4) for rank in range(4)]
    for roll in rolls[:3]:
        roll.begin("first")
        roll.note()
    for roll in rolls[:2]:
        roll.begin("second")
        roll.note()
    rolls[0].note()
    assert rolls[0].missing() == {
        1: "it was last seen in second, busy or dead",
        2: "it has not come back to Holdfast since first",
        3: "it has not called anything that all ranks have to call",
    }
    assert list(rolls[1].missing()) == [2, 3]
    assert list(rolls[2].missing()) == [3]


def test_a_rank_that_comes_late_when_another_died_is_not_called_missing(monkeypatch):
    store = dist.HashStore()
    rolls = [RollCall(store, rank, 3) for rank in range(3)]
    for roll in rolls:
        roll.begin("call")
        roll.note()
    rolls[0].note()
    monkeypatch.setattr(roll_call.time, "sleep", lambda seconds: rolls[1].note())
    assert list(rolls[0].missing()) == [2]


class GoneStore:
    def __getattr__(self, name: str) -> Any:
        raise ConnectionError


def test_a_call_does_without_the_roll_if_its_store_is_gone():
    roll = RollCall(GoneStore(), 0, 2)
    roll.begin("call")
    roll.note()
    with pytest.raises(ConnectionError):
        roll.missing()


def be_late_in_a_step() -> Any:
    """One rank does not come to the second exchange before the others have given up."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()

    def call() -> None:
        with meeting("the call") as ranks:
            ranks.all_gather("first", lambda: 1)
            if rank == 2:
                store.wait(["gave up 0", "gave up 1"], timedelta(seconds=60))
            ranks.all_gather("second", lambda: 1)

    with pytest.raises(RuntimeError) as caught:
        call()
    store.set(f"gave up {rank}", "")
    return caught.value


def test_a_rank_that_is_late_in_a_step_is_named(ranks: RankPool):
    found = ranks(3).run(be_late_in_a_step, group_timeout=2)
    for error in found[:2]:
        assert isinstance(error, MissingRanksError)
        assert error.ranks == [2]
        assert "rank 2 (it was last seen in the call, busy or dead)" in str(error)
        assert "within 2 s" in str(error)


def name_in_subgroup() -> Any:
    group = dist.new_group([1, 2], timeout=timedelta(seconds=2))
    if dist.get_rank() != 1:
        return None
    with pytest.raises(MissingRanksError) as caught, meeting("call", group):
        raise AssertionError
    return caught.value.ranks


def test_missing_ranks_are_called_as_the_job_counts_them(ranks: RankPool):
    assert ranks(3).run(name_in_subgroup) == [None, [2], None]


def background_has_no_roll() -> bool:
    return private_group_of(None, "background")._roll is None and private_group_of(None, "calls")._roll is not None


def test_background_saves_do_not_depend_on_the_store(ranks: RankPool):
    assert ranks(2).run(background_has_no_roll) == [True, True]
