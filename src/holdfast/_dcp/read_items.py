"""Resharding: which parts of which stored chunks go into which local chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from holdfast._base.boxes import overlaps
from holdfast._base.tiling import missing_part
from holdfast._formats.dcp.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from holdfast._formats.dcp.plan import LoadItemType, ReadItem
from holdfast.errors import StateMismatchError


def create_read_items_for_chunk_list(
    fqn: str, checkpoint_md: TensorStorageMetadata, local_chunks: list[ChunkStorageMetadata]
) -> list[ReadItem]:
    """Read items that fill ``local_chunks`` from the stored chunks of the tensor.

    Raises if a part of a local chunk is in none of the stored ones: it would silently keep its old content.
    """
    if len(local_chunks) == len(checkpoint_md.chunks) == 1:
        (chunk,) = checkpoint_md.chunks
        if chunk == local_chunks[0] and 0 not in chunk.sizes:
            return [_whole(fqn, chunk)]
    found = overlaps(local_chunks, checkpoint_md.chunks)
    gap = missing_part(local_chunks, checkpoint_md.chunks, checkpoint_md.size, found)
    if gap is not None:
        raise StateMismatchError(f"'{fqn}': {gap}", uncovered={fqn: gap})
    items = []
    for target_position, source_position, start, lengths in found:
        target, source = local_chunks[target_position], checkpoint_md.chunks[source_position]
        items.append(
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(fqn, target.offsets, target_position),
                dest_offsets=_relative(start, target.offsets),
                storage_index=MetadataIndex(fqn, source.offsets, source_position),
                storage_offsets=_relative(start, source.offsets),
                lengths=torch.Size(lengths),
            )
        )
    return items


def _whole(fqn: str, chunk: ChunkStorageMetadata) -> ReadItem:
    """The read item for the only chunk of a tensor, which is loaded as it was saved: most tensors are."""
    index, start = MetadataIndex(fqn, chunk.offsets, 0), _start(len(chunk.sizes))
    return ReadItem(LoadItemType.TENSOR, index, start, index, start, chunk.sizes)


@cache
def _start(dimensions: int) -> torch.Size:
    return torch.Size([0] * dimensions)


def create_read_item_for_bytes(fqn: str) -> ReadItem:
    """A read item for a value that is not a tensor."""
    index, nowhere = MetadataIndex(fqn), torch.Size([0])
    return ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)


def _relative(start: Sequence[int], origin: Sequence[int]) -> torch.Size:
    return torch.Size([position - base for position, base in zip(start, origin, strict=True)])
