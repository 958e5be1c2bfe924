"""How fast this disk and this memory are, how much memory there is, and how large a checkpoint will be."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from holdfast._base.json_parts import dumps
from holdfast._base.tuning import KIB, MIB
from holdfast._formats.native.layout import DATA_ALIGNMENT
from holdfast._layout.descriptions import TensorDescription, dtype_of_whole
from holdfast._save.agreement import agree
from holdfast._save.capture import Capture, Captured
from holdfast._save.options import CheckedOptions
from holdfast._stores.store import Store

if TYPE_CHECKING:
    from holdfast._ranks.shared_steps import Collectives


# How fast this disk and this memory are, by short measurements of what a save does to them.


_PIECE = MIB
_SMALLEST, _LARGEST = 64 * KIB, 256 * MIB
_GROWTH = 4
_LARGEST_COPY = 64 * MIB
_MOST_IS_OVERHEAD = 10
"""If nine tenths of the time or more do not depend on the size, then the rest is too little to say how it does."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class WriteSpeed:
    """What it takes to make bytes durable."""

    rate: float
    """Bytes in a second, once it runs."""
    overhead: float
    """Seconds for an object that has next to no bytes."""

    def seconds_for(self, nbytes: int) -> float:
        """How long so many bytes will take."""
        return self.overhead + nbytes / self.rate


def measure_writes(
    store: Store, name: str, *, patience: float, most: int | None = None, clock: Clock = time.perf_counter
) -> WriteSpeed:
    """Write a small object, and larger ones up to ``most`` bytes while all take no longer than ``patience``, about.

    Nothing of them is left.
    """
    # Other than zeros, these cannot be compressed by a disk that does so.
    piece = memoryview(os.urandom(_PIECE))
    overhead = seconds = spent = _timed_write(store, name, piece, _SMALLEST, clock)
    nbytes = _SMALLEST
    largest = _LARGEST if most is None else min(_LARGEST, most)
    while nbytes * _GROWTH <= largest:
        if spent + overhead + _GROWTH * (seconds - overhead) > patience:
            break
        nbytes *= _GROWTH
        seconds = _timed_write(store, name, piece, nbytes, clock)
        spent += seconds
    if nbytes == _SMALLEST:
        return WriteSpeed(nbytes / max(seconds, 1e-9), overhead)
    more = max(seconds - overhead, seconds / _MOST_IS_OVERHEAD, 1e-9)
    return WriteSpeed((nbytes - _SMALLEST) / more, overhead)


def _timed_write(store: Store, name: str, piece: memoryview, nbytes: int, clock: Clock) -> float:
    began = clock()
    try:
        with store.create(name, nbytes) as sink:
            for start in range(0, nbytes, len(piece)):
                sink.write(piece[: min(len(piece), nbytes - start)])
        store.sync()
        return clock() - began
    finally:
        with suppress(OSError):
            store.delete([name])


