"""The ranks of a call: they are in the same one, one's failure is everybody's, and who is missing is known."""

from __future__ import annotations

from datetime import timedelta
from itertools import count
from typing import Any

import pytest
import torch.distributed as dist

from holdfast._ranks import roll_call
from holdfast._ranks.meeting import meeting
from holdfast._ranks.private_group import private_group_of
from holdfast._ranks.roll_call import RollCall, Watch
from holdfast._watching.calls import Call
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


def watch_over(rank: int, store: Any, *, timeout: float = 10.0, size: int = 4) -> Watch:
    """What watches over a rank, without its thread: the test looks."""
    return Watch(rank, size, pytest.fail, open_roll=lambda: RollCall(store, rank), timeout=timeout)


def note(watch: Watch, call: int, exchange: int, name: str, waits_for: list[int]) -> None:
    watch.call, watch.exchange, watch.name, watch.waits_for = call, exchange, name, waits_for
    watch.roll().publish(watch.own_note())


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(roll_call, "time", clock)
    return clock


def test_whoever_makes_no_progress_is_named_after_the_timeout_and_what_is_known_of_it(clock):
    store = dist.HashStore()
    first, busy, elsewhere, _ = watches = [watch_over(rank, store) for rank in range(4)]
    note(busy, 2, 1, "second", [])
    note(elsewhere, 1, 5, "first", [])
    note(first, 2, 2, "second", [1, 2, 3])
    assert first._look((0, 2)) is None
    clock.now = 9.9
    assert first._look((0, 2)) is None
    clock.now = 10.0
    verdict = first._look((0, 2))
    assert verdict.missing == {
        1: "it was last seen in second: busy without progress, stopped or dead",
        2: "it has not called Holdfast again since first",
        3: "it has not joined this call",
    }
    assert watches[1]._look((0, 2)) == verdict  # which the others find


def test_progress_starts_the_time_anew(clock):
    store = dist.HashStore()
    first, busy = (watch_over(rank, store) for rank in range(2))
    busy.progress = call = Call("save", "x")
    note(first, 1, 2, "call", [1])
    for seconds in range(0, 50, 8):
        clock.now = seconds
        call.advance(1000)
        note(busy, 1, 1, "call", [])
        assert first._look((0, 1)) is None
    clock.now += 10
    note(busy, 1, 1, "call", [])  # it is alive, which is not enough
    assert "last seen in call, 7.0 KB done" in first._look((0, 1)).missing[1]


def test_time_in_which_a_rank_was_stopped_itself_is_not_held_against_others(clock):
    store = dist.HashStore()
    first, other = (watch_over(rank, store) for rank in range(2))
    note(first, 1, 2, "call", [1])
    note(other, 1, 1, "call", [])
    assert first._look((0, 1)) is None
    clock.now = 60.5
    first.oversleep(60.0)
    assert first._look((0, 1)) is None
    clock.now = 70.0
    first.oversleep(0.1)  # as it happens to everybody
    assert list(first._look((0, 1)).missing) == [1]


def test_bytes_of_the_process_pass_for_progress_but_not_for_ever(clock, monkeypatch):
    store = dist.HashStore()
    first, busy = (watch_over(rank, store) for rank in range(2))
    busy.progress = call = Call("save", "x")
    call.advance(1000)
    moved = count(1)
    monkeypatch.setattr(busy._signs, "look", lambda: next(moved) << 20)
    note(first, 1, 2, "call", [1])
    for seconds in range(0, 100, 8):  # ten timeouts
        clock.now = seconds
        note(busy, 1, 1, "call", [])
        assert first._look((0, 1)) is None
    clock.now += 8
    note(busy, 1, 1, "call", [])
    assert first._look((0, 1)) is None
    clock.now += 8
    note(busy, 1, 1, "call", [])
    assert "last seen in call, 1.0 KB done" in first._look((0, 1)).missing[1]  # and not what its process has moved


def test_bytes_of_a_process_that_saves_in_the_background_say_nothing(monkeypatch):
    watch = watch_over(0, dist.HashStore())
    watch.shows_signs = False
    monkeypatch.setattr(watch._signs, "look", pytest.fail)
    assert watch.own_note().signs == 0


def test_what_arrives_is_progress_of_those_that_send_it(clock):
    store = dist.HashStore()
    first, other = (watch_over(rank, store) for rank in range(2))
    note(first, 1, 1, "call", [1])
    note(other, 1, 1, "call", [])
    for seconds in range(0, 50, 8):
        clock.now = seconds
        assert first._look((0, 1)) is None
        first.transfers += 1
    clock.now += 8
    assert first._look((0, 1)) is None
    clock.now += 10
    assert list(first._look((0, 1)).missing) == [1]


def test_ranks_that_wait_for_each_other_and_a_third_one_at_once_name_only_that(clock):
    store = dist.HashStore()
    first, second, third = (watch_over(rank, store) for rank in range(3))
    first.waits_at_once = True
    note(third, 1, 1, "call", [])
    for seconds in (0, 8, 16):
        clock.now = seconds
        note(first, 1, 1, "call", [1, 2])
        note(second, 1, 1, "call", [0, 2])
        found = first._look((0, 1))
    assert list(found.missing) == [2]


def test_a_rank_that_waits_itself_is_not_to_blame_as_long_as_it_is_alive(clock):
    store = dist.HashStore()
    first, leader = (watch_over(rank, store) for rank in range(2))
    note(first, 1, 2, "call", [1])
    for seconds in range(0, 50, 8):
        clock.now = seconds
        note(leader, 1, 2, "call", [3])
        assert first._look((0, 1)) is None
    clock.now += 10
    assert list(first._look((0, 1)).missing) == [1]


def test_a_rank_that_has_come_is_not_to_blame_when_it_is_not_its_turn_yet(clock):
    store = dist.HashStore()
    leader, come, missing = (watch_over(rank, store) for rank in range(3))
    note(leader, 1, 2, "call", [2, 1])
    note(come, 1, 2, "call", [0])
    assert leader._look((0, 1)) is None
    clock.now = 10.0
    assert list(leader._look((0, 1)).missing) == [2]
    assert missing.waits_for == ()


class GoneStore:
    def __getattr__(self, name: str) -> Any:
        raise ConnectionError


def test_a_rank_is_named_also_if_the_store_is_gone(clock):
    watch = watch_over(0, GoneStore())
    watch.call, watch.exchange, watch.waits_for = 1, 1, [2, 1]
    assert watch._look((0, 1)) is None
    clock.now = 10.0
    assert watch._look((0, 1)).missing == {2: "nothing is known of it, since the process group's store is gone"}


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
        assert "rank 2 (it was last seen in the call: busy without progress, stopped or dead)" in str(error)
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


def wait_without_a_store() -> Any:
    """The process group is gone, and with it the store."""
    group = private_group_of(None, "background")
    with group.round() as link:
        link.all_gather(b"")
    group._watch.open_roll = group._watch._roll = None
    dist.destroy_process_group()
    if group.rank == 1:
        return None
    with pytest.raises(MissingRanksError) as caught, group.round("a save", timeout=1) as link:
        link.all_gather(b"")
    return caught.value.ranks


def test_background_saves_do_not_depend_on_the_store(ranks: RankPool):
    assert ranks(2).run(wait_without_a_store) == [[1], None]
