"""A quick self-test of the storage at a path: plain files, small flushes, and a save and a load beside them."""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast._stores.os_errors import some
from holdfast._stores.roots import LocalRoot
from holdfast._watching.progress import OnProgress, Progress
from holdfast.errors import NotAFolderError

_PIECE = 8 << 20
_FLUSHES = 20
_TENSORS = 16
_DIRECT = getattr(os, "O_DIRECT", 0)


def measure(place: str, nbytes: int, on_progress: OnProgress) -> dict[str, Any]:
    """Rates in bytes per second, flushes in milliseconds."""
    folder = Path(place).absolute()
    if not folder.is_dir():
        raise NotAFolderError(f"{folder} is not a folder; give one on the storage to be measured.", path=str(folder))
    pieces = max(1, -(-nbytes // _PIECE))
    nbytes = pieces * _PIECE
    free = LocalRoot(folder).free_bytes() or 0
    if free < 3 * nbytes:
        raise ValueError(f"{folder} has {free} bytes free, and 3 times {nbytes} are needed; give a smaller --size")
    steps = Progress(4 * nbytes, on_progress)
    with _folder_of_its_own(folder) as own:
        write = _timed(nbytes, lambda: _write(own / "plain", pieces, steps))
        seconds, direct = _read(own / "plain", pieces, steps)
        flushes = _flushes(own)
        saved, loaded = _save_and_load(own, nbytes, steps)
    read = nbytes / seconds
    return {
        "path": str(folder),
        "bytes": nbytes,
        "free_bytes": free,
        "write": write,
        "read": read,
        "direct": direct,
        "fsync_ms": {"median": statistics.median(flushes), "slowest": max(flushes)},
        "save": saved,
        "load": loaded,
        "save_ratio": None if saved is None else saved / write,
        "load_ratio": None if loaded is None else loaded / read,
    }


@contextmanager
def _folder_of_its_own(folder: Path) -> Iterator[Path]:
    own = folder / f".holdfast-bench-{secrets.token_hex(4)}"
    own.mkdir()
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _timed(nbytes: int, work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return nbytes / (time.perf_counter() - started)


def _aligned(fill: bool) -> mmap.mmap:
    """Memory that begins with a page, as reading and writing past the cache takes it."""
    memory = mmap.mmap(-1, _PIECE)
    if fill:
        memory.write(os.urandom(_PIECE))
    return memory


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """A file opened past the cache if that can be done, and whether it is."""
    if _DIRECT:
        try:
            return os.open(path, flags | _DIRECT, 0o666), True
        except OSError:
            pass  # this file system has no such way
    return os.open(path, flags, 0o666), False


def _write(path: Path, pieces: int, steps: Progress) -> None:
    descriptor, _ = _open(path, os.O_WRONLY | os.O_CREAT)
    with _aligned(fill=True) as memory:
        try:
            for _ in range(pieces):
                _write_all(descriptor, memory)
                steps.advance(_PIECE)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, memory: mmap.mmap) -> None:
    with memoryview(memory) as view:
        at = 0
        while at < len(view):
            at += some(os.write(descriptor, view[at:]))


def _read(path: Path, pieces: int, steps: Progress) -> tuple[float, bool]:
    """How long it takes to read the file, and whether that was past the cache."""
    forget(path)
    descriptor, direct = _open(path, os.O_RDONLY)
    with _aligned(fill=False) as memory:
        try:
            started = time.perf_counter()
            for _ in range(pieces):
                os.readv(descriptor, [memory])
                steps.advance(_PIECE)
            return time.perf_counter() - started, direct
        finally:
            os.close(descriptor)


def forget(path: Path) -> None:
    """Ask the system to drop what it has cached of a file."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _flushes(folder: Path) -> list[float]:
    """How long it takes to make 4 KB durable, in milliseconds, several times."""
    descriptor = os.open(folder / "flushed", os.O_WRONLY | os.O_CREAT, 0o666)
    times = []
    try:
        for _ in range(_FLUSHES):
            started = time.perf_counter()
            os.write(descriptor, bytes(4096))
            os.fsync(descriptor)
            times.append(1000 * (time.perf_counter() - started))
    finally:
        os.close(descriptor)
    return times


def _save_and_load(folder: Path, nbytes: int, steps: Progress) -> tuple[float | None, float | None]:
    """The rates of a save and of a load of random tensors; nothing without torch."""
    try:
        import torch
    except ModuleNotFoundError:
        return None, None
    from holdfast._load.load import load
    from holdfast._save.save import save

    count = nbytes // _TENSORS // 4
    state = {f"layer-{number}": torch.rand(count) for number in range(_TENSORS)}
    save({"warm": torch.zeros(1)}, folder / "warm")
    load({"warm": torch.zeros(1)}, folder / "warm")
    saved = _timed(nbytes, lambda: save(state, folder / "saved"))
    steps.advance(nbytes)
    for file in (folder / "saved").iterdir():
        forget(file)
    loaded = _timed(nbytes, lambda: load(state, folder / "saved"))
    steps.advance(nbytes)
    return saved, loaded
