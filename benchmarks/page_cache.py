"""What of a file is in memory: looked up, dropped and filled, so that cold is cold and warm is warm."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)

COLD = 0.02
"""Files of which a larger part than this is cached do not count as cold."""


class NotColdError(Exception):
    """The system did not let go of a file."""


def files_in(folder: Path) -> Iterator[Path]:
    """All files in a folder and its folders, or the file itself."""
    if folder.is_file():
        yield folder
    else:
        yield from (path for path in sorted(folder.rglob("*")) if path.is_file())


def drop(folder: Path) -> None:
    """Drop all files from the page cache; raises if that did not work."""
    for path in files_in(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what is not on the disk cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    if cached_part(folder) > COLD:
        _drop_everything()
    left = cached_part(folder)
    if left > COLD:
        raise NotColdError(f"{left:.0%} of {folder.name} stayed in the page cache")


def fill(folder: Path) -> None:
    """Read all files into the page cache, one after the other."""
    memory = mmap.mmap(-1, 4 << 20)
    for path in files_in(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(memory):
                pass
    memory.close()


def cached_part(folder: Path) -> float:
    """Which part of all files is in the page cache."""
    pages = cached = 0
    for path in files_in(folder):
        if path.stat().st_size:
            resident = _resident_pages(path)
            pages += len(resident)
            cached += int(resident.sum())
    return cached / pages if pages else 0.0


def _resident_pages(path: Path) -> np.ndarray:
    """One or zero for each page of a file."""
    size = path.stat().st_size
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
        found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        content = np.frombuffer(mapped, np.uint8)
        address = content.ctypes.data
        if _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore failed", str(path))
        del content  # or the mapping could not be closed
    return found & 1


def _drop_everything() -> None:
    """Where that is permitted."""
    try:
        with open("/proc/sys/vm/drop_caches", "w") as switch:
            switch.write("1")
    except OSError:
        pass
