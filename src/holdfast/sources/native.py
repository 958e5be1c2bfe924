"""A checkpoint of our own format, as something to read from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cached_property
from typing import Any, NoReturn

from holdfast.boxes import Box, overlap, volume
from holdfast.errors import CheckpointNotFoundError, ReplacedCheckpointError
from holdfast.formats.native.columns import (
    ChunkTable,
    Columns,
    StoredChunk,
    decode_columns,
    first_blocks,
    header_ends,
)
from holdfast.formats.native.damage import refuse
from holdfast.formats.native.names import RECORD
from holdfast.formats.native.reading import WINDOW_BYTES, ReadableFile, read_slabs
from holdfast.formats.native.record import LARGEST_RECORD, Record, StoredFile, decode_record
from holdfast.formats.native.refs import TensorRef
from holdfast.formats.native.slabs import Slab, Stretch, cut_into_slabs, cut_straight, lies_dense, row_major_strides
from holdfast.formats.native.values import decode
from holdfast.sources.source import Request, Source, check_requests
from holdfast.stores.store import Reader, Store

_LARGE = 1 << 36


class NativeSource(Source):
    """A committed checkpoint in a store. Nothing but its record is read before it is asked for."""

    format = "native"

    def __init__(self, store: Store, *, allow_pickle: bool = False) -> None:
        self.store = store
        self._allow_pickle = allow_pickle
        self.location = store.location
        self.record = read_record(store)
        self.identity = self.record.generation
        self._numbers = {ref.key: number for number, ref in enumerate(self.record.tensors)}
        self._checked_headers: set[int] = set()
        self._refuse_claims()

    @cached_property
    def tensors(self) -> Mapping[str, TensorRef]:
        """Every stored tensor, by its key."""
        return {ref.key: ref for ref in self.record.tensors}

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
    def written(self) -> Mapping[str, Any]:
        """How it was written."""
        return self.record.written

    def chunks(self, key: str) -> Sequence[Box]:
        """The boxes in which a tensor is stored."""
        return [Box(chunk.offsets, chunk.sizes) for chunk in self._chunks(key)]

    def read(self, requests: Sequence[Request], *, verify: bool = True) -> int:
        """Fill the memory of all requests."""
        check_requests(requests, self.tensors)
        slabs = [slab for request in requests for slab in self._slabs(request)]
        touched = {slab.file for slab in slabs}
        if verify:
            slabs.extend(self._headers(slabs))
        read = read_slabs(slabs, self._files(verify, slabs), self.record.block_bytes)
        if verify:
            self._checked_headers |= touched
        return read

    def verify(self) -> int:
        """Read every file and compare all digests. Returns how many bytes that were."""
        chunks: list[list[tuple[int, int, str]]] = [[] for _ in self.record.files]
        for ref in self.record.tensors:
            for chunk in self._chunks(ref.key):
                chunks[chunk.file].append(
                    (chunk.begin, chunk.begin + volume(chunk.sizes) * ref.dtype.itemsize, ref.key)
                )
        slabs: list[Slab | Stretch] = []
        for number, file in enumerate(self.record.files):
            checked = 0
            for begin, end, key in sorted(chunks[number]):
                slabs.extend(_to_be_checked(number, checked, begin, ""))
                slabs.extend(_to_be_checked(number, max(checked, begin), end, key))
                checked = max(checked, end)
            slabs.extend(_to_be_checked(number, checked, file.nbytes, ""))
        return read_slabs(slabs, self._files(verify=True, slabs=slabs), self.record.block_bytes)

    def _ref(self, key: str) -> TensorRef:
        ref = self.tensors.get(key)
        if ref is None:
            refuse(self.store.path_of(RECORD), f"refers to a tensor {key!r} that it does not list", "a key", key)
        return ref

    @cached_property
    def columns(self) -> Columns:
        """Where the chunks lie, and the digests."""
        index = self.record.index
        path = self.store.path_of(index.name)
        with self._opener(index, None)() as reader:
            data = bytearray(index.nbytes)
            reader.read_into(0, data)
        return decode_columns(bytes(data), self.record, path)

    @cached_property
    def _table(self) -> ChunkTable:
        return ChunkTable(self.columns, self.record, self.store.path_of(self.record.index.name))

    def _chunks(self, key: str) -> list[StoredChunk]:
        return self._table.of(self._numbers[key])

    def _slabs(self, request: Request) -> Iterator[Slab | Stretch]:
        itemsize = request.into.itemsize
        if request.into.size == 0:
            return
        for chunk in self._chunks(request.key):
            shared = overlap(chunk.offsets, chunk.sizes, request.offsets, request.sizes)
            if shared is None:
                continue
            start, lengths = shared
            strides = row_major_strides(chunk.sizes, itemsize)
            begin = chunk.begin + sum(
                (at - origin) * stride for at, origin, stride in zip(start, chunk.offsets, strides, strict=True)
            )
            part: list[Any] = [
                slice(at - origin, at - origin + length)
                for at, origin, length in zip(start, request.offsets, lengths, strict=True)
            ]
            part.append(Ellipsis)  # without it an array without dimensions would become an element
            into = request.into[tuple(part)]
            if into.flags.c_contiguous and lies_dense(into.shape, strides, itemsize):
                yield from cut_straight(
                    chunk.file,
                    begin,
                    into,
                    request.key,
                    block_bytes=self.record.block_bytes,
                    largest=WINDOW_BYTES,
                    file_bytes=self.record.files[chunk.file].nbytes,
                )
            else:
                yield from cut_into_slabs(chunk.file, begin, strides, into, request.key, WINDOW_BYTES)

    def _headers(self, slabs: Sequence[Slab | Stretch]) -> list[Slab]:
        """The headers of the files that are read, unless they were checked before."""
        needed_for = {slab.file: slab.key for slab in reversed(slabs) if slab.file not in self._checked_headers}
        return [
            part
            for number, key in needed_for.items()
            for part in _to_be_checked(number, 0, self._header_ends[number], key)
        ]

    @cached_property
    def _header_ends(self) -> list[int]:
        return header_ends(self.columns, self.record.files)

    def _files(self, verify: bool, slabs: Sequence[Slab | Stretch] = ()) -> list[ReadableFile]:
        keys = {slab.file: slab.key for slab in reversed(slabs) if slab.key}
        starts = first_blocks(self.record.files, self.record.block_bytes)
        return [
            ReadableFile(
                self.store.path_of(file.name),
                file.nbytes,
                self._opener(file, keys.get(number)),
                self.columns.digests[starts[number] : starts[number + 1]] if verify else None,
            )
            for number, file in enumerate(self.record.files)
        ]

    def _opener(self, file: StoredFile, key: str | None) -> Callable[[], AbstractContextManager[Reader]]:
        """A function that opens a file of the size that was recorded. ``key`` is what it is needed for."""

        @contextmanager
        def opened() -> Iterator[Reader]:
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
        for ref in self.record.tensors:
            if ref.nbytes >= _LARGE:
                for number in {chunk.file for chunk in self._chunks(ref.key)}:
                    file = self.record.files[number]
                    found = self.store.size(file.name)
                    if found is None:
                        self._refuse_missing(file, ref.key)
                    if found != file.nbytes:
                        path = self.store.path_of(file.name)
                        refuse(path, "does not have the size that was recorded", file.nbytes, found, ref.key)

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


def _to_be_checked(file: int, begin: int, end: int, key: str) -> Iterator[Slab]:
    """A part of a file, for its digests alone."""
    for at in range(begin, end, WINDOW_BYTES):
        yield Slab(file, at, min(WINDOW_BYTES, end - at), (), None, key)
