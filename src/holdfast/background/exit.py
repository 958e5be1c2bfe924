"""The end of the program: it waits for pending saves, and its exit code tells of a failed one.

Waiting happens where Python waits for threads, before anything is taken apart, so it also happens after an uncaught
exception. The exit code can only be changed by leaving for good, which is put off until the other exit functions
have run.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading

# Whoever registers later is called earlier: this module's function must run while pools of threads still work.
import concurrent.futures.thread  # noqa: F401  isort: skip

from holdfast.background.futures import unseen_failures
from holdfast.background.queues import all_queues
from holdfast.coordination.private_group import forget_private_groups

_FAILED = 1


def _finish_pending_saves() -> None:
    for queue in all_queues():
        queue.wait_until_idle()
    forget_private_groups()
    for outcome in unseen_failures():
        if not outcome.reported:
            outcome.reported = True
            sys.stderr.write(f"holdfast: {outcome}\n")


def _fail_if_a_save_failed() -> None:
    if not unseen_failures():
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed already
            continue
    os._exit(_FAILED)


threading._register_atexit(_finish_pending_saves)  # type: ignore[attr-defined]
atexit.register(_fail_if_a_save_failed)
