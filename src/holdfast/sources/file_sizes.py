"""How large files are, on any file system that checkpoints of other formats are read from."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from holdfast.stores.filesystem import AnyPath, FileSystemBase
from holdfast.stores.local import FileSystem


def sizes_of(fs: FileSystemBase, folder: AnyPath, names: Iterable[str]) -> list[tuple[str, int]]:
    """The files of these names in a folder that are there, and how many bytes each has."""
    found = []
    for name in names:
        with suppress(FileNotFoundError, NotADirectoryError):
            found.append((name, size_of(fs, fs.concat_path(folder, name))))
    return found


def size_of(fs: FileSystemBase, path: AnyPath) -> int:
    """How many bytes a file has."""
    if type(fs) is FileSystem:
        return os.stat(path).st_size
    with fs.create_stream(path, "rb") as stream:
        return stream.seek(0, os.SEEK_END)
