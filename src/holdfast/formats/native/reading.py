"""Reads regions of stored tensors: whole blocks, each once, checked against its digest before anything of it is used.

What is wanted is cut into slabs. Slabs that lie near each other make a window, which is read at once into a buffer, and
from there its slabs are copied out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.errors import DamagedCheckpointError
from holdfast.formats.native.blocks import Digests, digest_blocks
from holdfast.formats.native.slabs import Slab, Stretch, mark_blocks

WINDOW_BYTES = 4 << 20
_MANY_BYTES = 32 << 20
"""From here on several threads read; less is not worth starting them."""
_MOST_THREADS = 4


class FileReader(Protocol):
    """A file that is open for reading at any place, by several threads at once."""

    def read_into(self, begin: int, buffer: Any, /) -> None:
        """Fill the buffer with the bytes from ``begin`` on."""


@dataclass(frozen=True)
class ReadableFile:
    """A data file: how it is called, how large it is, how to open it, and the digests of its blocks."""

    name: str
    nbytes: int
    open: Callable[[], Any]
    """Gives a context manager for a ``FileReader``."""
    digests: Digests | None
    """None if nobody knows them, or nobody asks for them."""


@dataclass(frozen=True)
class _Window:
    """Neighbouring slabs of one file."""

    file: int
    first_block: int
    end: int
    slabs: Sequence[Slab]


def read_slabs(slabs: Sequence[Slab | Stretch], files: Sequence[ReadableFile], block_bytes: int) -> int:
    """Read everything to where it goes, and return how many bytes were read."""
    windows = list(_windows([slab for slab in slabs if isinstance(slab, Slab)], files, block_bytes))
    stretches = sorted((slab for slab in slabs if isinstance(slab, Stretch)), key=lambda found: found[:2])
    total = sum(window.end - window.first_block * block_bytes for window in windows)
    total += sum(stretch.into.nbytes for stretch in stretches)
    threads = 1 if total < _MANY_BYTES else min(_MOST_THREADS, os.cpu_count() or 1)
    with ExitStack() as stack:
        numbers = {window.file for window in windows} | {stretch.file for stretch in stretches}
        opened = {number: stack.enter_context(files[number].open()) for number in sorted(numbers)}
        job = _Job(opened, files, block_bytes)
        if threads == 1:
            return job.read_stretches(iter(stretches)) + job.read_windows(windows)
        # Each takes the next stretch when it has done one, so that all are busy to the end.
        shared = _Shared(stretches)
        share = -(-len(windows) // threads) or 1
        with ThreadPoolExecutor(threads, "holdfast-read") as pool:
            jobs = [pool.submit(job.read_stretches, shared) for _ in range(threads)]
            jobs += [pool.submit(job.read_windows, windows[at : at + share]) for at in range(0, len(windows), share)]
            return sum(job.result() for job in jobs)


class _Shared:
    """An iterator for several threads."""

    def __init__(self, items: Sequence[Stretch]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Stretch]:
        return self

    def __next__(self) -> Stretch:
        with self._lock:
            return next(self._items)


def _windows(slabs: Sequence[Slab], files: Sequence[ReadableFile], block_bytes: int) -> Iterator[_Window]:
    gathered: list[Slab] = []
    file, first_block, end = -1, 0, 0
    for slab in sorted(slabs, key=lambda slab: (slab.file, slab.begin)):
        slab_end = slab.begin + slab.span
        if gathered and (slab.file != file or slab_end - first_block * block_bytes > WINDOW_BYTES + block_bytes):
            yield _Window(file, first_block, end, gathered)
            gathered = []
        if not gathered:
            file, first_block, end = slab.file, slab.begin // block_bytes, 0
        gathered.append(slab)
        # Whole blocks are read, so a window ends with a block, or with the file.
        end = max(end, min(-(-slab_end // block_bytes) * block_bytes, files[file].nbytes))
    if gathered:
        yield _Window(file, first_block, end, gathered)


@dataclass(frozen=True)
class _Job:
    """Reads parts of opened files."""

    opened: dict[int, FileReader]
    files: Sequence[ReadableFile]
    block_bytes: int

    def read_stretches(self, stretches: Iterator[Stretch]) -> int:
        """Read whole blocks to where they go, and check them there."""
        total = 0
        for stretch in stretches:
            self.opened[stretch.file].read_into(stretch.begin, stretch.into.data)
            total += stretch.into.nbytes
            block = stretch.begin // self.block_bytes
            wrong = _first_wrong(self.files[stretch.file], block, stretch.into, self.block_bytes)
            if wrong is not None:
                stretch.into[:] = 0  # so that nothing of what is damaged can be taken for what was saved
                _refuse(self.files[stretch.file], *wrong, self.block_bytes, [stretch.key])
        return total

    def read_windows(self, windows: Sequence[_Window]) -> int:
        opened, files, block_bytes = self.opened, self.files, self.block_bytes
        buffer = np.empty(0, np.uint8)
        last: tuple[int, int, npt.NDArray[np.uint8]] | None = (
            None  # file, number and bytes of the last block that was read
        )
        total = 0
        for window in windows:
            begin = window.first_block * block_bytes
            if buffer.nbytes < window.end - begin:
                buffer = np.empty(window.end - begin, np.uint8)
            view = buffer[: window.end - begin]
            known = last[2] if last is not None and last[:2] == (window.file, window.first_block) else None
            if known is not None:
                view[: known.nbytes] = known
            read_to = 0
            for first, end in _block_runs(window, block_bytes, skip_first=known is not None):
                read_from, read_to = (first * block_bytes, min(end * block_bytes, view.nbytes))
                part = view[read_from:read_to]
                opened[window.file].read_into(begin + read_from, part.data)
                total += part.nbytes
                _check(files[window.file], window, first, part, block_bytes)
            for slab in window.slabs:
                if slab.into is not None:
                    slab.into[...] = np.ndarray(
                        slab.into.shape, slab.into.dtype, view.data, slab.begin - begin, slab.strides
                    )
            if read_to == view.nbytes:
                final = (view.nbytes - 1) // block_bytes
                last = (window.file, window.first_block + final, view[final * block_bytes :].copy())
        return total


def _block_runs(window: _Window, block_bytes: int, *, skip_first: bool) -> list[tuple[int, int]]:
    """Stretches of blocks that the slabs need, counted from the window's first block: first, and behind the last."""
    blocks = -(-(window.end - window.first_block * block_bytes) // block_bytes)
    counts = np.zeros(blocks + 1, np.int32)
    for slab in window.slabs:
        mark_blocks(counts, slab, window.first_block, block_bytes)
    needed = np.zeros(blocks + 2, np.int8)
    needed[1:-1] = np.cumsum(counts[:-1]) > 0
    if skip_first:
        needed[1] = 0
    edges = np.flatnonzero(np.diff(needed))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _check(file: ReadableFile, window: _Window, first: int, part: npt.NDArray[np.uint8], block_bytes: int) -> None:
    wrong = _first_wrong(file, window.first_block + first, part, block_bytes)
    if wrong is not None:
        begin = wrong[0] * block_bytes
        end = begin + block_bytes
        touched = [slab.key for slab in window.slabs if slab.begin < end and slab.begin + slab.span > begin]
        _refuse(file, *wrong, block_bytes, touched)


def _first_wrong(
    file: ReadableFile, block: int, part: npt.NDArray[np.uint8], block_bytes: int
) -> tuple[int, int, int] | None:
    """Of some blocks, the number of the first damaged one, with the digest it should have and the one it has."""
    if file.digests is None:
        return None
    found = digest_blocks(part, block_bytes)
    expected = file.digests[block : block + len(found)]
    if np.array_equal(found, expected):
        return None
    at = int(np.flatnonzero(found != expected)[0])
    return block + at, int(expected[at]), int(found[at])


def _refuse(
    file: ReadableFile, block: int, expected: int, found: int, block_bytes: int, touched: Sequence[str]
) -> NoReturn:
    begin, end = block * block_bytes, min((block + 1) * block_bytes, file.nbytes)
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
