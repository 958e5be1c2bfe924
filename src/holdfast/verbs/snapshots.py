"""A captured state with private copies in the place of its tensors, and the memory for several of them."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from holdfast.background.lanes import Lane
from holdfast.errors import SaveInProgressError
from holdfast.planning.copied_tensors import CopiedTensor
from holdfast.planning.holdings import Holding, LocalTensor
from holdfast.staging.copying import Copies, Copy
from holdfast.verbs.capturing import Captured

WhenBusy = Literal["wait", "copy", "raise"]


@dataclass
class Snapshot:
    """A state on its way into private memory."""

    copies: Copies
    nbytes: int
    """What all copies take."""
    _captured: Captured
    _parts: Mapping[str, list[tuple[Any, Copy | Any]]]

    @classmethod
    def of(cls, captured: Captured) -> Snapshot:
        """Note what is to be copied. Numpy arrays are copied here and now."""
        copies = Copies()
        others = 0
        parts: dict[str, list[tuple[Any, Any]]] = {}
        for holding in captured.holdings:
            if holding.tied_to is not None:
                # One copy for all names. All are kept: to other ranks each may be a tensor of its own.
                parts[holding.key] = parts[holding.tied_to]
                continue
            local: Any = captured.local[holding.key]
            noted = parts[holding.key] = [(box, _noted(copies, local, box)) for box in holding.boxes]
            others += sum(part.nbytes for _, part in noted if isinstance(part, np.ndarray))
        return cls(copies, copies.nbytes + others, captured, parts)

    def captured(self) -> Captured:
        """The state with the copies. What they hold is right when they are done."""
        local: dict[str, Any] = {}
        for key, parts in self._parts.items():
            made = tuple((box, part.twin if isinstance(part, Copy) else part) for box, part in parts)
            local[key] = CopiedTensor(key, made, self._captured.local[key].stored_dtype)
        return replace(self._captured, local=local)


def _noted(copies: Copies, local: LocalTensor, box: Any) -> Any:
    held = local.held(box)
    return held.copy() if isinstance(held, np.ndarray) else copies.add(local.key, held)


def with_digests(captured: Captured) -> Captured:
    """With the digests of what other ranks may hold as well, to be compared with theirs."""
    if not captured.to_compare:
        return captured
    known: dict[str, tuple[bytes, ...]] = {}

    def digests(holding: Holding) -> tuple[bytes, ...]:
        """Taken once for all names of the same memory."""
        name = holding.tied_to or holding.key
        if name not in known:
            known[name] = tuple(map(captured.local[holding.key].digest, holding.boxes))
        return known[name]

    holdings = [
        holding._replace(digests=digests(holding)) if holding.key in captured.to_compare else holding
        for holding in captured.holdings
    ]
    return replace(captured, holdings=holdings, to_compare=frozenset())


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
        if when_busy == "raise":
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
