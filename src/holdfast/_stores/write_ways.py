"""Whether large files are written through the page cache or past it: whichever was faster on the same disk before.

Neither is faster everywhere. The page cache copies everything once more; but on many machines that costs less than what
a processor has to do to fill memory again that a device has just read. So a program that saves several times tries
both, remembers how fast each was until everything was on the disk, and tries the slower one again from time to time.

Either way a large file takes little of the page cache, and drives nothing else out of it, unless it is wished to stay.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from enum import Enum

from holdfast import _settings as settings
from holdfast._base.tuning import (
    FIRST_TRY_AGAIN,
    NOTED_WRITE_BYTES,
    NOTED_WRITES,
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
        """The faster way, or one to be tried. The first files of a program say little: they are slow in any way, since
        they get memory that nobody has used yet."""
        cached = self._speeds[WriteWay.CACHED]
        if len(cached) < 2:
            return WriteWay.CACHED
        if not self._speeds[WriteWay.DIRECT]:
            return WriteWay.DIRECT
        faster = max(WriteWay, key=lambda way: max(self._speeds[way]))
        if faster is WriteWay.DIRECT and len(cached) < NOTED_WRITES:
            return WriteWay.CACHED  # once more, now that the first files are not to blame
        return faster.other if self._files >= self._try_again_at else faster

    def note(self, way: WriteWay, speed: float) -> None:
        """A file was written so many bytes per second."""
        self._files += 1
        self._speeds[way].append(speed)
        if self._files > self._try_again_at:
            self._try_again_at = self._files + min(self._files, TRY_AGAIN_AFTER)


_disks: dict[int, _Disk] = {}
_lock = threading.Lock()


def choose_way(descriptor: int) -> WriteWay:
    """How a new file is to be written."""
    wish = settings.current().page_cache
    if wish != "auto":
        return WriteWay.CACHED if wish == "use" else WriteWay.DIRECT
    with _lock:
        return _disks.setdefault(os.fstat(descriptor).st_dev, _Disk()).choose()


def stays_in_page_cache() -> bool:
    """Whether what goes through the page cache is to stay there."""
    return settings.current().page_cache == "use"


def note_speed(descriptor: int, way: WriteWay, size: int, seconds: float) -> None:
    """Remember how long a file took until it was on the disk. Small ones say nothing."""
    if size >= NOTED_WRITE_BYTES and seconds > 0:
        with _lock:
            _disks.setdefault(os.fstat(descriptor).st_dev, _Disk()).note(way, size / seconds)
