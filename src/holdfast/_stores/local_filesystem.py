"""The local disk, or what is mounted like one."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from holdfast._stores.durable_files import lock_folder, make_folder, sync_folder
from holdfast._stores.filesystem import AnyPath, FileSystemBase


class FileSystem(FileSystemBase):
    """Plain files. They get the permissions that the user's umask leaves."""

    @contextmanager
    def create_stream(self, path: AnyPath, mode: str) -> Iterator[io.IOBase]:
        """Open a file."""
        with Path(path).open(mode) as stream:
            yield cast(io.IOBase, stream)

    def concat_path(self, path: AnyPath, suffix: str) -> AnyPath:
        """Join folder and name."""
        return Path(path) / suffix

    def init_path(self, path: AnyPath) -> AnyPath:
        """The path as a ``Path``."""
        return Path(path)

    def rename(self, path: AnyPath, new_path: AnyPath) -> None:
        """Rename in one step, over an existing file if there is one."""
        os.replace(path, new_path)

    def mkdir(self, path: AnyPath) -> None:
        """Make the folder and its parents, each of them durable in its own parent."""
        make_folder(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Any path that is not a URL and below a folder that exists and can be written to."""
        if isinstance(checkpoint_id, Path):
            return True
        text = str(checkpoint_id)
        if "://" in text:
            return False
        return any(parent.exists() and os.access(parent, os.W_OK) for parent in Path(text).parents)

    @classmethod
    def validate_for_reading(cls, checkpoint_id: AnyPath) -> bool:
        """Any path that is not a URL: reading must not depend on a right to write."""
        return isinstance(checkpoint_id, Path) or "://" not in str(checkpoint_id)

    def exists(self, path: AnyPath) -> bool:
        """Whether there is something at ``path``."""
        return Path(path).exists()

    def rm_file(self, path: AnyPath) -> None:
        """Delete a file."""
        Path(path).unlink()

    def ls(self, path: AnyPath) -> list[str]:
        """Paths of what is in a folder."""
        return [str(entry) for entry in Path(path).iterdir()]

    @contextmanager
    def lock_folder(self, path: AnyPath) -> Iterator[None]:
        """Lock the folder itself, so that no file is left behind."""
        with lock_folder(path):
            yield

    def sync_folder(self, path: AnyPath) -> None:
        """Flush the folder's entries."""
        sync_folder(path)
