"""Descriptors that go past the page cache, and the aligned memory that they want."""

from __future__ import annotations

import errno
import mmap
import os

from holdfast.tuning import DIRECT_ALIGNMENT

CANNOT_BE_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
"""How file systems say that they do not do this, or not with such memory or positions."""

_O_DIRECT = getattr(os, "O_DIRECT", 0)


def open_directly(path: str, descriptor: int, flags: int) -> int | None:
    """Another descriptor of an open file, for direct access; None if its file system has none.

    The path may lead to another file by now. Then there is none either.
    """
    if not _O_DIRECT:
        return None
    try:
        direct = os.open(path, flags | _O_DIRECT)
    except OSError:
        return None
    if os.path.samestat(os.fstat(direct), os.fstat(descriptor)):
        return direct
    os.close(direct)
    return None


def aligned_memory(size: int) -> mmap.mmap:
    """Memory that begins with a page."""
    return mmap.mmap(-1, size)


def rounded_up(size: int, step: int = DIRECT_ALIGNMENT) -> int:
    """The next multiple.

    >>> rounded_up(5000), rounded_up(8192)
    (8192, 8192)
    """
    return -(-size // step) * step
