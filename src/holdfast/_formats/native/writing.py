"""Writes a data file from front to back, with the digests of its blocks taken from the very bytes that are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from holdfast._base.tuning import ROOM_BYTES
from holdfast._formats.native.blocks import Digests, digest_blocks
from holdfast._formats.native.layout import ChunkToWrite, FileLayout
from holdfast._stores.store import BufferedSink, Sink

Bytes = npt.NDArray[np.uint8]
Pieces = Callable[[ChunkToWrite], Iterable[Bytes]]
"""The bytes of a chunk, in order, in as many pieces as is convenient."""

Gather = Callable[[int, Bytes], tuple[int, int]]
"""Puts whole chunks, beginning with the one of that number, into a room: as many as can be had without effort and fit,
perhaps none. Tells how many, and how many bytes they took."""


def write_data_file(
    sink: Sink,
    layout: FileLayout,
    pieces: Pieces,
    block_bytes: int,
    memory: int | None = None,
    gather: Gather | None = None,
    advance: Callable[[int], None] | None = None,
) -> Digests:
    """Write a file as it was laid out. Returns the digests of its blocks.

    Bytes are collected in rooms of a few megabytes, so that thousands of small chunks cost few writes, and what is
    digested cannot change before it is written. ``advance`` is told of each of them.
    """
    rooms = _Rooms(sink, block_bytes, memory, advance)
    rooms.take(np.frombuffer(layout.header, np.uint8))
    number, count = 0, len(layout.chunks)
    while number < count:
        if gather is not None:
            gathered, filled = gather(number, rooms.rest())
            rooms.filled(filled)
            number += gathered
        if number < count:  # the next one does not fit whole, or has to be converted
            _write_chunk(rooms, layout.chunks[number][0], pieces)
            number += 1
    return rooms.finish()


def _write_chunk(rooms: _Rooms, chunk: ChunkToWrite, pieces: Pieces) -> None:
    given = 0
    for piece in pieces(chunk):
        rooms.take(piece)
        given += piece.nbytes
        del piece  # the next one is made while this name is still in use otherwise, and takes memory besides it
    if given != chunk.nbytes:
        raise AssertionError(f"{chunk.key!r} was planned with {chunk.nbytes} bytes and came with {given}")


class _Rooms:
    """Memory that is filled, digested block by block, and handed on."""

    def __init__(self, sink: Sink, block_bytes: int, memory: int | None, advance: Callable[[int], None] | None) -> None:
        self._sink = sink
        self._lender = sink if isinstance(sink, BufferedSink) else None
        self._advance = advance
        self._block_bytes = block_bytes
        self._memory = memory
        self._own: Bytes | None = None
        self._digests: list[Digests] = []
        self._begin()

    def take(self, data: Bytes) -> None:
        """The next bytes of the file."""
        filled, count = self._filled, data.nbytes
        if filled + count < self._room.nbytes:
            self._room[filled : filled + count] = data
            self._filled += count
            return
        taken = 0
        while taken < count:
            part = min(count - taken, self._room.nbytes - self._filled)
            self._room[self._filled : self._filled + part] = data[taken : taken + part]
            self._filled += part
            taken += part
            if self._filled == self._room.nbytes:
                self._hand_on()
                self._begin()

    def rest(self) -> Bytes:
        """What is free of the room, for bytes to be put there."""
        return self._room[self._filled :]

    def filled(self, count: int) -> None:
        """The next bytes of the file have been put into the rest of the room."""
        self._filled += count
        if self._filled == self._room.nbytes:
            self._hand_on()
            self._begin()

    def finish(self) -> Digests:
        """Hand on the rest. Returns all digests."""
        if self._filled:
            self._hand_on()
        return np.concatenate([np.empty(0, np.uint32), *self._digests])

    def _begin(self) -> None:
        lent = None if self._lender is None else self._lender.buffer(self._memory)
        room = np.empty(0, np.uint8) if lent is None else np.frombuffer(lent, np.uint8)
        # Digests are of whole blocks, so that a room which ends within a block is used up to its beginning.
        self._room = room[: self._whole_blocks(room.nbytes)]
        if not self._room.nbytes:
            if self._own is None:
                size = ROOM_BYTES if self._memory is None else min(ROOM_BYTES, self._memory)
                self._own = np.empty(max(self._block_bytes, self._whole_blocks(size)), np.uint8)
            self._room = self._own
        self._filled = 0

    def _whole_blocks(self, nbytes: int) -> int:
        return nbytes // self._block_bytes * self._block_bytes

    def _hand_on(self) -> None:
        part = self._room[: self._filled]
        self._digests.append(digest_blocks(part, self._block_bytes))
        if self._lender is None or self._room is self._own:
            self._sink.write(part.data)
        else:
            self._lender.advance(self._filled)
        if self._advance is not None:
            self._advance(self._filled)
