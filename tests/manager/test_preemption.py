"""Real signals to real processes: they are noted, handed on, and left as they were."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast._manager.cadence import Beat, Cadence
from holdfast._manager.preemption import Preemption
from holdfast._ranks.meeting import meeting
from tests.rank_pool import RankPool


def send(number: signal.Signals, process: int | None = None) -> None:
    """A signal, as another process would send it."""
    os.kill(os.getpid() if process is None else process, number)


def fate_of_child(body: Callable[[], Any]) -> int:
    """How a forked child ends that runs ``body``: an exit code (0 if it returns), or a signal as a negative number."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            body()
            code = 0
        except SystemExit as left:
            code = int(left.code)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _handlers_are_left_as_they_were():
    watched = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
    before = [signal.getsignal(number) for number in watched]
    yield
    after = [signal.getsignal(number) for number in watched]
    for number, handler in zip(watched, before, strict=True):
        signal.signal(number, handler)
    assert after == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noted_with_its_deadline_and_the_program_goes_on(number) -> None:
    clock = Clock()
    with Preemption(grace_seconds=30, clock=clock) as preemption:
        assert preemption.is_listening
        assert (preemption.notice, preemption.seconds_left()) == (None, None)
        send(number)
        clock.now += 12
        assert preemption.notice is not None
        assert preemption.notice.signal == number.name
        assert preemption.seconds_left() == 18
        clock.now += 100
        assert preemption.seconds_left() == 0
    assert not preemption.is_listening
    assert preemption.notice.signal == number.name  # still to be told to the other ranks


def test_without_a_known_grace_there_is_no_deadline() -> None:
    with Preemption(grace_seconds=None) as preemption:
        send(signal.SIGTERM)
        assert preemption.notice is not None
        assert preemption.seconds_left() is None


def test_the_first_of_two_signals_sets_the_deadline_and_the_second_does_not_kill() -> None:
    clock = Clock()
    with Preemption(grace_seconds=60, clock=clock) as preemption:
        send(signal.SIGUSR1)  # the warning, and then the thing itself, as Slurm sends them
        clock.now += 50
        send(signal.SIGTERM)
        assert preemption.notice is not None
        assert preemption.notice.signal == "SIGUSR1"
        assert preemption.seconds_left() == 10


def test_only_the_signals_that_were_asked_for_are_touched() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Preemption([signal.SIGUSR1]) as preemption:
        assert signal.getsignal(signal.SIGTERM) is before
        send(signal.SIGUSR1)
        assert preemption.notice is not None


def test_a_handler_that_was_there_is_called_as_well_each_time_and_is_back_afterwards() -> None:
    called: list[tuple[int, bool]] = []
    signal.signal(signal.SIGTERM, mine := lambda number, frame: called.append((number, frame is not None)))
    try:
        with Preemption(repeat_seconds=0) as preemption:
            send(signal.SIGTERM)
            assert preemption.notice is not None
            assert called == [(signal.SIGTERM, True)]
            send(signal.SIGTERM)
            assert called == [(signal.SIGTERM, True)] * 2
        assert signal.getsignal(signal.SIGTERM) is mine
        send(signal.SIGTERM)
        assert len(called) == 3
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_handler_that_raises_still_does_and_the_signal_is_noted() -> None:
    def leave(number: int, frame: Any) -> None:
        raise SystemExit(5)

    signal.signal(signal.SIGTERM, leave)
    preemption = Preemption()
    try:
        with pytest.raises(SystemExit), preemption:
            send(signal.SIGTERM)
        assert preemption.notice is not None
        assert signal.getsignal(signal.SIGTERM) is leave
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_signal_that_was_ignored_is_noted_and_ignored_again_afterwards() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Preemption(repeat_seconds=0) as preemption:
            send(signal.SIGTERM)
            send(signal.SIGTERM)
            assert preemption.notice is not None
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def twice(number: signal.Signals, seconds_between: float) -> Callable[[], None]:
    def body() -> None:
        clock = Clock()
        # Made here, and not before the fork: a child has none of its parent's.
        with Preemption([number], repeat_seconds=5, clock=clock):
            send(number)
            clock.now += seconds_between
            send(number)

    return body


def test_a_second_sigterm_does_what_the_first_would_have_done() -> None:
    assert fate_of_child(twice(signal.SIGTERM, 5)) == -signal.SIGTERM


def test_a_sigterm_that_a_launcher_passes_on_to_workers_that_got_it_already_is_no_second_one() -> None:
    assert fate_of_child(twice(signal.SIGTERM, 4.9)) == 0


def test_a_warning_may_be_repeated() -> None:
    assert fate_of_child(twice(signal.SIGUSR1, 100)) == 0


def test_ctrl_c_stops_at_the_end_of_the_step_and_at_once_the_second_time() -> None:
    with Preemption(["SIGINT"], repeat_seconds=0) as preemption:
        send(signal.SIGINT)
        assert preemption.notice is not None
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_nested_ones_both_hear_a_signal_and_leave_in_any_order() -> None:
    before = signal.getsignal(signal.SIGTERM)
    outer, inner = Preemption(), Preemption()
    with outer:
        with inner:
            send(signal.SIGTERM)
            assert outer.notice is not None
            assert inner.notice is not None
        assert not inner.is_listening
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before

    first, second = Preemption(), Preemption()
    with first:
        second.__enter__()
    send(signal.SIGTERM)
    assert first.notice is None
    assert second.notice is not None
    second.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) is before


def end_out_of_turn() -> None:
    calls: list[int] = []
    first, second = Preemption(), Preemption()
    with first:
        signal.signal(signal.SIGTERM, on_top(calls, signal.getsignal(signal.SIGTERM)))
        second.__enter__()
    second.__exit__(None, None, None)
    # What came on top hands on to the first one, which has ended and does as it would have been without it.
    send(signal.SIGTERM)


