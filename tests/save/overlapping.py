"""Races that always happen: background copies that wait until somebody waits for them, and writers that wait too."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import holdfast
from holdfast._background.copy_jobs import Copies
from holdfast._stores.local_store import LocalStore
from tests.exact import assert_same

PATIENCE = 60.0
"""Seconds after which something that should have happened will not."""


class HeldBack:
    """What is copied in the background waits until a step of an optimizer waits for it, or until it is let go."""

    def __init__(self) -> None:
        self.waits = 0
        """How often a step has waited."""
        self._all = threading.Event()
        self._gates: weakref.WeakKeyDictionary[Copies, threading.Event] = weakref.WeakKeyDictionary()

    def let_go(self) -> None:
        self._all.set()
        for gate in list(self._gates.values()):
            gate.set()

    def gate(self, copies: Copies) -> threading.Event:
        gate = self._gates.setdefault(copies, threading.Event())
        if self._all.is_set():
            gate.set()
        return gate


@contextmanager
def held_back() -> Iterator[HeldBack]:
    """Inside of the block, background copies begin when a step waits for them and not before."""
    held, work, wait_until_copied = HeldBack(), Copies._work, Copies.wait_until_copied

    def late_work(copies: Copies) -> None:
        assert held.gate(copies).wait(PATIENCE), "no step has waited for the copy"
        work(copies)

    def noted_wait(copies: Copies) -> None:
        held.waits += 1
        held.gate(copies).set()
        wait_until_copied(copies)

    with mock.patch.object(Copies, "_work", late_work), mock.patch.object(Copies, "wait_until_copied", noted_wait):
        try:
            yield held
        finally:
            held.let_go()


class GatedStore(LocalStore):
    """A folder to which nothing is written before the gate is open."""

    def __init__(self, path: Path) -> None:
        super().__init__(Path(path))
        self.reached = threading.Event()
        self.gate = threading.Event()

    @contextmanager
    def create(self, name: str, size: int | None = None, memory: int | None = None) -> Iterator[Any]:
        self.reached.set()
        assert self.gate.wait(PATIENCE), "nobody has opened the gate"
        with super().create(name, size, memory) as sink:
            yield sink


def assert_same_content(path: Any, expected: Any) -> None:
    """Fail unless two checkpoints have the same in them, bit by bit."""
    assert_same(holdfast.open(path).read(), holdfast.open(expected).read())


def scribble(value: Any) -> None:
    """Change every byte of all tensors and arrays in a nested state, in ways that torch does not notice."""
    if isinstance(value, torch.Tensor):
        if value.numel():
            torch.frombuffer(_memory_of(value), dtype=torch.uint8).bitwise_not_()
    elif isinstance(value, np.ndarray):
        base = value
        while isinstance(base.base, np.ndarray):
            base = base.base
        np.bitwise_not(base.reshape(-1).view(np.uint8), out=base.reshape(-1).view(np.uint8))
    elif isinstance(value, dict):
        for child in value.values():
            scribble(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            scribble(child)


def _memory_of(tensor: torch.Tensor) -> Any:
    import ctypes

    storage = tensor.untyped_storage()
    return (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
