"""Signals that wait: what ranks do together must not be cut in the middle, or their messages do not fit any more."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_MEANT_TO_INTERRUPT = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM")


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
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Any] = {}
    try:
        for name in _MEANT_TO_INTERRUPT:
            number = getattr(signal, name, None)  # not every system has all of them
            if number is not None and callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                signal.signal(number, lambda number, frame: waiting.append((number, frame)))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in waiting:
            handlers[number](number, frame)
