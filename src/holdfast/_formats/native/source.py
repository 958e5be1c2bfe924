"""A checkpoint of our own format, as something to read from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cached_property
from typing import Any, NoReturn

import numpy as np

from holdfast._base.boxes import Box, volume
from holdfast._base.tuning import READ_BYTES
from holdfast._formats.native.blocks import refuse
from holdfast._formats.native.chunk_index import ChunkIndex, ColumnIndex, IndexBytes, TableIndex
from holdfast._formats.native.columns import Columns, StoredChunk, chunk_volumes
from holdfast._formats.native.cutting import Cutter, first_keys
from holdfast._formats.native.kept_readers import KeptReaders
from holdfast._formats.native.names import RECORD
from holdfast._formats.native.read_plan import ByteRanges, Numbers, StridedCopy
from holdfast._formats.native.readable_files import ReadableFile
from holdfast._formats.native.reading import read_all
from holdfast._formats.native.record import LARGEST_RECORD, Record, decode_record
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.stored_files import StoredFile
from holdfast._formats.native.values import decode
from holdfast._formats.source import ChunkPlace, ReadRequest, Source, WholeReads, check_requests
from holdfast._stores.store import Reader, Store
from holdfast.errors import CheckpointNotFoundError, ReplacedCheckpointError

_LARGE = 1 << 36
_NO_WHOLES = WholeReads([], np.zeros(0, np.int64), np.zeros(0, np.int64))


class NativeSource(Source):
    """A committed checkpoint in a store. Nothing but its record is read before it is asked for."""

    format = "native"

    def __init__(self, store: Store, *, allow_pickle: bool = False, record: Record | None = None) -> None:
        """``record`` is that of a checkpoint which is not committed yet; otherwise the one in the store counts."""
        self.store = store
        self._allow_pickle = allow_pickle
        self.location = store.location
        self.record = read_record(store) if record is None else record
        self.identity = self.record.generation
        self._numbers = dict(zip(self.record.columns.keys, range(len(self.record.tensors)), strict=True))
        self._checked_headers: set[int] = set()
        self._kept = KeptReaders()
        stored = IndexBytes(self._read_table, self._read_index, store.path_of)
        self.tables = TableIndex(self.record, stored) if self.record.has_tables else None
        """Of the data files; None in version 1, where there are none."""
        self._index: ChunkIndex = self.tables or ColumnIndex(self.record, stored)
        self._refuse_claims()

    @cached_property
    def tensors(self) -> Mapping[str, TensorRef]:
        """Every stored tensor, by its key."""
        return dict(zip(self.record.columns.keys, self.record.tensors, strict=True))

    @cached_property
    def tree(self) -> Any:
        """The saved state, with references in place of tensors."""
        return decode(self.record.tree, self._ref, allow_pickle=self._allow_pickle)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the user noted."""
        noted = self.record.metadata
        return noted if isinstance(noted, dict) else {}

    @property
    def provenance(self) -> Mapping[str, Any]:
        """How it was written."""
        return self.record.written

    def chunks(self, key: str) -> Sequence[Box]:
        """The boxes in which a tensor is stored."""
        return [Box(chunk.offsets, chunk.sizes) for chunk in self._chunks(key)]

    def covered(self, key: str) -> Sequence[Box]:
        """All of it: that nothing is missing is proven where chunks are looked for."""
        if not self.record.has_tables:
            return self.chunks(key)
        shape = self.tensors[key].shape
        return [Box((0,) * len(shape), shape)] if 0 not in shape else []

    def chunk_places(self, key: str) -> list[ChunkPlace]:
        """The same boxes, with the files that they are stored in and who wrote them."""
        itemsize = self.tensors[key].dtype.itemsize
        found = []
        for chunk in self._chunks(key):
            file = self.record.files[chunk.file]
            nbytes = volume(chunk.sizes) * itemsize
            found.append(ChunkPlace(chunk.offsets, chunk.sizes, file.name, chunk.begin, nbytes, file.rank))
        return found

    def files(self) -> list[tuple[str, int]]:
        """The record, the index or columns, and the data files."""
        sizes = {listed.name: listed.size for listed in self.store.list()}
        names = [RECORD, *self.record.file_names()]
        return [(name, sizes[name]) for name in names if name in sizes]

    def read(self, requests: Sequence[ReadRequest], *, verify: bool = True, memory: int | None = None) -> int:
        """Fill the memory of all requests."""
        return self.read_many(requests, _NO_WHOLES, verify=verify, memory=memory)

    def read_many(
        self,
        requests: Sequence[ReadRequest],
        wholes: WholeReads,
        *,
        verify: bool = True,
        memory: int | None = None,
        shared: bool = False,
    ) -> int:
        """Fill the memory of all requests and of whole tensors."""
        with self._kept.during_call():
            return self._read_many(requests, wholes, memory, verify=verify, shared=shared)

    def _read_many(
        self,
        requests: Sequence[ReadRequest],
        wholes: WholeReads,
        memory: int | None,
        *,
        verify: bool,
        shared: bool,
    ) -> int:
        fill_cache = shared and self._mostly_whole(requests, wholes)
        alone, others = self._only_chunks(wholes)
        requests = [*requests, *others.requests(self.tensors)]
        check_requests(requests, self.tensors)
        cutter = Cutter(self.record.block_bytes, memory)
        requests = [request for request in requests if request.into.size]
        numbers = [self._numbers[request.key] for request in requests]
        found = self._index.find([(number, request) for number, request in zip(numbers, requests, strict=True)])
        for request, number, chunks in zip(requests, numbers, found, strict=True):
            cutter.cut(request, number, chunks)
        ranges = ByteRanges.joined([alone, ByteRanges.joined([ByteRanges.of(cutter.rows), *cutter.ranges])])
        needed_for = first_keys(ranges, cutter.copies)
        if verify:
            ranges = ByteRanges.joined([ranges, self._headers(needed_for)])
        read = self._read_all(
            ranges, cutter.copies, needed_for, memory, verify=verify, shared=shared, fill_cache=fill_cache
        )
        if verify:
            self._checked_headers |= set(needed_for)
        return read

    def _mostly_whole(self, requests: Sequence[ReadRequest], wholes: WholeReads) -> bool:
        """Whether most bytes are of tensors that are read whole: other ranks will want the same ones then."""
        whole, parts = int(wholes.nbytes.sum()), 0
        for request in requests:
            nbytes = volume(request.sizes) * self.tensors[request.key].dtype.itemsize
            if tuple(request.sizes) == self.tensors[request.key].shape:
                whole += nbytes
            else:
                parts += nbytes
        return whole > parts

    def incomplete_positions(self, keys: Sequence[str]) -> list[int]:
        """None: chunks are proven to tile their tensors, or parts of them, before anything is read from them."""
        numbers = self._numbered(keys)
        if not self.record.has_tables:
            self._refuse_overlaps(numbers)
        return []

    def _refuse_overlaps(self, numbers: Numbers) -> None:
        alone, _, _ = self._index.only_chunks(numbers)
        self._index.find([(number, None) for number in numbers[~alone].tolist()])

    def verify(self) -> int:
        """Read every file and compare all digests. Returns how many bytes that were."""
        columns, tensors = self.columns, self.record.tensors
        self._refuse_overlaps(np.arange(len(tensors)))
        itemsizes = np.array([ref.dtype.itemsize for ref in tensors], np.int64)
        nbytes = chunk_volumes(columns, self.record) * itemsizes[columns.chunk_tensor]
        file, begin = columns.chunk_file, columns.chunk_begin
        chunks = ByteRanges(file, begin, nbytes, np.zeros_like(begin), columns.chunk_tensor)
        everything = ByteRanges.joined([chunks, self._gaps(chunks)])
        needed_for = dict.fromkeys(range(len(self.record.files)), len(self._names) - 1) | first_keys(chunks, [])
        read = self._read_all(everything, [], needed_for, None, verify=True)
        return read + sum(file.nbytes - file.data_end for file in self.record.files)

    def _gaps(self, chunks: ByteRanges) -> ByteRanges:
        """The bytes of all files that belong to no chunk."""
        rows = []
        for number, file in enumerate(self.record.files):
            own = np.flatnonzero(chunks.file == number)
            own = own[np.argsort(chunks.begin[own], kind="stable")]
            begins = np.append(chunks.begin[own], file.data_end)
            ends = np.append(0, np.maximum.accumulate((chunks.begin + chunks.nbytes)[own]))
            gaps = np.flatnonzero(begins > ends)
            rows += [
                (number, end, begin - end, 0, len(self._names) - 1)
                for begin, end in zip(begins[gaps].tolist(), ends[gaps].tolist(), strict=True)
            ]
        return ByteRanges.of(rows)

    def _ref(self, key: str) -> TensorRef:
        ref = self.tensors.get(key)
        if ref is None:
            refuse(self.store.path_of(RECORD), f"refers to a tensor {key!r} that it does not list", "a key", key)
        return ref

    @property
    def columns(self) -> Columns:
        """Where all chunks are stored, and all digests."""
        return self._index.columns

    def _read_index(self) -> bytearray:
        index = self.record.index
        assert index is not None
        with self._opener(index, None)() as reader:
            data = bytearray(index.nbytes)
            reader.read_into(0, data)
        return data

    def _read_table(self, number: int, key: str | None) -> bytearray:
        file = self.record.files[number]
        assert file.table is not None
        with ExitStack() as stack:
            reader = stack.enter_context(self._opener(file, key)())
            data = bytearray(file.table.nbytes)
            reader.read_into(file.table.begin, data)
            if self.store.read_bytes > READ_BYTES:
                self._kept.keep(file.name, reader, stack)
        return data

    def _chunks(self, key: str) -> Sequence[StoredChunk]:
        return self._index.find([(self._numbers[key], None)])[0]

    @cached_property
    def _names(self) -> list[str]:
        """The keys of all tensors, and then that of what belongs to none."""
        return [*self.record.columns.keys, ""]

    def _numbered(self, keys: Sequence[str]) -> Numbers:
        try:
            return np.fromiter(map(self._numbers.__getitem__, keys), np.int64, len(keys))
        except KeyError as error:
            raise KeyError(f"there is no tensor {error} in the checkpoint") from None

    def _only_chunks(self, wholes: WholeReads) -> tuple[ByteRanges, WholeReads]:
        """Whole tensors that are stored as one chunk as ranges of files, and the others."""
        if not len(wholes.keys):
            return ByteRanges.of([]), wholes
        numbers = self._numbered(wholes.keys)
        alone, file, begin = self._index.only_chunks(numbers)
        ranges = ByteRanges(file, begin, wholes.nbytes[alone], wholes.addresses[alone], numbers[alone])
        others = np.flatnonzero(~alone)
        keys = [wholes.keys[position] for position in others.tolist()]
        return ranges, WholeReads(keys, wholes.addresses[others], wholes.nbytes[others])

    def _headers(self, needed_for: Mapping[int, int]) -> ByteRanges:
        """The headers of the files that are read, unless they were checked before."""
        rows = [
            (file, 0, self._index.header_end(file), 0, key)
            for file, key in needed_for.items()
            if file not in self._checked_headers
        ]
        return ByteRanges.of([row for row in rows if row[2]])

    def _read_all(
        self,
        ranges: ByteRanges,
        copies: Sequence[StridedCopy],
        needed_for: Mapping[int, int],
        memory: int | None,
        *,
        verify: bool,
        shared: bool = False,
        fill_cache: bool = False,
    ) -> int:
        """Read from the files that are needed. Only these are numbered there, since there may be very many others."""
        numbers = sorted(needed_for)
        ranges = ranges._replace(file=np.searchsorted(np.array(numbers, np.int64), ranges.file))
        places = {number: place for place, number in enumerate(numbers)}
        copies = [copy._replace(file=places[copy.file]) for copy in copies]
        files = [self._readable(number, needed_for[number], verify=verify) for number in numbers]
        return read_all(
            ranges,
            copies,
            self._names,
            files,
            self.record.block_bytes,
            memory,
            shared=shared,
            fill_cache=fill_cache,
        )

    def _readable(self, number: int, key: int, *, verify: bool) -> ReadableFile:
        file = self.record.files[number]
        return ReadableFile(
            self.store.path_of(file.name),
            file.data_end,
            self._opener(file, None if key == len(self.record.tensors) else self._names[key]),
            self._index.digests(number) if verify else None,
            self.store.read_bytes,
        )

    def _opener(self, file: StoredFile, key: str | None) -> Callable[[], AbstractContextManager[Reader]]:
        """A function that opens a file of the size that was recorded. ``key`` is what it is needed for."""

        @contextmanager
        def opened() -> Iterator[Reader]:
            kept = self._kept.find(file.name)
            if kept is not None:
                yield kept
                return
            with ExitStack() as stack:
                try:
                    reader = stack.enter_context(self.store.reader(file.name))
                except FileNotFoundError:
                    self._refuse_missing(file, key)
                if reader.size != file.nbytes:
                    path = self.store.path_of(file.name)
                    refuse(path, "does not have the size that was recorded", file.nbytes, reader.size, key)
                yield reader

        return opened

    def _refuse_claims(self) -> None:
        """Raise if large tensors cannot be what the record says, before anyone takes memory for them."""
        kinds = self.record.columns.likes  # mostly there are a few of them
        if self.tables is not None:
            self._refuse_more_than_files()
        if all(ref.nbytes < _LARGE for ref in kinds):
            return
        for number, ref in enumerate(self.record.tensors):
            if ref.nbytes >= _LARGE:
                for file in map(self.record.files.__getitem__, self._files_with(number)):
                    found = self.store.size(file.name)
                    if found is None:
                        self._refuse_missing(file, ref.key)
                    if found != file.nbytes:
                        path = self.store.path_of(file.name)
                        refuse(path, "does not have the size that was recorded", file.nbytes, found, ref.key)

    def _refuse_more_than_files(self) -> None:
        """Raise if all tensors together do not fit into the files."""
        there = sum(file.data_end for file in self.record.files)
        columns = self.record.columns
        claimed = sum(ref.nbytes * count for ref, count in zip(columns.likes, columns.how_often(), strict=True))
        if claimed > there:
            path = self.store.path_of(RECORD)
            refuse(path, "has tensors that are larger than all its files", f"{there} bytes at most", claimed)

    def _files_with(self, number: int) -> Iterable[int]:
        """The files that a tensor is in, or may be in."""
        if self.tables is not None:
            return self.tables.files_of(number)
        return {chunk.file for chunk in self._index.find([(number, None)])[0]}

    def _refuse_missing(self, file: StoredFile, key: str | None) -> NoReturn:
        path = self.store.path_of(file.name)
        found = self.record.generation
        with suppress(Exception):
            found = read_record(self.store).generation
        if found != self.record.generation:
            raise ReplacedCheckpointError(
                f"{path} is gone: another save has replaced the checkpoint at {self.location} since it was opened. "
                "Load or open it again.",
                path=self.location,
                opened=self.record.generation,
                found=found,
            )
        refuse(
            path,
            "is missing, though the record of the checkpoint lists it",
            f"{file.nbytes} bytes",
            "no such file",
            key,
        )


def read_record(store: Store) -> Record:
    """The record of the checkpoint in a store."""
    path = store.path_of(RECORD)
    try:
        with store.reader(RECORD) as reader:
            if reader.size > LARGEST_RECORD:  # which costs nothing to make, and would take all memory
                refuse(path, "is too large to be a record", f"at most {LARGEST_RECORD} bytes", reader.size)
            data = bytearray(reader.size)
            reader.read_into(0, data)
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"no checkpoint at {store.location}: there is no {RECORD}.", path=store.location
        ) from None
    return decode_record(bytes(data), path)
