"""A checkpoint in a folder of the local disk, or of what is mounted like one."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast._stores.durable_files import (
    link_to_free_name,
    lock_folder,
    make_folder,
    sync_folder,
    temporaries_of,
    temporary_name,
)
from holdfast._stores.file_reader import FileReader, open_file
from holdfast._stores.file_sink import FileSink
from holdfast._stores.os_errors import naming
from holdfast._stores.store import Listed, Listing, Store, checked_name, conflict, wrong_size


class LocalStore(Store):
    """Plain files in one folder, which is made when the first file is. All get the permissions that the umask leaves.

    Example:
        >>> import tempfile
        >>> store = LocalStore(tempfile.mkdtemp())
        >>> store.put("data", b"0123456789")
        >>> store.read("data", 2, 5)
        b'234'
        >>> store.commit("record", b"the data is complete", replaces=None)
        >>> sorted(found.name for found in store.list())
        ['data', 'record']
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not os.fspath(path):
            raise ValueError("the path of a checkpoint is empty; give the path of a folder")
        self.folder = Path(path).absolute()  # the current folder may be another one when the first file is made
        self.location = str(self.folder)
        self._parent_is_durable = False

    @contextmanager
    def create(self, name: str, size: int | None = None, memory: int | None = None) -> Iterator[FileSink]:
        """Write a new file. It has its name from the beginning, so a kill leaves a part of it."""
        path = self._path(name)
        sink = FileSink(self._open_new(path), path, size, memory)
        try:
            try:
                yield sink
                if size is not None and sink.size != size:
                    raise wrong_size(path, size, sink.size)
                with naming(path):
                    sink.finish()
            finally:
                with naming(path):
                    sink.close()  # some network disks report only now that they are full
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise

    @contextmanager
    def reader(self, name: str) -> Iterator[FileReader]:
        """Open a file."""
        reader = open_file(self._path(name))
        try:
            yield reader
        finally:
            reader.close()

    def size(self, name: str) -> int | None:
        """The size of a file, or None."""
        try:
            found = os.stat(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def list(self) -> Listing:
        """All plain files of the folder, and what links to one."""
        found = []
        try:
            entries = os.scandir(self.folder)
        except FileNotFoundError:
            return []
        with entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # deleted since, or a link to nothing
                    status = entry.stat()
                    if stat.S_ISREG(status.st_mode):
                        found.append(Listed(entry.name, status.st_size))
        return found

    def delete(self, names: Iterable[str]) -> None:
        """Delete files."""
        paths = [self._path(name) for name in names]
        failed: OSError | None = None
        for path in paths:
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def sync(self) -> None:
        """Flush the folder, and once its own name."""
        if not self.folder.is_dir():
            return
        with naming(self.location):
            sync_folder(self.folder)
        if not self._parent_is_durable:
            # Whoever made the folder may have been killed before it was durable.
            with suppress(PermissionError):
                sync_folder(self.folder.parent)
            self._parent_is_durable = True

    def commit(self, name: str, content: bytes, *, replaces: bytes | None) -> None:
        """Put a complete file in place by a link or a rename, while the folder is locked.

        Where folders cannot be locked, such as on NFS, a first commit is still safe from others. Of two that replace
        the same file at the same moment, the later one can win there without either of them noticing.
        """
        path = self._path(name)
        temporary = temporary_name(name)
        self.put(temporary, content)
        try:
            with lock_folder(self.folder):
                if self._content(name) != replaces:
                    raise conflict(path)
                # Of commits that were killed, or of such that will now be too late.
                doomed = temporaries_of(name, os.listdir(self.folder))
                _give_name(self._path(temporary), path, replace=replaces is not None)
                self.sync()
                with suppress(OSError):  # it is committed, whatever happens to the leftovers
                    self.delete(doomed)
        finally:
            with suppress(OSError):
                self.delete([temporary])

    def _path(self, name: str) -> str:
        return f"{self.location}/{checked_name(name)}"

    def _open_new(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return os.open(path, flags, 0o666)
        except FileNotFoundError:
            self._make_folder()
            return os.open(path, flags, 0o666)

    def _make_folder(self) -> None:
        try:
            make_folder(self.folder)
        except FileExistsError as error:  # which would sound as if the name of the new file were taken
            raise NotADirectoryError(errno.ENOTDIR, "is not a folder", self.location) from error

    def _content(self, name: str) -> bytes | None:
        try:
            return self.read(name)
        except FileNotFoundError:
            return None


def _give_name(temporary: str, path: str, *, replace: bool) -> None:
    """Put a complete file in place."""
    try:
        if replace:
            os.replace(temporary, path)
        else:
            link_to_free_name(temporary, path)
    except (FileExistsError, FileNotFoundError):
        # Only without a lock: another commit was faster, and may have removed our file as a leftover.
        raise conflict(path) from None
