"""Folders beside a destination in which the result of a conversion is made, until it is complete.

A kill leaves such a folder behind. It is locked as long as its process lives, so that whoever comes next knows whether
it may be removed. All names inside of it are fixed, but for the result's own, which is in a folder of its own; a note
says that it is a work folder, so that nothing a user may call so is taken for one.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast._stores.durable_files import flush_to_disk, make_folder, sync_folder
from holdfast.errors import NotAFolderError

if os.name == "posix":
    import fcntl

logger = logging.getLogger(__name__)

_CANNOT_LOCK = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.ENOLCK, errno.EACCES, errno.EPERM}
_WORK_FOLDER = re.compile(r"\.(.+)\.holdfast-[0-9a-f]{16}\.partial", re.DOTALL)
_NOTE = "conversion"
_NOTED = b"A conversion of Holdfast makes its result in this folder. What a kill left is removed by the next one.\n"
"""What the note begins with. The rest is the name of the destination, which may be too long for a part of a name."""
_LONGEST_SHOWN = 200
_MOST_SHOWN = 40


@dataclass(frozen=True, slots=True)
class ResultFolder:
    """A folder in which a result is made, and what is where in it."""

    folder: Path
    final: Path
    """The destination."""

    @property
    def new(self) -> Path:
        """Where the result is made. It has the name of the destination, since suffixes of files mean something."""
        return self.folder / "new" / self.final.name

    @property
    def old(self) -> Path:
        """Where that which is replaced is for a moment, if two names cannot be exchanged in one step."""
        return self.folder / "old"

    @property
    def scratch(self) -> Path:
        """A folder for files that are needed meanwhile."""
        return self.folder / "scratch"

    @property
    def gone(self) -> Path:
        """What ``old`` is called from when it is sure that nobody needs it, so that no half of it is put back."""
        return self.folder / "gone"

    @classmethod
    def at(cls, folder: Path) -> ResultFolder | None:
        """The work folder that a folder is; None if it is none."""
        match = _WORK_FOLDER.fullmatch(folder.name)
        name = None if match is None else _destination(folder, match.group(1))
        return None if name is None else cls(folder, folder.parent / name)

    def prepare(self) -> None:
        """Make what is inside of a new one."""
        with (self.folder / _NOTE).open("wb") as stream:
            stream.write(_NOTED + os.fsencode(self.final.name))
            flush_to_disk(stream)
        self.new.parent.mkdir()
        self.scratch.mkdir()
        sync_folder(self.folder)

    def clear(self) -> None:
        """Remove it. What was to be replaced is put back before that, if the new result has not got its name.

        An interrupt at any moment leaves what the next call needs to go on.
        """
        try:
            self._give_back()
            sync_folder(self.final.parent)  # the names, before what had them is removed
        except OSError as error:
            kept = f" What was at {self.final} is in {self.old}." if os.path.lexists(self.old) else ""
            logger.warning("%s could not be removed: %s.%s", self.folder, error, kept)
            return
        for part in (self.gone, self.new.parent, self.scratch):
            shutil.rmtree(part, ignore_errors=True)
        with suppress(OSError):
            if os.listdir(self.folder) == [_NOTE]:  # it goes last, so that what is left of the folder can be recognized
                os.unlink(self.folder / _NOTE)
            os.rmdir(self.folder)

    def _give_back(self) -> None:
        if not os.path.lexists(self.old):
            return
        if os.path.lexists(self.new) and _is_free(self.final):
            os.rename(self.old, self.final)
        else:
            os.rename(self.old, self.gone)


@contextmanager
def work_folder(final: Path) -> Iterator[ResultFolder]:
    """A new folder on the same disk as ``final``, for the ``with`` block. Older ones that nobody uses are removed.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "model"
    >>> with work_folder(place) as work:
    ...     was_made = work.folder.is_dir()
    >>> was_made, work.folder.exists()
    (True, False)
    """
    _refuse_file_as_folder(final.parent)
    new = _missing_parents(final.parent)
    make_folder(final.parent)
    sweep(final)
    work, lock = _locked_folder(final)
    try:
        try:
            work.prepare()
            yield work
        finally:
            work.clear()
    finally:
        if lock is not None:
            os.close(lock)
        for folder in new:
            with suppress(OSError):  # there is something in it, as a rule what was made
                folder.rmdir()


def sweep(final: Path) -> list[Path]:
    """Remove what killed conversions to this destination have left, and put back what they had taken away.

    Returns what was removed.
    """
    return [left for left in left_over(final.parent, final.name) if remove_left_over(left)]


def left_over(folder: Path, name: str | None = None) -> list[Path]:
    """The work folders in a folder: of conversions that were killed, or that still go on.

    ``name`` is that of the destination that they are for; None means all.
    """
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    candidates = (folder / other for other in names if _WORK_FOLDER.fullmatch(other))
    works = (work for work in map(ResultFolder.at, candidates) if work is not None)
    return [work.folder for work in works if name in (None, work.final.name)]


def is_in_use(folder: Path) -> bool:
    """Whether the process that made a work folder lives, or nobody knows."""
    try:
        lock = _lock(folder)
    except BlockingIOError:
        return True
    if lock is None:
        return folder.exists()
    os.close(lock)
    return False


def remove_left_over(folder: Path) -> bool:
    """Remove a work folder, if the process that made it is gone. False if it lives, or nobody knows."""
    try:
        lock = _lock(folder)
    except BlockingIOError:
        return False
    if lock is None:
        return False
    try:
        work = ResultFolder.at(folder)
        if work is not None:
            work.clear()
    finally:
        os.close(lock)
    return not folder.exists()


def _destination(folder: Path, shown: str) -> str | None:
    """The name of what a work folder is for, by the note in it; None if it has none, and so is not a work folder.

    One that was just made or is nearly removed may have no note, or a part of one, and nothing else either.
    """
    try:
        if os.path.islink(folder):
            return None
        names = os.listdir(folder)
        if not names:
            return shown
        with open(folder / _NOTE, "rb") as stream:
            content = stream.read(len(_NOTED) + 4096)
    except OSError:
        return None
    name = os.fsdecode(content[len(_NOTED) :]) if content.startswith(_NOTED) else ""
    if name.startswith(shown[:_MOST_SHOWN]) and name == os.path.basename(name) and name not in ("", ".", ".."):
        return name
    return shown if names == [_NOTE] and _NOTED.startswith(content[: len(_NOTED)]) else None


def _shown(name: str) -> str:
    """The name of a destination as a part of another one, which must not become too long for the disk."""
    return name if len(os.fsencode(name)) <= _LONGEST_SHOWN else name[:_MOST_SHOWN]


def _is_free(final: Path) -> bool:
    """Whether a name is not taken. An empty folder is nothing."""
    try:
        return not os.path.lexists(final) or (not os.path.islink(final) and not os.listdir(final))
    except NotADirectoryError:
        return False


def _locked_folder(final: Path) -> tuple[ResultFolder, int | None]:
    while True:
        folder = final.parent / f".{_shown(final.name)}.holdfast-{secrets.token_hex(8)}.partial"
        folder.mkdir()
        try:
            lock = _lock(folder)
        except BlockingIOError:  # another process took it for a left-over, and is removing it
            continue
        if folder.is_dir():
            return ResultFolder(folder, final), lock
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder, as long as what is returned is open. None if there is none, or folders cannot be locked.

    Raises:
        BlockingIOError: another process has locked it.
    """
    if os.name != "posix":
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError) and error.errno in _CANNOT_LOCK:
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
