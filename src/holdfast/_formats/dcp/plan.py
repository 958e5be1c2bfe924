"""What planners hand to storages: items to write, items to read, and the plans that list them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import prod
from typing import Any

import torch

from holdfast._formats.dcp.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties


class WriteItemType(Enum):
    """How an item is written: a whole tensor, a chunk of one, or a value that is not a tensor."""

    TENSOR = auto()
    SHARD = auto()
    BYTE_IO = auto()


class LoadItemType(Enum):
    """How an item is read."""

    TENSOR = auto()
    BYTE_IO = auto()


@dataclass(frozen=True)
class BytesIOWriteData:
    """The size of a value that is not a tensor, as far as it is known before writing."""

    nbytes: int


@dataclass(frozen=True)
class TensorWriteData:
    """The chunk that an item writes, and the full tensor that the chunk is part of."""

    chunk: ChunkStorageMetadata
    properties: TensorProperties
    size: torch.Size


@dataclass(frozen=True)
class WriteItem:
    """One unit that a rank writes."""

    index: MetadataIndex
    type: WriteItemType
    bytes_io_data: BytesIOWriteData | None = None
    tensor_data: TensorWriteData | None = None

    def tensor_storage_size(self) -> int | None:
        """Bytes of the FULL tensor that the item belongs to; None for values. See ``written_bytes``."""
        if self.tensor_data is None:
            return None
        return prod(self.tensor_data.size) * self.tensor_data.properties.dtype.itemsize


def written_bytes(item: WriteItem) -> int:
    """Bytes that writing this very item takes: what balancing ranks and threads must go by."""
    if item.tensor_data is not None:
        return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
    return item.bytes_io_data.nbytes if item.bytes_io_data is not None else 1


@dataclass(frozen=True)
class ReadItem:
    """One region to copy from a stored chunk (``storage_*``) into a destination chunk (``dest_*``).

    Offsets are relative to their own chunk.
    """

    type: LoadItemType
    dest_index: MetadataIndex
    dest_offsets: torch.Size
    storage_index: MetadataIndex
    storage_offsets: torch.Size
    lengths: torch.Size


@dataclass(frozen=True)
class SavePlan:
    """The items of one rank, with whatever planner and storage attach to them."""

    items: list[WriteItem]
    storage_data: Any = None
    planner_data: Any = None
    usable: bool = True
    """False when the plan only says: take the one you remember from the last save."""
    replica_digests: Mapping[MetadataIndex, bytes] = field(default_factory=dict, kw_only=True)
    """Digests of the items that other ranks may hold too, so that differing copies are noticed."""


@dataclass
class LoadPlan:
    """The items that one rank reads, with whatever planner and storage attach to them."""

    items: list[ReadItem]
    storage_data: Any = None
    planner_data: Any = None
