"""Ranks read for each other: each stored byte once, and from the rank that read it to all that want it.

It goes in rounds. In each of them a rank sends the batch that it has read to those that want parts of it, receives what
others have read for it, and passes on what is for ranks that the reader is not connected to; the next batch is being
read meanwhile. Every rank knows all rounds beforehand and goes through all of them whatever happens to it: after a
failure it reads nothing more and sends what is of the right size only, so that nobody waits in vain, and all ranks
learn of it at the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast._base.boxes import Box, place_of, volume
from holdfast._base.byte_counts import count_bytes
from holdfast._base.threads import in_order
from holdfast._base.tuning import MEMORY_BUDGET, MIB, SHARED_PART_BYTES
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.source import DiscardingArray, Into, ReadRequest, Source
from holdfast._load.shared_reads import SharedBatch, SharedReads, Span
from holdfast._load.shared_units import Piece, Unit
from holdfast._load.shared_wants import numbered
from holdfast._ranks.interrupts import interrupts_wait
from holdfast._ranks.transfers import Parcel, Transfers
from holdfast._ranks.tree_routes import Route, route_of

_ENOUGH_TO_READ_AHEAD = 4 * MIB
"""Of memory."""

Bytes = npt.NDArray[np.uint8]


class Buffers(NamedTuple):
    """How the memory budget of a load is divided, if ranks read for each other."""

    part: int
    """What a batch has at most. There are so many bytes in the batches that are read ahead, in the one that is sent, in
    the messages that are made of it, in each message that is received, and in what is sent in place of what is lost."""
    ahead: int
    """Batches that are being read, or have been, while one is sent."""
    received: int
    """Ranks from which messages are received at once."""
    reading: int
    """What each read may take besides."""

    @classmethod
    def within(cls, memory: int | None, *, passes_on: bool = False) -> Buffers:
        """Buffers that are no more than ``memory`` together, also on ranks that pass on what they receive.

        >>> Buffers.within(None)
        Buffers(part=4194304, ahead=2, received=7, reading=8388608)
        >>> Buffers.within(None, passes_on=True).received
        3
        >>> Buffers.within(256 << 10)
        Buffers(part=26214, ahead=1, received=1, reading=131072)
        """
        memory = MEMORY_BUDGET if memory is None else memory
        ahead = 2 if memory >= _ENOUGH_TO_READ_AHEAD else 1
        reading = memory // 8 if ahead > 1 else memory // 2
        left = memory - ahead * reading
        others, each = ahead + 3, 2 if passes_on else 1
        part = min(SHARED_PART_BYTES, left // (others + each))
        return cls(part, ahead, max(1, (left // part - others) // each) if ahead > 1 else 1, reading)


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


class _Prepared(NamedTuple):
    """A batch in memory."""

    arrays: Sequence[npt.NDArray[Any]]
    """One for each of its units."""
    buffer: Bytes
    """The memory of all of them. It may be where this rank wants them."""
    bytes_read: int = 0


class _Task(NamedTuple):
    """What this rank does with a batch."""

    batch: SharedBatch
    route: Route


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
        self._strides = self.transfers.strides
        self._spare: Bytes = np.zeros(self.buffers.part, np.uint8)  # takes no memory before somebody writes to it

    def run(self) -> Delivered:
        """Go through all rounds, then raise what went wrong in one of them."""
        own = map(copy, self.plan.batches.get(self.rank, []))
        reading = in_order(
            self._prepare, own, threads=self.buffers.ahead, ahead=self.buffers.ahead, name="holdfast-shared-read"
        )
        with closing(reading):
            for tasks in self._rounds():
                with self._noting(), interrupts_wait():
                    self._round(tasks, reading)
        if self.done.error is not None:
            failure, self.done.error = self.done.error, None
            try:
                raise failure
            finally:
                del failure  # or else it refers to this frame, which refers to it
        return self.done

    def check(self) -> None:
        """Only compare with their digests what this rank would read for all."""
        for batch in map(copy, self.plan.batches.get(self.rank, [])):
            nowhere = [DiscardingArray(unit.box.sizes, self._carrier(unit)) for unit in batch.reads]
            self._read(batch.reads, nowhere)

    def _rounds(self) -> Iterator[list[_Task]]:
        """What this rank does in each round.

        There are no more readers in a round than messages that a rank may have in memory. They are of different
        groups, so that all leaders have something to pass on.
        """
        leaf = self._strides[1]
        readers = sorted(self.plan.batches, key=lambda rank: (rank % leaf, rank))
        last = max(map(len, self.plan.batches.values()), default=0)
        for number in range(last):
            for first in range(0, len(readers), self.buffers.received):
                tasks = []
                for turn, reader in enumerate(readers[first : first + self.buffers.received], number + first):
                    if number < len(self.plan.batches[reader]):
                        batch = self.plan.batches[reader][number]
                        route = route_of(self.rank, reader, batch.receivers, self._strides, turn)
                        if route is not None:
                            tasks.append(_Task(copy(batch), route))  # of which nothing is kept after the round
                if tasks:
                    yield tasks

    def _round(self, tasks: Sequence[_Task], reading: Iterator[tuple[SharedBatch, _Prepared]]) -> None:
        """Send, receive and pass on, in the same stages on all ranks."""
        known: dict[int, _Prepared] = {}
        for stage in range(max(task.route.stage for task in tasks) + 1):
            sending = [n for n, task in enumerate(tasks) if task.route.stage == stage and not task.route.is_last]
            receiving = [n for n, task in enumerate(tasks) if task.route.stage == stage + 1]
            sends, receives = self._parcels(tasks, sending, receiving, known, reading)
            if sends or receives:
                self.transfers.exchange(sends, receives)
                count_bytes(sum(parcel.content.nbytes for parcel in receives))
            with self._noting():
                for number in sending:
                    prepared = known.pop(number, None)
                    if prepared is not None:
                        self.done.bytes_read += prepared.bytes_read
                        self._deliver_all(tasks[number].batch, prepared)
                for number, parcel in zip(receiving, receives, strict=True):
                    self.done.bytes_received += parcel.content.nbytes
                    if tasks[number].route.is_last:
                        self._deliver_message(tasks[number].batch, parcel.content)

    def _parcels(
        self,
        tasks: Sequence[_Task],
        sending: Sequence[int],
        receiving: Sequence[int],
        known: dict[int, _Prepared],
        reading: Iterator[tuple[SharedBatch, _Prepared]],
    ) -> tuple[list[Parcel], list[Parcel]]:
        """What is sent and received in a stage. If something fails here, it is of the same size, and worth nothing."""
        if self.done.error is None:
            with self._noting():
                for number in sending:
                    if tasks[number].route.comes_from is None:
                        known[number] = next(reading)[1]
                sends = [parcel for number in sending for parcel in self._messages(tasks[number], known[number])]
                return sends, [self._inbox(tasks[number], number, known) for number in receiving]
        known.clear()
        sends = [
            Parcel(rank, self._nothing(size)) for number in sending for rank, size in self._sizes_sent(tasks[number])
        ]
        receives = []
        for batch, route in (tasks[number] for number in receiving):
            assert route.comes_from is not None
            size = batch.message_for(self.rank)[-1].end if route.is_last else batch.nbytes
            receives.append(Parcel(route.comes_from, self._nothing(size)))
        return sends, receives

    def _sizes_sent(self, task: _Task) -> Iterator[tuple[int, int]]:
        batch, route = task
        for rank in route.passes_on:
            yield rank, batch.nbytes
        for rank in route.serves:
            yield rank, batch.message_for(rank)[-1].end

    def _nothing(self, size: int) -> Bytes:
        """Memory for what nobody will use: the load has failed on this rank."""
        if self._spare.nbytes < size:
            self._spare = np.zeros(size, np.uint8)
        return self._spare[:size]

    def _prepare(self, batch: SharedBatch) -> _Prepared:
        """Read a batch: to where it belongs if that is one place for all of it, or else into a buffer."""
        prepared = self._memory_for(batch, self._whole(batch.whole) if batch.whole is not None else None)
        if self.done.error is not None:
            return prepared
        into = prepared.arrays if batch.whole is None else [self._whole(unit) for unit in batch.reads]
        return prepared._replace(bytes_read=self._read(batch.reads, into))

    def _memory_for(self, batch: SharedBatch, whole: npt.NDArray[Any] | None = None) -> _Prepared:
        """Memory for all of a batch: a part of what was read at once, or the state's, or new one."""
        if whole is not None:
            assert batch.whole is not None
            place = whole[place_of(*batch.units[0].box, origin=batch.whole.box.offsets)]
            found: Bytes | None = place.reshape(-1).view(np.uint8)
        else:
            found = self._place_of(batch)
        memory = np.empty(batch.nbytes, np.uint8) if found is None else found
        arrays = [
            memory[begin:end].view(self._carrier(unit)).reshape(unit.box.sizes)
            for unit, (begin, end) in zip(batch.units, batch.places, strict=True)
        ]
        return _Prepared(arrays, memory)

    def _read(self, units: Sequence[Unit], into: Sequence[Into]) -> int:
        requests = [
            ReadRequest(self.refs[unit.tensor].key, *unit.box, place) for unit, place in zip(units, into, strict=True)
        ]
        if not requests:
            return 0
        return self.source.read(requests, verify=self.verify, memory=self.buffers.reading)

    def _place_of(self, batch: SharedBatch) -> Bytes | None:
        """The memory of the state that takes a batch as it is; None if there is none, or several parts of it."""
        if len(batch.units) > 1:
            return None
        (unit,) = batch.units
        found = (self._straight(unit.tensor, piece) for piece in unit.wanted_by(self.rank) if piece.box == unit.box)
        return next((place for place in found if place is not None), None)

    def _whole(self, unit: Unit) -> npt.NDArray[Any]:
        """The memory of this rank for a unit that is sent in several batches, and read before the first."""
        for piece in unit.wanted_by(self.rank):
            if piece.box == unit.box:
                memory = self._straight(unit.tensor, piece)
                if memory is not None:
                    return memory.view(self._carrier(unit)).reshape(unit.box.sizes)
        raise AssertionError("a rank reads what is too large for a buffer, and has no place for it")

    def _straight(self, tensor: int, piece: Piece) -> Bytes | None:
        """The memory that a piece goes to, if it takes the bytes as they are and all in one place."""
        places = self.places[tensor, piece.want]
        if len(places) != 1 or not isinstance(places[0], np.ndarray):
            return None
        part = places[0][place_of(*piece.box, origin=piece.want.offsets)]
        return part.reshape(-1).view(np.uint8) if part.flags.c_contiguous else None

    def _inbox(self, task: _Task, number: int, known: dict[int, _Prepared]) -> Parcel:
        """Where something that comes is put."""
        batch, route = task
        assert route.comes_from is not None
        if not route.is_last:
            known[number] = self._memory_for(batch)
            return Parcel(route.comes_from, known[number].buffer)
        spans = batch.message_for(self.rank)
        into = self._straight_for(spans)
        return Parcel(route.comes_from, np.empty(spans[-1].end, np.uint8) if into is None else into)

    def _straight_for(self, spans: Sequence[Span]) -> Bytes | None:
        """The memory of the state that takes a message as it is."""
        if len(spans) > 1:
            return None
        (span,) = spans
        found = (self._straight(span.tensor, piece) for piece in span.pieces if piece.box == span.box)
        return next((place for place in found if place is not None), None)

    def _messages(self, task: _Task, prepared: _Prepared) -> Iterator[Parcel]:
        """What goes to the other ranks. Those that get the same get the same memory."""
        batch, route = task
        for rank in route.passes_on:
            yield Parcel(rank, prepared.buffer)
        made: dict[tuple[tuple[int, Box], ...], Bytes] = {}
        for rank in route.serves:
            spans = batch.message_for(rank)
            content = tuple((span.unit, span.box) for span in spans)
            if content not in made:
                made[content] = _message(spans, batch, prepared)
            yield Parcel(rank, made[content])

    def _deliver_all(self, batch: SharedBatch, prepared: _Prepared) -> None:
        """Put what this rank wants of a batch in its place."""
        for unit, array in zip(batch.units, prepared.arrays, strict=True):
            for piece in unit.wanted_by(self.rank):
                self._deliver(unit.tensor, piece, array, unit.box)

    def _deliver_message(self, batch: SharedBatch, message: Bytes) -> None:
        """Put a message for this rank in its place."""
        for span in batch.message_for(self.rank):
            elements = message[span.begin : span.end].view(self.refs[span.tensor].dtype.carrier)
            for piece in span.pieces:
                self._deliver(span.tensor, piece, elements.reshape(span.box.sizes), span.box)

    def _deliver(self, tensor: int, piece: Piece, elements: npt.NDArray[Any], box: Box) -> None:
        """Put a piece of what is in a box in its place, unless it is there already."""
        if self.done.error is not None:
            return
        places = self.places[tensor, piece.want]
        self.done.elements += volume(piece.box.sizes) * len(places)
        straight = self._straight(tensor, piece) if piece.box == box else None
        if straight is not None and straight.ctypes.data == elements.ctypes.data:
            return
        for place in places:
            place[place_of(*piece.box, origin=piece.want.offsets)] = elements[place_of(*piece.box, origin=box.offsets)]

    def _carrier(self, unit: Unit) -> np.dtype[Any]:
        return self.refs[unit.tensor].dtype.carrier

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Go on after whatever happens in a ``with`` block: the others count on this rank in all rounds."""
        try:
            yield
        except BaseException as error:
            self._note(error)

    def _note(self, error: BaseException) -> None:
        if self.done.error is None or not isinstance(error, Exception):  # Ctrl-C is raised as that, whatever failed
            self.done.error = error


def _message(spans: Sequence[Span], batch: SharedBatch, prepared: _Prepared) -> Bytes:
    """What a rank gets of a batch, in contiguous memory: that of the batch if it can be."""
    if [(span.unit, span.box) for span in spans] == [(n, unit.box) for n, unit in enumerate(batch.units)]:
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
