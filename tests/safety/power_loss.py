"""What a disk may hold after a power cut, by the rules of POSIX and nothing kinder.

Bytes of a file are safe once the file was synced. Its name, its new name and its removal are safe once the folder was
synced; until then each of them may or may not have happened, in any combination.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.safety.syscalls import Change

Disk = frozenset[tuple[str, bytes | None]]
"""Paths and contents; None for a folder."""

_ALL_COMBINATIONS_UP_TO = 4


@dataclass(frozen=True)
class _Names:
    """Which path stands for which file (by inode), or for a folder (None)."""

    entries: dict[str, int | None]

    def after(self, changes: Sequence[Change]) -> _Names:
        entries = dict(self.entries)
        for change in changes:
            if change.call == "create":
                entries[change.path] = change.inode
            elif change.call == "mkdir":
                entries[change.path] = None
            elif change.call == "rename":
                assert change.new_path is not None
                entries.pop(change.path, None)
                entries[change.new_path] = change.inode
            elif change.call == "link":
                assert change.new_path is not None
                entries[change.new_path] = change.inode
            else:
                entries.pop(change.path, None)
        return _Names(entries)


class PowerCuts:
    """The disks that a power cut could leave while `changes` happen below a folder that now looks as it does."""

    def __init__(self, below: Path) -> None:
        found = {str(path): path for path in [below, *below.rglob("*")]}
        self._below = below
        self._safe = _Names({name: None if path.is_dir() else path.stat().st_ino for name, path in found.items()})
        self._bytes = {path.stat().st_ino: path.read_bytes() for path in found.values() if path.is_file()}

    def during(self, changes: Sequence[Change]) -> Iterator[set[Disk]]:
        """For each of the changes: what a cut just after it could leave."""
        pending: list[Change] = []
        for change in changes:
            if change.call in ("fsync", "fdatasync") and change.is_folder:
                synced = [waiting for waiting in pending if os.path.dirname(waiting.path) == change.path]
                self._safe = self._safe.after(synced)
                pending = [waiting for waiting in pending if waiting not in synced]
            elif change.call in ("fsync", "fdatasync"):
                assert change.content is not None
                self._bytes[change.inode] = change.content
            elif change.call in ("create", "mkdir", "rename", "link", "unlink", "rmdir"):
                pending.append(change)
                if change.call == "create":
                    self._bytes[change.inode] = b""
            yield set(self._disks(pending))

    def _disks(self, pending: Sequence[Change]) -> Iterator[Disk]:
        for happened in _subsets(pending):
            entries = self._safe.after(happened).entries
            reachable = {
                path: inode
                for path, inode in entries.items()
                if all(str(parent) in entries for parent in Path(path).parents if parent.is_relative_to(self._below))
            }
            yield frozenset(
                (os.path.relpath(path, self._below), None if inode is None else self._bytes[inode])
                for path, inode in reachable.items()
            )


def _subsets(pending: Sequence[Change]) -> Iterator[Sequence[Change]]:
    if len(pending) <= _ALL_COMBINATIONS_UP_TO:
        for size in range(len(pending) + 1):
            yield from itertools.combinations(pending, size)
        return
    yield ()
    yield pending
    for number in range(len(pending)):
        yield pending[number : number + 1]
        yield [*pending[:number], *pending[number + 1 :]]


def write_disk(disk: Disk, folder: Path) -> None:
    """Make the files of a disk."""
    for path, content in sorted(disk, key=lambda entry: entry[0]):
        if content is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            (folder / path).write_bytes(content)
