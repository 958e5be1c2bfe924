"""Writes the container of a ``torch.save`` file: a zip archive of any number of entries of any size.

Entries are stored as they are, and their content starts at a multiple of 64 bytes, so that ``torch.load(mmap=True)``
can use it in place.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from holdfast._base.crc import crc32
from holdfast._base.tuning import STREAM_BYTES
from holdfast._formats.archives import zip_layout as layout
from holdfast._stores.store import BufferedSink

ALIGNMENT = 64
_ROOT = "archive/"
_VERSION, _VERSION64 = 20, 45


class Output(Protocol):
    """Where an archive goes."""

    def write(self, data: Any, /) -> Any:
        """Take all of it."""


Fill = Callable[[int, memoryview, int], int]
"""``(begin, memory, crc)``: fills memory with the content from ``begin`` on, and adds it to the CRC of what was before.
Memory begins and ends with a multiple of 16 bytes of the content, or with the content itself."""


class ZipWriter:
    """Appends entries to what is at ``position`` of an output, one after another; ``close`` writes the directory.

    If an output is a ``BufferedSink``, entries that are made piece by piece are made right in its buffers.

    >>> import io, zipfile
    >>> stream = io.BytesIO()
    >>> archive = ZipWriter(stream)
    >>> archive.add("version", b"3")
    >>> archive.close()
    >>> zipfile.ZipFile(stream).read("archive/version")
    b'3'
    """

    def __init__(self, output: Output, position: int = 0) -> None:
        self._output = output
        self._lending = output if isinstance(output, BufferedSink) else None
        self._position = position
        self._lines: list[bytes] = []

    def add(self, name: str, content: bytes | memoryview) -> None:
        """Write an entry."""
        full_name = (_ROOT + name).encode()
        view = memoryview(content).cast("B")
        crc, begin = crc32(view), self._position
        self._write(_header(full_name, crc, len(view), begin, flags=0))
        self._write(view)
        self._lines.append(_line(full_name, crc, len(view), begin, flags=0))

    def add_in_pieces(self, name: str, size: int, fill: Fill) -> None:
        """Write an entry that is never in memory as a whole. Its CRC is only known in the end, and stands behind it."""
        full_name, begin = self._begin_entry(name, size)
        crc = done = 0
        while done < size:
            lent = None if self._lending is None else self._lending.buffer()
            memory = (memoryview(bytearray(STREAM_BYTES)) if lent is None else lent)[: size - done]
            crc = fill(done, memory, crc)
            if self._lending is None or lent is None:
                self._output.write(memory)
            else:
                self._lending.advance(memory.nbytes)
            done += memory.nbytes
        self._position += size
        self._end_entry(full_name, crc, size, begin)

    def add_from(self, name: str, size: int, pieces: Iterable[memoryview]) -> None:
        """Write an entry whose content comes in pieces, of ``size`` bytes in all."""
        full_name, begin = self._begin_entry(name, size)
        crc, content = 0, self._position
        for piece in pieces:
            for at in range(0, len(piece), STREAM_BYTES):
                part = piece[at : at + STREAM_BYTES]
                crc = crc32(part, crc)
                self._write(part)
        if self._position - content != size:
            raise ValueError(f"{self._position - content} bytes came for {name}, which was to have {size}")
        self._end_entry(full_name, crc, size, begin)

    def _begin_entry(self, name: str, size: int) -> tuple[bytes, int]:
        full_name, begin = (_ROOT + name).encode(), self._position
        self._write(_header(full_name, 0, size, begin, flags=layout.CRC_FOLLOWS))
        return full_name, begin

    def _end_entry(self, name: bytes, crc: int, size: int, begin: int) -> None:
        descriptor = layout.DESCRIPTOR64 if size >= layout.MAX32 else layout.DESCRIPTOR
        self._write(descriptor.pack(layout.DESCRIPTOR_MAGIC, crc, size, size))
        self._lines.append(_line(name, crc, size, begin, flags=layout.CRC_FOLLOWS))

    def close(self) -> None:
        """Write the directory. The output stays open."""
        start, count = self._position, len(self._lines)
        self._write(b"".join(self._lines))
        size = self._position - start
        if count >= layout.MAX16 or max(start, size) >= layout.MAX32:
            end64 = self._position
            record = (layout.END64_MAGIC, layout.END64.size - 12, _VERSION64, _VERSION64, 0, 0, count, count)
            self._write(layout.END64.pack(*record, size, start))
            self._write(layout.LOCATOR64.pack(layout.LOCATOR64_MAGIC, 0, end64, 1))
        count, size, start = min(count, layout.MAX16), min(size, layout.MAX32), min(start, layout.MAX32)
        self._write(layout.END.pack(layout.END_MAGIC, 0, 0, count, count, size, start, 0))

    def _write(self, data: bytes | memoryview) -> None:
        self._output.write(data)
        self._position += len(data)


def _header(name: bytes, crc: int, size: int, position: int, *, flags: int) -> bytes:
    """What stands in front of an entry's content, as long as it takes for the content to be aligned."""
    version, short, extra = _VERSION, size, b""
    if size >= layout.MAX32:
        version, short, extra = _VERSION64, layout.MAX32, _extra64([size, size])
    padding = -(position + layout.LOCAL.size + len(name) + len(extra) + layout.EXTRA.size) % ALIGNMENT
    extra += layout.EXTRA.pack(layout.PADDING_ID, padding) + bytes(padding)
    lengths = (short, short, len(name), len(extra))
    fields = (layout.LOCAL_MAGIC, version, layout.UTF8 | flags, layout.STORED, 0, 0, crc, *lengths)
    return layout.LOCAL.pack(*fields) + name + extra


def _line(name: bytes, crc: int, size: int, position: int, *, flags: int) -> bytes:
    """An entry's line in the directory. Of sizes and position, those that need 64 bits move to an extra field."""
    large = [number for number in (size, size, position) if number >= layout.MAX32]
    version, extra = (_VERSION64, _extra64(large)) if large else (_VERSION, b"")
    short = min(size, layout.MAX32)
    lengths = (short, short, len(name), len(extra), 0)
    fields = (layout.CENTRAL_MAGIC, version, version, layout.UTF8 | flags, layout.STORED, 0, 0, crc, *lengths)
    return layout.CENTRAL.pack(*fields, 0, 0, 0, min(position, layout.MAX32)) + name + extra


def _extra64(numbers: list[int]) -> bytes:
    return layout.EXTRA.pack(layout.ZIP64_ID, 8 * len(numbers)) + struct.pack(f"<{len(numbers)}Q", *numbers)
