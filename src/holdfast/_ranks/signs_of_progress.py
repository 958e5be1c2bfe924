"""What shows from outside that a process gets on: bytes that it reads, writes, sends and receives.

Not all work counts what it has done: a file that is made durable, the last parts of an upload, a reader of someone
else. What the system counts for a process is there for all of it. Time on a CPU is none of it: a process that spins
for ever has that, too.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_STEP = 1 << 20
"""Bytes that a process moves in passing, by logs and messages between ranks, which are no sign of progress."""

_PAGE, _PAGES = 4096, "pages"
_MOST_FILES = 4096
"""A process that has more open files than that is not asked about each of them."""

_TCP_BYTES = struct.Struct("120xQQ")
"""Bytes that were acknowledged, and received, in what Linux says of a connection (``struct tcp_info``)."""


class SignsOfProgress:
    """The bytes that this process has moved since the first look, as far as the system says.

    In steps that no log and no message between ranks makes in a while.

    >>> signs = SignsOfProgress()
    >>> signs.look()
    0
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last: dict[object, int] | None = None
        self._total = 0

    def look(self) -> int:
        """The bytes so far."""
        counters = dict(self._counters())
        if self._last is not None:
            for key, count in counters.items():
                # A connection that is new counts from its beginning. Pages that are written back while no thread
                # waits for them are somebody else's.
                self._total += max(count - self._last.get(key, count if key == _PAGES else 0), 0)
        self._last = counters
        return self._total // _STEP * _STEP

    def _counters(self) -> Iterator[tuple[object, int]]:
        with suppress(OSError, KeyError, ValueError):
            lines = dict(line.split(b":") for line in (self._proc / "self/io").read_bytes().splitlines())
            yield "files", int(lines[b"rchar"]) + int(lines[b"wchar"])
        yield from self._connections()
        yield from self._pages_written_back()

    def _connections(self) -> Iterator[tuple[object, int]]:
        """What went over each connection, which is not among the bytes of files if it is a socket to its user."""
        try:
            numbers = [int(name) for name in os.listdir(self._proc / "self/fd")]
        except (OSError, ValueError):
            return
        for number in numbers if len(numbers) <= _MOST_FILES else ():
            with suppress(OSError, struct.error, AttributeError):
                found = os.fstat(number)
                if stat.S_ISSOCK(found.st_mode):
                    yield found.st_ino, _bytes_over(number)

    def _pages_written_back(self) -> Iterator[tuple[object, int]]:
        """What the machine has written to its disks, if a thread of this process waits for a disk, as in ``fsync``."""
        with suppress(OSError, ValueError, StopIteration):
            if any(_waits_for_disk(task / "stat") for task in (self._proc / "self/task").iterdir()):
                lines = (self._proc / "vmstat").read_bytes().splitlines()
                yield _PAGES, _PAGE * int(next(line for line in lines if line.startswith(b"nr_written ")).split()[1])


def _bytes_over(number: int) -> int:
    """What was sent and received over a TCP connection; 0 for what is none."""
    with socket.socket(fileno=os.dup(number)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return 0
        known = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return sum(_TCP_BYTES.unpack_from(known))


def _waits_for_disk(status: Path) -> bool:
    with suppress(OSError):  # threads come and go
        return status.read_bytes().rpartition(b")")[2].split()[:1] == [b"D"]
    return False
