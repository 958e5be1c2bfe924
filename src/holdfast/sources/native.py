"""A checkpoint of our own format, as something to read from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, NoReturn

from holdfast.boxes import Box, overlap
from holdfast.errors import CheckpointNotFoundError, DamagedCheckpointError
from holdfast.formats.native.columns import (
    ChunkTable,
    Columns,
    StoredChunk,
    decode_columns,
    first_blocks,
    header_ends,
)
from holdfast.formats.native.names import RECORD
from holdfast.formats.native.reading import WINDOW_BYTES, ReadableFile, read_slabs
from holdfast.formats.native.record import Record, StoredFile, decode_record
from holdfast.formats.native.refs import TensorRef
from holdfast.formats.native.slabs import Slab, cut_into_slabs, row_major_strides
from holdfast.formats.native.values import decode
from holdfast.sources.source import Request, Source, check_requests
from holdfast.stores.store import Reader, Store


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
            slabs.extend(self._headers(touched - self._checked_headers))
        read = read_slabs(slabs, self._files(verify), self.record.block_bytes)
        if verify:
            self._checked_headers |= touched
        return read

    def verify_everything(self) -> int:
        """Read every file and compare all digests. Returns how many bytes that were."""
        slabs = [slab for number, file in enumerate(self.record.files) for slab in _to_be_checked(number, file.nbytes)]
        return read_slabs(slabs, self._files(verify=True), self.record.block_bytes)

    def _ref(self, key: str) -> TensorRef:
        ref = self.tensors.get(key)
        if ref is None:
            _refuse(self.store.path_of(RECORD), f"refers to a tensor {key!r} that it does not list", "a key", key)
        return ref

    @cached_property
    def columns(self) -> Columns:
        """Where the chunks lie, and the digests."""
        index = self.record.index
        path = self.store.path_of(index.name)
        try:
            data = self.store.read(index.name)
        except FileNotFoundError:
            _refuse_missing(path, index)
        return decode_columns(data, self.record, path)

    @cached_property
    def _table(self) -> ChunkTable:
        return ChunkTable(self.columns, self.record, self.store.path_of(self.record.index.name))

    def _chunks(self, key: str) -> list[StoredChunk]:
        return self._table.of(self._numbers[key])

    def _slabs(self, request: Request) -> Iterator[Slab]:
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
            yield from cut_into_slabs(chunk.file, begin, strides, into, request.key, WINDOW_BYTES)

    def _headers(self, files: set[int]) -> Iterator[Slab]:
        for number in sorted(files):
            yield from _to_be_checked(number, self._header_ends[number])

    @cached_property
    def _header_ends(self) -> list[int]:
        return header_ends(self.columns, self.record.files)

    def _files(self, verify: bool) -> list[ReadableFile]:
        starts = first_blocks(self.record.files, self.record.block_bytes)
        return [
            ReadableFile(
                self.store.path_of(file.name),
                file.nbytes,
                self._opener(file),
                self.columns.digests[starts[number] : starts[number + 1]] if verify else None,
            )
            for number, file in enumerate(self.record.files)
        ]

    def _opener(self, file: StoredFile) -> Callable[[], AbstractContextManager[Reader]]:
        @contextmanager
        def opened() -> Iterator[Reader]:
            path = self.store.path_of(file.name)
            try:
                manager = self.store.reader(file.name)
                reader = manager.__enter__()
            except FileNotFoundError:
                _refuse_missing(path, file)
            try:
                if reader.size != file.nbytes:
                    _refuse(path, "does not have the size that was recorded", file.nbytes, reader.size)
                yield reader
            finally:
                manager.__exit__(None, None, None)

        return opened


def read_record(store: Store) -> Record:
    """The record of the checkpoint in a store."""
    try:
        data = store.read(RECORD)
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"no checkpoint at {store.location}: there is no {RECORD}.", path=store.location
        ) from None
    return decode_record(data, store.path_of(RECORD))


def _to_be_checked(file: int, end: int) -> Iterator[Slab]:
    """The beginning of a file, for its digests alone."""
    for begin in range(0, end, WINDOW_BYTES):
        yield Slab(file, begin, min(WINDOW_BYTES, end - begin), (), None, "")


def _refuse_missing(path: str, file: StoredFile) -> NoReturn:
    _refuse(path, "is missing, though the record of the checkpoint lists it", f"{file.nbytes} bytes", "no such file")


def _refuse(path: str, what: str, expected: Any, found: Any) -> NoReturn:
    raise DamagedCheckpointError(
        f"{path} {what} (expected {expected}, found {found}). Copy the checkpoint again with all its files, or load "
        "another one.",
        file=path,
        key=None,
        expected=expected,
        found=found,
    )
