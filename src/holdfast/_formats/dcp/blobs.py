"""One item as a blob: a torch.save archive whose bytes are sealed by CRCs that also stand in the index."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from holdfast._base.boxes import Box, cut
from holdfast._base.crc import crc32
from holdfast._base.tuning import PIECE_BYTES, SMALL_TENSOR, STREAM_BYTES
from holdfast._formats.dcp.archive import TensorArchive
from holdfast._formats.dcp.metadata import Seal
from holdfast._formats.dcp.plan import WriteItem
from holdfast._formats.dcp.small_archives import SmallArchives
from holdfast._formats.dcp.transforms import WriterTransforms
from holdfast._formats.tensor_bytes import as_bytes
from holdfast._formats.tensor_places import narrowed
from holdfast.errors import HoldfastError


@dataclass(frozen=True)
class WrittenBlob:
    """What was written for an item."""

    length: int
    seal: Seal
    dtype: torch.dtype | None
    transform_descriptors: list[str] | None = None


class WrittenElements:
    """How to get at the elements of tensors that are written. These are in memory anyway."""

    def slab_bytes(self, tensor: torch.Tensor) -> int | None:
        """How many are to be asked for at a time; None if all may be that are in memory as they are written."""
        return None

    def of(self, view: torch.Tensor) -> torch.Tensor:
        """A tensor like ``view`` whose elements are there until the next one is asked for."""
        return view

    def whole(self, tensor: torch.Tensor) -> bytes | memoryview:
        """The bytes of a small tensor."""
        return as_bytes(self.of(tensor))

    def pieces(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """The bytes of a tensor in parts. No more than a slab is copied of one that is otherwise in memory."""
        for part in cut(Box((0,) * tensor.dim(), tuple(tensor.shape)), _slab_elements(tensor, self)):
            yield as_bytes(self.of(narrowed(tensor, part.offsets, part.sizes)))


IN_MEMORY = WrittenElements()


class BlobWriter:
    """Writes blobs to a stream, one behind the other. Small ones are collected: the stream may have them later."""

    def __init__(self, stream: Any, transforms: WriterTransforms, elements: WrittenElements = IN_MEMORY) -> None:
        self._stream = stream
        self._transforms = transforms
        self._elements = elements
        self._small = SmallArchives(stream) if elements is IN_MEMORY and not transforms.extensions else None

    def write(self, item: WriteItem, data: torch.Tensor | io.BytesIO) -> WrittenBlob:
        """Write the data of ``item`` behind what was written before."""
        if self._small is not None:
            if isinstance(data, torch.Tensor):
                _check_shape(item, data)
                added = self._small.add(data)
                if added is not None:
                    return WrittenBlob(*added, data.dtype)
            self._small.flush()
        return write_blob(self._stream, item, data, self._transforms, self._elements)

    def finish(self) -> None:
        """Let the stream have all of it."""
        if self._small is not None:
            self._small.flush()


def write_blob(
    stream: Any,
    item: WriteItem,
    data: torch.Tensor | io.BytesIO,
    transforms: WriterTransforms,
    elements: WrittenElements = IN_MEMORY,
) -> WrittenBlob:
    """Write the data of ``item`` at the stream's position."""
    if isinstance(data, torch.Tensor):
        _check_shape(item, data)
        tensor = data.detach()
        if transforms.extensions or tensor.is_quantized:
            return _write_whole(stream, item, _archive_bytes(tensor), transforms, tensor.dtype)
        return _write_tensor(stream, tensor, elements)
    if not isinstance(data, io.BytesIO):
        raise HoldfastError(
            f"'{item.index.fqn}': the planner resolved the item to a {type(data).__name__}; "
            "resolve_data must return a tensor or a BytesIO"
        )
    return _write_whole(stream, item, data.getvalue(), transforms, None)


def _write_tensor(stream: Any, tensor: torch.Tensor, elements: WrittenElements) -> WrittenBlob:
    archive = TensorArchive(tensor.dtype, tuple(tensor.shape))
    prefix, length = archive.prefix, archive.payload_length
    if length <= SMALL_TENSOR:
        payload = elements.whole(tensor)
        payload_crc = crc32(payload)
        suffix = archive.suffix(payload_crc)
        stream.write(b"".join((prefix, payload, suffix)))
    else:
        stream.write(prefix)
        payload_crc = 0
        for piece in elements.pieces(tensor):
            for start in range(0, piece.nbytes, STREAM_BYTES):
                part = piece[start : start + STREAM_BYTES]
                payload_crc = crc32(part, payload_crc)
                stream.write(part)
        suffix = archive.suffix(payload_crc)
        stream.write(suffix)
    seal = Seal(len(prefix), length, payload_crc, crc32(suffix, archive.prefix_crc))
    return WrittenBlob(len(prefix) + length + len(suffix), seal, tensor.dtype)


def _slab_elements(tensor: torch.Tensor, elements: WrittenElements) -> int:
    slab_bytes = elements.slab_bytes(tensor)
    if slab_bytes is not None:
        return max(1, slab_bytes // tensor.dtype.itemsize)
    in_place = tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return max(1, tensor.numel() if in_place else PIECE_BYTES // tensor.dtype.itemsize)


def _write_whole(
    stream: Any, item: WriteItem, data: bytes, transforms: WriterTransforms, dtype: torch.dtype | None
) -> WrittenBlob:
    recorded: list[str] | None = None
    if transforms.extensions:
        collected = io.BytesIO()
        transformed, recorded = transforms.transform_save_stream(item, collected)
        transformed.write(data)
        transformed.close()
        data = collected.getvalue()
    stream.write(data)
    return WrittenBlob(len(data), Seal(0, len(data), crc32(data), 0), dtype, recorded)


def _archive_bytes(tensor: torch.Tensor) -> bytes:
    collected = io.BytesIO()
    if tensor.is_quantized:
        torch.save(tensor.clone(), collected)
    else:
        _write_tensor(collected, tensor, IN_MEMORY)
    return collected.getvalue()


def _check_shape(item: WriteItem, tensor: torch.Tensor) -> None:
    if item.tensor_data is not None and tensor.size() != item.tensor_data.chunk.sizes:
        raise HoldfastError(
            f"'{item.index.fqn}': the planner resolved the item to a tensor of shape {list(tensor.size())}, but the "
            f"plan says {list(item.tensor_data.chunk.sizes)}; a planner that changes shapes must change the plan too"
        )
