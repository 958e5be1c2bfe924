"""How much memory this process may still take: what the machine has left, and what its cgroups allow.

Several ranks of one machine or container take from the same memory, so every limit says which one it is.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
    """All limits of this process. Empty where the system does not tell.

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