def on_top(calls: list[int], below: Any) -> Callable[[int, Any], None]:
    def handler(number: int, frame: Any) -> None:
        calls.append(number)
        below(number, frame)

    return handler


def test_a_handler_that_came_on_top_stays_and_finds_the_former_one_behind_us() -> None:
    assert fate_of_child(end_out_of_turn) == -signal.SIGTERM


def test_outside_of_the_main_thread_there_is_a_warning_and_nothing_is_changed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[tuple[bool, Any, list[str]]] = []

    def body() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Preemption() as preemption:
                seen.append(
                    (preemption.is_listening, signal.getsignal(signal.SIGTERM), [str(w.message) for w in caught])
                )
                preemption.note("the cloud says so")
                assert preemption.notice is not None

    thread = threading.Thread(target=body, name="trainer")
    thread.start()
    thread.join()
    [(is_listening, handler, [message])] = seen
    assert not is_listening
    assert handler is before
    assert "SIGTERM, SIGUSR1 will not be noticed" in message
    assert "trainer" in message


def test_one_that_ends_in_another_thread_only_hands_on() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGTERM, mine := lambda number, frame: calls.append(number))
    try:
        preemption = Preemption().__enter__()
        thread = threading.Thread(target=preemption.stop_listening)
        thread.start()
        thread.join()
        send(signal.SIGTERM)
        assert preemption.notice is None
        assert calls == [signal.SIGTERM]
        with Preemption():
            pass
        signal.signal(signal.SIGTERM, mine)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def sleep_for_ever(is_running: Any) -> None:
    is_running.set()
    threading.Event().wait()


@pytest.mark.parametrize("moment", ["at once", "when it runs"])
def test_forked_children_die_of_sigterm_as_they_would_without_us(moment: str) -> None:
    """Those who load data are ended in this way, and waited for."""
    context = multiprocessing.get_context("fork")
    with Preemption() as preemption:
        is_running = context.Event()
        child = context.Process(target=sleep_for_ever, args=(is_running,), daemon=True)
        child.start()
        if moment == "when it runs":
            is_running.wait()
        child.terminate()
        child.join(20)
        assert child.exitcode == -signal.SIGTERM
        assert preemption.notice is None
        send(signal.SIGTERM)
        assert preemption.notice is not None  # the parent goes on listening


@pytest.mark.parametrize(
    ("signals", "message"),
    [(["SIGKILL"], "SIGKILL cannot"), (["SIGNONSENSE"], "no signal 'SIGNONSENSE'"), ([12345], "no signal 12345")],
)
def test_signals_that_cannot_be_noted_are_refused(signals, message) -> None:
    with pytest.raises(ValueError, match=f"{message}.*SIGTERM"):
        Preemption(signals)


def test_a_grace_that_leaves_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="grace_seconds=0"):
        Preemption(grace_seconds=0)


def exchange(step: int, beat: Beat) -> list[Beat]:
    with meeting("maybe_save") as ranks:
        return ranks.all_gather("exchange", lambda: beat)


def train_until_stopped(who: int, number: signal.Signals) -> tuple[int, list[str | None], Any, bool]:
    """Train with collectives at every step. After some of them rank 0 sends the signal to rank ``who``."""
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    with Preemption(grace_seconds=60) as preemption:
        pulse = Cadence(every_steps=7, preemption=preemption, exchange=exchange)
        saves: list[str | None] = []
        gradient = torch.ones(10)
        step = 0
        while not pulse.should_stop:
            step += 1
            dist.all_reduce(gradient)
            if dist.get_rank() == 0 and step == 20:
                send(number, pids[who])
            decision = pulse.at_step(step)
            saves.append(decision.save)
        assert decision.seconds_left is not None
        assert 0 < decision.seconds_left <= 60
        return step, saves, decision.cause, preemption.notice is not None


@pytest.mark.parametrize(("who", "number"), [(0, signal.SIGTERM), (2, signal.SIGTERM), (1, signal.SIGUSR1)])
def test_a_signal_to_one_live_rank_stops_all_ranks_at_the_same_step(ranks: RankPool, who: int, number) -> None:
    outcomes = ranks(3).run(train_until_stopped, who, number)
    step, saves, *_ = outcomes[0]
    assert [outcome[:3] for outcome in outcomes] == [(step, saves, f"{number.name} on rank {who}")] * 3
    assert [outcome[3] for outcome in outcomes] == [rank == who for rank in range(3)]
    assert step >= 20
    assert saves[:-1] == ["steps" if each % 7 == 0 else None for each in range(1, step)]
    assert saves[-1] == "preemption"


def train_with_a_signal_during_the_exchange() -> tuple[int, str | None]:
    """The signal comes while the ranks talk, which it must not interrupt."""
    with Preemption() as preemption:
        sent = False

        def interrupted(step: int, beat: Beat) -> list[Beat]:
            nonlocal sent
            with meeting("maybe_save") as ranks:
                if dist.get_rank() == 1 and not sent:
                    send(signal.SIGTERM)
                    sent = True
                return ranks.all_gather("exchange", lambda: beat)

        pulse = Cadence(preemption=preemption, exchange=interrupted)
        step = 0
        while not pulse.should_stop:
            step += 1
            decision = pulse.at_step(step)
        return step, decision.cause


def test_a_signal_during_an_exchange_counts_at_the_next_one(ranks: RankPool) -> None:
    [first, second] = ranks(2).run(train_with_a_signal_during_the_exchange)
    assert first == second
    assert first[0] > 1
    assert first[1] == "SIGTERM on rank 1"
