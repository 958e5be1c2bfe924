"""Gives back memory that holds pages of a mapped file, once they have been used."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from mmap import PAGESIZE
from typing import Any

import torch

_PAGE_OUT = 21
"""Linux' MADV_PAGEOUT. Unlike MADV_DONTNEED it loses nothing, whatever memory it is applied to."""


def release_pages(tensor: torch.Tensor) -> None:
    """Let the system reuse the memory behind ``tensor`` at once; it is read from the file again when it is needed.

    It would be taken anyway when memory gets short. This keeps a process that goes through a large file from looking
    as large as the file. It does nothing where the system has no such call.
    """
    advise = _madvise()
    if advise is None or tensor.device.type != "cpu":
        return
    storage = tensor.untyped_storage()
    start = -(-storage.data_ptr() // PAGESIZE) * PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // PAGESIZE * PAGESIZE
    if end > start:
        advise(start, end - start, _PAGE_OUT)


@cache
def _madvise() -> Any:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
