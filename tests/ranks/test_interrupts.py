"""Signals that wait: all of them are handed on afterwards, whatever their handlers raise."""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from holdfast._ranks.interrupts import interrupts_wait

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]


@pytest.fixture
def handled() -> Iterator[dict[int, Callable[[], Any]]]:
    """What the handlers of signals do. They are noted in the list under 0."""
    acts: dict[int, Any] = {0: []}

    def handler(number: int, frame: FrameType | None) -> None:
        acts[0].append(number)
        acts.get(number, lambda: None)()

    former = {number: signal.signal(number, handler) for number in SIGNALS}
    yield acts
    for number, before in former.items():
        assert signal.getsignal(number) is handler
        signal.signal(number, before)


def raise_all(but: int | None = None) -> None:
    for number in SIGNALS:
        if number != but:
            signal.raise_signal(number)


def raises(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def test_a_handler_that_raises_does_not_keep_the_next_signals_from_theirs(handled: Any) -> None:
    handled[signal.SIGINT] = raises(KeyboardInterrupt())

    def act() -> None:
        raise_all()
        assert handled[0] == []

    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        act()
    assert handled[0] == SIGNALS


def test_if_several_raise_the_last_one_counts_and_tells_of_the_others(handled: Any) -> None:
    handled[signal.SIGINT] = raises(KeyboardInterrupt("first"))
    handled[signal.SIGTERM] = raises(SystemExit(3))
    with pytest.raises(SystemExit) as caught, interrupts_wait():
        raise_all()
    assert isinstance(caught.value.__context__, KeyboardInterrupt)
    assert handled[0] == SIGNALS


def test_an_error_in_the_block_stays_in_sight(handled: Any) -> None:
    handled[signal.SIGINT] = raises(KeyboardInterrupt())

    def act() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the block")

    with pytest.raises(KeyboardInterrupt) as caught, interrupts_wait():
        act()
    assert isinstance(caught.value.__context__, ValueError)


@pytest.mark.parametrize("at", range(len(SIGNALS)))
def test_a_signal_that_comes_while_handlers_are_put_back_leaves_no_handler_behind(
    handled: Any, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """And none of the signals that waited is lost."""
    handled[signal.SIGUSR1] = raises(OverflowError("right now"))
    put_back, calls = signal.signal, []

    def interrupted(number: int, handler: Any) -> Any:
        before = put_back(number, handler)
        if handler is not before and len(calls) == at:
            calls.append(number)
            signal.raise_signal(signal.SIGUSR1)
        calls.append(number)
        return before

    def act() -> None:
        raise_all(but=signal.SIGUSR1)
        monkeypatch.setattr(signal, "signal", interrupted)

    with pytest.raises(OverflowError), interrupts_wait():
        act()
    monkeypatch.undo()
    assert sorted(handled[0]) == sorted(SIGNALS)
    handled[signal.SIGUSR1] = lambda: None
    for number in SIGNALS:
        signal.raise_signal(number)
    assert len(handled[0]) == 2 * len(SIGNALS)


def test_what_was_raised_is_gone_when_nobody_has_it_any_more(handled: Any) -> None:
    class Large(Exception):
        pass

    def fail() -> None:
        raise Large

    def run() -> weakref.ref[Large]:
        try:
            with interrupts_wait():
                signal.raise_signal(signal.SIGINT)
        except Large as error:
            return weakref.ref(error)
        raise AssertionError

    handled[signal.SIGINT] = fail
    gc.collect()
    gc.disable()
    try:
        error = run()
        assert error() is None
    finally:
        gc.enable()
