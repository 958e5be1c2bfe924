"""Writes a data file from front to back, with the digests of its blocks taken from the very bytes that are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.formats.native.blocks import Digests, digest_blocks
from holdfast.formats.native.layout import ChunkToWrite, FileLayout

Bytes = npt.NDArray[np.uint8]
Pieces = Callable[[ChunkToWrite], Iterable[Bytes]]
"""The bytes of a chunk, in order, in as many pieces as is convenient."""

WRITE_BYTES = 8 << 20


class Stream(Protocol):
    """What a file is written to."""

    def write(self, buffer: Any, /) -> Any:
        """Take the next bytes, all of them."""


def write_data_file(
    stream: Stream, layout: FileLayout, pieces: Pieces, block_bytes: int, write_bytes: int = WRITE_BYTES
) -> Digests:
    """Write a file as it was laid out. Returns the digests of its blocks.

    Bytes are collected in one buffer of ``write_bytes``, so that thousands of small chunks cost few writes, and what is
    digested cannot change before it is written.
    """
    buffer = np.empty(max(block_bytes, write_bytes // block_bytes * block_bytes), np.uint8)
    digests: list[Digests] = []
    filled = 0

    def flush() -> None:
        nonlocal filled
        digests.append(digest_blocks(buffer[:filled], block_bytes))
        stream.write(buffer[:filled].data)
        filled = 0

    def take(data: Bytes) -> None:
        nonlocal filled
        taken = 0
        while taken < data.nbytes:
            count = min(data.nbytes - taken, buffer.nbytes - filled)
            buffer[filled : filled + count] = data[taken : taken + count]
            filled += count
            taken += count
            if filled == buffer.nbytes:
                flush()

    take(np.frombuffer(layout.header, np.uint8))
    for chunk, _ in layout.chunks:
        given = 0
        for piece in pieces(chunk):
            take(piece)
            given += piece.nbytes
        if given != chunk.nbytes:
            raise AssertionError(f"{chunk.key!r} was planned with {chunk.nbytes} bytes and came with {given}")
    if filled:
        flush()
    return np.concatenate(digests)
