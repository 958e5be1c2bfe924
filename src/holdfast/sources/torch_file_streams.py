"""Tensors of a ``torch.save`` file as streams of their bytes."""

from __future__ import annotations

import numpy as np

from holdfast.boxes import volume
from holdfast.formats.dcp.zip_layout import Entry, damaged
from holdfast.formats.native.refs import TensorRef
from holdfast.sources.source import Request, Source
from holdfast.storage.byte_ranges import Ranges, read_with_crc
from holdfast.storage.chunk_reads import boxes_of_run


class EntryStream:
    """A tensor that is all of an entry, as it lies there."""

    def __init__(self, file: Ranges, name: str, entry: Entry, location: str) -> None:
        self._file = file
        self._name = name
        self._entry = entry
        self._location = location
        self._crc = 0
        self.is_complete = False

    def fill(self, begin: int, memory: memoryview, /) -> None:
        """Read the bytes from ``begin`` on."""
        self._crc = read_with_crc(self._file, self._entry.offset + begin, memory, self._crc)

    def finish(self) -> None:
        """Compare the CRC."""
        if self._entry.crc is not None and self._crc != self._entry.crc:
            expected, found = f"{self._entry.crc:08x}", f"{self._crc:08x}"
            raise damaged(self._location, self._name, "wrong CRC-32", expected, found)
        self.is_complete = True


class PartsStream:
    """A tensor that was compared already, or that is in memory."""

    def __init__(self, source: Source, ref: TensorRef, memory: int) -> None:
        self._source = source
        self._ref = ref
        self._memory = memory

    def fill(self, begin: int, memory: memoryview, /) -> None:
        """Read the boxes that the bytes are made of."""
        elements = np.frombuffer(memory, np.uint8).view(self._ref.dtype.carrier)
        first = begin // self._ref.dtype.itemsize
        requests, done = list[Request](), 0
        for box in boxes_of_run(self._ref.shape, first, first + elements.size):
            into = elements[done : done + volume(box.sizes)].reshape(box.sizes)
            requests.append(Request(self._ref.key, tuple(box.offsets), tuple(box.sizes), into))
            done += into.size
        self._source.read(requests, verify=False, memory=self._memory)

    def finish(self) -> None:
        """There is nothing to compare."""
