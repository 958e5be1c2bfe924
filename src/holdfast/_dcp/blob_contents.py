"""What is in blobs that were read as a whole: values, and tensors of any form."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from holdfast._base.crc import crc32
from holdfast._base.tuning import STREAM_BYTES
from holdfast._dcp.blob_checks import check_seal, name_of, wrong_crc
from holdfast._dcp.blob_steps import ItemCount, StoredItems
from holdfast._dcp.destinations import destination_of
from holdfast._dcp.planner import LoadPlanner
from holdfast._formats.dcp.archive import FamiliarArchives, read_tensor
from holdfast._formats.dcp.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata, _StorageInfo
from holdfast._formats.dcp.plan import LoadItemType, ReadItem
from holdfast._formats.dcp.stored_chunks import archived_elements
from holdfast._formats.dcp.transforms import ReaderTransforms
from holdfast._formats.ranged_files import StreamRanges
from holdfast._formats.tensor_places import TensorPlace, narrowed
from holdfast.errors import DamagedCheckpointError, HoldfastError

Blob: TypeAlias = bytes | bytearray | memoryview
FindChunk: TypeAlias = Callable[[MetadataIndex], tuple[TensorStorageMetadata, ChunkStorageMetadata]]
"""What the index says of a stored chunk."""

_ENVELOPE = 1 << 20
"""More than an archive takes around the bytes of a tensor."""
_WIDEST_ELEMENT = 16
"""What an element may take beyond the index's dtype: it was converted on its way, or it has a scale of its own."""
_LARGEST_VALUE = 4 << 30
_LARGEST_RATIO = 1024
"""A value may be that much larger than what is stored of it, or ``_LARGEST_VALUE``. The index does not say more."""


