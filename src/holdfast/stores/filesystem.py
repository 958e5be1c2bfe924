"""The contract of file systems that DCP checkpoints live on: named byte streams, renames, nothing about tensors."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

AnyPath: TypeAlias = str | os.PathLike[str]


class FileSystemBase(ABC):
    """What a writer or reader needs of a file system. Subclass it to store checkpoints elsewhere."""

    puts_atomically: bool = False
    """Whether ``put`` is the way to make or replace a file in one step, because ``rename`` is not."""

    @contextmanager
    @abstractmethod
    def create_stream(self, path: AnyPath, mode: str) -> Iterator[io.IOBase]:
        """Open ``path`` for the length of a ``with`` block."""
        yield io.BytesIO()

    @abstractmethod
    def concat_path(self, path: AnyPath, suffix: str) -> AnyPath:
        """The path of the file ``suffix`` in the folder ``path``."""

    @abstractmethod
    def rename(self, path: AnyPath, new_path: AnyPath) -> None:
        """Give a file another name. A file that has that name already is replaced, in one step where possible."""

    def put(self, path: AnyPath, content: bytes) -> None:
        """Make a file, or replace it, so that nobody ever sees a part of it. Needed where ``puts_atomically``."""
        raise NotImplementedError

    @abstractmethod
    def init_path(self, path: AnyPath) -> AnyPath:
        """The form of ``path`` that the other methods take."""

    @abstractmethod
    def mkdir(self, path: AnyPath) -> None:
        """Make the folder and its parents, if they do not exist."""

    @classmethod
    @abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Whether checkpoints can be kept under this name."""

    @abstractmethod
    def exists(self, path: AnyPath) -> bool:
        """Whether there is something at ``path``."""

    @abstractmethod
    def rm_file(self, path: AnyPath) -> None:
        """Delete a file."""

    def ls(self, path: AnyPath) -> list[str]:
        """Paths of what is in a folder; nothing where the file system cannot tell."""
        return []

    @contextmanager
    def lock_folder(self, path: AnyPath) -> Iterator[None]:
        """Keep other savers out of a folder for the length of a ``with`` block, where the file system can do that."""
        yield

    def sync_folder(self, path: AnyPath) -> None:  # noqa: B027 - many file systems need not do anything
        """Make the names in a folder durable, where that is a separate act."""
