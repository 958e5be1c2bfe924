"""The root of very many ranks that are not there: all others say what it says, unless they are given other words.

What is counted is the work of this rank: its processor time without that for making up what others say, and the bytes
that it would get and send.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from holdfast._ranks.shared_steps import Collectives

T = TypeVar("T")

Others = Callable[[Any], "list[Any] | None"]
"""What all ranks send to the coordinator, given what this one sends; None if it is the same."""


class EnoughError(Exception):
    """Raised at the step that is not to be simulated any more."""


class Work:
    """What one rank did."""

    def __init__(self) -> None:
        self.bytes_in = self.bytes_out = 0
        self.cpu = 0.0
        self._began: float | None = None

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the processor time of the block."""
        self._began = time.process_time()
        try:
            yield
        finally:
            self.cpu += time.process_time() - self._began
            self._began = None

    @contextmanager
    def of_others(self) -> Iterator[None]:
        """Do not count that of the block, within one that is counted."""
        began = time.process_time()
        try:
            yield
        finally:
            if self._began is not None:
                self._began += time.process_time() - began


class SimulatedRanks(Collectives):
    """The ranks of a call, as their root sees them."""

    def __init__(self, world_size: int, work: Work, *, stop_at: str = "", others: Others | None = None) -> None:
        super().__init__(None, False, 0)
        self.use_dist = True
        self.world_size = world_size
        self._work = work
        self._stop_at = stop_at
        self._others = others

    def global_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.world_size))

    def gather_object(self, object: T) -> list[T]:
        return self._said_by_all(object, pickle.dumps(object), self._others)

    def all_gather_object(self, object: T) -> list[T]:
        return self._said_by_all(object, pickle.dumps(object), None)

    def broadcast_object(self, object: T | None) -> T:
        payload = pickle.dumps(object)
        self._work.bytes_out += len(payload) * (self.world_size - 1)
        return pickle.loads(payload)  # type: ignore[no-any-return]

    def scatter_object(self, object_list: list[T] | None) -> T:
        payloads = [pickle.dumps(item) for item in object_list or ()]
        self._work.bytes_out += sum(map(len, payloads[1:]))
        return pickle.loads(payloads[0])  # type: ignore[no-any-return]

    def barrier(self) -> None:
        """Nobody is late."""

    def step(self, name: str) -> Any:
        if name == self._stop_at:
            raise EnoughError(name)
        return super().step(name)

    def _said_by_all(self, own: T, payload: bytes, others: Others | None) -> list[T]:
        with self._work.of_others():
            said = None if others is None else others(own)
            payloads = [payload] * self.world_size if said is None else [pickle.dumps(words) for words in said]
        self._work.bytes_in += sum(map(len, payloads)) - len(payload)
        return [pickle.loads(words) for words in payloads]
