"""Signals that wait: what ranks do together must not be cut in the middle, or their messages do not fit any more."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_MEANT_TO_INTERRUPT = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM")

_ATTEMPTS = 20

_is_waiting = False
"""Whether the main thread is in such a block already, which is enough."""


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let handlers of signals run afterwards. They run in the main thread, and may raise whatever they like there.

    >>> try:
    ...     with interrupts_wait():
    ...         signal.raise_signal(signal.SIGINT)
    ...         print("goes on")
    ... except KeyboardInterrupt:
    ...     print("interrupted")
    goes on
    interrupted
    """
    global _is_waiting
    if threading.current_thread() is not threading.main_thread() or _is_waiting:
        yield
        return
    stand_in = _StandIn()
    try:
        _is_waiting = True
        for name in _MEANT_TO_INTERRUPT:
            number = getattr(signal, name, None)  # not every system has all of them
            if number is not None and callable(handler := signal.getsignal(number)):
                stand_in.handlers[number] = handler
                signal.signal(number, stand_in)
        yield
    finally:
        _is_waiting = False
        stand_in.leave()


class _StandIn:
    """Takes the place of handlers, and notes the signals that come meanwhile."""

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}
        self._waiting: deque[tuple[int, FrameType | None]] = deque()
        self._is_over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._is_over:  # a signal has kept the handlers from being put back
            self.handlers[number](number, frame)
        else:
            self._waiting.append((number, frame))

    def leave(self) -> None:
        """Put the handlers back, and call them for the signals that came: for all, also if one raises something.

        If several do, the last one counts, with those before as its context, as if no signal had waited. So does what
        the handler of a signal raises that comes right now.
        """
        self._is_over = True
        raised: BaseException | None = None
        # Often: a signal that comes right now is handled before the handler is put back, and keeps it from that.
        former = [entry for entry in self.handlers.items() for _ in range(_ATTEMPTS)]
        while former or self._waiting:
            try:
                while former:
                    number, handler = former.pop()
                    signal.signal(number, handler)
                    former = [entry for entry in former if entry[0] != number]
                while self._waiting:
                    number, frame = self._waiting.popleft()
                    self.handlers[number](number, frame)
            except BaseException as error:
                if error is not raised and error.__context__ is None:
                    error.__context__ = raised
                raised = error
        if raised is not None:
            try:
                raise raised
            finally:
                del raised  # or else it refers to this frame, which refers to it
