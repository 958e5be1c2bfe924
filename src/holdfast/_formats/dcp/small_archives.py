"""Archives of small tensors, put together one behind the other to be written at once.

Of the archive of a small tensor most is around its bytes, and follows from its dtype and shape. So it is made once for
each of these, copied, and completed by the bytes and their CRC.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast._base.crc import crc32
from holdfast._base.tuning import CACHED_WRITE_BYTES, SMALL_TENSOR
from holdfast._formats.dcp.archive import TensorArchive
from holdfast._formats.dcp.metadata import Seal
from holdfast._formats.tensor_bytes import is_plain_contiguous, move_small

_CRC = struct.Struct("<I")


class _Form(NamedTuple):
    """What archives of one dtype and shape have in common."""

    content: bytes
    """All of it, with zeros where the elements and their CRC belong."""
    begin: int
    end: int
    """Where the elements are."""
    crc_places: tuple[int, ...]
    prefix_crc: int


@lru_cache(maxsize=1024)
def _form(dtype: torch.dtype, shape: torch.Size) -> _Form:
    archive = TensorArchive(dtype, shape)
    begin, length = len(archive.prefix), archive.payload_length
    content = archive.prefix + bytes(length) + archive.suffix(0)
    return _Form(content, begin, begin + length, archive.crc_places, archive.prefix_crc)


class SmallArchives:
    """Collects archives for a stream. What is collected belongs before whatever is written to the stream next."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._buffer = np.empty(0, np.uint8)
        self._view = memoryview(b"")
        self._address = 0
        self._filled = 0

    def add(self, tensor: torch.Tensor) -> tuple[int, Seal] | None:
        """Take a tensor, and say how long its archive is and what it adds up to; None if it is not a small one."""
        if not is_plain_contiguous(tensor) or tensor.nbytes > SMALL_TENSOR:
            return None
        content, begin, end, crc_places, prefix_crc = _form(tensor.dtype, tensor.shape)
        at = self._place_for(len(content))
        view = self._view[at : at + len(content)]
        view[:] = content
        move_small(self._address + at + begin, tensor.data_ptr(), end - begin)
        crc = crc32(view[begin:end])
        for place in crc_places:
            _CRC.pack_into(view, place, crc)
        return len(content), Seal(begin, end - begin, crc, crc32(view[end:], prefix_crc))

    def flush(self) -> None:
        """Write what is collected."""
        if self._filled:
            self._stream.write(self._view[: self._filled])
            self._filled = 0

    def _place_for(self, length: int) -> int:
        if not len(self._buffer):
            self._buffer = np.empty(CACHED_WRITE_BYTES, np.uint8)
            self._view, self._address = self._buffer.data, self._buffer.ctypes.data
        if self._filled + length > len(self._buffer):
            self.flush()
        at = self._filled
        self._filled += length
        return at
