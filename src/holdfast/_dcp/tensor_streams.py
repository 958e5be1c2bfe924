"""Stored tensors as streams of their bytes in row-major order, of which no more than a piece need be in memory.

A piece of a tensor is a few boxes, and each box is put together from the chunks that it meets. Boxes that follow each
other in the order of the tensor meet the elements of every chunk in the chunk's own order. So chunks that are stored
row by row are read from front to back, each byte once, and are compared with their CRC at the end of the stream.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import IO, TypeAlias, TypeVar

import torch

from holdfast._base.box_bytes import boxes_of_run
from holdfast._base.boxes import Box, overlaps
from holdfast._base.crc import crc32
from holdfast._base.tuning import READ_BYTES
from holdfast._dcp.blob_checks import refuse_short_file, wrong_crc
from holdfast._dcp.blob_contents import BlobContents
from holdfast._dcp.blob_steps import StoredItems
from holdfast._dcp.planner import LoadPlanner
from holdfast._dcp.reader import FileSystemReader
from holdfast._formats.dcp.metadata import Seal, _StorageInfo
from holdfast._formats.dcp.plan import LoadPlan, ReadItem
from holdfast._formats.dcp.stored_chunks import archived_tensor, check_envelope, sealed_elements
from holdfast._formats.ranged_files import Ranges, StreamRanges, read_with_crc
from holdfast._formats.tensor_places import Arrangement, StridedArray, arrangement_of, fill, narrowed
from holdfast._stores.filesystem import AnyPath
from holdfast.errors import HoldfastError

T = TypeVar("T")

OpenFile: TypeAlias = Callable[[], Ranges]
"""Gives a file, opened again if need be."""

_WIDEST_ELEMENT = 16
_OPEN_FILES = 64
"""The chunks of one tensor may be in more files than a process may have open."""


class StreamingReader(FileSystemReader):
    """Reads DCP checkpoints whose tensors are too large to be in memory.

    What went through transforms is unpacked into a file without a name in the folder ``scratch``. For what is not
    stored row by row, ``memory`` is used: the more of it, the fewer times parts of a chunk are passed over.
    """

    def __init__(
        self,
        path: AnyPath,
        scratch: AnyPath | None,
        memory: int,
        *,
        allow_pickle: bool | None = None,
        verify: bool | None = None,
    ) -> None:
        super().__init__(path, allow_pickle=allow_pickle, verify=verify)
        self.scratch = scratch
        self._memory = memory

    @contextmanager
    def stream(self, items: Sequence[ReadItem], sizes: Sequence[int], dtype: torch.dtype) -> Iterator[TensorStream]:
        """A tensor that is put together from ``items``. Its files are open inside of the ``with`` block."""
        with ExitStack() as until_read:
            finding = _Finding(self, until_read)
            parts = [finding.part(item) for item in items if 0 not in item.lengths]
            is_turned = any(isinstance(part, _InFile) and not part.is_row_major for part in parts)
            stream = TensorStream(sizes, dtype, parts)
            yield _ReadAhead(stream, self._memory) if is_turned else stream

    def explaining_failures(self, step: Callable[[], T]) -> T:
        """Errors of a step are of our classes, as those of a load are."""
        try:
            return step()
        except HoldfastError:
            raise
        except Exception as error:
            raise HoldfastError(f"reading {self.path} failed: {type(error).__name__}: {error}.") from error


class TensorStream:
    """The bytes of a tensor, which are to be asked for from front to back."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, parts: Sequence[_Part]) -> None:
        self._sizes = tuple(sizes)
        self._dtype = dtype
        self._parts = parts
        self._boxes = [part.box for part in parts]
        self._is_one_chunk = len(parts) == 1 and parts[0].is_all_of(self._sizes, dtype)

    def fill(self, begin: int, memory: memoryview) -> None:
        """Fill memory with the bytes from ``begin`` on, in whole elements."""
        elements = torch.frombuffer(memory, dtype=torch.uint8).view(self._dtype)
        first = begin // self._dtype.itemsize
        done = 0
        for box in boxes_of_run(self._sizes, first, first + elements.numel()):
            count = prod(box.sizes)
            place = elements[done : done + count].view(box.sizes)
            done += count
            for shared in overlaps([box], self._boxes):
                start = [at - base for at, base in zip(shared.start, box.offsets, strict=True)]
                region = Box(shared.start, shared.lengths)
                self._parts[shared.source].read(region, narrowed(place, start, shared.lengths))

    def fill_with_crc(self, begin: int, memory: memoryview, crc: int) -> int:
        """The same, and add the bytes to the CRC of those before."""
        self.fill(begin, memory)
        # The bytes of a tensor that is one chunk were summed up when they were read.
        return self._parts[0].crc if self._is_one_chunk else crc32(memory, crc)

    def finish(self) -> None:
        """All was asked for: compare the chunks with their CRCs."""
        for part in self._parts:
            part.finish()


