"""Reads parts of files: whole blocks, each once, checked against its digest before anything of it is kept.

Long ranges of bytes are read straight to where they go and checked there: what turns out to be damaged is overwritten
with zeros. Small things that are near each other are read together into a buffer, checked, and copied from there.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from holdfast._base.threads import count_processors, share_work
from holdfast._base.tuning import (
    CACHED_READ_BYTES,
    MEMORY_BUDGET,
    MEMORY_OF_A_READER,
    READ_BYTES,
    READERS,
    REMOTE_BUFFERED_BYTES,
    SEVERAL_READERS_FROM,
    SMALLEST_BUFFER,
)
from holdfast._formats.native.blocks import Digests, digest_blocks
from holdfast._formats.native.read_plan import (
    BufferedRead,
    ByteRanges,
    DirectRead,
    StridedCopy,
    bytes_at,
    plan_reads,
    runs_of,
)
from holdfast._formats.native.readable_files import OpenFiles, ReadableFile
from holdfast._stores.store import CachedReader, Reader, fill_in_pieces
from holdfast.errors import DamagedCheckpointError


def read_size(memory: int | None, block_bytes: int, *, is_far: bool = False) -> int:
    """How many bytes are read at once, if no more memory than that may be taken."""
    most = (MEMORY_BUDGET if memory is None else memory) // MEMORY_OF_A_READER
    wanted = min(REMOTE_BUFFERED_BYTES if is_far else READ_BYTES, most)
    return max(wanted // block_bytes * block_bytes, block_bytes, SMALLEST_BUFFER)


def reader_count(memory: int | None, size: int) -> int:
    """How many threads may read ``size`` bytes at once each."""
    return max(1, min(READERS, (MEMORY_BUDGET if memory is None else memory) // (MEMORY_OF_A_READER * size)))


def read_with_digests(
    reader: Reader, begin: int, into: npt.NDArray[np.uint8], block_bytes: int, *, shared: bool = False
) -> Iterator[tuple[int, Digests]]:
    """Fill memory with whole blocks. Yields where in it some of them begin, and their digests."""
    step = max(CACHED_READ_BYTES // block_bytes, 1) * block_bytes
    for low, high in fill_in_pieces(reader, begin, into.data, step, shared=shared):
        yield low, digest_blocks(into[low:high], block_bytes)


def read_all(
    ranges: ByteRanges,
    copies: Sequence[StridedCopy],
    names: Sequence[str],
    files: Sequence[ReadableFile],
    block_bytes: int,
    memory: int | None = None,
    *,
    shared: bool = False,
) -> int:
    """Read everything to where it goes, and return how many bytes were read.

    ``names`` are those of the keys. ``shared`` if other processes of this machine are likely to want the same bytes.
    """
    is_far = any(file.is_far for file in files)
    size = read_size(memory, block_bytes, is_far=is_far)
    straight = max(file.read_bytes for file in files) if is_far else None
    reads = plan_reads(ranges, copies, [file.nbytes for file in files], block_bytes, size, straight)
    wanted = int(ranges.nbytes.sum()) + sum(copy.into.size * copy.into.itemsize for copy in copies)
    threads = 1
    if is_far or wanted >= SEVERAL_READERS_FROM:
        threads = max(1, min(reader_count(memory, size), len(reads)))
    with closing(OpenFiles(files, (read.file for read in reads))) as opened:
        # Of an object that is far away, a block is rather read twice than asked for by itself.
        several = {} if is_far else _blocks_of_several(reads, block_bytes)
        job = _Job(opened, files, names, block_bytes, several, fill_cache=shared)
        workers = [partial(job.read, stays=number < count_processors()) for number in range(threads)]
        return sum(share_work(reads, workers, "holdfast-read"))


class _BlockOfSeveral:
    """A block that several buffered reads need: the first of them reads it for all."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.awaited = 1
        """How many reads have not had it yet."""
        self.content: npt.NDArray[np.uint8] | None = None


