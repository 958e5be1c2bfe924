"""The parts of stored tensors and values that ranks want, cut into blocks, and put in place where they arrive."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, TypeAlias

import torch

from holdfast._base.boxes import Box
from holdfast._base.tuning import DELIVERY_BYTES
from holdfast._dcp.destinations import resolve_target
from holdfast._dcp.planner import LoadPlanner
from holdfast._formats.archives.values import encode_value
from holdfast._formats.dcp.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast._formats.dcp.plan import LoadItemType, ReadItem
from holdfast._formats.tensor_bytes import as_bytes, as_plain_cpu
from holdfast._formats.tensor_places import fill, narrowed
from holdfast._ranks.parcels import Note
from holdfast._ranks.shared_steps import Attempt
from holdfast.errors import HoldfastError

Present: TypeAlias = Callable[[torch.Tensor], AbstractContextManager[None]]
"""Sees to it that the elements of a view are there inside of a ``with`` block."""


def _is_there(_: torch.Tensor) -> AbstractContextManager[None]:
    return nullcontext()


class Delivery:
    """One key of the file, and who wants which part of it."""

    def __init__(
        self, key: str, value: Any, requests: list[tuple[int, int, ReadItem]], present: Present = _is_there
    ) -> None:
        self._present = present
        self.is_tensor = isinstance(entry_of(value), TensorStorageMetadata)
        self._value = value
        self._requests = requests
        for _, _, item in requests:
            _check_request(key, value if self.is_tensor else None, item)
        if not self.is_tensor:
            encoded = encode_value(value)
            self._value = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)

    def blocks(self) -> Iterator[tuple[int, Note, torch.Tensor]]:
        """The bytes of every request, with the rank they go to."""
        for rank, number, item in self._requests:
            part = self._value
            if self.is_tensor:
                part = narrowed(part, item.storage_offsets, item.lengths)
            left = part.numel() * part.dtype.itemsize
            for box in blocks(tuple(part.shape), part.dtype.itemsize):
                block = narrowed(part, box.offsets, box.sizes)
                with self._present(block):
                    content = _flat_bytes(block)
                    left -= content.numel()
                    yield rank, Note(number, content.numel(), left), content


class Arrivals:
    """The items of this rank, which arrive in blocks. After a first error, what comes is passed over."""

    def __init__(self, items: Sequence[ReadItem], planner: LoadPlanner, metadata: Metadata) -> None:
        self._items = items
        self._planner = planner
        self._metadata = metadata
        self._begun: dict[int, _Filling] = {}
        self._failed: Attempt[None] | None = None

    def take(self, note: Note, content: torch.Tensor) -> None:
        """Put a block where it belongs. Never raises: the sender would not notice, and go on sending."""
        if self._failed is None:
            attempt = Attempt(lambda: self._put(note, content))
            if attempt.failure is not None:
                self._failed = attempt

    def finish(self) -> None:
        """Raise what went wrong."""
        if self._failed is not None and self._failed.failure is not None:
            raise self._failed.failure[0]

    def _put(self, note: Note, content: torch.Tensor) -> None:
        item = self._items[note.number]
        filling = self._begun.get(note.number)
        if filling is None:
            filling = self._begun[note.number] = self._begin(item)
        filling.add(content)
        if not note.left:
            del self._begun[note.number]
            filling.finish()

    def _begin(self, item: ReadItem) -> _Filling:
        if item.type == LoadItemType.BYTE_IO:
            return _Value(item, self._planner)
        entry = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        return _Region(item, self._planner, entry.properties.dtype)


class _Filling:
    """An item that is being filled."""

    def __init__(self, item: ReadItem, planner: LoadPlanner) -> None:
        self.item = item
        self.planner = planner

    def add(self, content: torch.Tensor) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError


class _Value(_Filling):
    """A value, whose stored form is put together before it is handed over."""

    def __init__(self, item: ReadItem, planner: LoadPlanner) -> None:
        super().__init__(item, planner)
        self._bytes = io.BytesIO()

    def add(self, content: torch.Tensor) -> None:
        self._bytes.write(as_bytes(content))

    def finish(self) -> None:
        self._bytes.seek(0)
        self.planner.load_bytes(self.item, self._bytes)


class _Region(_Filling):
    """A region of a tensor, whose blocks are copied as they come."""

    def __init__(self, item: ReadItem, planner: LoadPlanner, dtype: torch.dtype) -> None:
        super().__init__(item, planner)
        self._dtype = dtype
        self._boxes = blocks(tuple(item.lengths), dtype.itemsize)
        self._target = resolve_target(item, planner)

    def add(self, content: torch.Tensor) -> None:
        box = next(self._boxes)
        block = content.view(self._dtype).view(box.sizes)
        fill(narrowed(self._target, box.offsets, box.sizes), block, self.item.dest_index.fqn)

    def finish(self) -> None:
        self.planner.commit_tensor(self.item, self._target)


def blocks(lengths: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """Cut a box into blocks of at most ``DELIVERY_BYTES``, in row-major order. An empty box is one block."""
    return _cut((0,) * len(lengths), lengths, max(1, DELIVERY_BYTES // itemsize))


def _cut(offsets: tuple[int, ...], lengths: tuple[int, ...], most: int) -> Iterator[Box]:
    if prod(lengths) <= most:
        yield Box(offsets, lengths)
        return
    dim = next(dim for dim, length in enumerate(lengths) if length > 1)
    half = lengths[dim] // 2
    for start, length in ((0, half), (half, lengths[dim] - half)):
        yield from _cut(
            (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]),
            (*lengths[:dim], length, *lengths[dim + 1 :]),
            most,
        )


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = as_plain_cpu(tensor)
    if not plain.numel():
        return torch.empty(0, dtype=torch.uint8)
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def entry_of(value: Any) -> STORAGE_TYPES:
    """What the index says of a value. Tensors that are not arrays of bytes are values like others."""
    is_array = isinstance(value, torch.Tensor) and value.layout == torch.strided
    if not is_array or value.is_quantized or value.is_nested or value.is_meta:
        return BytesStorageMetadata()
    whole = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.size(), [whole])


def _check_request(key: str, tensor: torch.Tensor | None, item: ReadItem) -> None:
    """A planner of the caller's own may ask for what is not there."""
    if (item.type == LoadItemType.TENSOR) != (tensor is not None):
        raise HoldfastError(
            f"'{key}' was asked for as a {item.type.name}, which it is not. The planner must ask for what the "
            "metadata of the file says."
        )
    if tensor is None:
        return
    sizes, starts, lengths = tensor.size(), item.storage_offsets, item.lengths
    fits = len(sizes) == len(starts) == len(lengths)
    if not fits or any(s + n > size for s, n, size in zip(starts, lengths, sizes, strict=True)):
        raise HoldfastError(
            f"'{key}': a region at {list(starts)} of sizes {list(lengths)} was asked for, and the tensor in the file "
            f"is of size {list(sizes)}. The planner must ask for regions inside of it."
        )