class _ReadAhead(TensorStream):
    """Reads larger pieces than it is asked for."""

    def __init__(self, stream: TensorStream, memory: int) -> None:
        super().__init__(stream._sizes, stream._dtype, stream._parts)
        self._total = prod(self._sizes) * self._dtype.itemsize
        self._memory = memoryview(bytearray(min(self._total, memory - memory % _WIDEST_ELEMENT)))
        self._begin = self._end = 0

    def fill(self, begin: int, memory: memoryview) -> None:
        """Hand out what was read ahead, and read more when that is used up."""
        done = 0
        while done < memory.nbytes:
            if begin + done == self._end:
                self._begin, self._end = self._end, min(self._total, self._end + self._memory.nbytes)
                super().fill(self._begin, self._memory[: self._end - self._begin])
            first = begin + done - self._begin
            count = min(memory.nbytes - done, self._end - self._begin - first)
            memory[done : done + count] = self._memory[first : first + count]
            done += count


@dataclass(frozen=True)
class _Chunk:
    """A stored chunk, and what of it goes where."""

    item: ReadItem
    sizes: tuple[int, ...]
    info: _StorageInfo
    source: str

    @property
    def key(self) -> str:
        return self.item.storage_index.fqn

    @property
    def is_whole(self) -> bool:
        """Whether all of it is needed. A part of a chunk has no CRC of its own that it could be compared with."""
        return tuple(self.item.lengths) == self.sizes

    def compare(self, expected: int, found: int) -> None:
        if found != expected:
            raise wrong_crc(self.info, self.source, self.item.storage_index, expected, found)


