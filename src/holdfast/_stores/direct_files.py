"""What files need that are read and written past the page cache, and what Linux says of those that are not."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from contextlib import suppress
from typing import Any

from holdfast._base.tuning import DIRECT_ALIGNMENT

# Descriptors that go past the page cache, and the aligned memory that they want.


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


# Calls of Linux that Python has no function for. Where a system lacks them, nothing happens: they only save time.


_HAS_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SYNC_FILE_RANGE_WRITE = 2
_SYNC_FILE_RANGE_ALL = 7
"""Write, and wait until that and what was begun before is on the disk."""
_CANNOT_SYNC_A_RANGE = {errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP}
_CACHESTAT = 451
"""Its number is the same on all processors. Linux has it from version 6.5 on."""


def reserve(descriptor: int, size: int) -> None:
    """Make sure that there is space for a file, where the file system can say.

    ``os.posix_fallocate`` would write zeros all over the file where it cannot.
    """
    if _fallocate is not None and _fallocate(descriptor, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number in _HAS_NO_SPACE:
            raise OSError(number, os.strerror(number))


def begin_to_write_back(descriptor: int, begin: int, size: int) -> None:
    """Let the system write a part of the page cache to the disk now, rather than all of it when the file is flushed."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, begin, size, _SYNC_FILE_RANGE_WRITE)


def write_back_and_let_go(descriptor: int, begin: int, size: int) -> None:
    """Have a part of the page cache written, and its memory free for what comes next. Raises what the disk reports: the
    system says so once, and would no longer when the file is flushed."""
    if _sync_file_range is None:
        return
    if _sync_file_range(descriptor, begin, size, _SYNC_FILE_RANGE_ALL) != 0:
        number = ctypes.get_errno()
        if number not in _CANNOT_SYNC_A_RANGE:
            raise OSError(number, os.strerror(number))
    let_go(descriptor, begin, size)


def let_go(descriptor: int, begin: int = 0, size: int = 0) -> None:
    """What of a part of a file is on the disk, or of all of it, need not stay in the page cache."""
    with suppress(OSError, AttributeError):  # it is advice, and there are systems without it
        os.posix_fadvise(descriptor, begin, size, os.POSIX_FADV_DONTNEED)


def count_cached_pages(descriptor: int, begin: int, size: int) -> int | None:
    """How many pages of a part of a file are in the page cache; None if the system does not say."""
    if _syscall is None:
        return None
    part, counts = (ctypes.c_uint64 * 2)(begin, size), (ctypes.c_uint64 * 5)()
    failed = _syscall(_CACHESTAT, descriptor, part, counts, 0)
    return None if failed else int(counts[0])


def _function(name: str, *arguments: Any) -> Any:
    if os.name != "posix":
        return None
    found = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if found is not None:
        found.argtypes = arguments
    return found


_fallocate = _function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_sync_file_range = _function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_syscall = (
    _function("syscall", ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    if sys.platform == "linux"
    else None
)