def _blocks_of_several(
    reads: Sequence[DirectRead | BufferedRead], block_bytes: int
) -> dict[tuple[int, int], _BlockOfSeveral]:
    found: dict[tuple[int, int], _BlockOfSeveral] = {}
    before = (-1, -1)
    for read in reads:
        if isinstance(read, BufferedRead):
            if before == (read.file, read.first_block):
                found.setdefault(before, _BlockOfSeveral()).awaited += 1
            before = (read.file, (read.end - 1) // block_bytes)
    return found


@dataclass(frozen=True)
class _Job:
    """Reads parts of opened files."""

    opened: OpenFiles
    files: Sequence[ReadableFile]
    names: Sequence[str]
    block_bytes: int
    blocks_of_several: dict[tuple[int, int], _BlockOfSeveral]
    """By file and number of the block."""
    fill_cache: bool
    """Whether what comes from a disk is to be left in the page cache."""

    def read(self, reads: Iterable[DirectRead | BufferedRead], *, stays: bool = True) -> int:
        """Read one after the other, with a buffer for all.

        A thread that does not stay is one more than there are processors, to wait for a disk as well. Where there is
        nothing to wait for, it would only take time from the others, and leaves them alone.
        """
        buffer = np.empty(0, np.uint8)
        total = 0
        for read in reads:
            if isinstance(read, DirectRead):
                needed = 0 if read.address else read.nbytes
            else:
                needed = read.end - read.begin(self.block_bytes)
            if buffer.nbytes < needed:
                buffer = np.empty(needed, np.uint8)
            with self.opened.using(read.file) as reader:
                leaves = not stays and self._is_cached(reader, read)
                if isinstance(read, DirectRead):
                    total += self._read_directly(reader, read, buffer)
                else:
                    total += self._read_buffered(reader, read, buffer[:needed])
            if leaves:
                break
        return total

    def _is_cached(self, reader: Reader, read: DirectRead | BufferedRead) -> bool:
        if not isinstance(reader, CachedReader):
            return False
        begin = read.begin if isinstance(read, DirectRead) else read.begin(self.block_bytes)
        end = begin + read.nbytes if isinstance(read, DirectRead) else read.end
        return bool(reader.is_cached(begin, end - begin))

    def _read_directly(self, reader: Reader, read: DirectRead, buffer: npt.NDArray[np.uint8]) -> int:
        if not read.address:
            self._fill(reader, read.file, read.begin, buffer[: read.nbytes], lambda begin, end: [read.key])
            return read.nbytes
        into = bytes_at(read.address, read.nbytes)
        try:
            self._fill(reader, read.file, read.begin, into, lambda begin, end: [read.key])
        except BaseException:
            into[:] = 0  # so that nothing of what is damaged can be taken for what was saved
            raise
        return read.nbytes

    def _read_buffered(self, reader: Reader, read: BufferedRead, view: npt.NDArray[np.uint8]) -> int:
        begin = read.begin(self.block_bytes)
        needed = read.needed_blocks(self.block_bytes)
        total = 0
        for block in {0, len(needed) - 1}:
            several = self.blocks_of_several.get((read.file, read.first_block + block))
            if several is not None and needed[block]:
                needed[block] = False
                total += self._read_for_several(reader, read, block, several, view)
        for first, end in runs_of(needed):
            part = view[first * self.block_bytes : end * self.block_bytes]
            self._fill(
                reader,
                read.file,
                begin + first * self.block_bytes,
                part,
                lambda low, high: _touched(read, low, high),
            )
            total += part.nbytes
        _copy_out(read, view, begin)
        return total

    def _read_for_several(
        self, reader: Reader, read: BufferedRead, block: int, several: _BlockOfSeveral, view: npt.NDArray[np.uint8]
    ) -> int:
        """Get a block that other reads need as well. Returns the bytes that were read for that."""
        part = view[block * self.block_bytes : (block + 1) * self.block_bytes]
        with several.lock:
            several.awaited -= 1
            if several.content is not None:
                part[:] = several.content
                if not several.awaited:
                    several.content = None
                return 0
            begin = (read.first_block + block) * self.block_bytes
            self._fill(reader, read.file, begin, part, lambda low, high: _touched(read, low, high))
            several.content = part.copy()
            return part.nbytes

    def _fill(
        self,
        reader: Reader,
        file: int,
        begin: int,
        into: npt.NDArray[np.uint8],
        keys: Callable[[int, int], list[int]],
    ) -> None:
        """Read whole blocks and check them, if there is something to compare them with."""
        if self.files[file].digests is None:
            for _ in fill_in_pieces(reader, begin, into.data, CACHED_READ_BYTES, shared=self.fill_cache):
                pass
            return
        for at, found in read_with_digests(reader, begin, into, self.block_bytes, shared=self.fill_cache):
            self._check(file, begin + at, found, keys)

    def _check(self, number: int, begin: int, found: Digests, keys: Callable[[int, int], list[int]]) -> None:
        file = self.files[number]
        assert file.digests is not None
        block = begin // self.block_bytes
        expected = file.digests[block : block + len(found)]
        if found.tobytes() == expected.tobytes():
            return
        at = int(np.flatnonzero(found != expected)[0])
        low, high = (block + at) * self.block_bytes, min((block + at + 1) * self.block_bytes, file.nbytes)
        touched = [self.names[key] for key in keys(low, high)]
        _refuse(file, low, high, int(expected[at]), int(found[at]), touched)


def _touched(read: BufferedRead, begin: int, end: int) -> list[int]:
    """The keys of what is stored between these places."""
    ranges = read.ranges
    inside = (ranges.begin < end) & (ranges.begin + ranges.nbytes > begin)
    found: list[int] = ranges.key[inside].tolist()
    return found + [copy.key for copy in read.copies if copy.begin < end and copy.begin + copy.span > begin]


def _copy_out(read: BufferedRead, view: npt.NDArray[np.uint8], begin: int) -> None:
    """Put everything where it goes."""
    wanted = read.ranges.chosen(read.ranges.address != 0)
    sources = wanted.begin + (view.ctypes.data - begin)
    # There is no cheaper way from Python: a view of numpy or torch takes longer to make than a small tensor to copy.
    move = ctypes.memmove
    for address, source, nbytes in zip(wanted.address.tolist(), sources.tolist(), wanted.nbytes.tolist(), strict=True):
        move(address, source, nbytes)
    for copy in read.copies:
        copy.into[...] = np.ndarray(copy.into.shape, copy.into.dtype, view.data, copy.begin - begin, copy.strides)


def _refuse(file: ReadableFile, begin: int, end: int, expected: int, found: int, touched: Sequence[str]) -> NoReturn:
    keys = sorted({key for key in touched if key})
    affected = f"needed for {', '.join(map(repr, keys[:5]))}" if keys else "the header, or bytes of no tensor"
    raise DamagedCheckpointError(
        f"{file.name} is damaged: the bytes {begin} to {end} ({affected}) are not those that were saved (digest "
        f"{expected:08x}, found {found:08x}). Load another checkpoint, or restore this file from a copy.",
        file=file.name,
        key=keys[0] if keys else None,
        expected=expected,
        found=found,
    )
