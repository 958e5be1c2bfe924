"""A local file that appears whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from holdfast.stores.durability import flush_to_disk
from holdfast.stores.local import FileSystem

_CANNOT_BE_NAMELESS = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}


@contextmanager
def written_atomically(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A stream whose content is durable at ``path`` when the ``with`` block ends, in place of a file that was there.

    After an exception, nothing is left of it and an earlier file is as it was. On Linux that holds after a kill too:
    the file has no name before it is complete.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "file"
    >>> with written_atomically(path) as stream:
    ...     _ = stream.write(b"whole")
    >>> path.read_bytes()
    b'whole'
    """
    final = Path(os.path.realpath(path))  # a link stays a link, and what it points to is replaced
    if final.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder and not a file to be replaced", str(final))
    if final.exists() and not final.is_file():
        raise FileExistsError(errno.EEXIST, "is a device or a pipe and not a file to be replaced", str(final))
    if not final.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder to write to", str(final.parent))
    temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.tmp")
    stream, has_name = _opened(temporary)
    try:
        with stream:
            _keep_permissions(final, stream.fileno())
            yield stream
            flush_to_disk(stream)
            if not has_name:
                _give_name(stream.fileno(), temporary)
        os.replace(temporary, final)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    FileSystem().sync_folder(final.parent)


def _keep_permissions(replaced: Path, descriptor: int) -> None:
    """Who may read the old file may read the new one, and nobody else."""
    if not replaced.exists():
        return
    before = replaced.stat()
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
    with suppress(PermissionError):  # only some may give files away
        os.fchown(descriptor, before.st_uid, before.st_gid)


def _opened(temporary: Path) -> tuple[IO[bytes], bool]:
    """A new file, and whether it has its name already."""
    if hasattr(os, "O_TMPFILE") and Path("/proc/self/fd").is_dir():
        try:
            descriptor = os.open(temporary.parent, os.O_TMPFILE | os.O_WRONLY, 0o666)
        except OSError as error:
            if error.errno not in _CANNOT_BE_NAMELESS:
                raise
        else:
            return os.fdopen(descriptor, "wb"), False
    return temporary.open("xb"), True


def _give_name(descriptor: int, name: Path) -> None:
    folder = os.open(name.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Python follows the link in /proc only if it is told a folder that names are relative to.
        os.link(f"/proc/self/fd/{descriptor}", name.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)
