"""What happens to job D: `kill -9`, between two steps and in the middle of a save."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NoReturn

from holdfast.stores import LocalRoot, LocalStore, Store

RECORD = "holdfast.json"


def die() -> NoReturn:
    """No handler runs, nothing is flushed, nobody says goodbye."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives that")


class DeadlyRoot(LocalRoot):
    """A folder of checkpoints where the save of one step is deadly."""

    def __init__(self, path: Path, step: int) -> None:
        super().__init__(path)
        self._deadly_folder = f"step-{step:08d}"

    def child(self, name: str) -> Store:
        return DeadlyStore(self.folder / name) if name == self._deadly_folder else super().child(name)


class DeadlyStore(LocalStore):
    """The process dies when all files of a checkpoint are written, and only the record that makes them one is not."""

    def commit(self, name: str, content: bytes, *, replaces: bytes | None) -> None:
        if name == RECORD:
            die()
        super().commit(name, content, replaces=replaces)
