"""What is to be shown: the checkpoints in a folder, of whatever format, or a single one."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from holdfast.errors import CheckpointNotFoundError
from holdfast.formats.native.names import RECORD, generation_of
from holdfast.manager.run_file import RUN_FILE
from holdfast.stores.places import local_path
from holdfast.stores.roots import LocalRoot, Root, root_at
from holdfast.stores.store import Store

Format: TypeAlias = Literal["native", "dcp", "safetensors", "torch"]

_DCP_INDEX = re.compile(r"(?:__\d+)?\.metadata")
_SAFETENSORS = (".safetensors", ".safetensors.index.json", ".safetensors.commit.json")
_TORCH_FILES = (".pt", ".pth", ".ckpt", ".bin")
_ZIP_MAGIC = b"PK\x03\x04"
_UNSETTLED = 2.0
"""Seconds within which a folder may have changed again without a new time of change."""


@dataclass(frozen=True)
class SeenFile:
    """A file as a look at its folder found it."""

    name: str
    size: int
    changed_at: float | None = None
    """Seconds since the epoch, where the store tells."""
    path: str | None = None
    """Where it is, if it is on a local disk."""


@dataclass(frozen=True)
class SeenFolder:
    """The files of a folder, or the one file that is a checkpoint by itself."""

    name: str
    files: tuple[SeenFile, ...]
    changed_at: float | None = None
    is_file: bool = False

    @property
    def names(self) -> set[str]:
        """Of all files."""
        return {file.name for file in self.files}

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)

    @property
    def format(self) -> Format | None:
        """Of the checkpoint in it; None if there is none, or not yet."""
        return _format_of_file(self.files[0]) if self.is_file else format_of(self.names)


class Shelf:
    """A folder with checkpoints, looked at again and again. A folder in it that has not changed is not read twice."""

    def __init__(self, place: str | os.PathLike[str] | Root) -> None:
        self.single: str | None = None
        """The name of the only checkpoint to be shown, if a checkpoint was given and not a folder with some."""
        self.root, self.single = _root_and_single(place)
        self._seen: dict[str, tuple[int, SeenFolder]] = {}

    @property
    def location(self) -> str:
        """What was given."""
        return self.root.location if self.single is None else f"{self.root.location}/{self.single}"

    def look(self) -> list[SeenFolder]:
        """Everything that may hold a checkpoint, now."""
        if isinstance(self.root, LocalRoot):
            return self._look_at_the_disk(self.root)
        names = self.root.children() if self.single is None else [self.single]
        return [_listed(self.root, name) for name in sorted(names)]

    def place(self, name: str) -> str | Store:
        """What to open for a checkpoint that ``look`` has found."""
        if isinstance(self.root, LocalRoot):
            return f"{self.root.location}/{name}"
        return self.root.child(name)

    def _look_at_the_disk(self, root: LocalRoot) -> list[SeenFolder]:
        found, folder = [], root.folder
        names = sorted(_names_in(folder)) if self.single is None else [self.single]
        for name in names:
            try:
                status = os.stat(folder / name)
                if not _is_folder(status):
                    path = str(folder / name)
                    file = SeenFile(name, status.st_size, status.st_mtime, path)
                    if _format_of_file(file) is not None:
                        found.append(SeenFolder(name, (file,), status.st_mtime, is_file=True))
                    continue
                found.append(self._folder(str(folder / name), name, status))
            except (FileNotFoundError, NotADirectoryError):
                continue  # it was deleted meanwhile
        gone = self._seen.keys() - {seen.name for seen in found}
        for name in gone:
            del self._seen[name]
        return found

    def _folder(self, path: str, name: str, status: os.stat_result) -> SeenFolder:
        known = self._seen.get(name)
        if known is not None and known[0] == status.st_mtime_ns and not _may_grow(known[1]):
            return known[1]
        files = tuple(_files_in(path))
        seen = SeenFolder(name, files, status.st_mtime)
        if time.time() - status.st_mtime > _UNSETTLED:
            self._seen[name] = status.st_mtime_ns, seen
        return seen


def format_of(names: Collection[str]) -> Format | None:
    """The format of the checkpoint in a folder with these files.

    >>> format_of({".metadata", "__0_0.distcp"}), format_of({"__0_0.distcp"})
    ('dcp', None)
    """
    if RECORD in names:
        return "native"
    if any(map(_DCP_INDEX.fullmatch, names)):
        return "dcp"
    if any(name.endswith(_SAFETENSORS) and generation_of(name) is None for name in names):
        return "safetensors"
    return None


def _format_of_file(file: SeenFile) -> Format | None:
    if file.name.endswith(".safetensors"):
        return "safetensors"
    if not file.name.endswith(_TORCH_FILES) or file.path is None:
        return None
    try:
        with open(file.path, "rb") as stream:
            return "torch" if stream.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC else None
    except OSError:
        return None


def _root_and_single(place: str | os.PathLike[str] | Root) -> tuple[Root, str | None]:
    if isinstance(place, Root):
        return place, None
    path = local_path(place)
    if path is None:
        return _at_a_url(os.fsdecode(place))
    path = path.absolute()
    if not path.exists():
        raise CheckpointNotFoundError(
            f"there is nothing at {path}. Give the folder of a run, or a checkpoint; check the path for a typo.",
            path=str(path),
        )
    if path.is_file():
        path = path.parent if path.name == RECORD or _DCP_INDEX.fullmatch(path.name) else path
        return LocalRoot(path.parent), path.name
    names = set(_names_in(path))
    if RUN_FILE not in names and _is_single(path, names):
        return LocalRoot(path.parent), path.name
    return LocalRoot(path), None


def _at_a_url(url: str) -> tuple[Root, str | None]:
    url = url.rstrip("/")
    root = root_at(url)
    above, _, name = url.rpartition("/")
    names = {listed.name for listed in root.store.list()}
    has_place_above = bool(name) and not above.endswith(("/", ":"))
    if RUN_FILE not in names and format_of(names) is not None and has_place_above:
        return root_at(above), name
    return root, None


def _is_single(path: Path, names: Collection[str]) -> bool:
    """Whether a folder is one checkpoint, and not a place where several are."""
    found = format_of(names)
    if found != "safetensors":
        return found is not None
    if any((path / name).is_dir() and format_of(_names_in(path / name)) is not None for name in names):
        return False  # those of a training, and the final weights beside them
    is_listed = any(name.endswith(_SAFETENSORS[1:]) for name in names)
    files = [name for name in names if name.endswith(".safetensors")]
    return is_listed or len(files) == 1 or all("-of-" in name for name in files)


def _names_in(folder: str | os.PathLike[str]) -> Sequence[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _files_in(path: str) -> list[SeenFile]:
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                status = entry.stat()
            except FileNotFoundError:
                continue
            if not _is_folder(status):
                found.append(SeenFile(entry.name, status.st_size, status.st_mtime, entry.path))
    return found


def _listed(root: Root, name: str) -> SeenFolder:
    return SeenFolder(name, tuple(SeenFile(listed.name, listed.size) for listed in root.child(name).list()))


def _is_folder(status: os.stat_result) -> bool:
    return (status.st_mode & 0o170000) == 0o040000


def _may_grow(seen: SeenFolder) -> bool:
    """Whether files may be added to without the folder changing: files of saves that are not committed."""
    if seen.format is None:
        return True
    generations = {generation_of(file.name) for file in seen.files} - {None}
    return len(generations) > 1 or seen.format != "native"
