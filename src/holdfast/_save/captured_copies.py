"""A captured state with private copies in the place of its tensors, and the memory for several of them."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from holdfast._background.copy_jobs import Copies, Copy
from holdfast._background.queues import Lane
from holdfast._base.boxes import Box, contains
from holdfast._formats.tensor_bytes import array_pieces, digest_of_small, tensor_pieces
from holdfast._layout.descriptions import Bytes, LocalTensor, TensorDescription, digest_pieces, part_of
from holdfast._save.capture import Captured
from holdfast.errors import SaveInProgressError

# What one rank holds of a tensor, as private copies of its parts: nothing but the save knows them.


class CopiedTensor(NamedTuple):
    """Takes the place of a ``LocalTensor``. Its parts are plain tensors on the CPU, or one numpy array.

    >>> copied = CopiedTensor("w", ((Box((2,), (2,)), torch.tensor([1, 2], dtype=torch.uint8)),))
    >>> [piece.tolist() for piece in copied.pieces(Box((3,), (1,)), 1024)]
    [[2]]
    """

    key: str
    parts: tuple[tuple[Box, Any], ...]
    """Each with its place in the tensor."""
    stored_dtype: torch.dtype | None = None

    @property
    def value(self) -> Any:
        """The copy, if there is one only."""
        return self.parts[0][1] if len(self.parts) == 1 else None

    def pieces(self, box: Box, largest: int) -> Iterator[Bytes]:
        """The stored form of a box that is in one of the parts."""
        held, part = self._around(box)
        chosen = part_of(part, box, held.offsets)
        if isinstance(chosen, np.ndarray):
            return array_pieces(chosen, largest)
        return tensor_pieces(chosen, largest, self.stored_dtype)

    def digest(self, box: Box) -> bytes:
        """Of the content of a part."""
        _, part = self._around(box)
        if isinstance(part, np.ndarray):
            return digest_pieces(array_pieces(part))
        return digest_of_small(part) or digest_pieces(tensor_pieces(part))

    def _around(self, box: Box) -> tuple[Box, Any]:
        for held, part in self.parts:
            if contains(held, box):
                return held, part
        raise AssertionError(f"this rank was asked for a part of {self.key!r} that it does not hold: {box}")


WhenBusy = Literal["wait", "copy", "error"]


@dataclass
class CapturedCopy:
    """A captured state on its way into private memory: what to copy of it, and the same with the copies."""

    copies: Copies
    nbytes: int
    """What all copies take."""
    _captured: Captured
    _parts: Mapping[str, list[tuple[Any, Copy | Any]]]

    @classmethod
    def of(cls, captured: Captured) -> CapturedCopy:
        """Note what is to be copied. Numpy arrays are copied here and now."""
        copies = Copies()
        others = 0
        parts: dict[str, list[tuple[Any, Any]]] = {}
        for description in captured.descriptions:
            if description.tied_to is not None:
                # One copy for all names. All are kept: to other ranks each may be a tensor of its own.
                parts[description.key] = parts[description.tied_to]
                continue
            local: Any = captured.local[description.key]
            noted = parts[description.key] = [(box, _noted(copies, local, box)) for box in description.boxes]
            others += sum(part.nbytes for _, part in noted if isinstance(part, np.ndarray))
        return cls(copies, copies.nbytes + others, captured, parts)

    def captured(self) -> Captured:
        """The state with the copies. What they hold is right when they are done."""
        local: dict[str, Any] = {}
        for key, parts in self._parts.items():
            made = tuple((box, part.twin if isinstance(part, Copy) else part) for box, part in parts)
            local[key] = CopiedTensor(key, made, self._captured.local[key].stored_dtype)
        return replace(self._captured, local=local, is_private=True)


def _noted(copies: Copies, local: LocalTensor, box: Any) -> Any:
    held = local.held(box)
    return held.copy() if isinstance(held, np.ndarray) else copies.add(local.key, held)


def with_digests(captured: Captured) -> Captured:
    """With the digests of what other ranks may hold as well, to be compared with theirs."""
    if not captured.to_compare:
        return captured
    known: dict[str, tuple[bytes, ...]] = {}

    def digests(description: TensorDescription) -> tuple[bytes, ...]:
        """Taken once for all names of the same memory."""
        name = description.tied_to or description.key
        if name not in known:
            known[name] = tuple(map(captured.local[description.key].digest, description.boxes))
        return known[name]

    descriptions = [
        description._replace(digests=digests(description)) if description.key in captured.to_compare else description
        for description in captured.descriptions
    ]
    return replace(captured, descriptions=descriptions, to_compare=frozenset())


_pending: weakref.WeakKeyDictionary[Lane, list[tuple[Future[Any], int]]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def wait_for_memory(lane: Lane, nbytes: int, when_busy: WhenBusy, most: int) -> None:
    """Return when there may be one more snapshot of so many bytes in the lane of these ranks.

    With ``when_busy="copy"`` that is when there are not more than ``most`` bytes in all.
    """
    while True:
        pending = _in_use(lane)
        if not pending:
            return
        if when_busy == "error":
            raise SaveInProgressError(
                "an earlier background save has not ended yet. Wait for it, save less often, or let async_save wait "
                "(when_busy='wait') or take memory for one more copy (when_busy='copy').",
                pending=len(pending),
            )
        if lane.queue.is_worked_on_here():
            return  # a callback of the very save that it would wait for
        if when_busy == "copy" and sum(size for _, size in pending) + nbytes <= most:
            return
        concurrent.futures.wait([pending[0][0]])


def note_memory(lane: Lane, save: Future[Any], nbytes: int) -> None:
    """A save has a snapshot of so many bytes, until it ends."""
    with _lock:
        _pending.setdefault(lane, []).append((save, nbytes))


def _in_use(lane: Lane) -> list[tuple[Future[Any], int]]:
    with _lock:
        found = [entry for entry in _pending.get(lane, []) if not entry[0].done()]
        _pending[lane] = found
        return list(found)


def _start_anew_in_forked_child() -> None:
    """The saves are the parent's, and somebody may hold the lock."""
    global _lock
    _lock = threading.Lock()
    _pending.clear()


os.register_at_fork(after_in_child=_start_anew_in_forked_child)
