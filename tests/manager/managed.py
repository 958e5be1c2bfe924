"""Runs for the tests of the manager as a whole: small states, damage, and disks that fail when they are told to."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast._manager.steps import folder_of
from holdfast.stores import LocalRoot, LocalStore
from tests.manager.small_disks import find_no_space


def state_of(step: float) -> dict[str, Any]:
    return {"model": {"weight": torch.full((1000,), float(step))}, "seen": int(step)}


def is_state_of(state: dict[str, Any], step: int) -> bool:
    return state["seen"] == step and bool(torch.equal(state["model"]["weight"], torch.full((1000,), float(step))))


def train(manager: holdfast.CheckpointManager, steps: range, **options: Any) -> None:
    for step in steps:
        manager.maybe_save(step, state_of(step), **options)


def a_run(root: Any, *steps: int, **options: Any) -> None:
    """A run that has ended, with these steps."""
    with holdfast.CheckpointManager(root, background=False, save_at_end=False, **options) as manager:
        for step in steps:
            manager.save(step, state_of(step), metrics={"loss": 1 / step})


def steps_in(root: Any) -> list[int]:
    return [info.step for info in holdfast.CheckpointManager(root).steps()]


def restored_from(root: Any, **options: Any) -> tuple[holdfast.RestoredStep | None, dict[str, Any]]:
    state = state_of(0)
    with holdfast.CheckpointManager(root) as manager:
        return manager.restore(state, **options), state


def file_of(root: Path, step: int, pattern: str) -> Path:
    (found,) = (root / folder_of(step)).glob(pattern)
    return found


def flip_a_byte(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 0xFF
    file.write_bytes(content)


def damage_data(root: Path, step: int) -> None:
    flip_a_byte(file_of(root, step, "data-*"), -7)


class MoodyRoot(LocalRoot):
    """A disk that has no space for some steps, fails for others, and counts what is read."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        self.failing: set[int] = set()
        self.full: set[int] = set()
        self.failures = 0
        self.bytes_read: dict[str, int] = {}

    def child(self, name: str) -> LocalStore:
        return MoodyStore(self, name)


class MoodyStore(LocalStore):
    def __init__(self, root: MoodyRoot, name: str) -> None:
        super().__init__(root.folder / name)
        self._root, self._name = root, name

    @contextmanager
    def create(self, name: str, size: int | None = None, memory: int | None = None) -> Iterator[Any]:
        with super().create(name, size, memory) as sink:
            if name.startswith("data-") and self._name in {folder_of(step) for step in self._root.full}:
                self._root.failures += 1
                find_no_space()
            if name.startswith("data-") and self._name in {folder_of(step) for step in self._root.failing}:
                self._root.failures += 1
                raise OSError(5, "Input/output error", self.path_of(name))
            yield sink

    @contextmanager
    def reader(self, name: str) -> Iterator[Any]:
        with super().reader(name) as reader:
            yield CountingReader(reader, self._root.bytes_read, name.partition("-")[0])


class CountingReader:
    def __init__(self, reader: Any, counts: dict[str, int], kind: str) -> None:
        self._reader, self._counts, self._kind = reader, counts, kind
        self.size = reader.size

    def read_into(self, begin: int, buffer: Any) -> None:
        self._counts[self._kind] = self._counts.get(self._kind, 0) + memoryview(buffer).nbytes
        self._reader.read_into(begin, buffer)


def not_by_python(patch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """As if a library that is not written in Python handled a signal, which is a warning."""
    real = signal.getsignal
    patch.setattr(signal, "getsignal", lambda asked: None if asked == number else real(asked))