class _Part:
    """What a tensor has of a chunk."""

    def __init__(self, chunk: _Chunk) -> None:
        self.chunk = chunk
        item = chunk.item
        self.box = Box(tuple(item.dest_offsets), tuple(item.lengths))
        self.crc = 0
        """Of what was read, if it is read from front to back."""
        self._moved = [inside - at for inside, at in zip(item.storage_offsets, item.dest_offsets, strict=True)]

    def is_all_of(self, sizes: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether its bytes are those of a tensor like that, in their order."""
        return False

    def read(self, region: Box, target: torch.Tensor) -> None:
        """Fill ``target`` with a region of the tensor."""
        offsets = [at + by for at, by in zip(region.offsets, self._moved, strict=True)]
        self._read(Box(tuple(offsets), region.sizes), target)

    def finish(self) -> None:
        """Everything was read."""

    def _read(self, region: Box, target: torch.Tensor) -> None:
        """Fill ``target`` with a region of the chunk."""
        raise NotImplementedError


class _InFile(_Part):
    """Elements that are read from their file when they are asked for."""

    def __init__(
        self, chunk: _Chunk, open_file: OpenFile, position: int, dtype: torch.dtype, arrangement: Arrangement
    ) -> None:
        super().__init__(chunk)
        self._open_file = open_file
        self._position = position
        self._dtype = dtype
        self._arrangement = arrangement
        self.is_row_major = arrangement.is_row_major(chunk.sizes)
        self.expected: int | None = None
        """The CRC of the elements, if they are to be compared with it in the end."""
        self.conj = self.neg = False

    def is_all_of(self, sizes: Sequence[int], dtype: torch.dtype) -> bool:
        same = self._dtype == dtype and not (self.conj or self.neg)
        return same and self.is_row_major and self.chunk.is_whole and self.chunk.sizes == tuple(sizes)

    def finish(self) -> None:
        if self.expected is not None:
            self.chunk.compare(self.expected, self.crc)

    def _read(self, region: Box, target: torch.Tensor) -> None:
        array = StridedArray(self._open_file(), self._position, self._dtype, self._arrangement)
        self.crc = array.read(region, target, self.chunk.key, summed=self.is_row_major, crc=self.crc)
        if self.conj:
            target.conj_physical_()
        if self.neg:
            target.neg_()


class _InMemory(_Part):
    """Elements that are in no file as they are: in another byte order, say, or some of them in several places."""

    def __init__(self, chunk: _Chunk, elements: torch.Tensor) -> None:
        super().__init__(chunk)
        self._elements = elements

    def _read(self, region: Box, target: torch.Tensor) -> None:
        start = [at - first for at, first in zip(region.offsets, self.chunk.item.storage_offsets, strict=True)]
        fill(target, narrowed(self._elements, start, region.sizes), self.chunk.key)


class _Finding:
    """Looks for the chunks of a tensor, and checks what can be checked before they are read."""

    def __init__(self, reader: StreamingReader, until_read: ExitStack) -> None:
        self._reader = reader
        self._until_read = until_read
        self._files = _OpenFiles(reader)
        until_read.callback(self._files.close)
        self._unpacked: IO[bytes] | None = None

    def part(self, item: ReadItem) -> _Part:
        """What the tensor has of a chunk."""
        reader = self._reader
        ((name, (blob,)),) = reader._by_file_and_blob([item]).items()
        _, stored = reader._stored_chunk(item.storage_index)
        source = str(reader.fs.concat_path(reader.path, name))
        chunk = _Chunk(item, tuple(stored.sizes), blob.info, source)
        open_file = self._files.opener(name, blob)
        refuse_short_file(open_file(), blob, source)
        part: _Part | None
        if blob.info.transform_descriptors:
            part = self._archived(chunk, *self._unpack(chunk, open_file))
        elif blob.info.seal is not None:
            part = self._sealed(chunk, blob.info.seal, open_file)
        else:
            part = self._archived(chunk, blob.info, open_file)
        return part or self._in_memory(chunk)

    def _sealed(self, chunk: _Chunk, seal: Seal, open_file: OpenFile) -> _Part | None:
        """A chunk that the index describes; None if its elements are not what that describes."""
        entry, stored = self._reader._stored_chunk(chunk.item.storage_index)
        elements = sealed_elements(chunk.info, entry.properties.dtype, stored)
        if elements is None:
            return None
        arrangement = Arrangement(tuple(range(len(chunk.sizes))), chunk.sizes)
        part = _InFile(chunk, open_file, elements.position, elements.dtype, arrangement)
        if self._reader._verifies() and chunk.is_whole:
            check_envelope(open_file(), chunk.info, seal, chunk.source, chunk.key)
            part.expected = elements.crc
        return part

    def _archived(self, chunk: _Chunk, info: _StorageInfo, open_file: OpenFile) -> _Part | None:
        """A chunk that only its archive describes; None if its elements cannot be used as they are stored there."""
        verify = self._reader._verifies()
        found = archived_tensor(open_file(), info, source=chunk.source, key=chunk.key, verify=verify)
        if found is None or found[0].sizes != chunk.sizes:
            return None
        record, payload = found
        arrangement = arrangement_of(record.sizes, record.strides)
        if arrangement is None:
            return None
        begin = info.offset + payload.offset
        part = _InFile(
            chunk, open_file, begin + record.storage_offset * record.dtype.itemsize, record.dtype, arrangement
        )
        part.conj, part.neg = record.conj, record.neg
        if verify and payload.crc is not None and chunk.is_whole:
            if part.is_row_major and payload.length == prod(chunk.sizes) * record.dtype.itemsize:
                part.expected = payload.crc
            else:  # it is going to be read in another order
                chunk.compare(payload.crc, _crc_of(open_file(), begin, payload.length))
        return part

    def _in_memory(self, chunk: _Chunk) -> _Part:
        """A chunk that has to be read as a whole, or to be refused."""
        entry, _ = self._reader._stored_chunk(chunk.item.storage_index)
        place = torch.empty(chunk.item.lengths, dtype=entry.properties.dtype, device="cpu")
        self._reader.read_data(LoadPlan([chunk.item]), _TensorFiller(place)).wait()
        return _InMemory(chunk, place)

    def _unpack(self, chunk: _Chunk, open_file: OpenFile) -> tuple[_StorageInfo, OpenFile]:
        """Undo the transforms of a chunk. It goes behind those that were unpacked before."""
        info, reader = chunk.info, self._reader
        if reader._verifies() and info.seal is not None:
            chunk.compare(info.seal.payload_crc, _crc_of(open_file(), info.offset, info.length))
        if self._unpacked is None:
            scratch = tempfile.TemporaryFile(dir=reader.scratch)  # noqa: SIM115 - is closed with everything else
            self._unpacked = self._until_read.enter_context(scratch)
        unpacked = self._unpacked
        begin = unpacked.seek(0, os.SEEK_END)
        with reader.fs.create_stream(chunk.source, "rb") as stream:
            stored = reader._slice_file(stream, info)
            contents = BlobContents(reader.transforms, reader._stored_chunk)
            descriptors = info.transform_descriptors or []
            for piece in contents.pieces_transformed_back(stored, info.length, descriptors, chunk.source, chunk.item):
                unpacked.write(piece)
        content = replace(info, offset=begin, length=unpacked.tell() - begin, transform_descriptors=None, seal=None)
        return content, lambda: StreamRanges(unpacked, chunk.source)


class _OpenFiles:
    """Files of a checkpoint, of which those that were used last are open."""

    def __init__(self, reader: StreamingReader) -> None:
        self._reader = reader
        self._open: OrderedDict[str, tuple[Ranges, ExitStack]] = OrderedDict()

    def opener(self, name: str, blob: StoredItems) -> OpenFile:
        """Gives the file that a blob is in."""
        return lambda: self._opened(name, blob)

    def close(self) -> None:
        """Nothing will be read any more."""
        for _, closing in self._open.values():
            closing.close()

    def _opened(self, name: str, blob: StoredItems) -> Ranges:
        if name not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)[1][1].close()
            closing = ExitStack()
            self._open[name] = closing.enter_context(self._reader._opened(name, [blob])), closing
        self._open.move_to_end(name)
        return self._open[name][0]


class _TensorFiller(LoadPlanner):
    """Has what is read put into a tensor."""

    def __init__(self, place: torch.Tensor) -> None:
        self._place = place

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._place

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


def _crc_of(file: Ranges, begin: int, length: int) -> int:
    buffer = memoryview(bytearray(min(length, READ_BYTES)))
    crc = 0
    for done in range(0, length, READ_BYTES):
        crc = read_with_crc(file, begin + done, buffer[: length - done], crc)
    return crc