class BlobContents:
    """Takes the blobs of one load apart."""

    def __init__(self, transforms: ReaderTransforms, stored_chunk: FindChunk) -> None:
        self._transforms = transforms
        self._stored_chunk = stored_chunk
        self._familiar = FamiliarArchives()

    def apply(
        self, stored: StoredItems, blob: Blob, planner: LoadPlanner, progress: ItemCount, source: str, *, verify: bool
    ) -> None:
        """Apply items that need a part of one blob, which is in memory."""
        info, items = stored
        index = items[0].storage_index
        if verify and info.seal is not None:
            check_seal(blob, info, source, index)
        if info.transform_descriptors:
            blob = self._transformed_back(blob, info.transform_descriptors, source, items[0])
        if items[0].type == LoadItemType.BYTE_IO:
            for item in items:
                planner.load_bytes(item, _NamedBytes(blob, source, verify and info.seal is None))
                progress.applied += 1
            return
        elements = self._elements_of(blob, info, source, index, verify=verify)
        for item in items:
            place = destination_of(item, planner, elements.dtype)
            whole = item.lengths == elements.sizes
            if not (whole and isinstance(place, TensorPlace) and place.take_small(elements.payload)):
                tensor = elements.tensor
                place.take(tensor if whole else narrowed(tensor, item.storage_offsets, item.lengths))
            progress.applied += 1
            place.commit()

    def _transformed_back(self, blob: Blob, descriptors: Sequence[str], source: str, item: ReadItem) -> Blob:
        """What the blob was before it went through transforms."""
        content = bytearray()
        for piece in self.pieces_transformed_back(io.BytesIO(blob), len(blob), descriptors, source, item):
            content += piece
        return content

    def pieces_transformed_back(
        self, blob: Any, stored: int, descriptors: Sequence[str], source: str, item: ReadItem
    ) -> Iterator[bytes]:
        """What a blob was before it went through transforms, in order. What they cannot undo is damaged."""
        limit = self._most_bytes(item, stored)
        length = 0
        try:
            stream = self._transforms.transform_load_stream(item, descriptors, blob)
            while length <= limit and (piece := stream.read(STREAM_BYTES)):
                length += len(piece)
                if length <= limit:
                    yield piece
        except (HoldfastError, MemoryError):
            raise
        except Exception as error:
            raise DamagedCheckpointError(
                f"{source} is damaged: {name_of(item.storage_index)} went through {list(descriptors)} when it was "
                f"saved, and undoing that fails ({type(error).__name__}: {error}). Copy the file again, or load "
                "another checkpoint.",
                file=source,
                key=item.storage_index.fqn,
                expected=list(descriptors),
                found=str(error),
            ) from error
        if length > limit:
            raise DamagedCheckpointError(
                f"{source} is damaged, or made to fill the memory: undoing {list(descriptors)} for "
                f"{name_of(item.storage_index)} gives more than the {limit} bytes that it can have by the index. Copy "
                "the file again, or load another checkpoint.",
                file=source,
                key=item.storage_index.fqn,
                expected=limit,
                found=length,
            )

    def _most_bytes(self, item: ReadItem, stored: int) -> int:
        """How large the archive of an item can be of which so many bytes are stored."""
        if item.type == LoadItemType.BYTE_IO:
            return max(_LARGEST_VALUE, _LARGEST_RATIO * stored)
        entry, chunk = self._stored_chunk(item.storage_index)
        return chunk.sizes.numel() * (entry.properties.dtype.itemsize + _WIDEST_ELEMENT) + _ENVELOPE

    def _elements_of(
        self, blob: Blob, info: _StorageInfo, source: str, index: MetadataIndex, *, verify: bool
    ) -> _Elements:
        entry, chunk = self._stored_chunk(index)
        seal = info.seal
        if seal is not None and seal.payload_length < len(blob) and not info.transform_descriptors:
            payload = memoryview(blob)[seal.payload_offset : seal.payload_offset + seal.payload_length]
            elements = _from_payload(payload, entry.properties.dtype, chunk)
            if elements is not None:
                return elements
        if seal is None and not info.transform_descriptors:
            elements = self._familiar_elements(memoryview(blob), info, source, index, chunk, verify=verify)
            if elements is not None:
                return elements
        tensor = read_tensor(blob, source=source, key=index.fqn, verify=verify and seal is None)
        if tensor.size() != chunk.sizes:
            raise DamagedCheckpointError(
                f"{source}: {name_of(index)} should be of shape {list(chunk.sizes)}, not {list(tensor.size())}. "
                "The file belongs to another save; copy the right one, or load another checkpoint.",
                file=source,
                key=index.fqn,
                expected=list(chunk.sizes),
                found=list(tensor.size()),
            )
        return _Elements(tensor.dtype, chunk.sizes, None, tensor)

    def _familiar_elements(
        self,
        blob: memoryview,
        info: _StorageInfo,
        source: str,
        index: MetadataIndex,
        chunk: ChunkStorageMetadata,
        *,
        verify: bool,
    ) -> _Elements | None:
        """The elements in an archive that is like one before; None if it is not."""
        known = self._familiar.recognize(blob)
        if known is not None and known.sizes == tuple(chunk.sizes):
            if verify and (found := crc32(known.elements)) != known.crc:
                raise wrong_crc(info, source, index, known.crc, found)
            return _from_payload(known.elements, known.dtype, chunk)
        if self._familiar.is_worth_learning(len(blob)):
            whole = replace(info, offset=0)
            content = StreamRanges(io.BytesIO(blob), source)
            elements = archived_elements(content, whole, chunk, source=source, key=index.fqn, verify=verify)
            if elements is not None and elements.order is None:
                self._familiar.remember(blob, elements.position, elements.dtype, tuple(chunk.sizes))
        return None


class _NamedBytes(io.BytesIO):
    """Bytes that know their file, as files do, and whether they still have to be checked, for planners to use."""

    def __init__(self, content: Blob, name: str, verify: bool) -> None:
        super().__init__(content)
        self.name = name
        self.verify = verify


class _Elements:
    """The elements of a chunk: in row-major order in memory, or as a tensor."""

    __slots__ = ("_tensor", "dtype", "payload", "sizes")

    def __init__(
        self, dtype: torch.dtype, sizes: torch.Size, payload: memoryview | None, tensor: torch.Tensor | None = None
    ) -> None:
        self.dtype = dtype
        self.sizes = sizes
        self.payload = payload
        self._tensor = tensor

    @property
    def tensor(self) -> torch.Tensor:
        """All of them. Making one takes longer than to copy a few, so it is made for those who need it."""
        if self._tensor is None:
            assert self.payload is not None
            self._tensor = _tensor_in(self.payload, self.dtype, self.sizes)
        return self._tensor


def _from_payload(payload: memoryview, dtype: torch.dtype, chunk: ChunkStorageMetadata) -> _Elements | None:
    """The elements behind raw bytes; None if these are not what the index describes."""
    if payload.nbytes != chunk.sizes.numel() * dtype.itemsize:
        return None
    return _Elements(dtype, chunk.sizes, payload)


def _tensor_in(payload: memoryview, dtype: torch.dtype, sizes: torch.Size) -> torch.Tensor:
    if payload.nbytes == 0:
        return torch.empty(sizes, dtype=dtype)
    raw = torch.frombuffer(payload if not payload.readonly else bytearray(payload), dtype=torch.uint8)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(sizes)
