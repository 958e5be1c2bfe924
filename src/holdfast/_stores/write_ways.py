"""Whether large files are written through the page cache or past it: whichever was faster on the same disk before.

Neither is faster everywhere. The page cache copies everything once more; but on many machines that costs less than what
a processor has to do to fill memory again that a device has just read, and what was saved is still there for whoever
loads it next. So a program that saves several times tries both, remembers how fast each was until everything was on the
disk, and tries the slower one again from time to time. Files that would fill the memory go past the page cache.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from enum import Enum
from pathlib import Path

from holdfast import _settings as settings
from holdfast._base.tuning import (
    FIRST_TRY_AGAIN,
    NOTED_WRITE_BYTES,
    NOTED_WRITES,
    PAGE_CACHE_SHARE,
    TRY_AGAIN_AFTER,
)


class WriteWay(Enum):
    """How the bytes of a large file get to the disk."""

    CACHED = "through the page cache"
    DIRECT = "past the page cache"

    @property
    def other(self) -> WriteWay:
        """The other one."""
        return WriteWay.DIRECT if self is WriteWay.CACHED else WriteWay.CACHED


class _Disk:
    """How fast files were written to one disk."""

    def __init__(self) -> None:
        self._speeds: dict[WriteWay, deque[float]] = {way: deque(maxlen=NOTED_WRITES) for way in WriteWay}
        self._files = 0
        self._try_again_at = FIRST_TRY_AGAIN

    def choose(self) -> WriteWay:
        """The faster way, or one to be tried. The first file of a program says little: it is slow in any way."""
        if len(self._speeds[WriteWay.CACHED]) < 2:
            return WriteWay.CACHED
        if not self._speeds[WriteWay.DIRECT]:
            return WriteWay.DIRECT
        faster = max(WriteWay, key=lambda way: max(self._speeds[way]))
        return faster.other if self._files >= self._try_again_at else faster

    def note(self, way: WriteWay, speed: float) -> None:
        """A file was written so many bytes per second."""
        self._files += 1
        self._speeds[way].append(speed)
        if self._files > self._try_again_at:
            self._try_again_at = self._files + min(self._files, TRY_AGAIN_AFTER)


_disks: dict[int, _Disk] = {}
_lock = threading.Lock()


def choose_way(descriptor: int, size: int) -> WriteWay:
    """How a new file of so many bytes is to be written."""
    wish = settings.current().page_cache
    if wish != "auto":
        return WriteWay.CACHED if wish == "use" else WriteWay.DIRECT
    if size * PAGE_CACHE_SHARE > available_memory():
        return WriteWay.DIRECT
    with _lock:
        return _disks.setdefault(os.fstat(descriptor).st_dev, _Disk()).choose()


def note_speed(descriptor: int, way: WriteWay, size: int, seconds: float) -> None:
    """Remember how long a file took until it was on the disk. Small ones say nothing."""
    if size >= NOTED_WRITE_BYTES and seconds > 0:
        with _lock:
            _disks.setdefault(os.fstat(descriptor).st_dev, _Disk()).note(way, size / seconds)


def available_memory(system: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> float:
    """How many bytes the page cache can take without anything being swapped; infinite where nobody says.

    A container may have less than the machine: what it is allowed, without what its programs use.
    """
    return min(_of_machine(system), _of_group(group))


def _of_machine(system: Path) -> float:
    try:
        lines = dict(line.split(":", 1) for line in system.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return float("inf")


def _of_group(group: Path) -> float:
    try:
        limit = int((group / "memory.max").read_text())  # "max" if there is none
        numbers = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - int(numbers["anon"]) - int(numbers["shmem"])
    except (OSError, KeyError, ValueError):
        return float("inf")
