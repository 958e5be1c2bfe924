"""Files that are read in ranges of bytes, by several threads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Protocol

from holdfast._base.crc import crc32
from holdfast._base.threads import count_processors, in_order
from holdfast._base.tuning import (
    CACHED_READ_BYTES,
    MEMORY_BUDGET,
    MEMORY_OF_A_READER,
    MERGE_GAP,
    READ_BYTES,
    READERS,
    READS_UNDER_WAY,
    SEVERAL_READERS_FROM,
    SMALLEST_BUFFER,
)
from holdfast._stores.file_reader import FileReader, open_file
from holdfast._stores.filesystem import AnyPath, FileSystemBase
from holdfast._stores.local_filesystem import FileSystem
from holdfast._stores.store import CachedReader, fill_in_pieces, too_short
from holdfast._stores.store_files import StoreFiles
from holdfast.errors import DamagedCheckpointError

# Files that are read in ranges of bytes: those of the local disk at any place at once, others through their stream.


_OPENED_BY_THE_SYSTEM = FileSystem.create_stream


class Ranges(Protocol):
    """The bytes of an open file."""

    @property
    def size(self) -> int:
        """How many bytes there are."""

    def read_into(self, begin: int, buffer: Any, /) -> None:
        """Fill the buffer with the bytes from ``begin`` on."""


def is_plain(fs: FileSystemBase) -> bool:
    """Whether there is a way to the bytes past the streams of a file system, which several threads may go.

    There is if it opens files as the operating system does, and if the files are objects of a store.
    """
    return type(fs).create_stream is _OPENED_BY_THE_SYSTEM or isinstance(fs, StoreFiles)


@contextmanager
def opened_ranges(fs: FileSystemBase, path: AnyPath, *, plainly: bool) -> Iterator[Ranges]:
    """Open a file for reading; ``plainly`` past its file system, so that several threads may read it."""
    if plainly and isinstance(fs, StoreFiles):
        with fs.opened(path) as stored:
            yield stored
    elif plainly:
        reader = open_file(os.fspath(path))
        try:
            yield reader
        finally:
            reader.close()
    else:
        with fs.create_stream(path, "rb") as stream:
            yield StreamRanges(stream, path)


@contextmanager
def ranges_behind(stream: Any, fs: FileSystemBase, path: AnyPath) -> Iterator[Ranges]:
    """The bytes of an open stream. Where it is a file of the local disk, several threads may read them."""
    if type(fs).create_stream is not _OPENED_BY_THE_SYSTEM:
        yield StreamRanges(stream, path)
        return
    reader = FileReader(os.dup(stream.fileno()), str(path), os.fstat(stream.fileno()).st_size)
    try:
        yield reader
    finally:
        reader.close()


class StreamRanges:
    """A stream that can be moved about. ``path`` is how errors call what it reads.

    >>> import io
    >>> two = bytearray(2)
    >>> StreamRanges(io.BytesIO(b"holdfast"), "an example").read_into(4, two)
    >>> two
    bytearray(b'fa')
    """

    def __init__(self, stream: Any, path: AnyPath) -> None:
        self.stream = stream
        self._path = path
        self.size: int = stream.seek(0, os.SEEK_END)

    def read_into(self, begin: int, buffer: Any, /) -> None:
        """Fill the buffer."""
        view = memoryview(buffer)
        self.stream.seek(begin)
        done = 0
        while done < view.nbytes:
            count = self.stream.readinto(view[done:])
            if not count:
                raise too_short(str(self._path), begin + view.nbytes, begin + done)
            done += count


def read_with_crc(file: Ranges, begin: int, memory: memoryview, crc: int = 0) -> int:
    """Fill memory, and sum up what was read. ``crc`` is that of all that was read before."""
    for low, high in fill_in_pieces(file, begin, memory, CACHED_READ_BYTES):
        crc = crc32(memory[low:high], crc)
    return crc


def refuse_short_chunk(file: Ranges, position: int, nbytes: int, source: str, key: str) -> None:
    """Raise if a file ends before a chunk does."""
    if position + nbytes > file.size:
        found = max(0, file.size - position)
        raise DamagedCheckpointError(
            f"{source} ends too early: '{key}' needs {nbytes} bytes at {position}, and there are {found}. The file was "
            "cut off or replaced meanwhile; copy it again, or load another one.",
            file=source,
            key=key,
            expected=nbytes,
            found=found,
        )


# Reading in several threads, with all else done in order by the thread that asked for it.
#
# Planners belong to whoever wrote them and are not made for threads: they are asked for memory, and notified that it is
# filled, by the calling thread alone.


def read_size(memory: int | None, at_once: int = READS_UNDER_WAY) -> int:
    """How many bytes are read by each of the reads that are under way, if all must do with so much memory.

    >>> read_size(64 << 20) >> 20, read_size(1 << 20) >> 10, read_size(1 << 20, at_once=1) >> 10
    (4, 64, 512)
    """
    most = (MEMORY_BUDGET if memory is None else memory) // (MEMORY_OF_A_READER * at_once)
    return max(min(READ_BYTES, most) // SMALLEST_BUFFER * SMALLEST_BUFFER, SMALLEST_BUFFER)


class ReadStep(Protocol):
    """A part of a load."""

    def read(self) -> Any:
        """The part that any thread may do."""

    def finish(self, result: Any) -> None:
        """What follows, given what ``read`` returned. The steps are finished in their order, by one thread."""


def carry_out(steps: Iterable[ReadStep], *, threads: int) -> None:
    """Take all steps, in some threads of which this is one. The first error is raised when nothing is being read any
    more."""
    if threads == 1:
        for step in steps:
            step.finish(step.read())
        return
    import torch  # what is not filled by threads needs none

    # An inference tensor may only be filled in the mode that it was made in, which each thread has for itself.
    inference = torch.is_inference_mode_enabled()

    def read(step: ReadStep) -> Any:
        with torch.inference_mode(inference):
            return step.read()

    under_way = in_order(read, steps, threads=threads, ahead=READS_UNDER_WAY, name="holdfast-read", joins=True)
    with closing(under_way):
        for step, result in under_way:
            step.finish(result)


def useful_threads(nbytes: int, *, cached: bool) -> int:
    """How many of them read so much best: as many as there are processors where no disk is waited for, or else more."""
    if nbytes < SEVERAL_READERS_FROM:
        return 1
    return min(READERS, count_processors()) if cached else READERS


def seems_cached(file: Ranges, begin: int) -> bool:
    """Whether what is at some place of a file can be had without waiting, which others will be like."""
    size = min(MERGE_GAP, file.size - begin)
    return size > 0 and isinstance(file, CachedReader) and bool(file.is_cached(begin, size))
