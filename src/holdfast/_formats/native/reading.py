"""Reads parts of files: whole blocks, each once, checked against its digest before anything of it is kept.

Long ranges of bytes are read straight to where they go and checked there: what turns out to be damaged is overwritten
with zeros. Small things that are near each other are read together into a buffer, checked, and copied from there.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import numpy as np

from holdfast._base.threads import processors_of_a_rank, share_work
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
from holdfast._formats.native.blocks import Digests, as_digests, long_digests
from holdfast._formats.native.read_plan import (
    BufferedRead,
    ByteRanges,
    DirectRead,
    StridedCopy,
    memory_at,
    plan_reads,
)
from holdfast._formats.native.readable_files import FileInUse, OpenFiles, ReadableFile
from holdfast._stores.store import FillInPieces
from holdfast.errors import DamagedCheckpointError

_LOOKED_AT = 4
"""Reads, to find out whether there is something to wait for."""


def read_size(memory: int | None, block_bytes: int, *, is_far: bool = False) -> int:
    """How many bytes are read at once, if no more memory than that may be taken."""
    most = (MEMORY_BUDGET if memory is None else memory) // MEMORY_OF_A_READER
    wanted = min(REMOTE_BUFFERED_BYTES if is_far else READ_BYTES, most)
    return max(wanted // block_bytes * block_bytes, block_bytes, SMALLEST_BUFFER)


def reader_count(memory: int | None, size: int) -> int:
    """How many threads may read ``size`` bytes at once each."""
    return max(1, min(READERS, (MEMORY_BUDGET if memory is None else memory) // (MEMORY_OF_A_READER * size)))


def read_with_digests(
    fill: FillInPieces, begin: int, into: memoryview, block_bytes: int, *, shared: bool = False
) -> Digests:
    """Fill memory with whole blocks, and return their digests. Each is taken while its bytes are at hand."""
    step = max(CACHED_READ_BYTES // block_bytes, 1) * block_bytes
    found: list[int] = []
    for low, high in fill(begin, into, step, shared=shared):
        found += long_digests(into, low, high, block_bytes)
    return as_digests(found)


def read_all(
    ranges: ByteRanges,
    copies: Sequence[StridedCopy],
    names: Sequence[str],
    files: Sequence[ReadableFile],
    block_bytes: int,
    memory: int | None = None,
    *,
    shared: bool = False,
    fill_cache: bool = False,
) -> int:
    """Read everything to where it goes, and return how many bytes were read.

    ``names`` are those of the keys. ``shared`` if other processes of this machine read at the same time, and
    ``fill_cache`` if they are likely to want the same bytes.
    """
    is_far = any(file.is_far for file in files)
    size = read_size(memory, block_bytes, is_far=is_far)
    straight = max(file.read_bytes for file in files) if is_far else None
    reads = plan_reads(ranges, copies, [file.nbytes for file in files], block_bytes, size, straight)
    wanted = int(ranges.nbytes.sum()) + sum(copy.into.size * copy.into.itemsize for copy in copies)
    with closing(OpenFiles(files, (read.file for read in reads))) as opened:
        # Of an object that is far away, a block is rather read twice than asked for by itself.
        several = {} if is_far else _blocks_of_several(reads, block_bytes)
        job = _Job(opened, files, names, block_bytes, several, fill_cache=fill_cache)
        threads, processors = 1, processors_of_a_rank(shared=shared)
        if is_far or wanted >= SEVERAL_READERS_FROM:
            most = processors if not is_far and job.looks_cached(reads) else READERS
            threads = max(1, min(most, reader_count(memory, size), len(reads)))
        workers = [partial(job.read, stays=number < processors) for number in range(threads)]
        return sum(share_work(reads, workers, "holdfast-read"))


class _BlockOfSeveral:
    """A block that several buffered reads need: the first of them reads it for all."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.awaited = 1
        """How many reads have not had it yet."""
        self.content: bytes | None = None


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
        buffer = memoryview(b"")
        total = 0
        for read in reads:
            if isinstance(read, DirectRead):
                needed = 0 if read.address else read.nbytes
            else:
                needed = read.end - read.begin(self.block_bytes)
            if buffer.nbytes < needed:
                buffer = np.empty(needed, np.uint8).data
            file = self.opened.look_at(read.file)
            try:
                leaves = not stays and self._is_cached(file, read)
                if isinstance(read, DirectRead):
                    total += self._read_directly(file, read, buffer)
                else:
                    total += self._read_buffered(file, read, buffer[:needed])
            finally:
                self.opened.used(read.file)
            if leaves:
                break
        return total

    def looks_cached(self, reads: Sequence[DirectRead | BufferedRead]) -> bool:
        """Whether there is probably nothing to wait for: some reads from everywhere can be had without."""
        some = reads[:: max(1, len(reads) // _LOOKED_AT)]
        return all(self._is_cached(self.opened.look_at(read.file), read) for read in some)

    def _is_cached(self, file: FileInUse, read: DirectRead | BufferedRead) -> bool:
        """Whether at least its first block can be had without waiting."""
        if file.cached is None:
            return False
        begin = read.begin if isinstance(read, DirectRead) else read.begin(self.block_bytes)
        end = begin + read.nbytes if isinstance(read, DirectRead) else read.end
        return bool(file.cached.is_cached(begin, min(self.block_bytes, end - begin)))

    def _read_directly(self, file: FileInUse, read: DirectRead, buffer: memoryview) -> int:
        if not read.address:
            self._fill(file, read.file, read.begin, buffer[: read.nbytes], lambda begin, end: [read.key])
            return read.nbytes
        into = memory_at(read.address, read.nbytes)
        try:
            self._fill(file, read.file, read.begin, into, lambda begin, end: [read.key])
        except BaseException:
            np.frombuffer(into, np.uint8)[:] = 0  # so that nothing of what is damaged is taken for what was saved
            raise
        return read.nbytes

    def _read_buffered(self, file: FileInUse, read: BufferedRead, view: memoryview) -> int:
        begin, size = read.begin(self.block_bytes), self.block_bytes
        last = (view.nbytes - 1) // size
        total = 0
        elsewhere = {}
        for block in {0, last} if self.blocks_of_several else ():
            several = self.blocks_of_several.get((read.file, read.first_block + block))
            if several is not None:
                elsewhere[block] = several
        runs = read.needed_runs(size, without=elsewhere)
        for block, several in elsewhere.items():
            total += self._read_for_several(file, read, block, several, view)
        for first, end in runs:
            part = view[first * size : end * size]
            self._fill(file, read.file, begin + first * size, part, lambda low, high: _touched(read, low, high))
            total += part.nbytes
        _copy_out(read, view, begin)
        return total

    def _read_for_several(
        self, file: FileInUse, read: BufferedRead, block: int, several: _BlockOfSeveral, view: memoryview
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
            self._fill(file, read.file, begin, part, lambda low, high: _touched(read, low, high))
            several.content = bytes(part)
            return part.nbytes

    def _fill(
        self, file: FileInUse, number: int, begin: int, into: memoryview, keys: Callable[[int, int], list[int]]
    ) -> None:
        """Read whole blocks and check them, if there is something to compare them with."""
        if self.files[number].digests is None:
            for _ in file.fill(begin, into, CACHED_READ_BYTES, shared=self.fill_cache):
                pass
            return
        found = read_with_digests(file.fill, begin, into, self.block_bytes, shared=self.fill_cache)
        self._check(number, begin, found, keys)

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


def _copy_out(read: BufferedRead, view: memoryview, begin: int) -> None:
    """Put everything where it goes."""
    ranges = read.ranges
    if len(ranges.file):
        first = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        sources = (ranges.begin + (first - begin)).tolist()
        # There is no cheaper way from Python: a view of numpy or torch takes longer to make than a small tensor to
        # copy.
        move = ctypes.memmove
        for address, source, nbytes in zip(ranges.address.tolist(), sources, ranges.nbytes.tolist(), strict=True):
            if address:
                move(address, source, nbytes)
    for copy in read.copies:
        copy.into[...] = np.ndarray(copy.into.shape, copy.into.dtype, view, copy.begin - begin, copy.strides)


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
