"""Work in threads: nothing outlives the call, the first failure is raised and stops the rest."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from typing import Any

import pytest

from holdfast._base import threads
from holdfast._base.threads import in_order, map_in_threads, share_work, some_threads, work_through

PATIENCE = 60


def no_more_than(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on so many more threads can be started at a time."""
    start = threading.Thread.start
    limit = threading.active_count() + count

    def limited(self: threading.Thread) -> None:
        if threading.active_count() >= limit:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)


@pytest.fixture(autouse=True)
def no_thread_outlives_its_call():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("possible", [0, 1, 2, 10])
def test_all_is_done_with_however_many_threads_can_be_started(possible, monkeypatch):
    no_more_than(possible, monkeypatch)
    done: list[int] = []
    work_through(range(100), done.append, 4, "test")
    assert sorted(done) == list(range(100))
    assert map_in_threads(abs, [-1, 2, -3], 3, "test") == [1, 2, 3]
    assert list(in_order(abs, [-1, 2, -3], threads=3, ahead=2, name="test")) == [(-1, 1), (2, 2), (-3, 3)]
    pool = some_threads(4, "test")
    assert (pool is None) == (possible == 0)
    if pool is not None:
        with pool:
            assert [pool.submit(abs, -number).result() for number in range(8)] == list(range(8))


def test_no_threads_are_started_for_one_worker_and_nothing_to_do():
    assert map_in_threads(abs, [], 4, "test") == []
    assert share_work([1, 2], [sum], "test") == [3]
    seen = []
    work_through([1], lambda task: seen.append(threading.current_thread()), 0, "test")
    assert seen == [threading.current_thread()]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_first_failure_is_raised_and_leaves_nothing_for_the_others(first):
    def fail(tasks: Any) -> None:
        next(tasks)
        raise OSError("gone")

    def fail_later(tasks: Any) -> None:
        for _ in tasks:  # for ever, unless somebody takes them away
            pass
        raise ValueError("as a consequence")

    workers = [fail_later] * 3
    workers[first] = fail
    with pytest.raises(OSError, match="gone"):
        share_work(iter(int, 1), workers, "test")


def test_a_failure_of_another_thread_ends_the_work_of_the_calling_one():
    main = threading.current_thread()
    failing = threading.Event()

    def work(task: int) -> None:
        if threading.current_thread() is not main:
            failing.set()
            raise OSError("gone")
        assert failing.wait(PATIENCE)

    with pytest.raises(OSError, match="gone"):
        work_through(iter(int, 1), work, 2, "test")  # for ever


@pytest.mark.parametrize("where", ["working", "waiting", "elsewhere"])
def test_an_interrupt_stops_all_and_is_raised_when_nobody_works_any_more(where):
    main = threading.current_thread()
    main_is_done, working, release = threading.Event(), threading.Event(), threading.Event()
    still_at_work: list[bool] = []

    def first(tasks: Any) -> None:
        if where == "working":
            next(tasks)
            assert working.wait(PATIENCE)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("was not interrupted")
        main_is_done.set()

    def second(tasks: Any) -> None:
        if where != "working":
            assert main_is_done.wait(PATIENCE)
        for _ in tasks:  # for ever, unless somebody takes them away
            working.set()
            if where != "working" and not release.is_set():
                release.set()
                # A thread that gets the signal does not wake the main thread, whose work it is to handle it.
                receiver = main if where == "waiting" else threading.current_thread()
                signal.pthread_kill(receiver.ident or 0, signal.SIGINT)
        still_at_work.append(False)

    with pytest.raises(KeyboardInterrupt):
        share_work(iter(int, 1), [first, second], "test")
    assert still_at_work == [False]


@pytest.mark.parametrize("joins", [False, True])
def test_results_come_in_order_and_no_further_ahead_than_allowed(joins):
    under_way: set[int] = set()
    asked: list[threading.Thread] = []

    def items() -> Any:
        for number in range(20):
            asked.append(threading.current_thread())
            under_way.add(number)
            assert len(under_way) <= 3
            yield number

    results = []
    for item, result in in_order(lambda number: number * 2, items(), threads=2, ahead=3, name="test", joins=joins):
        results.append((item, result))
        under_way.discard(item)
    assert results == [(number, number * 2) for number in range(20)]
    assert set(asked) == {threading.current_thread()}


def test_closing_waits_for_what_is_under_way_and_gives_up_the_rest():
    begun, ended = [], []
    release = threading.Event()

    def work(number: int) -> int:
        begun.append(number)
        if number:
            assert release.wait(PATIENCE)
        ended.append(number)
        return number

    results = in_order(work, range(10), threads=2, ahead=8, name="test")
    with closing(results):
        assert next(results) == (0, 0)
        timer = threading.Timer(0.05, release.set)
        timer.start()
    assert sorted(begun) == sorted(ended)
    assert len(begun) < 8
    timer.join()


@pytest.mark.parametrize("joins", [False, True])
def test_what_waits_for_its_predecessor_is_not_left_waiting(joins):
    """As the parts of a tensor do that is read from front to back."""
    done = [threading.Event() for _ in range(50)]

    def work(number: int) -> None:
        if number == 20:
            raise OSError("gone")
        if number and number < 20:
            assert done[number - 1].wait(PATIENCE)
        done[number].set()

    for taken in range(1, 22):
        for event in done:
            event.clear()
        results = in_order(work, range(50), threads=3, ahead=6, name="test", joins=joins)
        with closing(results):
            try:
                for _ in range(taken):
                    next(results)
            except OSError:
                assert taken == 21


def test_who_joins_works_while_the_others_do():
    both = threading.Barrier(2, timeout=PATIENCE)
    seen = []

    def work(number: int) -> None:
        both.wait()
        seen.append(threading.current_thread())

    assert [number for number, _ in in_order(work, range(8), threads=2, ahead=4, name="test", joins=True)] == [
        *range(8)
    ]
    assert len(set(seen)) == 2
    assert seen.count(threading.current_thread()) == 4


def test_an_interrupt_of_who_joins_is_raised_when_nobody_works_any_more():
    both, release, ended = threading.Barrier(2, timeout=PATIENCE), threading.Event(), threading.Event()

    def work(number: int) -> None:
        both.wait()
        if threading.current_thread() is threading.main_thread():
            release.set()
            raise KeyboardInterrupt
        assert release.wait(PATIENCE)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        list(in_order(work, range(8), threads=2, ahead=4, name="test", joins=True))
    assert ended.is_set()


@pytest.mark.parametrize(
    ("launched", "processors", "expected"),
    [("8", 96, 12), ("8", 2, 1), ("1", 2, 2), (None, 16, 4), ("", 2, 1), ("0", 8, 2), ("eight", 8, 2)],
)
def test_ranks_of_a_machine_divide_its_processors(monkeypatch, launched, processors, expected):
    monkeypatch.setattr(threads, "count_processors", lambda: processors)
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if launched is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", launched)
    assert threads.processors_of_a_rank(shared=True) == expected
    assert threads.processors_of_a_rank(shared=False) == processors


def test_a_rank_that_has_processors_of_its_own_uses_them_all(monkeypatch):
    monkeypatch.setattr(threads, "count_processors", lambda: 12)
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert threads.processors_of_a_rank(shared=True) == 12


def test_a_pool_has_all_its_threads():
    pool = some_threads(3, "test")
    assert pool is not None
    with pool:
        barrier = threading.Barrier(3, timeout=PATIENCE)
        assert sorted(job.result() for job in [pool.submit(barrier.wait) for _ in range(3)]) == [0, 1, 2]
