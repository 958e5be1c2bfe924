"""Files that appear complete or not at all, and survive a loss of power once they have."""

from __future__ import annotations

import errno
import io
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from holdfast._stores.file_sink import FileSink
from holdfast._stores.local_filesystem import FileSystem

# What makes written bytes survive a loss of power.


def flush_to_disk(stream: Any) -> None:
    """Make what was written to a stream durable. Nothing may be written to it afterwards."""
    complete = getattr(stream, "complete", None)
    (stream.flush if complete is None else complete)()
    try:
        descriptor = stream.fileno()
    except (AttributeError, io.UnsupportedOperation, OSError):
        return  # not a file of this machine: closing it is what makes it durable
    os.fsync(descriptor)


# A local file that appears whole or not at all.


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


# A large local file that appears whole or not at all, and is written past the page cache.


@contextmanager
def sink_atomically(path: str | os.PathLike[str], expected: int, memory: int) -> Iterator[FileSink]:
    """A sink whose content is durable at ``path`` when the ``with`` block ends, as with ``written_atomically``.

    ``expected`` is about how many bytes there will be, and ``memory`` how many of them may be on their way.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/file"
    >>> with sink_atomically(path, 5, 1 << 20) as sink:
    ...     sink.write(b"whole")
    >>> open(path, "rb").read()
    b'whole'
    """
    with written_atomically(path) as stream:
        descriptor = os.dup(stream.fileno())
        name = f"/proc/self/fd/{descriptor}"  # it has no other name yet
        sink = FileSink(descriptor, name, expected)
        try:
            sink.buffer(memory)  # the first call decides
            yield sink
            sink.finish()
            os.ftruncate(descriptor, sink.size)  # the expectation may have been too large
        except OSError as error:
            if error.filename == name:
                raise OSError(error.errno, error.strerror, os.fspath(path)) from error
            raise
        finally:
            sink.close()
