"""What a conversion writes: a renamed part of a checkpoint of any format, whose tensors come as streams of bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast._base.box_bytes import boxes_of_run
from holdfast._base.boxes import volume
from holdfast._base.threads import in_order
from holdfast._base.tuning import MEMORY_BUDGET, PIECE_BYTES, SHARE_OF_A_PIECE, SHARE_OF_WRITE_BUFFERS
from holdfast._formats.native.dtypes import DType
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.source import ByteStream, ReadRequest, Source
from holdfast._load.stored_nodes import StoredNode
from holdfast._tools.converting.casts import cast_elements

# A tensor that several threads read part by part, each part when the one before it has been read.


class OrderedReads:
    """Gives threads their turn. Whoever has part of the bytes to read must have been started before all that follow."""

    def __init__(self, opening: AbstractContextManager[ByteStream], nbytes: int) -> None:
        self._opening = opening
        self._nbytes = nbytes
        self._turn = threading.Condition()
        self._position = 0
        self._is_stopped = False
        self._stream: ByteStream | None = None
        self._open = ExitStack()

    def fill(self, begin: int, memory: memoryview) -> None:
        """Fill memory with the bytes from ``begin`` on, when those before have been read."""
        with self._turn:
            self._turn.wait_for(lambda: self._position == begin or self._is_stopped)
            if self._is_stopped:
                raise RuntimeError("an earlier part of the tensor was not read")
        try:
            self._read(begin, memory)
        except BaseException:
            self.stop()
            raise
        with self._turn:
            self._position += memory.nbytes
            self._turn.notify_all()

    def stop(self) -> None:
        """Nobody waits any longer: what is to be read before will not be."""
        with self._turn:
            self._is_stopped = True
            self._turn.notify_all()

    def close(self) -> None:
        """Let go of files. Nobody reads any more."""
        self._open.close()

    def _read(self, begin: int, memory: memoryview) -> None:
        if self._stream is None:
            self._stream = self._open.enter_context(self._opening)
        self._stream.fill(begin, memory)
        if begin + memory.nbytes == self._nbytes:
            self._stream.finish()
            self._open.close()


# Tensors are read from front to back in row-major order, some pieces ahead, by several threads. Whoever writes takes
# the pieces one after the other; what was taken is digested, and compared later with what can be read back.


Bytes = npt.NDArray[np.uint8]

_READERS = 3
"""Threads that read. Pieces are a few megabytes, so that this keeps a disk busy."""
_PIECES_AHEAD = _READERS + 2
"""Pieces in memory at most: those that are being read, and two that wait to be written."""
_SMALL_PIECE = 4096


@dataclass(frozen=True)
class OutTensor:
    """A tensor that is to be written."""

    key: str
    """Its new key: the first of its names in the new tree."""
    source_key: str
    shape: tuple[int, ...]
    stored: DType
    """What its elements are in the source."""
    dtype: DType
    """What they will be. They are cast on the way if that is something else."""
    kind: str = "replicated"
    numpy: Any = None
    """The numpy dtype, as in ``TensorRef``, if it was a numpy array."""
    rank: int | None = None
    """Whose it is, if every rank had one of its own."""

    @property
    def nbytes(self) -> int:
        """The bytes of its elements as they will be written."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def elements(self) -> int:
        """How many there are."""
        return prod(self.shape)


class OutgoingBytes(NamedTuple):
    """Bytes of a tensor, as they are to be written. The memory is used again when the next piece is asked for."""

    key: str
    """As it was asked for: a key of the tensor, or another name of it."""
    begin: int
    """Where in the tensor they begin."""
    data: memoryview


def leaves_of(tree: Any, *, is_flat: bool) -> dict[str, Any]:
    """All that has a key in a tree. In a flat one, its names are the keys."""
    return dict(tree) if is_flat else {leaf.key: leaf.value for leaf in StoredNode.of(tree).leaves()}


