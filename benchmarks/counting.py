"""How many bytes were read: as a store sees it, and as the kernel does."""

from __future__ import annotations

from pathlib import Path

from tests.stores.counting import CountingLocalStore, bytes_in, bytes_twice, files_in, separate_ranges

__all__ = [
    "DIGEST_BLOCK",
    "CountingLocalStore",
    "bytes_in",
    "bytes_read_by_this_process",
    "bytes_twice",
    "files_in",
    "separate_ranges",
]

DIGEST_BLOCK = 1 << 16
"""Of the native format: a part of a block cannot be checked without the rest of it."""


def bytes_read_by_this_process() -> int:
    """By all calls that read, as the kernel counts them."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "rchar":
            return int(value)
    return 0
