"""The steps of reading blobs: small ones many at once, large ones straight into the state, all others one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from holdfast.formats.crc import combined
from holdfast.formats.dcp.storage_info import _StorageInfo
from holdfast.garbage import no_garbage_collection
from holdfast.planning.plan import ReadItem
from holdfast.storage.byte_ranges import Ranges
from holdfast.storage.chunk_reads import ChunkRead, Run
from holdfast.storage.destinations import Destination
from holdfast.storage.load_progress import Progress
from holdfast.storage.read_steps import Step


class StoredItems(NamedTuple):
    """A blob, and the items that need it or a part of it."""

    info: _StorageInfo
    items: list[ReadItem]


class Batch:
    """Blobs that lie close together and are read at once."""

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

    def steps(self) -> Iterator[Step]:
        """One, if there is anything to read."""
        if self._blobs:
            yield self

    def read(self) -> bytearray:
        """All blobs."""
        content = bytearray(self.end - self.begin)
        self._file.read_into(self.begin, content)
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

    def steps(self, progress: Progress) -> Iterator[Step]:
        """One for every stretch, and the end."""
        progress.begin(self)
        progress.bytes_read += self._reading.bytes_read
        for run in self._reading.stretches():
            yield _Stretch(self, run)
        yield _End(self, progress)

    def read(self, run: Run) -> int:
        """A stretch."""
        self._begun = True
        return self._reading.read(run, summed=self._summed)

    def add(self, run: Run, crc: int) -> None:
        """The next stretch was read."""
        if self._summed:
            self._crc = combined(self._crc, crc, run.end - run.begin)

    def end(self, progress: Progress) -> None:
        """All stretches were read."""
        self._finish(self._crc)
        progress.end(self, len(self._places))

    def clear(self) -> bool:
        """Leave zeros where there may be a part of it."""
        if self._begun:
            for place in self._places:
                place.clear()
        return self._begun


class _Stretch:
    def __init__(self, chunk: Chunk, run: Run) -> None:
        self._chunk = chunk
        self._run = run

    def read(self) -> int:
        return self._chunk.read(self._run)

    def finish(self, crc: int) -> None:
        self._chunk.add(self._run, crc)


class _End:
    """Comes behind the stretches of a chunk, which may be none."""

    def __init__(self, chunk: Chunk, progress: Progress) -> None:
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
