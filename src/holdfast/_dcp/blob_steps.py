"""The steps of reading blobs, and how far a load has come with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from holdfast._base.byte_counts import count_bytes
from holdfast._base.crc import combined
from holdfast._base.garbage import no_garbage_collection
from holdfast._dcp.destinations import Destination
from holdfast._formats.box_reads import ByteRange, ChunkRead
from holdfast._formats.dcp.metadata import _StorageInfo
from holdfast._formats.dcp.plan import ReadItem
from holdfast._formats.ranged_files import Ranges, ReadStep

# The steps of reading blobs: small ones many at once, large ones straight into the state, all others one by one.


class StoredItems(NamedTuple):
    """A blob, and the items that need it or a part of it."""

    info: _StorageInfo
    items: list[ReadItem]


class Batch:
    """Blobs that are close together and are read at once."""

    def __init__(self, file: Ranges, apply: Callable[[StoredItems, Any], None]) -> None:
        self._file = file
        self._apply = apply
        self._blobs: list[StoredItems] = []
        self.begin = self.end = 0

    def takes(self, info: _StorageInfo, *, most: int, gap: int) -> bool:
        """Whether a blob behind the others is better read with them than on its own."""
        if not self._blobs:
            return True
        close = self.begin <= info.offset <= self.end + gap
        return close and info.offset + info.length - self.begin <= most

    def add(self, blob: StoredItems) -> None:
        """One more."""
        if not self._blobs:
            self.begin = blob.info.offset
        self._blobs.append(blob)
        self.end = max(self.end, blob.info.offset + blob.info.length)

    def steps(self) -> Iterator[ReadStep]:
        """One, if there is anything to read."""
        if self._blobs:
            yield self

    def read(self) -> bytearray:
        """All blobs."""
        content = bytearray(self.end - self.begin)
        self._file.read_into(self.begin, content)
        count_bytes(len(content))
        return content

    def finish(self, content: bytearray) -> None:
        """Check the blobs and hand them on."""
        view = memoryview(content)
        with no_garbage_collection():
            for blob in self._blobs:
                start = blob.info.offset - self.begin
                self._apply(blob, view[start : start + blob.info.length])


class WholeBlob:
    """A blob that is read as a stream of its own."""

    def __init__(
        self, blob: StoredItems, read: Callable[[], bytearray], apply: Callable[[StoredItems, Any], None]
    ) -> None:
        self._blob = blob
        self._apply = apply
        self.read = read

    def finish(self, content: bytearray) -> None:
        """Check it and hand it on."""
        self._apply(self._blob, content)


class Chunk:
    """A chunk that goes straight into the state. It is compared with its CRC if all of it is read."""

    def __init__(
        self, reading: ChunkRead, places: Sequence[Destination], finish: Callable[[int], None], *, summed: bool
    ) -> None:
        # `finish` must not know of this: such a circle would keep tensors alive until the garbage collector comes.
        self._reading = reading
        self._places = places
        self._finish = finish
        self._summed = summed
        self._crc = 0
        self._begun = False

    def steps(self, progress: ItemCount) -> Iterator[ReadStep]:
        """One for every read, and the end."""
        progress.begin(self)
        progress.bytes_read += self._reading.bytes_read
        for run in self._reading.reads():
            yield _ChunkStep(self, run)
        yield _End(self, progress)

    def read(self, run: ByteRange) -> int:
        """A range."""
        self._begun = True
        return self._reading.read(run, summed=self._summed)

    def add(self, run: ByteRange, crc: int) -> None:
        """The next range was read."""
        if self._summed:
            self._crc = combined(self._crc, crc, run.end - run.begin)

    def end(self, progress: ItemCount) -> None:
        """All reads were read."""
        self._finish(self._crc)
        progress.end(self, len(self._places))

    def clear(self) -> bool:
        """Leave zeros where there may be a part of it."""
        if self._begun:
            for place in self._places:
                place.clear()
        return self._begun


class _ChunkStep:
    def __init__(self, chunk: Chunk, run: ByteRange) -> None:
        self._chunk = chunk
        self._run = run

    def read(self) -> int:
        return self._chunk.read(self._run)

    def finish(self, crc: int) -> None:
        self._chunk.add(self._run, crc)


class _End:
    """Comes behind the reads of a chunk, which may be none."""

    def __init__(self, chunk: Chunk, progress: ItemCount) -> None:
        self._chunk = chunk
        self._progress = progress

    def read(self) -> None:
        pass

    def finish(self, _: None) -> None:
        self._chunk.end(self._progress)


class Closing:
    """Comes behind all steps that need a file."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close

    def read(self) -> None:
        """Nothing to read."""

    def finish(self, _: None) -> None:
        """Nobody needs the file any more."""
        self._close()


# How far a load has come, and what becomes of that which an error left half read.


class HalfRead(Protocol):
    """Something that is being read into the state."""

    def clear(self) -> bool:
        """Leave zeros where there may be a part of it. False if nothing was read yet."""


class ItemCount:
    """Counts the items of one rank."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.applied = 0
        self.bytes_read = 0
        self._under_way: dict[int, HalfRead] = {}
        self._cleared = 0

    def begin(self, reading: HalfRead) -> None:
        """Something is going to be read straight into the state."""
        self._under_way[id(reading)] = reading

    def end(self, reading: HalfRead, items: int) -> None:
        """It is there, complete and undamaged."""
        del self._under_way[id(reading)]
        self.applied += items

    def clear_what_is_half_read(self) -> None:
        """After an error, when nothing is being read any more."""
        self._cleared += sum(reading.clear() for reading in self._under_way.values())
        self._under_way = {}

    def how_far(self) -> str:
        """What had already happened to the state when reading failed."""
        return how_far(self.applied, self.total, self._cleared)


def how_far(applied: int, total: int, cleared: int = 0) -> str:
    """What had already happened to the state when reading failed."""
    zeros = f" {cleared} tensor(s) that were being read are zero now." if cleared else ""
    if applied == 0:
        return f"None of the {total} item(s) of this rank had been loaded.{zeros}"
    return (
        f"{applied} of {total} item(s) of this rank had been loaded already: the state is a mix of old and new.{zeros}"
    )
