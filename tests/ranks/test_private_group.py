"""The ranks' private connection: whole messages, rounds, and nobody who waits for a rank that has left."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from holdfast._ranks.interrupts import interrupts_wait
from holdfast._ranks.meeting import LinkedCollectives
from holdfast._ranks.private_group import PrivateGroup, forget_private_group, private_group_of
from holdfast.errors import CheckpointException, ConnectionLostError, MissingRanksError
from tests.rank_pool import RankPool


def exchange_everything(root: int) -> list[Any]:
    group = private_group_of(None)
    rank, size = group.rank, len(group.members)
    mine = bytes([rank]) * rank * 1000  # uneven, and nothing from rank 0
    with group.round():
        return [
            [len(part) for part in group.all_gather(mine)],
            group.gather(mine, root),
            group.scatter([bytes([n]) * n for n in range(size)] if rank == root else None, root),
            group.broadcast(b"from the root" if rank == root else None, root),
            group.broadcast(b"" if rank == root else None, root),
            group.all_gather(b""),
        ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_messages_of_any_size_arrive_whole(ranks: RankPool, size: int) -> None:
    for root in {0, size - 1}:
        results = ranks(size).run(exchange_everything, root)
        payloads = [bytes([rank]) * rank * 1000 for rank in range(size)]
        for rank, (lengths, gathered, scattered, said, empty, nothing) in enumerate(results):
            assert lengths == [len(payload) for payload in payloads]
            assert gathered == (payloads if rank == root else None)
            assert scattered == bytes([rank]) * rank
            assert (said, empty, nothing) == (b"from the root", b"", [b""] * size)


def steps_of_collectives(coordinator: int) -> list[Any]:
    with private_group_of(None).round() as group:
        steps = LinkedCollectives(group, coordinator)
        found = [
            steps.get_rank(),
            steps.get_world_size(),
            steps.global_ranks(),
            steps.is_coordinator,
            steps.all_gather("plan", lambda: steps.rank * 10),
            steps.reduce_scatter("plan", lambda: steps.rank, lambda all_ranks: [sum(all_ranks) + n for n in all_ranks]),
            steps.all_reduce("write", lambda: steps.rank, sum),
            steps.broadcast("plan", lambda: f"from {steps.rank}"),
        ]
        steps.barrier()
        with pytest.raises(CheckpointException) as caught:
            steps.all_gather("read", lambda: 1 // steps.rank)
        found.append(list(caught.value.failures))
        return found


@pytest.mark.parametrize("coordinator", [0, 2])
def test_it_carries_all_steps_of_collectives(ranks: RankPool, coordinator: int) -> None:
    for rank, found in enumerate(ranks(3).run(steps_of_collectives, coordinator)):
        assert found == [
            rank,
            3,
            (0, 1, 2),
            rank == coordinator,
            [0, 10, 20],
            3 + rank,
            3,
            f"from {coordinator}",
            [0],
        ]


def leave_early(leaver: int, how: str) -> tuple[str, list[int]]:
    group = private_group_of(None)
    error: Any = None
    try:
        with group.round():
            group.all_gather(b"together")
            if group.rank == leaver and how == "raises":
                raise KeyError("only here")
            if not (group.rank == leaver and how == "returns"):
                group.gather(b"alone", 0)
    except Exception as raised:
        error = raised
    with group.round():  # the next round has all of them again
        after = [part[0] for part in group.all_gather(bytes([group.rank]))]
    return f"{type(error).__name__}: {error}", after


@pytest.mark.parametrize("how", ["raises", "returns"])
@pytest.mark.parametrize("leaver", [0, 2])
def test_a_rank_that_left_is_noticed_and_the_next_round_works(ranks: RankPool, leaver: int, how: str) -> None:
    results = ranks(3).run(leave_early, leaver, how, deadline=30)
    for rank, (error, after) in enumerate(results):
        assert after == [0, 1, 2]
        if rank != leaver:
            assert error.startswith("CheckpointException")
            assert f"rank {leaver} gave up the save" in error
        else:
            assert error.startswith("KeyError" if how == "raises" else "NoneType")


def talk_on_both_groups() -> bool:
    """The program uses its own group all the time, in an order that has nothing to do with the private one."""
    group, stop, failures = private_group_of(None), threading.Event(), []

    def chat() -> None:
        try:
            for number in range(50):
                with group.round():
                    assert group.all_gather(bytes([number])) == [bytes([number])] * 2
        except BaseException as error:
            failures.append(error)
        finally:
            stop.set()

    thread = threading.Thread(target=chat)
    thread.start()
    for _ in range(50):
        total = torch.ones(100)
        dist.all_reduce(total)
        assert total.sum() == 200
    thread.join()
    return failures == []


def test_the_program_can_use_its_own_group_meanwhile(ranks: RankPool) -> None:
    assert ranks(2).run(talk_on_both_groups) == [True, True]


def outlive_the_group() -> list[Any]:
    group = private_group_of(None)
    with group.round():
        before = group.all_gather(b"a")
    orphaned_before = group.is_orphaned()
    dist.destroy_process_group()
    with group.round():
        after = group.all_gather(b"b")
    return [before, orphaned_before, after, group.is_orphaned()]


def test_it_outlives_the_process_group(ranks: RankPool) -> None:
    assert ranks(2).run(outlive_the_group) == [[[b"a"] * 2, False, [b"b"] * 2, True]] * 2


def let_go_of_the_store() -> bool:
    store = weakref.ref(c10d._get_process_group_store(c10d._get_default_group()))
    group = private_group_of(None)
    with group.round():
        group.all_gather(b"")
    dist.destroy_process_group()
    gc.collect()
    return store() is None


def test_it_does_not_keep_the_store_of_a_destroyed_group_alive(ranks: RankPool) -> None:
    """It may be a server, whose port a new group wants to have."""
    assert ranks(2).run(let_go_of_the_store) == [True, True]


def make_groups() -> bool:
    whole, part = private_group_of(None), private_group_of(dist.new_group([0, 1]))
    assert private_group_of(None) is whole is private_group_of(dist.group.WORLD)
    assert part is not whole
    assert part.members == whole.members
    forget_private_group(whole)
    return private_group_of(None) is not whole


def test_every_process_group_has_one(ranks: RankPool) -> None:
    assert ranks(2).run(make_groups) == [True, True]


def lose_a_rank() -> list[str] | None:
    group = private_group_of(None)
    with group.round():
        group.all_gather(b"")
    if group.rank == 1:
        forget_private_group(group)
        return None
    found = []
    for _ in range(2):
        with pytest.raises(Exception) as caught, group.round():  # noqa: PT011
            group.all_gather(b"")
        found.append(type(caught.value).__name__ + ": " + str(caught.value))
    return found


def test_a_lost_connection_is_reported_again(ranks: RankPool) -> None:
    (first, second), _ = ranks(2).run(lose_a_rank)
    assert first.startswith(f"{MissingRanksError.__name__}: ranks that all others wait for died, or left: rank 1 (")
    assert second.startswith(ConnectionLostError.__name__)
    assert "lost the connection" in second


def test_it_is_for_rounds_only() -> None:
    store = dist.HashStore()
    group = PrivateGroup(0, (0,), store, "test", dist.constants.default_pg_timeout)
    with pytest.raises(RuntimeError, match="outside of a round"):
        group.all_gather(b"")
    with group.round():
        assert group.all_gather(b"x") == [b"x"]
    with pytest.raises(RuntimeError, match="outside of a round"):
        group.all_gather(b"")


def talk_in_threads() -> list[Any]:
    """Two threads have rounds at the same time, which of them first is up to the machine."""
    found: list[Any] = []

    def meet() -> None:
        for _ in range(20):
            with private_group_of(None, "threads").round() as link:
                sent = f"{dist.get_rank()}".encode() * 1000
                found.append([received == f"{n}".encode() * 1000 for n, received in enumerate(link.all_gather(sent))])

    threads = [threading.Thread(target=meet) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_threads_have_their_rounds_one_after_the_other(ranks: RankPool) -> None:
    for found in ranks(3).run(talk_in_threads, group_timeout=20):
        assert found == [[True] * 3] * 40


def nest_rounds() -> list[Any]:
    group = private_group_of(None, "nested")
    with group.round("a save") as link:
        with pytest.raises(RuntimeError, match="a load is called within another call"), group.round("a load"):
            raise AssertionError
        return link.all_gather(b"still here")


def test_a_round_within_a_round_is_refused_and_the_first_one_goes_on(ranks: RankPool) -> None:
    assert ranks(2).run(nest_rounds) == [[b"still here"] * 2] * 2


def interrupt_between_messages() -> tuple[str, list[bytes]]:
    """Ctrl-C when a question was sent, and the answer has not come yet."""
    group = private_group_of(None, "interrupted")
    ask, handler = group._ask, signal.signal(signal.SIGINT, signal.default_int_handler)

    def ask_and_interrupt(frame: Any, join: Any) -> Any:
        group._ask = ask  # type: ignore[method-assign]
        asked = ask(frame, join)
        signal.raise_signal(signal.SIGINT)
        return asked

    if dist.get_rank() == 1:
        group._ask = ask_and_interrupt  # type: ignore[method-assign]
    error: BaseException | None = None
    try:
        with group.round():
            group.all_gather(b"a" * 100)
            group.all_gather(b"b")
    except BaseException as raised:
        error = raised
    finally:
        signal.signal(signal.SIGINT, handler)
    with group.round():
        return type(error).__name__, group.all_gather(b"again")


def test_an_interrupt_in_the_middle_of_an_exchange_waits_for_its_end(ranks: RankPool) -> None:
    errors = ["CheckpointException", "KeyboardInterrupt", "CheckpointException"]
    found = ranks(3).run(interrupt_between_messages, group_timeout=20)
    assert found == [(error, [b"again"] * 3) for error in errors]


def test_interrupts_that_waited_are_not_lost_if_something_else_fails() -> None:
    before = signal.getsignal(signal.SIGINT)

    @interrupts_wait()
    def fail_interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ValueError("something else")

    with pytest.raises(KeyboardInterrupt) as caught:
        fail_interrupted()
    assert isinstance(caught.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is before


def interrupt_between_question_and_answer(culprit: int) -> tuple[str, list[bytes]]:
    """Something raises where a rank has asked and not been answered, as a reduction on the coordinator may."""
    group = private_group_of(None, "interrupted")
    error: BaseException | None = None
    try:
        with group.round():
            asked = group.ask(b"a")
            if group.rank == culprit:
                raise KeyboardInterrupt
            group.answer(asked)
            group.all_gather(b"b")
    except BaseException as raised:
        error = raised
    with group.round():
        return type(error).__name__, group.all_gather(b"again")


@pytest.mark.parametrize("culprit", [0, 1])
def test_who_leaves_between_a_question_and_its_answer_keeps_nobody_waiting(ranks: RankPool, culprit: int) -> None:
    found = ranks(3).run(interrupt_between_question_and_answer, culprit, group_timeout=20)
    errors = ["KeyboardInterrupt" if rank == culprit else "CheckpointException" for rank in range(3)]
    assert found == [(error, [b"again"] * 3) for error in errors]


def come_late() -> list[bytes]:
    with private_group_of(None, "late").round(timeout=30) as link:
        link.all_gather(b"")
        if link.rank == 1:
            time.sleep(3)
        return link.all_gather(b"x")


def test_a_call_may_have_more_time_than_the_process_group(ranks: RankPool) -> None:
    assert ranks(2).run(come_late, group_timeout=2.0) == [[b"x", b"x"]] * 2


def test_a_timeout_is_a_number_of_seconds() -> None:
    group = PrivateGroup(0, (0,), dist.HashStore(), "test", dist.constants.default_pg_timeout)
    for wrong in (-1, "long", True):
        with pytest.raises(ValueError, match="timeout="), group.round(timeout=wrong):  # type: ignore[arg-type]
            raise AssertionError
