"""Real disks that are soon full: a file system in memory with a few megabytes, mounted for one test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast._stores.file_sink import FileSink
from holdfast._stores.local_store import LocalStore
from holdfast._stores.os_errors import naming


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A disk at a folder. The test is skipped where nothing may be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True) if os.getuid() == 0 else None
    if mounted is None or mounted.returncode != 0:
        pytest.skip("only root can mount a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def find_no_space() -> None:
    """The error of a disk that is full, as the system raises it, on any machine."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        os.write(descriptor, b"x")
    finally:
        os.close(descriptor)


class FullForData(LocalStore):
    """A folder on a disk that is full for everything large."""

    @contextmanager
    def create(self, name: str, size: int | None = None, memory: int | None = None) -> Iterator[FileSink]:
        with super().create(name, size, memory) as sink:
            if name.startswith("data-"):
                with naming(self.path_of(name)):
                    find_no_space()
            yield sink
