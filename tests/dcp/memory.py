"""How much memory something takes at its peak, seen from inside of the process that does it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Growth(NamedTuple):
    """Megabytes by which a process grew at most."""

    anonymous: int
    """Memory of its own."""
    resident: int
    """The same, and with it the pages of mapped files that were in memory."""


def growth_while(function: Callable[..., Any], *arguments: Any) -> Growth:
    """Call ``function`` and watch."""
    seen = [_now()]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.0005):
            seen.append(_now())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        function(*arguments)
    finally:
        done.set()
        watcher.join()
    anonymous, resident = zip(*seen, strict=True)
    return Growth(max(anonymous) - anonymous[0], max(resident) - resident[0])


def _now() -> tuple[int, int]:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, resident = (int(fields[name].split()[0]) // 1024 for name in ("RssAnon", "VmRSS"))
    return anonymous, resident
