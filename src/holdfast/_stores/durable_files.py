"""Files of the local disk that appear complete or not at all, and survive a loss of power once they have.

Everything that flushes files and folders, locks a folder for a commit, or puts a complete file under its name is here.
The order of the system calls is what the crash tests prove: write, flush the file, give it its name, flush the folder.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from holdfast._stores.file_sink import FileSink
from holdfast._stores.filesystem import AnyPath, FileSystemBase

if os.name == "posix":
    import fcntl

_CANNOT_SYNC_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}
_CANNOT_LOCK_FOLDERS = {*_CANNOT_SYNC_FOLDERS, errno.ENOLCK, errno.EACCES, errno.EPERM}
_CANNOT_LINK = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_LOCK_PATIENCE = 60.0
_LOCK_PAUSE = 0.01

# What makes written bytes, and the names of files, survive a loss of power.


def flush_to_disk(stream: Any) -> None:
    """Make what was written to a stream durable. Nothing may be written to it afterwards."""
    complete = getattr(stream, "complete", None)
    (stream.flush if complete is None else complete)()
    try:
        descriptor = stream.fileno()
    except (AttributeError, io.UnsupportedOperation, OSError):
        return  # not a file of this machine: closing it is what makes it durable
    os.fsync(descriptor)


def write_durably(files: FileSystemBase, path: AnyPath, content: bytes, *, sync: bool = True) -> None:
    """Write a small file, durable unless ``sync`` is False. After an exception, nothing is left of it."""
    try:
        with files.create_stream(path, "wb") as stream:
            stream.write(content)
            if sync:
                flush_to_disk(stream)
    except BaseException:
        with suppress(OSError):
            files.rm_file(path)
        raise


def sync_folder(path: AnyPath) -> None:
    """Flush the entries of a folder. File systems that refuse to sync a folder have nothing to flush there."""
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


def make_folder(path: AnyPath) -> None:
    """Make a folder and its parents, each of them durable in its own parent."""
    folder = Path(path)
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)  # another rank may have been faster; a file of that name is an error
    sync_folder(folder.parent)


# One commit at a time.


@contextmanager
def lock_folder(path: AnyPath) -> Iterator[None]:
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


# A complete file gets its name. Until then it has a temporary one, or none.


def temporary_name(name: str) -> str:
    """What a file is called before it is complete.

    >>> list(temporaries_of("record", [temporary_name("record"), temporary_name("other"), "record"])) != []
    True
    """
    return f".{name}.{uuid.uuid4().hex[:8]}.tmp"


def temporaries_of(name: str, names: Iterable[str]) -> list[str]:
    """Of the names in a folder, those that a file of this name had before it was complete."""
    pattern = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{8}}\.tmp")
    return [other for other in names if pattern.fullmatch(other)]


def link_to_free_name(temporary: str, path: str) -> None:
    """Give a complete file a name that must be free, a ``FileExistsError`` otherwise.

    Even without a lock, only one of several can link its file to a name. Where there are no links, it is renamed.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        if not os.path.samefile(temporary, path):  # network disks may try twice, and meet what they did themselves
            raise
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        os.replace(temporary, path)


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
    temporary = final.with_name(temporary_name(final.name))
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
    sync_folder(final.parent)


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
        # Python follows the link in /proc only if it is given a folder that names are relative to.
        os.link(f"/proc/self/fd/{descriptor}", name.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


# A large local file that appears complete or not at all.


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
        sink = FileSink(descriptor, name, expected, memory)
        try:
            yield sink
            sink.finish()
            os.ftruncate(descriptor, sink.size)  # the expectation may have been too large
        except OSError as error:
            if error.filename == name:
                raise OSError(error.errno, error.strerror, os.fspath(path)) from error
            raise
        finally:
            sink.close()
