"""The end of the program: it waits for pending saves, and its exit code is 1 if one failed or took too long.

Waiting happens where Python waits for threads, before anything is taken apart, so it also happens after an uncaught
exception. Threads of the program and exit functions may save even later; such saves end before the call returns. The
exit code can only be changed by leaving for good, which is put off until all exit functions have run and files are
closed. Only a save that does not end, or Ctrl-C while it is waited for, ends the program at once.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import io
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

# Whoever registers later is called earlier, and pools of threads must still work when this module's function runs.
import concurrent.futures.thread  # noqa: F401  isort: skip

from holdfast import _settings as settings
from holdfast._background.futures import has_unseen_failures, take_unreported_failures
from holdfast._background.queues import all_lanes, use_no_more_threads
from holdfast._background.writer_process import close_idle_writers
from holdfast._ranks.private_group import forget_private_groups

_FAILED = 1
_INTERRUPTED = 128 + signal.SIGINT
"""What shells call a program that ended by Ctrl-C."""


def _finish_pending_saves() -> None:
    patience = _patience()
    use_no_more_threads()
    try:
        unfinished = _drain(patience)
    except KeyboardInterrupt:
        _give_up("interrupted", _pending(), _INTERRUPTED)
    if unfinished:
        # At once: pools of threads, which are joined next, would wait for what these saves are stuck in.
        _give_up(f"the program ended {patience:g} s ago (HOLDFAST_DRAIN_SECONDS)", unfinished, _FAILED)
    close_idle_writers()
    forget_private_groups()
    _tell_of_failures()
    if multiprocessing.parent_process() is not None and _has_failed():
        _leave(_FAILED)  # such a process does not call exit functions, and ends without taking anything apart


def _patience() -> float:
    try:
        return settings.current().drain_seconds
    except ValueError as error:  # the environment was changed since the save began, which must not be lost for it
        sys.stderr.write(f"holdfast: {error}\n")
        return settings.Settings.drain_seconds


def _drain(seconds: float) -> list[str]:
    """Wait for the saves of all lanes. Those that are not finished then."""
    end = time.monotonic() + seconds
    for lane in all_lanes():
        lane.queue.wait_until_idle(max(0.0, end - time.monotonic()))
    return _pending()


def _pending() -> list[str]:
    return [str(claim) for lane in all_lanes() for claim in lane.queue.claims()]


def _give_up(why: str, unfinished: Sequence[str], code: int) -> NoReturn:
    sys.stderr.write(f"holdfast: {why}; these saves were not finished: {', '.join(unfinished)}\n")
    _tell_of_failures()
    _leave(code)


def _tell_of_failures() -> None:
    for failure in take_unreported_failures():
        sys.stderr.write(f"holdfast: {failure}\n")


def _has_failed() -> bool:
    _tell_of_failures()
    return has_unseen_failures()


def _leave_last_if_a_save_failed() -> None:
    """Functions that were registered before this one are still to be called, so the program does not leave here.

    It does when Python takes ``sys`` apart, which comes last: an object there is deleted. That object must not keep
    anything else alive, such as a file that is yet to be flushed, and so its method has no module behind it.
    """
    if _has_failed():
        method = types.FunctionType(
            _leave_with.__code__, {"__builtins__": vars(builtins)}, argdefs=_leave_with.__defaults__
        )
        leaves = type("LeavesLast", (), {"__del__": method, "__module__": "builtins"})
        sys._holdfast_leaves = leaves()  # type: ignore[attr-defined]


def _leave_with(
    self: Any,
    leave: Callable[[int], NoReturn] = os._exit,
    code: int = _FAILED,
    all_objects: Callable[[], list[Any]] = gc.get_objects,
    files: tuple[type, ...] = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom),
) -> None:
    # Some are closed by now. Others are still open, as something refers to them that would be gone only later.
    for file in all_objects():
        if type(file) in files:
            try:
                file.flush()
            except Exception:  # closed, or what it writes to is
                continue
    leave(code)


def _leave(code: int) -> NoReturn:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed already
            continue
    os._exit(code)


try:
    threading._register_atexit(_finish_pending_saves)  # type: ignore[attr-defined]  # typeshed leaves out private names
except RuntimeError:  # the program is ending already, and a thread of its own saves for the first time
    use_no_more_threads()
atexit.register(_leave_last_if_a_save_failed)
