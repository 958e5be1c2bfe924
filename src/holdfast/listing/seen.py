"""Files and folders as a look at them found them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from holdfast.sources.format_names import Format, format_of_folder, format_of_unfinished


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
    file_format: Format | None = None
    """If it is one file."""
    trouble: str = ""
    """Why it could not be looked at, if so. Its name is all that is known then."""

    @property
    def is_file(self) -> bool:
        """Whether it is a file and not a folder."""
        return self.file_format is not None

    @cached_property
    def names(self) -> set[str]:
        """Of all files."""
        return {file.name for file in self.files}

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)

    @cached_property
    def format(self) -> Format | None:
        """Of the checkpoint in it; None if there is none, or not yet."""
        return self.file_format or format_of_folder(self.names)

    @cached_property
    def unfinished_format(self) -> Format | None:
        """Of what a save has left in it, or is writing, if there is no checkpoint."""
        return format_of_unfinished(self.names) if self.format is None else None

    def last_change(self, names: Iterable[str] | None = None) -> float | None:
        """When one of its files, or of these, was last written; None where that is not told."""
        wanted = self.names if names is None else set(names)
        times = [file.changed_at for file in self.files if file.name in wanted and file.changed_at is not None]
        return max(times, default=None)
