"""The local disk, or what is mounted like one."""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from holdfast._stores.filesystem import AnyPath, FileSystemBase

if os.name == "posix":
    import fcntl

_CANNOT_SYNC_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}
_CANNOT_LOCK_FOLDERS = {*_CANNOT_SYNC_FOLDERS, errno.ENOLCK, errno.EACCES, errno.EPERM}
_LOCK_PATIENCE = 60.0
_LOCK_PAUSE = 0.01


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
        folder = Path(path)
        if folder.is_dir():
            return
        self.mkdir(folder.parent)
        folder.mkdir(exist_ok=True)  # another rank may have been faster; a file of that name is an error
        self.sync_folder(folder.parent)

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
        """Lock the folder itself, so that no file is left behind. Commits are short, and a dead process has no lock."""
        if os.name != "posix":
            yield
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            locked = _lock(descriptor, path)
            try:
                yield
            finally:
                if locked:
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough if a child was forked meanwhile
        finally:
            os.close(descriptor)

    def sync_folder(self, path: AnyPath) -> None:
        """Flush the folder's entries. File systems that refuse to sync a folder have nothing to flush there."""
        if os.name != "posix":
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC_FOLDERS:
                raise
        finally:
            os.close(descriptor)


def _lock(descriptor: int, path: AnyPath) -> bool:
    """Wait for the lock. False where folders cannot be locked, such as on NFS."""
    deadline = time.monotonic() + _LOCK_PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another save has been committing to {path} for {_LOCK_PATIENCE:g} s") from None
            time.sleep(_LOCK_PAUSE)
        except OSError as error:
            if error.errno not in _CANNOT_LOCK_FOLDERS:
                raise
            return False