def bytes_of_next(stream: Iterator[OutgoingBytes], nbytes: int) -> Iterator[memoryview]:
    """The bytes of the tensor that comes next in a stream, of which there are so many."""
    while nbytes:
        data = next(stream).data
        nbytes -= data.nbytes
        yield data


@dataclass
class Outgoing:
    """Everything that goes into the new checkpoint."""

    source: Source
    tree: Any
    """The new state: containers and values, with a ``TensorRef`` of the new key and dtype for every tensor. Names of
    tied tensors have the same one."""
    tensors: Mapping[str, OutTensor]
    """By key; each once, however many names it has."""
    leaves: Mapping[str, Any]
    """All keys of the new tree with what is there: a ``TensorRef`` or a value. For formats that have flat keys."""
    is_flat: bool = False
    """Whether the new state is nothing but a dict of such keys, which may be any str then."""
    allow_pickle: bool = False
    """Whether pickles may be loaded and written."""
    memory_budget: int | None = None
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Tensors that the source holds as values, and so in memory, by their keys there."""
    optimizers: Mapping[str, str] = field(default_factory=dict)
    """The classes of optimizers by their new keys, as far as the source noted them."""
    advance: Callable[[int], None] = lambda count: None
    """Called with the number of bytes that have been taken, by one thread."""
    digests: dict[str, bytes] = field(default_factory=dict)
    """The XXH3-128 digest of every tensor that was taken from front to back, by its own key."""
    scratch: str | os.PathLike[str] | None = None
    """A folder for what has to be unpacked on the way."""
    bytes_read: int = 0

    def __post_init__(self) -> None:
        self.budget = MEMORY_BUDGET if self.memory_budget is None else self.memory_budget
        """How many bytes of memory buffers may take."""
        self.piece_bytes = max(_SMALL_PIECE, min(PIECE_BYTES, self.budget // SHARE_OF_A_PIECE))
        """A piece has so many bytes at most, unless a single element has more."""
        self._counting = threading.Lock()

    @property
    def values(self) -> dict[str, Any]:
        """All leaves that are not tensors."""
        return {key: value for key, value in self.leaves.items() if key not in self.names}

    @cached_property
    def names(self) -> Mapping[str, OutTensor]:
        """All keys of the new tree that are tensors. Tied ones have several, with the same tensor."""
        return {key: self.tensors[value.key] for key, value in self.leaves.items() if type(value) is TensorRef}

    def stream(self, keys: Iterable[str]) -> Generator[OutgoingBytes, None, None]:
        """The bytes of tensors, in this order, each from front to back. Nothing comes for tensors without elements.

        ``keys`` may be any names. Pieces that follow are read meanwhile, small tensors together.
        """
        buffers = [np.empty(0, np.uint8) for _ in range(_PIECES_AHEAD)]
        hasher = xxhash.xxh3_128()

        def read(parcel: Sequence[_Part]) -> Bytes:
            try:
                return self._read_parcel(parcel, buffers.pop())
            except BaseException:
                for part in parcel:
                    if part.in_order is not None:
                        part.in_order.stop()
                raise

        until_done = ExitStack()
        parcels = self._parcels(list(keys), until_done)
        reading = in_order(read, parcels, threads=_READERS, ahead=_PIECES_AHEAD, name="holdfast-convert")
        with until_done, closing(reading):
            for parcel, buffer in reading:
                at = 0
                for part in parcel:
                    data = buffer.data[at : at + part.nbytes]
                    if part.begin == 0:
                        hasher.reset()
                    hasher.update(data)
                    if part.begin + part.nbytes == part.tensor.nbytes:
                        self.digests[part.tensor.key] = hasher.digest()
                    self.advance(part.nbytes)
                    yield OutgoingBytes(part.key, part.begin, data)
                    at += part.nbytes
                buffers.append(buffer)

    def note_empty(self) -> None:
        """Tensors without elements have a digest too."""
        for tensor in self.tensors.values():
            if tensor.nbytes == 0:
                self.digests[tensor.key] = xxhash.xxh3_128().digest()

    def _parcels(self, keys: Sequence[str], until_done: ExitStack) -> Iterator[list[_Part]]:
        """What is read at once: parts of a large tensor one by one, small ones together."""
        parcel: list[_Part] = []
        remaining = self.piece_bytes
        for key in keys:
            tensor = self.names[key]
            widest = max(tensor.stored.itemsize, tensor.dtype.itemsize)
            needed = tensor.elements * widest
            if parcel and needed > remaining:
                yield parcel
                parcel, remaining = [], self.piece_bytes
            if needed <= remaining:
                if needed:
                    parcel.append(_Part(key, tensor, 0, tensor.nbytes))
                    remaining -= needed
                continue
            in_order = self._in_order(tensor, until_done)
            step = max(1, self.piece_bytes // widest) * tensor.dtype.itemsize
            for begin in range(0, tensor.nbytes, step):
                yield [_Part(key, tensor, begin, min(step, tensor.nbytes - begin), in_order)]
        if parcel:
            yield parcel

    def _in_order(self, tensor: OutTensor, until_done: ExitStack) -> OrderedReads | None:
        """How to read the parts of a tensor one after the other, where parts have no checksums of their own."""
        opening = self.source.stream(
            tensor.source_key, memory=self.budget // SHARE_OF_WRITE_BUFFERS, scratch=self.scratch
        )
        if opening is None:
            return None
        reads = OrderedReads(opening, tensor.elements * tensor.stored.itemsize)
        until_done.callback(reads.close)
        return reads

    def _read_parcel(self, parcel: Sequence[_Part], buffer: Bytes) -> Bytes:
        total = sum(part.nbytes for part in parcel)
        if buffer.nbytes < total:
            buffer = np.empty(max(total, min(self.piece_bytes, sum(t.nbytes for t in self.tensors.values()))), np.uint8)
        self._read(parcel, buffer)
        return buffer

    def _read(self, parcel: Sequence[_Part], buffer: Bytes) -> None:
        """Fill memory with parts of tensors, one behind the other."""
        requests: list[ReadRequest] = []
        casts: list[tuple[_Part, Any, Bytes]] = []
        at = read = 0
        for part in parcel:
            tensor, target = part.tensor, buffer[at : at + part.nbytes]
            at += part.nbytes
            if (array := self.arrays.get(tensor.source_key)) is not None:
                target[:] = array.reshape(-1).view(np.uint8)[part.begin : part.begin + part.nbytes]
                continue
            first, count = part.begin // tensor.dtype.itemsize, part.nbytes // tensor.dtype.itemsize
            if tensor.stored == tensor.dtype and _is_aligned(target, tensor.stored):
                elements = target.view(tensor.stored.carrier)
            else:
                elements = np.empty(count, tensor.stored.carrier)
                casts.append((part, elements, target))
            if part.in_order is not None:
                part.in_order.fill(first * tensor.stored.itemsize, elements.view(np.uint8).data)
                read += elements.nbytes
                continue
            done = 0
            for box in boxes_of_run(tensor.shape, first, first + count):
                size = volume(box.sizes)
                into = elements[done : done + size].reshape(box.sizes)
                requests.append(ReadRequest(tensor.source_key, tuple(box.offsets), tuple(box.sizes), into))
                done += size
        if requests:
            read += self.source.read(requests, memory=self.budget)
        with self._counting:
            self.bytes_read += read
        for part, elements, target in casts:
            target[:] = cast_elements(elements, part.tensor.stored, part.tensor.dtype).view(np.uint8)


class _Part(NamedTuple):
    """A part of a tensor that is read at once."""

    key: str
    tensor: OutTensor
    begin: int
    nbytes: int
    in_order: OrderedReads | None = None
    """By which it is read, if parts have to be read one after the other."""


def _is_aligned(memory: Bytes, dtype: DType) -> bool:
    return memory.ctypes.data % max(1, dtype.carrier.alignment) == 0
