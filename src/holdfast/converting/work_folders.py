"""Folders beside a destination in which the result of a conversion is made, until it is complete.

A kill leaves such a folder behind. It is locked as long as its process lives, so that whoever comes next knows whether
it may be removed.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.errors import NotAFolderError
from holdfast.stores.local import FileSystem

if os.name == "posix":
    import fcntl

_CANNOT_LOCK = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.ENOLCK, errno.EACCES, errno.EPERM}
_WORK_FOLDER = re.compile(r"\.(.+)\.holdfast-[0-9a-f]{16}\.partial", re.DOTALL)

OLD = "old"
"""What is replaced lies in the work folder under this name, where two names cannot be exchanged in one step."""


@contextmanager
def work_folder(final: Path) -> Iterator[Path]:
    """A new folder on the same disk as ``final``, for the ``with`` block. Older ones that nobody uses are removed.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "model"
    >>> with work_folder(place) as work:
    ...     was_made = work.is_dir()
    >>> was_made, work.exists()
    (True, False)
    """
    _refuse_file_as_folder(final.parent)
    new = _missing_parents(final.parent)
    FileSystem().mkdir(final.parent)
    sweep(final)
    work, lock = _locked_folder(final)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        for folder in new:
            with suppress(OSError):  # there is something in it, as a rule what was made
                folder.rmdir()


def sweep(final: Path) -> list[Path]:
    """Remove what killed conversions to this destination have left. Returns what was removed."""
    return [left for left in left_over(final.parent, final.name) if remove_left_over(left)]


def left_over(folder: Path, name: str | None = None) -> list[Path]:
    """The work folders in a folder: of conversions that were killed, or that still go on.

    ``name`` is that of the destination that they are for; None means all.
    """
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(other, _WORK_FOLDER.fullmatch(other)) for other in names]
    return [folder / other for other, match in found if match is not None and name in (None, match.group(1))]


def is_in_use(work: Path) -> bool:
    """Whether the process that made a work folder lives, or nobody knows."""
    lock = _lock(work)
    if lock is None:
        return work.exists()
    os.close(lock)
    return False


def remove_left_over(work: Path) -> bool:
    """Remove a work folder, if the process that made it is gone. False if it lives, or nobody knows."""
    lock = _lock(work)
    if lock is None:
        return False
    try:
        _give_back(work)
        shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(lock)
    return not work.exists()


def _give_back(work: Path) -> None:
    """Put back what was to be replaced, if the process was killed between taking it away and putting the new there."""
    match = _WORK_FOLDER.fullmatch(work.name)
    old, final = work / OLD, work.parent / (match.group(1) if match is not None else "")
    if old.exists() and not os.path.lexists(final):
        os.rename(old, final)


def _locked_folder(final: Path) -> tuple[Path, int | None]:
    while True:
        work = final.parent / f".{final.name}.holdfast-{secrets.token_hex(8)}.partial"
        work.mkdir()
        lock = _lock(work)
        # Another process may have swept it before it was locked.
        if work.is_dir():
            return work, lock
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder, as long as what is returned is open. None if others have it, or folders cannot be locked."""
    if os.name != "posix":
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError) or error.errno in _CANNOT_LOCK:
            return None
        raise
    return descriptor


def _refuse_file_as_folder(folder: Path) -> None:
    there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not there.is_dir():
        raise NotAFolderError(
            f"{there} is a file, so nothing can be written below it. Write to another place, or move it away.",
            path=str(there),
        )


def _missing_parents(folder: Path) -> list[Path]:
    return [place for place in (folder, *folder.parents) if not place.exists()]
