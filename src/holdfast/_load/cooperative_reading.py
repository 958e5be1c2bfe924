"""Ranks read for each other: each stored byte once, and from the rank that read it to all that want it.

It goes in rounds. In each of them a rank sends the batch that it has read to those that want parts of it, and receives
what others have read for it; the next batch is being read meanwhile. Every rank knows all rounds beforehand and goes
through all of them whatever happens to it: after a failure it reads nothing more and sends zeros, so that nobody waits
in vain, and all ranks learn of it at the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast._base.boxes import Box, place_of, volume
from holdfast._base.threads import in_order
from holdfast._base.tuning import MEMORY_BUDGET, MIB, SHARED_PART_BYTES
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.source import DiscardingArray, Into, ReadRequest, Source
from holdfast._load.shared_reads import SharedBatch, SharedReads, Span, Unit, numbered
from holdfast._ranks.interrupts import interrupts_wait
from holdfast._ranks.transfers import Parcel, Transfers

_ENOUGH_TO_READ_AHEAD = 4 * MIB
"""Of memory."""

Bytes = npt.NDArray[np.uint8]


class Buffers(NamedTuple):
    """How the memory budget of a load is divided, if ranks read for each other."""

    part: int
    """What a batch has at most. There are so many bytes in the batches that are read ahead, in the one that is sent, in
    the messages that are made of it, and in each message that is received."""
    ahead: int
    """Batches that are being read, or have been, while one is sent."""
    received: int
    """Ranks from which messages are received at once."""
    reading: int
    """What each read may take besides."""

    @classmethod
    def within(cls, memory: int | None) -> Buffers:
        """Buffers that are no more than ``memory`` together.

        >>> Buffers.within(None)
        Buffers(part=4194304, ahead=2, received=7, reading=8388608)
        >>> Buffers.within(256 << 10)
        Buffers(part=32768, ahead=1, received=1, reading=131072)
        """
        memory = MEMORY_BUDGET if memory is None else memory
        ahead = 2 if memory >= _ENOUGH_TO_READ_AHEAD else 1
        reading = memory // 8 if ahead > 1 else memory // 2
        left = memory - ahead * reading
        part = min(SHARED_PART_BYTES, left // (ahead + 3))
        return cls(part, ahead, max(1, left // part - ahead - 3) if ahead > 1 else 1, reading)


@dataclass
class Delivered:
    """What came of it on one rank."""

    bytes_read: int = 0
    bytes_received: int = 0
    elements: int = 0
    error: BaseException | None = None
    """The first thing that went wrong. It is raised when all rounds are over."""


Places = Mapping[tuple[int, Box], Sequence[Into]]
"""Where a rank wants boxes of tensors, by the number of the tensor."""


@dataclass(frozen=True)
class _Prepared:
    """A batch in memory."""

    arrays: list[npt.NDArray[Any]]
    """One for each of its units."""
    buffer: Bytes | None
    """The buffer that has them; None if they were read into the state."""
    bytes_read: int = 0


@dataclass
class CooperativeReading:
    """The rounds of one load on one rank."""

    plan: SharedReads
    source: Source
    rank: int
    places: Places
    transfers: Transfers
    buffers: Buffers
    verify: bool = True
    refs: Sequence[TensorRef] = ()
    done: Delivered = field(default_factory=Delivered)

    def __post_init__(self) -> None:
        self.refs = numbered(self.source)

    def run(self) -> Delivered:
        """Go through all rounds, then raise what went wrong in one of them."""
        own = self.plan.batches.get(self.rank, [])
        reading = in_order(
            self._prepare, own, threads=self.buffers.ahead, ahead=self.buffers.ahead, name="holdfast-shared-read"
        )
        with closing(reading):
            for sends, received in self._rounds():
                try:
                    with interrupts_wait():
                        self._round(next(reading) if sends else None, received)
                except BaseException as error:  # the others count on this rank in all rounds
                    self._note(error)
        if self.done.error is not None:
            failure, self.done.error = self.done.error, None
            try:
                raise failure
            finally:
                del failure  # or else it refers to this frame, which refers to it
        return self.done

    def check(self) -> None:
        """Only compare with their digests what this rank would read for all."""
        for batch in self.plan.batches.get(self.rank, []):
            nowhere = [DiscardingArray(unit.box.sizes, self._carrier(unit)) for unit in batch.reads]
            self._read(batch.reads, nowhere)

    def _rounds(self) -> Iterator[tuple[bool, list[tuple[int, list[Span]]]]]:
        """For each round whether this rank sends a batch, and what it receives from whom.

        There are no more senders in a round than messages that a rank may have in memory.
        """
        readers = sorted(self.plan.batches)
        last = max(map(len, self.plan.batches.values()), default=0)
        for number in range(last):
            for first in range(0, len(readers), self.buffers.received):
                senders = [
                    (reader, self.plan.batches[reader][number])
                    for reader in readers[first : first + self.buffers.received]
                    if number < len(self.plan.batches[reader])
                ]
                messages = [(sender, batch.message_for(self.rank)) for sender, batch in senders if sender != self.rank]
                yield any(sender == self.rank for sender, _ in senders), [each for each in messages if each[1]]

    def _round(self, own: tuple[SharedBatch, _Prepared] | None, received: Sequence[tuple[int, list[Span]]]) -> None:
        sends = [] if own is None else self._messages(*own)
        receives = []
        for sender, spans in received:
            into = self._straight(spans[0]) if len(spans) == 1 else None
            receives.append((Parcel(sender, np.empty(spans[-1].end, np.uint8) if into is None else into), into is None))
        try:
            self.transfers.exchange(sends, [parcel for parcel, _ in receives])
        except Exception as error:
            self._note(error)
            return
        for (_, spans), (parcel, is_buffer) in zip(received, receives, strict=True):
            self.done.bytes_received += spans[-1].end
            self.done.elements += sum(map(self._elements, spans))
            if is_buffer:
                for span in spans:
                    elements = parcel.content[span.begin : span.end].view(self.refs[span.tensor].dtype.carrier)
                    self._deliver(span, elements.reshape(span.box.sizes))
        if own is not None:
            self.done.bytes_read += own[1].bytes_read
            self._deliver_own(*own)

    def _prepare(self, batch: SharedBatch) -> _Prepared:
        """Read a batch: to where it belongs if that is one place for all of it, or else into a buffer."""
        straight = self._place_of(batch)
        buffer = None if straight is not None else np.empty(batch.places()[-1][1], np.uint8)
        arrays = []
        for unit, (begin, end) in zip(batch.units, batch.places(), strict=True):
            memory = straight if buffer is None else buffer[begin:end]
            assert memory is not None
            arrays.append(memory.view(self._carrier(unit)).reshape(unit.box.sizes))
        try:
            if self.done.error is None:
                into = arrays if batch.whole is None else [self._whole(unit) for unit in batch.reads]
                return _Prepared(arrays, buffer, self._read(batch.reads, into))
        except BaseException as error:
            self._note(error)
        for array in arrays:
            array[...] = np.zeros((), array.dtype)
        return _Prepared(arrays, buffer)

    def _read(self, units: Sequence[Unit], into: Sequence[Into]) -> int:
        requests = [
            ReadRequest(self.refs[unit.tensor].key, *unit.box, place) for unit, place in zip(units, into, strict=True)
        ]
        if not requests:
            return 0
        return self.source.read(requests, verify=self.verify, memory=self.buffers.reading)

    def _place_of(self, batch: SharedBatch) -> Bytes | None:
        """The memory of this rank that takes a batch as it is; None if there is none, or several parts of it."""
        unit = batch.units[0]
        if batch.whole is not None:
            part = self._whole(batch.whole)[place_of(*unit.box, origin=batch.whole.box.offsets)]
            memory: Bytes = part.reshape(-1).view(np.uint8)
            return memory
        if len(batch.units) > 1:
            return None
        found = (self._straight(span) for span in batch.message_for(self.rank) if span.box == unit.box)
        return next((place for place in found if place is not None), None)

    def _whole(self, unit: Unit) -> npt.NDArray[Any]:
        """The memory of this rank for a unit that is sent in several batches, and read before the first."""
        for piece in unit.wanted_by(self.rank):
            if piece.box == unit.box:
                memory = self._straight(Span(0, unit.tensor, piece.want, piece.box, 0, unit.nbytes))
                if memory is not None:
                    return memory.view(self._carrier(unit)).reshape(unit.box.sizes)
        raise AssertionError("a rank reads what is too large for a buffer, and has no place for it")

    def _straight(self, span: Span) -> Bytes | None:
        """The memory that a piece goes to, if it takes the bytes as they are and all in one place."""
        places = self.places[span.tensor, span.want]
        if len(places) != 1 or not isinstance(places[0], np.ndarray):
            return None
        part = places[0][place_of(*span.box, origin=span.want.offsets)]
        return part.reshape(-1).view(np.uint8) if part.flags.c_contiguous else None

    def _messages(self, batch: SharedBatch, prepared: _Prepared) -> list[Parcel]:
        """What goes to the other ranks. Those that get the same get the same memory."""
        made: dict[tuple[tuple[int, Box], ...], Bytes] = {}
        parcels = []
        for rank in batch.receivers():
            if rank != self.rank:
                spans = batch.message_for(rank)
                content = tuple((span.unit, span.box) for span in spans)
                if content not in made:
                    made[content] = _message(spans, batch, prepared)
                parcels.append(Parcel(rank, made[content]))
        return parcels

    def _deliver_own(self, batch: SharedBatch, prepared: _Prepared) -> None:
        for span in batch.message_for(self.rank):
            self.done.elements += self._elements(span)
            if prepared.buffer is not None:
                inside = place_of(*span.box, origin=batch.units[span.unit].box.offsets)
                self._deliver(span, prepared.arrays[span.unit][inside])
            elif span.box != batch.units[0].box or not self._is_own(span, prepared.arrays[0]):
                self._deliver(span, prepared.arrays[0][place_of(*span.box, origin=batch.units[0].box.offsets)])

    def _is_own(self, span: Span, array: npt.NDArray[Any]) -> bool:
        """Whether a batch was read straight to where this piece belongs."""
        memory = self._straight(span)
        return memory is not None and memory.ctypes.data == array.ctypes.data

    def _deliver(self, span: Span, elements: npt.NDArray[Any]) -> None:
        if self.done.error is not None:
            return
        try:
            for place in self.places[span.tensor, span.want]:
                place[place_of(*span.box, origin=span.want.offsets)] = elements
        except BaseException as error:
            self._note(error)

    def _elements(self, span: Span) -> int:
        """How many are written for a piece."""
        return volume(span.box.sizes) * len(self.places[span.tensor, span.want])

    def _carrier(self, unit: Unit) -> np.dtype[Any]:
        return self.refs[unit.tensor].dtype.carrier

    def _note(self, error: BaseException) -> None:
        if self.done.error is None or not isinstance(error, Exception):  # Ctrl-C is raised as that, whatever failed
            self.done.error = error


def _message(spans: Sequence[Span], batch: SharedBatch, prepared: _Prepared) -> Bytes:
    """What a rank gets of a batch, in contiguous memory: that of the batch if it can be."""
    everything = [(span.unit, span.box) for span in spans] == [(n, unit.box) for n, unit in enumerate(batch.units)]
    if everything and prepared.buffer is not None:
        return prepared.buffer
    parts = [
        prepared.arrays[span.unit][place_of(*span.box, origin=batch.units[span.unit].box.offsets)] for span in spans
    ]
    if len(parts) == 1 and parts[0].flags.c_contiguous:
        single: Bytes = parts[0].reshape(-1).view(np.uint8)
        return single
    message = np.empty(spans[-1].end, np.uint8)
    for span, part in zip(spans, parts, strict=True):
        message[span.begin : span.end].view(part.dtype).reshape(part.shape)[...] = part
    return message
