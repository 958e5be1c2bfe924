"""The container around stored objects: zip archives whose entries are all stored uncompressed.

Because nothing is compressed, the directory at the end of an archive says where the bytes of every entry are, and
they can be read on their own. Names are handled without the archive's root folder, which is ``archive/`` in what
torch and Holdfast write and the file's name in what people copied from ``torch.save``.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from holdfast.errors import DamagedCheckpointError

ReadAt = Callable[[int, int], bytes]
"""``(offset, length)`` to that many bytes of an archive."""

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR64 = struct.Struct("<4sIQI")
DESCRIPTOR = struct.Struct("<4s3I")
DESCRIPTOR64 = struct.Struct("<4sI2Q")
EXTRA = struct.Struct("<2H")

LOCAL_MAGIC, CENTRAL_MAGIC, DESCRIPTOR_MAGIC = b"PK\x03\x04", b"PK\x01\x02", b"PK\x07\x08"
END_MAGIC, END64_MAGIC, LOCATOR64_MAGIC = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"

ENCRYPTED, CRC_FOLLOWS, UTF8 = 0x0001, 0x0008, 0x0800
STORED = 0
MAX16, MAX32 = 0xFFFF, 0xFFFFFFFF
PADDING_ID, ZIP64_ID = 0x4246, 0x0001
ROOT = "archive/"

FIXED = (("version", b"3\n"), ("byteorder", sys.byteorder.encode()))
"""What is the same in every archive. It comes first, so that its place is the same too."""

_WINDOW = 4096


class ZipEntry(NamedTuple):
    """Where the bytes of an entry are in its archive."""

    offset: int
    length: int
    crc: int | None
    """CRC-32 of the bytes; None if the writer recorded none."""


# Writing


def local_entry(name: str, content: bytes) -> bytes:
    """A whole entry of known content."""
    full_name = (ROOT + name).encode()
    size = len(content)
    header = LOCAL.pack(LOCAL_MAGIC, 20, UTF8, STORED, 0, 0, zlib.crc32(content), size, size, len(full_name), 0)
    return header + full_name + content


def central_entry(name: str, crc: int, size: int, position: int, *, flags: int = 0) -> bytes:
    """The line of an entry in the directory. ``position`` is where its local header starts."""
    full_name = (ROOT + name).encode()
    version, short, extra = 20, size, b""
    if size >= MAX32:
        version, short, extra = 45, MAX32, EXTRA.pack(ZIP64_ID, 16) + struct.pack("<2Q", size, size)
    lengths = (short, short, len(full_name), len(extra), 0)
    header = CENTRAL.pack(CENTRAL_MAGIC, version, version, UTF8 | flags, STORED, 0, 0, crc, *lengths, 0, 0, 0, position)
    return header + full_name + extra


def end_of_archive(count: int, length: int, position: int) -> bytes:
    """What stands behind a directory of ``length`` bytes at ``position``."""
    end = END.pack(END_MAGIC, 0, 0, count, count, length, min(position, MAX32), 0)
    if position < MAX32:
        return end
    end64 = END64.pack(END64_MAGIC, END64.size - 12, 45, 45, 0, 0, count, count, length, position)
    return end64 + LOCATOR64.pack(LOCATOR64_MAGIC, 0, position + length, 1) + end


def _fixed() -> tuple[bytes, bytes]:
    entries, lines = b"", b""
    for name, content in FIXED:
        lines += central_entry(name, zlib.crc32(content), len(content), len(entries))
        entries += local_entry(name, content)
    return entries, lines


FIXED_ENTRIES, FIXED_LINES = _fixed()

# Reading


class _Listed(NamedTuple):
    """A line of the directory."""

    name: bytes
    flags: int
    crc: int
    length: int
    position: int


class _Damage(Exception):
    """Something is wrong with an archive; becomes an error that says with which."""

    def __init__(self, what: str, expected: Any = None, found: Any = None) -> None:
        super().__init__(what, expected, found)


def damaged(source: str, key: str | None, what: str, expected: Any = None, found: Any = None) -> DamagedCheckpointError:
    """The error for stored bytes that cannot be what was saved."""
    about = f"'{key}'" if key is not None else "an item"
    detail = "" if expected is None and found is None else f" (expected {expected}, found {found})"
    return DamagedCheckpointError(
        f"{source}: the stored bytes of {about} are damaged: {what}{detail}. Load another checkpoint, or copy this "
        "file again from where it came from.",
        file=source,
        key=key,
        expected=expected,
        found=found,
    )


def read_directory(read_at: ReadAt, length: int, *, source: str, key: str | None = None) -> dict[str, ZipEntry]:
    """All entries of the archive that ``read_at`` reads, by name.

    Everything that locates bytes is checked: entries are stored as they are, are inside the archive, do not overlap,
    and have the same name in both places. Two small reads do for an ordinary archive, however large its content.
    """
    try:
        archive = _Archive(read_at, length)
        listed, directory_at = archive.directory()
        entries = _without_root(_located(archive, listed, directory_at))
    except _Damage as damage:
        raise damaged(source, key, *damage.args) from None
    # Under torch.serialization.set_crc32_options(False) torch writes 0 for all of them.
    if all(entry.crc == 0 for entry in entries.values()):
        return {name: entry._replace(crc=None) for name, entry in entries.items()}
    return entries


class _Archive:
    """The bytes of an archive, read in windows because its structures stand close together."""

    def __init__(self, read_at: ReadAt, length: int) -> None:
        self._read_at = read_at
        self._length = length
        self._windows: list[tuple[int, bytes]] = []

    def get(self, position: int, length: int) -> bytes:
        """``length`` bytes at ``position``."""
        if position < 0 or position + length > self._length:
            raise _Damage("it refers to bytes beyond its end", f"at most {self._length} bytes", position + length)
        for start, window in self._windows:
            if start <= position and position + length <= start + len(window):
                return window[position - start : position - start + length]
        window = self._read(position, max(length, _WINDOW))
        # The end, the directory and the newest are enough: entries are looked at in the order in which they are stored.
        self._windows[2:] = [(position, window)]
        return window[:length]

    def directory(self) -> tuple[list[_Listed], int]:
        """The lines of the directory, and where it starts."""
        count, size, position, end = self._end()
        if position + size > end:
            raise _Damage("its directory is not inside of it", f"an end before byte {end}", position + size)
        return list(_lines(self.get(position, size), count)), position

    def _read(self, position: int, length: int) -> bytes:
        length = min(length, self._length - position)
        data = bytes(self._read_at(position, length))
        if len(data) != length:
            raise _Damage("it is cut off", f"{length} bytes at {position}", f"{len(data)} bytes")
        return data

    def _end(self) -> tuple[int, int, int, int]:
        """Number of entries, size and position of the directory, and where the records behind it start."""
        start = max(0, self._length - _WINDOW)
        tail = self._read(start, self._length - start)
        self._windows.append((start, tail))
        at = tail.rfind(END_MAGIC)
        if at < 0 or at + END.size > len(tail):
            raise _Damage("it is not a complete archive", "an end-of-archive record", "none")
        _, disk, other_disk, here, count, size, position, comment = END.unpack_from(tail, at)
        if disk or other_disk or here != count or at + END.size + comment != len(tail):
            raise _Damage("its end-of-archive record makes no sense")
        if count == MAX16 or MAX32 in (size, position):
            return self._end64(start + at)
        return count, size, position, start + at

    def _end64(self, end: int) -> tuple[int, int, int, int]:
        magic, _, at, _ = LOCATOR64.unpack(self.get(end - LOCATOR64.size, LOCATOR64.size))
        if magic != LOCATOR64_MAGIC:
            raise _Damage("the record of its large sizes is missing")
        record = END64.unpack(self.get(at, END64.size))
        magic, *_, here, count, size, position = record
        if magic != END64_MAGIC or here != count:
            raise _Damage("the record of its large sizes makes no sense")
        return count, size, position, at


def _lines(directory: bytes, count: int) -> Iterator[_Listed]:
    at = 0
    for _ in range(count):
        if at + CENTRAL.size > len(directory):
            raise _Damage("its directory is too short", f"{count} entries")
        header = CENTRAL.unpack_from(directory, at)
        magic, _, _, flags, method, _, _, crc, packed, length, names, extras, comments, disk, _, _, position = header
        at += CENTRAL.size
        name, extra = directory[at : at + names], directory[at + names : at + names + extras]
        at += names + extras + comments
        if magic != CENTRAL_MAGIC or at > len(directory) or disk:
            raise _Damage("its directory makes no sense")
        length, packed, position = _large(extra, [length, packed, position])
        if method != STORED or packed != length or flags & ENCRYPTED:
            raise _Damage("an entry is compressed or encrypted", "bytes stored as they are", name)
        yield _Listed(name, flags, crc, length, position)
    if at != len(directory):
        raise _Damage("its directory has more than its entries", at, len(directory))


def _large(extra: bytes, numbers: list[int]) -> list[int]:
    """The numbers of a directory line, with those that need 64 bits taken from its extra field."""
    if MAX32 not in numbers:
        return numbers
    at = 0
    while at + EXTRA.size <= len(extra):
        kind, size = EXTRA.unpack_from(extra, at)
        at += EXTRA.size
        if kind == ZIP64_ID and size >= 8 * numbers.count(MAX32) and at + size <= len(extra):
            large = iter(struct.unpack_from(f"<{size // 8}Q", extra, at))
            return [next(large) if number == MAX32 else number for number in numbers]
        at += size
    raise _Damage("a large entry has no size")


def _located(archive: _Archive, listed: list[_Listed], directory_at: int) -> Iterator[tuple[bytes, ZipEntry]]:
    """Where the content of each entry starts, which only its local header knows."""
    free_from = 0
    for line in sorted(listed, key=lambda line: line.position):
        if line.position < free_from:
            raise _Damage("its entries overlap", f"an entry at {free_from} or later", line.position)
        size = LOCAL.size + len(line.name)
        header = archive.get(line.position, size)
        magic, _, flags, method, _, _, crc, _, length, names, extras = LOCAL.unpack_from(header)
        same_name = names == len(line.name) and header[LOCAL.size :] == line.name
        if magic != LOCAL_MAGIC or not same_name or method != STORED or flags != line.flags:
            raise _Damage("an entry is not where the directory says", line.name, header[LOCAL.size :])
        if not flags & CRC_FOLLOWS and (crc != line.crc or length not in (line.length, MAX32)):
            raise _Damage("an entry and the directory disagree", line.crc, crc)
        offset = line.position + size + extras
        free_from = offset + line.length
        if free_from > directory_at:
            raise _Damage("an entry goes beyond the start of the directory", directory_at, free_from)
        yield line.name, ZipEntry(offset, line.length, line.crc)


def _without_root(entries: Iterable[tuple[bytes, ZipEntry]]) -> dict[str, ZipEntry]:
    found: dict[str, ZipEntry] = {}
    root = None
    for raw_name, entry in entries:
        try:
            folder, slash, name = raw_name.decode().partition("/")
        except UnicodeDecodeError:
            raise _Damage("an entry has a name that is not UTF-8", found=raw_name) from None
        root = folder if root is None else root
        if not slash or folder != root or name in found:
            raise _Damage("its entries are not in one folder, or there twice", found=raw_name)
        if name:
            found[name] = entry
    return found
