"""Files that ``torch.save`` wrote, as something to read from."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast._base.box_bytes import boxes_of_run
from holdfast._base.boxes import Box, cut, volume
from holdfast._base.byte_counts import count_bytes
from holdfast._base.threads import map_in_threads
from holdfast._base.tuning import READ_BYTES, STREAM_BYTES
from holdfast._formats.archives.zip_layout import LOCAL_MAGIC, ZipEntry, damaged
from holdfast._formats.box_reads import ArrayPlace, ChunkRead, WantedRegion
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.torch_elements import as_array
from holdfast._formats.ranged_files import Ranges, read_size, read_with_crc, seems_cached, useful_threads
from holdfast._formats.source import ByteStream, ChunkPlace, ReadRequest, Source, check_requests, part_of
from holdfast._formats.tensor_places import arrangement_of, narrowed
from holdfast._formats.torch_file.access import LocalFile, StoreObject
from holdfast._formats.torch_file.opened_states import open_state
from holdfast._formats.torch_file.reading import read_torch_file
from holdfast._formats.torch_file.reserved_memory import ReservedFile
from holdfast._stores.file_reader import FileReader
from holdfast._stores.store import Store
from holdfast.errors import RefusedPickleError, UnsupportedValueError

# Tensors of a ``torch.save`` file as streams of their bytes.


class EntryStream:
    """A tensor that is all of an entry, as it is there."""

    def __init__(self, file: Ranges, name: str, entry: ZipEntry, location: str) -> None:
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
        requests, done = list[ReadRequest](), 0
        for box in boxes_of_run(self._ref.shape, first, first + elements.size):
            into = elements[done : done + volume(box.sizes)].reshape(box.sizes)
            requests.append(ReadRequest(self._ref.key, tuple(box.offsets), tuple(box.sizes), into))
            done += into.size
        self._source.read(requests, verify=False, memory=self._memory)

    def finish(self) -> None:
        """There is nothing to compare."""


# Files that ``torch.save`` wrote.


class StoredEntry(NamedTuple):
    """An entry of the archive that a file is."""

    name: str
    begin: int
    nbytes: int
    keys: tuple[str, ...]
    """Of the tensors whose elements are in it."""
    has_crc: bool


class TorchFileSource(Source):
    """A state that was saved by ``torch.save`` as a dict. Of the file only the description is read to open it.

    >>> import tempfile, torch, numpy as np
    >>> file = tempfile.mkdtemp() + "/model.pt"
    >>> torch.save({"w": torch.tensor([[1, 2], [3, 4]]).T, "epochs": (1, 2)}, file)
    >>> source = TorchFileSource(file)
    >>> source.tree["epochs"]
    (1, 2)
    >>> column = np.empty((2, 1), source.tensors["w"].dtype.carrier)
    >>> _ = source.read([ReadRequest("w", (0, 1), (2, 1), column)])
    >>> column.tolist()
    [[3], [4]]
    """

    format = "torch"
    checks_parts = False

    def __init__(self, path: str | Path, *, allow_pickle: bool = False, store: Store | None = None) -> None:
        """``path`` is that of a file; with ``store``, it is the name of an object in that."""
        self._access = LocalFile(str(path)) if store is None else StoreObject(store, str(path))
        self.location = self._access.path
        self._unchecked: dict[int, tuple[str, ZipEntry]] = {}
        self._presence = threading.Lock()
        """Held while a part of the reserved memory is there for one tensor, and may be for another."""
        with self._access.opened() as file:
            start = bytearray(min(len(LOCAL_MAGIC), file.size))
            file.read_into(0, start)
            self._file = ReservedFile(file, self.location) if start == LOCAL_MAGIC else None
            self.identity = self._file.identity if self._file is not None else _digest(file)
            state = self._load(file, allow_pickle)
        if not isinstance(state, dict):
            raise UnsupportedValueError(
                f"{path} holds a {type(state).__module__}.{type(state).__qualname__}, and a checkpoint is a dict. "
                'Save it as torch.save({"name": it}, path).',
                key="",
            )
        opened = open_state(state, self.location)
        self._tree, self._refs, self._tensors = opened.tree, opened.refs, opened.tensors
        if self._file is not None:
            self._read_what_is_not_read_later(self._file, opened.values)

    @property
    def tensors(self) -> Mapping[str, TensorRef]:
        """Every stored tensor that is nothing but its elements, by its key."""
        return self._refs

    @property
    def tree(self) -> Any:
        """The saved state. Tensors of other kinds (sparse or quantized, say) are values in it."""
        return self._tree

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Nothing: there is no place for it in such a file."""
        return {}

    def chunks(self, key: str) -> list[Box]:
        """The whole tensor."""
        shape = self._refs[key].shape
        return [Box((0,) * len(shape), shape)]

    def chunk_places(self, key: str) -> list[ChunkPlace]:
        """The whole tensor, in the only file."""
        ref, tensor = self._refs[key], self._tensors[key]
        begin = None
        if self._file is not None and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            begin = self._file.position_of(tensor) if ref.nbytes else None
        return [ChunkPlace((0,) * len(ref.shape), ref.shape, Path(self.location).name, begin, ref.nbytes, None)]

    def files(self) -> list[tuple[str, int]]:
        """The only file."""
        return [(Path(self.location).name, self._access.size)]

    def read(self, requests: Sequence[ReadRequest], *, verify: bool = True, memory: int | None = None) -> int:
        """Fill the memory of all requests.

        With ``verify`` a storage of which all is wanted is compared with its CRC, the first time. There is none for
        parts: of those only the ranges that are wanted are read, unchecked.
        """
        check_requests(requests, self._refs)
        if not requests:
            return 0
        wanted = sum(request.into.nbytes for request in requests)
        with self._access.opened() as file:
            threads = 1
            if isinstance(file, FileReader):  # others have windows that they share
                threads = min(useful_threads(wanted, cached=seems_cached(file, file.size // 2)), len(requests))
            most = read_size(memory, at_once=threads)
            readings = [_Reading(file, self._tensors[request.key], request, most) for request in requests]
            return sum(map_in_threads(partial(self._read_one, verify=verify), readings, threads, "holdfast-read"))

    @contextmanager
    def stream(self, key: str, *, memory: int, scratch: str | os.PathLike[str] | None = None) -> Iterator[ByteStream]:
        """The bytes of a tensor. If they are those of an entry they are compared with its CRC on the way, or before."""
        tensor = self._tensors[key]
        position = None if self._file is None else self._file.position_of(tensor)
        storage = None if self._file is None else self._file.position_of(tensor.untyped_storage())
        unchecked = None if storage is None else self._unchecked.get(storage)
        with self._access.opened() as file:
            is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
            if unchecked is not None and is_plain and position == storage and unchecked[1].length == tensor.nbytes:
                stream = EntryStream(file, *unchecked, self.location)
                yield stream
                if stream.is_complete:
                    self._unchecked.pop(unchecked[1].offset, None)
                return
            if unchecked is not None:  # it is read in another order, or not all of it
                _check(file, *unchecked, self.location)
                self._unchecked.pop(unchecked[1].offset, None)
            yield PartsStream(self, self._refs[key], memory)

    def verify(self) -> int:
        """Compare every entry of the file with its CRC."""
        if self._file is None:  # all of it was compared when it was opened
            return super().verify()
        with self._access.opened() as file:
            for name, entry in self._file.entries.items():
                _check(file, name, entry, self.location)
        return sum(entry.length for entry in self._file.entries.values())

    def entries(self) -> list[StoredEntry]:
        """The entries of the archive, with the keys of the tensors that are in them; none for files without one."""
        if self._file is None:
            return []
        keys: dict[int | None, list[str]] = {}
        for key, tensor in self._tensors.items():
            keys.setdefault(self._file.position_of(tensor.untyped_storage()), []).append(key)
        return [
            StoredEntry(name, entry.offset, entry.length, tuple(keys.get(entry.offset, ())), entry.crc is not None)
            for name, entry in self._file.entries.items()
        ]

    def check_entry(self, name: str) -> None:
        """Compare one of them with its CRC."""
        assert self._file is not None
        with self._access.opened() as file:
            _check(file, name, self._file.entries[name], self.location)

    def close(self) -> None:
        """Let go of the file."""
        self._tensors = {}
        self._file = None
        self._access.close()

    def _load(self, file: Ranges, allow_pickle: bool) -> Any:
        if self._file is not None:
            try:
                return self._file.load(file)
            except RefusedPickleError:
                # torch may know more names than we do. What it makes of them is checked as a whole, and now.
                self._file = None
        with self._access.on_disk() as path:
            return read_torch_file(path, allow_pickle=allow_pickle, verify=True)

    def _read_what_is_not_read_later(self, file: ReservedFile, values: Sequence[Any]) -> None:
        """Read everything but the bytes of tensors, and compare it with its CRC; tensors are when they are read."""
        with self._access.opened() as stream:
            hidden = file.fill_hidden(stream, self._tensors.values(), values)
            for name, entry in file.entries.items():
                if entry.offset in hidden:
                    _check(stream, name, entry, self.location)
                else:
                    self._unchecked[entry.offset] = name, entry

    def _read_one(self, reading: _Reading, *, verify: bool) -> int:
        file, tensor, request, _ = reading
        position = None if self._file is None else self._file.position_of(tensor)
        if self._file is None or position is None:  # it is in memory
            request.into[...] = as_array(narrowed(tensor, request.offsets, request.sizes))
            return request.into.nbytes
        storage = self._file.position_of(tensor.untyped_storage())
        unchecked = None
        if verify and storage is not None and request.sizes == tuple(tensor.shape):
            unchecked = self._unchecked.get(storage)
        chunk = reading.as_chunk(position)
        if chunk is not None and (unchecked is None or (chunk.is_whole and chunk.nbytes == unchecked[1].length)):
            return self._read_chunk(chunk, request, unchecked)
        checked = 0
        if unchecked is not None:  # there is no CRC of just what is read
            _check(file, *unchecked, self.location)
            self._unchecked.pop(unchecked[1].offset, None)
            checked = unchecked[1].length
        if chunk is not None:
            return checked + self._read_chunk(chunk, request, None)
        with self._presence:
            return checked + self._read_in_parts(
                self._file, file, narrowed(tensor, request.offsets, request.sizes), request
            )

    def _read_chunk(self, chunk: ChunkRead, request: ReadRequest, unchecked: tuple[str, ZipEntry] | None) -> int:
        """Read ranges straight into the memory of a request, and compare them if they are an unchecked entry."""
        found = 0
        for run in chunk.reads():
            found = chunk.read(run, summed=unchecked is not None, crc=found)
        if unchecked is not None:
            name, entry = unchecked
            if entry.crc is not None and found != entry.crc:
                request.into[...] = 0
                raise damaged(self.location, name, "wrong CRC-32", f"{entry.crc:08x}", f"{found:08x}")
            self._unchecked.pop(entry.offset, None)
        return chunk.bytes_read

    def _read_in_parts(self, memory: ReservedFile, file: Ranges, part: torch.Tensor, request: ReadRequest) -> int:
        """Read elements that are more than once in the tensor, or only computed when read, some at a time."""
        for box in cut(Box((0,) * part.dim(), tuple(part.shape)), READ_BYTES // part.dtype.itemsize):
            piece = narrowed(part, *box)
            with memory.present(file, piece):
                part_of(request.into, *box)[...] = as_array(piece)
        return request.into.nbytes


class _Reading(NamedTuple):
    """A request for a part of a tensor in the file."""

    file: Ranges
    tensor: torch.Tensor
    request: ReadRequest
    most: int
    """What is read at once."""

    def as_chunk(self, position: int) -> ChunkRead | None:
        """The tensor as a part of a row-major array, in whatever order its elements are; None if it is none."""
        tensor, request = self.tensor, self.request
        arrangement = arrangement_of(tensor.shape, tensor.stride())
        if arrangement is None or tensor.is_conj() or tensor.is_neg():
            return None
        order, sizes = arrangement
        offsets, lengths = [request.offsets[dim] for dim in order], [request.sizes[dim] for dim in order]
        into = request.into.transpose(order)
        if arrangement.has_steps:
            offsets, lengths, into = [*offsets, 0], [*lengths, 1], into[..., None]
        wanted = [WantedRegion(Box(tuple(offsets), tuple(lengths)), ArrayPlace(into))]
        return ChunkRead(self.file, position, sizes, tensor.dtype.itemsize, wanted, most=self.most)


def _check(file: Ranges, name: str, entry: ZipEntry, source: str) -> None:
    if entry.crc is None:
        return
    found = 0
    memory = memoryview(bytearray(min(READ_BYTES, entry.length)))
    for begin in range(entry.offset, entry.offset + entry.length, READ_BYTES):
        found = read_with_crc(file, begin, memory[: entry.offset + entry.length - begin], found)
    if found != entry.crc:
        raise damaged(source, name, "wrong CRC-32", f"{entry.crc:08x}", f"{found:08x}")


def _digest(file: Ranges) -> str:
    digest = hashlib.blake2b(digest_size=16)
    memory = memoryview(bytearray(min(STREAM_BYTES, file.size)))
    for begin in range(0, file.size, STREAM_BYTES):
        piece = memory[: file.size - begin]
        file.read_into(begin, piece)
        count_bytes(piece.nbytes)
        digest.update(piece)
    return digest.hexdigest()
