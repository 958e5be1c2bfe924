"""One data file of a DCP checkpoint: which items go into it, and how they get there."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.formats.dcp.storage_info import _StorageInfo
from holdfast.formats.dcp.values import needs_pickle
from holdfast.garbage import no_garbage_collection
from holdfast.planning.plan import WriteItem, WriteItemType, written_bytes
from holdfast.planning.planner import SavePlanner
from holdfast.storage.blobs import IN_MEMORY, Elements, write_blob
from holdfast.storage.contract import WriteResult
from holdfast.storage.device_copies import OverlappingCpuLoader
from holdfast.storage.transforms import WriterTransforms
from holdfast.stores.durability import flush_to_disk
from holdfast.stores.filesystem import AnyPath
from holdfast.tuning import SHORT_WRITE

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
    elements: Elements = IN_MEMORY,
) -> list[WriteResult]:
    """Write a file, values first; with ``sync`` its content is durable afterwards."""
    results: list[WriteResult] = []
    position = 0
    is_short = file.expected_size() < SHORT_WRITE
    with create_stream(file.path, "wb") as stream, no_garbage_collection() if is_short else nullcontext():
        for item, data in resolved_items(file.items, planner, copy_ahead):
            result = write_item(stream, position, file.name, item, data, transforms, elements)
            position += result.size_in_bytes
            results.append(result)
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
    elements: Elements = IN_MEMORY,
) -> WriteResult:
    """Write one item, which begins at ``position`` of the file."""
    blob = write_blob(stream, item, data, transforms, elements)
    info = _StorageInfo(file_name, position, blob.length, blob.transform_descriptors, blob.seal)
    needs = needs_pickle(data.getvalue()) if isinstance(data, io.BytesIO) else None
    if needs is not None:
        return ValueNeedingPickle(item.index, blob.length, info, needs=needs)
    return StoredResult(item.index, blob.length, info, blob.dtype)


def split_by_size_and_type(bins: int, items: list[WriteItem]) -> list[list[WriteItem]]:
    """Share items out to ``bins`` of about the same number of bytes, the largest first."""
    if bins == 1:
        return [items]
    shares: list[list[WriteItem]] = [[] for _ in range(bins)]
    load = [0] * bins
    for item in sorted(items, key=written_bytes, reverse=True):
        lightest = load.index(min(load))
        shares[lightest].append(item)
        load[lightest] += max(1, written_bytes(item))
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
