"""How fast this disk and this memory are, by short measurements of what a save does to them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch

from holdfast.stores.store import Store
from holdfast.tuning import KIB, MIB

_PIECE = MIB
_SMALLEST, _LARGEST = 64 * KIB, 256 * MIB
_GROWTH = 4
_LARGEST_COPY = 64 * MIB
_MOST_IS_OVERHEAD = 10
"""If nine tenths of the time or more do not depend on the size, then the rest is too little to say how it does."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class WriteSpeed:
    """What it takes to make bytes durable."""

    rate: float
    """Bytes in a second, once it runs."""
    overhead: float
    """Seconds for an object that has next to no bytes."""

    def seconds_for(self, nbytes: int) -> float:
        """How long so many bytes will take."""
        return self.overhead + nbytes / self.rate


def measure_writes(
    store: Store, name: str, *, patience: float, most: int | None = None, clock: Clock = time.perf_counter
) -> WriteSpeed:
    """Write a small object, and larger ones up to ``most`` bytes while all take no longer than ``patience``, about.

    Nothing of them is left.
    """
    # Other than zeros, these cannot be compressed by a disk that does so.
    piece = memoryview(os.urandom(_PIECE))
    overhead = seconds = spent = _timed_write(store, name, piece, _SMALLEST, clock)
    nbytes = _SMALLEST
    largest = _LARGEST if most is None else min(_LARGEST, most)
    while nbytes * _GROWTH <= largest:
        if spent + overhead + _GROWTH * (seconds - overhead) > patience:
            break
        nbytes *= _GROWTH
        seconds = _timed_write(store, name, piece, nbytes, clock)
        spent += seconds
    if nbytes == _SMALLEST:
        return WriteSpeed(nbytes / max(seconds, 1e-9), overhead)
    more = max(seconds - overhead, seconds / _MOST_IS_OVERHEAD, 1e-9)
    return WriteSpeed((nbytes - _SMALLEST) / more, overhead)


def _timed_write(store: Store, name: str, piece: memoryview, nbytes: int, clock: Clock) -> float:
    began = clock()
    try:
        with store.create(name, nbytes) as sink:
            for start in range(0, nbytes, len(piece)):
                sink.write(piece[: min(len(piece), nbytes - start)])
        store.sync()
        return clock() - began
    finally:
        with suppress(OSError):
            store.delete([name])


def measure_copies(
    tensors: Iterable[torch.Tensor], *, patience: float, clock: Clock = time.perf_counter
) -> float | None:
    """Bytes in a second from where the tensors are to memory that was used before; None if they have no bytes."""
    source = max(tensors, key=lambda tensor: tensor.nbytes, default=None)
    if source is None or source.nbytes == 0:
        return None
    part = source.detach().reshape(-1)[: max(1, _LARGEST_COPY // source.itemsize)]
    copy = torch.empty(part.shape, dtype=part.dtype)
    copy.copy_(part)  # the first one pays for fresh memory
    best, spent = float("inf"), 0.0
    for _ in range(5):
        began = clock()
        copy.copy_(part)
        seconds = clock() - began
        best, spent = min(best, seconds), spent + seconds
        if spent > patience:
            break
    return part.nbytes / max(best, 1e-9)
