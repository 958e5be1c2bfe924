"""Signals by which a cluster says that this process will be ended soon.

A handler of Python runs in the main thread, between two of its instructions: a signal that comes during a long call
into torch is noticed when that call returns. All that happens then is that the signal is noted; the training loop looks
at the note at its next step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from holdfast._base.notices import warn_caller

USUAL_SIGNALS = tuple(name for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""What Kubernetes, Slurm, torchrun and the clouds send. Not every system has both."""

_WARNINGS = {getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)}
"""Signals that programs agree on a meaning for. A scheduler may repeat its warning, so a second one does not kill."""


@dataclass(frozen=True)
class Notice:
    """That this process is asked to stop, by which signal, and until when (in seconds of the clock)."""

    signal: str
    deadline: float | None


class Preemption:
    """Notes signals inside a ``with`` block, so that the training loop can save and stop.

    Handlers that were there before are called as well, and are back afterwards. A second signal to end, such as an
    impatient SIGTERM, does what it would have done without us; but not within ``repeat_seconds`` of the first,
    because launchers pass on to their workers what the workers got already. Forked children, such as those that load
    data, have the handlers that were there before.

    >>> with Preemption(["SIGTERM"], grace_seconds=30) as preemption:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     preemption.notice.signal
    'SIGTERM'
    """

    def __init__(
        self,
        signals: Iterable[str | int] = USUAL_SIGNALS,
        *,
        grace_seconds: float | None = 30.0,
        repeat_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if grace_seconds is not None and not grace_seconds > 0:
            raise ValueError(f"grace_seconds={grace_seconds!r} leaves no time to save; use more than 0, or None")
        self.grace_seconds = grace_seconds
        self.repeat_seconds = repeat_seconds
        self.notice: Notice | None = None
        self._signals = dict.fromkeys(map(_signal_called, signals))
        self._clock = clock
        self._watches: list[_Watch] = []

    @property
    def names(self) -> str:
        """The signals, as a str."""
        return ", ".join(number.name for number in self._signals)

    @property
    def is_listening(self) -> bool:
        """Whether signals are noted."""
        return bool(self._watches)

    def seconds_left(self) -> float | None:
        """How long the process may still run, at least 0; None if nobody wants it to stop, or nobody knows."""
        if self.notice is None or self.notice.deadline is None:
            return None
        return max(0.0, self.notice.deadline - self._clock())

    def note(self, name: str) -> None:
        """Note that the process must stop soon. For those who hear of it in another way than by a signal.

        >>> preemption = Preemption(grace_seconds=120)
        >>> preemption.note("the spot market")
        >>> preemption.notice.signal
        'the spot market'
        """
        deadline = None if self.grace_seconds is None else self._clock() + self.grace_seconds
        # The first one counts: the clock of whoever sent it has been running since.
        self.notice = self.notice or Notice(name, deadline)

    def __enter__(self) -> Preemption:
        if threading.current_thread() is not threading.main_thread():
            warn_caller(
                f"{self.names} will not be noticed by this process: Python lets only the main thread handle signals, "
                f"and this is {threading.current_thread().name}. Begin in the main thread, or call note() yourself. "
                "Signals that other ranks notice still stop this one.",
                RuntimeWarning,
            )
            return self
        try:
            for number in self._signals:
                self._watch(number)
        except BaseException:  # a program may have warnings raised
            self.stop_listening()
            raise
        _listening.append(self)
        return self

    def _watch(self, number: signal.Signals) -> None:
        if signal.getsignal(number) is None:
            warn_caller(
                f"{number.name} will not be noticed: a library that is not written in Python handles it", RuntimeWarning
            )
            return
        self._watches.append(_Watch(number, self, self._clock))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_listening()

    def stop_listening(self) -> None:
        """Put the handlers back that were there before. Does nothing the second time."""
        while self._watches:
            self._watches.pop().end()
        if self in _listening:
            _listening.remove(self)


class _Watch:
    """The handler of one signal, itself given to ``signal.signal``, so that it can see whether it is still there."""

    def __init__(self, number: signal.Signals, preemption: Preemption, clock: Callable[[], float]) -> None:
        self._number = number
        self._preemption: Preemption | None = preemption
        self._clock = clock
        self._noted_at: float | None = None
        self._former: Any = signal.getsignal(number)
        signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._preemption is None or self._is_repeated_late(self._preemption):
            self._do_as_before(frame)
            return
        if self._noted_at is None:
            self._noted_at = self._clock()
        self._preemption.note(self._number.name)
        former = self._former_in_use()
        if callable(former) and former is not signal.default_int_handler:
            former(number, frame)

    def end(self) -> None:
        """Put the former handler back. If another one has come on top, stay where we are but only hand on."""
        self._preemption = None
        current: object = signal.getsignal(self._number)
        if current is self and threading.current_thread() is threading.main_thread():
            signal.signal(self._number, self._former_in_use())

    def _is_repeated_late(self, preemption: Preemption) -> bool:
        if self._noted_at is None or self._number in _WARNINGS:
            return False
        return self._clock() - self._noted_at >= preemption.repeat_seconds

    def _do_as_before(self, frame: FrameType | None) -> None:
        former = self._former_in_use()
        if callable(former):
            former(self._number, frame)
        elif former == signal.SIG_DFL:
            signal.signal(self._number, signal.SIG_DFL)
            signal.raise_signal(self._number)
            signal.signal(self._number, self)  # not every signal ends the process

    def _former_in_use(self) -> Any:
        """The former handler. Watches that have ended out of turn need not be in the way for longer."""
        former = self._former
        while isinstance(former, _Watch) and former._preemption is None:
            former = former._former
        return former


def _signal_called(name: str | int) -> signal.Signals:
    try:
        number = signal.Signals[name] if isinstance(name, str) else signal.Signals(name)
    except (KeyError, ValueError):
        raise ValueError(f"there is no signal {name!r} here; use some of {_NAMES}") from None
    if number.name not in _NAMES:
        raise ValueError(f"{number.name} cannot be handled; use some of {_NAMES}")
    return number


_NAMES = sorted({each.name for each in signal.Signals} - {"SIGKILL", "SIGSTOP"})

_listening: list[Preemption] = []


_before_fork = threading.local()
"""What the thread that forks had blocked before."""


def _hold_signals_back() -> None:
    """Python drops what reaches a child before it runs, as when it is ended at once. The system keeps it instead."""
    ours = {number for preemption in _listening for number in preemption._signals}
    _before_fork.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ours)


def _let_signals_in() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.blocked)


def _leave_signals_alone_in_forked_child() -> None:
    """Whoever forked the child ends it by SIGTERM, and waits for it: noting the signal would keep both for ever."""
    for preemption in reversed(list(_listening)):
        preemption.stop_listening()
    _let_signals_in()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_hold_signals_back,
        after_in_parent=_let_signals_in,
        after_in_child=_leave_signals_alone_in_forked_child,
    )
