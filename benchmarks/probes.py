"""What the hardware can do with the same number of bytes, and nothing else to do."""

from __future__ import annotations

import functools
import mmap
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from benchmarks.scales import MIB
from benchmarks.states import State
from holdfast._stores.direct_files import begin_to_write_back
from holdfast._stores.durable_files import sync_folder

WRITE_BYTES = 8 * MIB
READ_BYTES = 4 * MIB
CACHED_WRITE_BYTES = MIB
ALIGNMENT = 4096

Task = Callable[[], None]


def copy_memory(state: State, place: State) -> None:
    """Every tensor to another place in memory, by torch."""
    for key, tensor in state.items():
        place[key].copy_(tensor)


def write_directly(path: Path, size: int, writers: int) -> None:
    """A durable file, past the page cache, out of memory that needs no preparing."""
    size = _aligned(size)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    memory = _random_memory()
    try:
        os.posix_fallocate(descriptor, 0, size)

        def write(begin: int) -> None:
            count = min(WRITE_BYTES, size - begin)
            if os.pwrite(descriptor, memoryview(memory)[:count], begin) != count:
                raise OSError(f"{path} took fewer bytes than it was given")

        _run([_bound(write, begin) for begin in range(0, size, WRITE_BYTES)], writers)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_folder(path.parent)


def write_cached(path: Path, size: int) -> None:
    """A durable file through the page cache, whose content the system is told early to write to the disk."""
    size = _aligned(size)
    memory = memoryview(_random_memory())[:CACHED_WRITE_BYTES]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(descriptor, 0, size)
        told = 0
        for begin in range(0, size, CACHED_WRITE_BYTES):
            end = begin + os.pwrite(descriptor, memory[: size - begin], begin)
            if end - told >= WRITE_BYTES:
                begin_to_write_back(descriptor, told, end - told)
                told = end
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_folder(path.parent)


def read_buffered(path: Path, place: State, readers: int) -> None:
    """The file into the tensors of a state, through the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:

        def read(begin: int, memory: memoryview) -> None:
            if os.preadv(descriptor, [memory], begin) != memory.nbytes:
                raise OSError(f"{path} gave fewer bytes than it was asked for")

        _run([_bound(read, begin, memory) for begin, memory in _stretches(place)], readers)
    finally:
        os.close(descriptor)


def read_directly(path: Path, readers: int) -> None:
    """All bytes of the file past the page cache, into aligned memory that the readers use again and again."""
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    with ExitStack() as cleanup:
        cleanup.callback(os.close, descriptor)
        free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        for _ in range(readers):
            free.put(cleanup.enter_context(mmap.mmap(-1, READ_BYTES)))

        def read(begin: int) -> None:
            memory = free.get()
            count = min(READ_BYTES, size - begin)
            with memoryview(memory) as view, view[:count] as part:
                found = os.preadv(descriptor, [part], begin)
            free.put(memory)
            if found != count:
                raise OSError(f"{path} gave fewer bytes than it was asked for")

        _run([_bound(read, begin) for begin in range(0, size, READ_BYTES)], readers)


@functools.cache
def _random_memory() -> mmap.mmap:
    """Aligned, as pages are."""
    memory = mmap.mmap(-1, WRITE_BYTES)
    memory.write(np.random.default_rng(0).bytes(WRITE_BYTES))
    return memory


def _stretches(place: State) -> Iterator[tuple[int, memoryview]]:
    begin = 0
    for tensor in place.values():
        memory = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        for at in range(0, memory.nbytes, READ_BYTES):
            part = memory[at : at + READ_BYTES]
            yield begin, part
            begin += part.nbytes


def _run(tasks: Sequence[Task], threads: int) -> None:
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)

    def work() -> None:
        while True:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            task()

    if threads == 1:
        work()
        return
    with ThreadPoolExecutor(threads) as pool:
        for worker in [pool.submit(work) for _ in range(threads)]:
            worker.result()


def _bound(function: Callable[..., None], *arguments: object) -> Task:
    return lambda: function(*arguments)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
