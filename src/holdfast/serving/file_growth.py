"""How much of a file has been written so far.

Its size does not tell: large files get all of their space before the first byte, so that a full disk is noticed early.
The file system knows which parts are still holes.
"""

from __future__ import annotations

import os

_MOST_PARTS = 10_000
"""A file in more parts than this counts as written: to go through all would take too long."""


def written_bytes(path: str | os.PathLike[str]) -> int:
    """How many bytes of a file have content; all of them where the file system does not tell.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     size = file.truncate(1 << 24)
    ...     before = written_bytes(file.name)
    ...     written = os.pwrite(file.fileno(), bytes(1 << 20), 1 << 23)
    ...     before, written_bytes(file.name)
    (0, 1048576)
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        size = os.fstat(descriptor).st_size
        if not hasattr(os, "SEEK_DATA"):
            return size
        return _without_holes(descriptor, size)
    finally:
        os.close(descriptor)


def _without_holes(descriptor: int, size: int) -> int:
    position = written = 0
    for _ in range(_MOST_PARTS):
        try:
            begin = os.lseek(descriptor, position, os.SEEK_DATA)
            position = os.lseek(descriptor, begin, os.SEEK_HOLE)
        except OSError:  # there is no content behind this position, or the file system has no such call
            return written
        written += position - begin
        if position >= size:
            return min(written, size)
    return size
