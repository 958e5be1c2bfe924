"""One rank's connection to ranks that are not there: they say what this one says, and all the work of this one is done.

The messages go up and down the same tree as between real ranks. What other ranks would do to make theirs is not
counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast._ranks.exchanges import Exchanges, Join, as_list, entries_of
from holdfast._ranks.packing import pack, unpack
from holdfast._ranks.trees import groups_of, strides_of
from holdfast._save.common_ground import Ballot


class Work:
    """What one rank did."""

    def __init__(self) -> None:
        self.cpu = 0.0
        """Seconds of processor time."""
        self.bytes_in = self.bytes_out = 0
        """Of messages."""
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
        """Leave out that of the block, within one that is counted."""
        began = time.process_time()
        try:
            yield
        finally:
            if self._began is not None:
                self._began += time.process_time() - began


class SimulatedLink(Exchanges):
    """How one rank reaches ranks that are not there."""

    def __init__(self, rank: int, size: int, work: Work, *, answers: list[bytes] | None = None) -> None:
        """``answers`` are those of the root, in their order, which another rank than the root needs."""
        self.rank = rank
        self.members = tuple(range(size))
        self.answers = list(answers or ())
        """What the root has answered, or what is still to come from it."""
        self._work = work
        self._groups = groups_of(rank, size, strides_of(size))

    @property
    def connections(self) -> int:
        """With how many ranks this one is connected."""
        return sum(len(group.members) - 1 for group in self._groups)

    def ask(self, payload: bytes, join: Join | None = None, *, last: bool = False) -> bytes | None:
        """See ``Link``."""
        for group in self._groups:
            if group.leader != self.rank:
                self._work.bytes_out += len(payload)
                return None
            others = group.members[1:]
            with self._work.of_others():
                if join is None:  # every rank adds its own entry to the list
                    (entry, *_) = entries_of(payload)
                    single = as_list([entry])
                    said = [single * len(group.led_by(member)) for member in others]
                else:
                    said = _agreeing(payload, len(others))
            self._work.bytes_in += sum(map(len, said))
            payload = join([payload, *said]) if join is not None else b"".join([payload, *said])
        return payload if self.rank == 0 else None

    def answer(self, payload: bytes | None, *, only: int | None = None, split: bool = False) -> bytes:
        """See ``Link``."""
        if self.rank != 0:
            found = self.answers.pop(0)
            self._work.bytes_in += len(found)
        else:
            found = payload or b""
            self.answers.append(found)
        led = [len(group.members) - 1 for group in self._groups if group.leader == self.rank]
        if split:  # all but this rank's own entry goes down, once
            own = list(entries_of(found))[self.rank]
            self._work.bytes_out += len(found) - len(own) if self.rank == 0 else 0
            return own
        if only is None:
            self._work.bytes_out += len(found) * sum(led)
        return found


def _agreeing(payload: bytes, count: int) -> list[bytes]:
    """What so many others say who have the same as this rank: copies of everything add up to 0."""
    if count and payload:
        kind, value = unpack(payload)
        if isinstance(value, Ballot):
            same = value._replace(generation="", copies=0)
            balancing = pack((kind, same._replace(copies=-value.copies)))
            return [balancing, *([pack((kind, same))] * (count - 1))]
    return [payload] * count
