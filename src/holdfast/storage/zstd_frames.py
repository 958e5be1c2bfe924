"""The frames of a Zstandard stream, taken apart into pieces that are small however much they decompress to.

A block of a few bytes may stand for 128 KiB, and never for more; so memory is bounded if blocks are decompressed one at
a time. That a stream was cut off shows here too, where some decompressors just end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

_MAGIC = 0xFD2FB528
_SKIPPABLE_MAGIC = 0x184D2A50  # and the 15 numbers after it
_RUN = 1  # the type of blocks that are one byte, repeated
_PIECE = 1 << 17


def frame_pieces(stream: IO[bytes]) -> Iterator[Iterator[bytes]]:
    """The pieces of each frame. Take all pieces of one frame before the next frame."""
    while start := stream.read(1):
        magic = int.from_bytes(start + _exactly(stream, 3), "little")
        if magic & ~0xF == _SKIPPABLE_MAGIC:
            _skip(stream, int.from_bytes(_exactly(stream, 4), "little"))
        elif magic == _MAGIC:
            yield _pieces(stream)
        else:
            raise ValueError(f"these are not the bytes of a zstd frame: {magic:08x}")


def _pieces(stream: IO[bytes]) -> Iterator[bytes]:
    flags = _exactly(stream, 1)
    yield _MAGIC.to_bytes(4, "little") + flags + _exactly(stream, _rest_of_header(flags[0]))
    is_last = False
    while not is_last:
        head = _exactly(stream, 3)
        word = int.from_bytes(head, "little")
        is_last, kind, size = bool(word & 1), (word >> 1) & 3, word >> 3
        yield head + _exactly(stream, 1 if kind == _RUN else size)
    if flags[0] & 0b100:
        yield _exactly(stream, 4)  # the checksum


def _rest_of_header(flags: int) -> int:
    """Bytes of the header behind its flags: the window's size, the dictionary's id, the content's size."""
    is_single_segment = bool(flags & 0b10_0000)
    window = 0 if is_single_segment else 1
    dictionary = (0, 1, 2, 4)[flags & 0b11]
    content = (1 if is_single_segment else 0, 2, 4, 8)[flags >> 6]
    return window + dictionary + content


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size) if size else b""
    while len(data) < size:
        more = stream.read(size - len(data))
        if not more:
            raise EOFError("the compressed data ends too early")
        data += more
    return data


def _skip(stream: IO[bytes], size: int) -> None:
    while size:
        size -= len(_exactly(stream, min(size, _PIECE)))