def measure_copies(
    tensors: Iterable[torch.Tensor], *, patience: float, clock: Clock = time.perf_counter
) -> float | None:
    """Bytes in a second from where the tensors are to memory that was used before; None if they have no bytes."""
    source = max(tensors, key=lambda tensor: tensor.nbytes, default=None)
    if source is None or source.nbytes == 0:
        return None
    part = source.detach().reshape(-1)[: max(1, _LARGEST_COPY // source.itemsize)]
    copy = torch.empty(part.shape, dtype=part.dtype)
    copy.copy_(part)  # the first one pays for fresh memory
    best, spent = float("inf"), 0.0
    for _ in range(5):
        began = clock()
        copy.copy_(part)
        seconds = clock() - began
        best, spent = min(best, seconds), spent + seconds
        if spent > patience:
            break
    return part.nbytes / max(best, 1e-9)


# How much memory this process may still take: what the machine has left, and what its cgroups allow.
#
# Several ranks of one machine or container take from the same memory, so every limit says which one it is.


_NO_LIMIT = 1 << 60
"""The first version of cgroups says a number beyond this where there is no limit."""


@dataclass(frozen=True)
class MemoryLimit:
    """Memory that may still be taken, by all who share it."""

    shared_by: str
    """The same text on all ranks that take from the same memory."""
    source: str
    """What sets the limit, for people."""
    available: int


def memory_limits(system: str | os.PathLike[str] = "/") -> list[MemoryLimit]:
    """All limits of this process. Empty where the system does not say.

    >>> all(limit.available >= 0 for limit in memory_limits())
    True
    """
    root = Path(system)
    machine = _text(root / "proc/sys/kernel/random/boot_id") or socket.gethostname()
    found = []
    left = _fields(root / "proc/meminfo").get("MemAvailable")
    if left is not None:
        found.append(MemoryLimit(f"machine {machine}", f"the machine {socket.gethostname()}", left * 1024))
    for folder in _cgroups(root):
        available = _available_in(folder)
        if available is not None:
            status = folder.stat()
            shared_by = f"machine {machine}, cgroup {status.st_dev}:{status.st_ino}"
            found.append(MemoryLimit(shared_by, f"the memory limit of the cgroup {folder}", available))
    return found


def shortages(
    needed: Sequence[int], limits: Sequence[Sequence[MemoryLimit]]
) -> list[tuple[MemoryLimit, tuple[int, ...], int]]:
    """Where ranks together need more than is there: the limit, the ranks that share it, and what they need.

    >>> tight = MemoryLimit("machine a", "the machine a", 10)
    >>> roomy = MemoryLimit("machine b", "the machine b", 100)
    >>> shortages([6, 6, 6], [[tight], [tight], [roomy]])
    [(MemoryLimit(shared_by='machine a', source='the machine a', available=10), (0, 1), 12)]
    """
    sharing: dict[str, list[tuple[int, MemoryLimit]]] = {}
    for rank, of_rank in enumerate(limits):
        for limit in of_rank:
            sharing.setdefault(limit.shared_by, []).append((rank, limit))
    found = []
    for members in sharing.values():
        # They looked one after the other. Whoever saw least is nearest to the truth.
        limit = min((limit for _, limit in members), key=lambda limit: limit.available)
        together = sum(needed[rank] for rank, _ in members)
        if together > limit.available:
            found.append((limit, tuple(rank for rank, _ in members), together))
    return found


def _cgroups(root: Path) -> Iterator[Path]:
    """The folders of this process's cgroups for memory, with all above them: each may have a limit."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tops = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "memory" in controllers.split(","):
            tops = [root / "sys/fs/cgroup/memory"]
        else:
            continue
        for top in tops:
            # Inside of a container the path may be that of the machine outside, which is not to be seen from here.
            inside = top / path.strip("/")
            folder = inside if inside.is_dir() else top
            while True:
                yield folder
                if folder == top:
                    break
                folder = folder.parent


def _available_in(folder: Path) -> int | None:
    """What a cgroup leaves; None without a limit. Pages of files can be dropped, so they are counted as free."""
    for limit_file, usage_file, droppable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is not None and usage is not None and limit < _NO_LIMIT:
            return max(0, limit - usage + _fields(folder / "memory.stat").get(droppable, 0))
    return None


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isdigit() else None


def _fields(file: Path) -> Mapping[str, int]:
    """The numbers of a file with lines such as ``MemFree:  1000 kB``."""
    words = [line.replace(":", " ").split() for line in _text(file).splitlines()]
    return {row[0]: int(row[1]) for row in words if len(row) >= 2 and row[1].isdigit()}


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text().strip()
    return ""


# How many bytes a checkpoint of a state will have, and how many a copy of it in memory, before anything is written.


_BYTES_PER_CHUNK = 160
"""Of a chunk in the header of its file and in the record, about."""

_BYTES_PER_BLOCK = 4 / (64 << 10)
"""Of digests, for each byte of data."""

_BYTES_PER_CHECKPOINT = 4096
"""Of a record that says nothing."""


@dataclass(frozen=True)
class LocalState:
    """What one rank has of a state, as descriptions."""

    descriptions: Sequence[TensorDescription]
    value_bytes: int
    """Of everything that is not a tensor, as text."""
    copy_bytes: int
    """Of a copy of this rank's tensors."""


@dataclass(frozen=True)
class CheckpointSize:
    """What a checkpoint will be like."""

    nbytes: int
    """In all files, to within some percent."""
    tensor_count: int
    written: Sequence[int]
    """The bytes that each rank writes."""
    copied: Sequence[int]
    """The bytes that each rank has to copy if its state is to go on changing."""


def look_at(state: Any, options: CheckedOptions, rank: int, world_size: int) -> Captured:
    """What a save would find in a state. No tensor is read, let alone copied."""
    return Capture.of(replace(options, replica_mismatch="ignore"), rank, tuple(range(world_size))).take(state)


def share_of(captured: Captured) -> LocalState:
    """A rank's contribution to the size."""
    values = sum(len(dumps(value)) for value in (captured.tree, *captured.own.values()))
    copied = sum(
        prod(box.sizes) * _itemsize(captured.local[description.key].value)
        for description in captured.descriptions
        if description.tied_to is None
        for box in description.boxes
    )
    return LocalState(captured.descriptions, values, copied)


def size_of(shares: Sequence[LocalState]) -> CheckpointSize:
    """The size of the checkpoint that all ranks save together. Raises if their parts do not fit together."""
    agreed = agree([share.descriptions for share in shares])
    written = [sum(chunk.nbytes for chunk in chunks) for chunks in agreed.chunks]
    files = sum(map(bool, written))
    chunk_count = sum(map(len, agreed.chunks))
    around = DATA_ALIGNMENT * files + _BYTES_PER_CHUNK * chunk_count + _BYTES_PER_CHECKPOINT
    values = max(share.value_bytes for share in shares)
    return CheckpointSize(
        nbytes=int(sum(written) * (1 + _BYTES_PER_BLOCK)) + around + values,
        tensor_count=len(agreed.tensors),
        written=written,
        copied=[share.copy_bytes for share in shares],
    )


def checkpoint_size(state: Any, ranks: Collectives, options: CheckedOptions | None = None) -> CheckpointSize:
    """What a checkpoint of ``state`` will be like. All ranks call this, each with its own part.

    Example:
        >>> import torch
        >>> from holdfast._ranks.meeting import meeting
        >>> with meeting("a look at the size") as ranks:
        ...     size = checkpoint_size({"weights": torch.ones(1000, 1000)}, ranks)
        >>> size.written, size.copied, 4_000_000 < size.nbytes < 4_100_000
        ([4000000], [4000000], True)
    """
    chosen = options or CheckedOptions.of()
    return ranks.all_reduce("size", lambda: share_of(look_at(state, chosen, ranks.rank, ranks.world_size)), size_of)


def _itemsize(value: Any) -> int:
    """Of an element as it is in memory now, whatever it is stored as."""
    if isinstance(value, torch.Tensor):
        return dtype_of_whole(value).itemsize
    return int(value.dtype.itemsize) if isinstance(value, np.ndarray) else 1
