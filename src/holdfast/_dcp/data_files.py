"""One data file of a DCP checkpoint: which items go into it, and how they get there."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from holdfast._base.garbage import no_garbage_collection
from holdfast._base.tuning import SHORT_WRITE
from holdfast._dcp.device_copies import OverlappingCpuLoader
from holdfast._dcp.planner import SavePlanner
from holdfast._dcp.storage import WriteResult
from holdfast._formats.archives.values import needs_pickle
from holdfast._formats.dcp.blobs import IN_MEMORY, BlobWriter, WrittenBlob, WrittenElements, write_blob
from holdfast._formats.dcp.metadata import _StorageInfo
from holdfast._formats.dcp.plan import WriteItem, WriteItemType, written_bytes
from holdfast._formats.dcp.transforms import WriterTransforms
from holdfast._layout.owners import balanced_owners
from holdfast._stores.durable_files import flush_to_disk
from holdfast._stores.filesystem import AnyPath
from holdfast._stores.large_files import LargeFile
from holdfast._stores.os_errors import naming

# A stream into a large new file of the local disk.


@contextmanager
def large_stream(path: AnyPath, expected: int, memory: int) -> Iterator[LargeStream]:
    """Make or replace a file of about the ``expected`` size, with at most so much memory for what is on its way."""
    name = os.fspath(path)
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        stream = LargeStream(descriptor, name, expected, memory)
        try:
            yield stream
            stream.complete()
        finally:
            stream.close()
    finally:
        os.close(descriptor)


class LargeStream:
    """Takes bytes from front to back."""

    def __init__(self, descriptor: int, path: str, expected: int, memory: int) -> None:
        self._descriptor = descriptor
        self._path = path
        with naming(path):
            self._file = LargeFile(descriptor, path, expected, memory)
        self._is_complete = False

    def write(self, data: Any, /) -> int:
        """Take all of it: it may be changed afterwards."""
        if not len(data):
            return 0
        view = memoryview(data).cast("B")
        with naming(self._path):  # errors of earlier writes are raised here
            if self._is_complete:
                raise ValueError(f"{self._path} is complete, and {view.nbytes} more bytes were written to it")
            self._file.write(view)
        return view.nbytes

    def complete(self) -> None:
        """There is no more to come. Wait until all of it is written, and give the file its size."""
        if not self._is_complete:
            self._is_complete = True
            with naming(self._path):
                self._file.finish()

    def fileno(self) -> int:
        """The file, for those who want to have it durable."""
        return self._descriptor

    def close(self) -> None:
        """Wait until no write is under way."""
        self._file.close()


_ENVELOPE = 1536
"""More than what an archive puts around the bytes of an ordinary tensor."""


@dataclass(frozen=True)
class StoredResult(WriteResult):
    """A write result that also knows the dtype that was really written."""

    dtype: torch.dtype | None = None
    host: str = socket.gethostname()
    """The machine that wrote it: on the same machine, all ranks must see the file."""


@dataclass(frozen=True)
class ValueNeedingPickle(StoredResult):
    """A value that cannot be loaded without the reader's explicit trust."""

    needs: str = ""


@dataclass(frozen=True)
class DataFile:
    """A file and the items that go into it."""

    path: AnyPath
    name: str
    """How the index will refer to it."""
    items: Sequence[WriteItem]

    def expected_size(self) -> int:
        """About how large it will be, rather a little more: values and what transforms make are only known later."""
        return sum(map(written_bytes, self.items)) + _ENVELOPE * len(self.items)


def write_file(
    create_stream: Callable[[AnyPath, str], AbstractContextManager[Any]],
    file: DataFile,
    planner: SavePlanner,
    transforms: WriterTransforms,
    *,
    copy_ahead: int,
    sync: bool,
    elements: WrittenElements = IN_MEMORY,
) -> list[WriteResult]:
    """Write a file, values first; with ``sync`` its content is durable afterwards."""
    results: list[WriteResult] = []
    position = 0
    is_short = file.expected_size() < SHORT_WRITE
    with create_stream(file.path, "wb") as stream, no_garbage_collection() if is_short else nullcontext():
        blobs = BlobWriter(stream, transforms, elements)
        for item, data in resolved_items(file.items, planner, copy_ahead):
            result = _result(blobs.write(item, data), position, file.name, item, data)
            position += result.size_in_bytes
            results.append(result)
        blobs.finish()
        if sync:
            flush_to_disk(stream)
    return results


def write_item(
    stream: Any,
    position: int,
    file_name: str,
    item: WriteItem,
    data: torch.Tensor | io.BytesIO,
    transforms: WriterTransforms,
    elements: WrittenElements = IN_MEMORY,
) -> WriteResult:
    """Write one item, which begins at ``position`` of the file."""
    return _result(write_blob(stream, item, data, transforms, elements), position, file_name, item, data)


def _result(
    blob: WrittenBlob, position: int, file_name: str, item: WriteItem, data: torch.Tensor | io.BytesIO
) -> WriteResult:
    info = _StorageInfo(file_name, position, blob.length, blob.transform_descriptors, blob.seal)
    needs = needs_pickle(data.getvalue()) if isinstance(data, io.BytesIO) else None
    if needs is not None:
        return ValueNeedingPickle(item.index, blob.length, info, needs=needs)
    return StoredResult(item.index, blob.length, info, blob.dtype)


def split_by_size_and_type(bins: int, items: list[WriteItem]) -> list[list[WriteItem]]:
    """Share items out to ``bins`` of about the same number of bytes, the largest first."""
    if bins == 1:
        return [items]
    sizes = list(map(written_bytes, items))
    owners = balanced_owners([tuple(range(bins))] * len(items), sizes, bins)
    shares: list[list[WriteItem]] = [[] for _ in range(bins)]
    for number in sorted(range(len(items)), key=sizes.__getitem__, reverse=True):
        shares[owners[number]].append(items[number])
    return shares


def resolved_items(
    items: Iterable[WriteItem], planner: SavePlanner, copy_ahead: int
) -> Iterator[tuple[WriteItem, torch.Tensor | io.BytesIO]]:
    """Items with their data, of which only as much is in memory at a time as is needed."""
    tensors = []
    for item in items:
        if item.type == WriteItemType.BYTE_IO:
            yield item, planner.resolve_data(item)
        else:
            tensors.append(item)
    if not torch.accelerator.is_available() or copy_ahead <= 0:
        yield from ((item, planner.resolve_data(item)) for item in tensors)
        return
    resolve: Callable[[Any], Any] = planner.resolve_data
    loader = OverlappingCpuLoader(resolve, inflight_threshhold=copy_ahead)
    for item in tensors:
        loader.add(written_bytes(item), item)
    loader.start_loading()
    for tensor, copied in loader.values():
        assert isinstance(copied, WriteItem)
        yield copied, tensor
