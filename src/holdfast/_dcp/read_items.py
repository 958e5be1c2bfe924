"""Resharding: which parts of which stored chunks go into which local chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from holdfast._base.boxes import Overlap, overlaps
from holdfast._base.tiling import missing_part
from holdfast._formats.dcp.columns import ChunkColumns, ChunksLater
from holdfast._formats.dcp.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
    still_to_be_made,
)
from holdfast._formats.dcp.plan import LoadItemType, ReadItem
from holdfast.errors import StateMismatchError


def create_read_items_for_chunk_list(
    fqn: str, checkpoint_md: TensorStorageMetadata, local_chunks: list[ChunkStorageMetadata]
) -> list[ReadItem]:
    """Read items that fill ``local_chunks`` from the stored chunks of the tensor.

    Raises if a part of a local chunk is in none of the stored ones: it would silently keep its old content.
    """
    later = still_to_be_made(checkpoint_md)
    if isinstance(later, ChunksLater):
        items = _from_columns(fqn, later.columns(), local_chunks)
        if items is not None:
            return items
    if len(local_chunks) == len(checkpoint_md.chunks) == 1:
        (chunk,) = checkpoint_md.chunks
        if chunk == local_chunks[0] and 0 not in chunk.sizes:
            return [_whole(fqn, chunk)]
    found = overlaps(local_chunks, checkpoint_md.chunks)
    gap = missing_part(local_chunks, checkpoint_md.chunks, checkpoint_md.size, found)
    if gap is not None:
        raise StateMismatchError(f"'{fqn}': {gap}", uncovered={fqn: gap})
    return [_item(fqn, local_chunks, one.target, checkpoint_md.chunks[one.source], one.source, one) for one in found]


def _item(
    fqn: str,
    local_chunks: Sequence[ChunkStorageMetadata],
    target_position: int,
    source: ChunkStorageMetadata,
    source_position: int,
    shared: Overlap,
) -> ReadItem:
    target = local_chunks[target_position]
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(fqn, target.offsets, target_position),
        dest_offsets=_relative(shared.start, target.offsets),
        storage_index=MetadataIndex(fqn, source.offsets, source_position),
        storage_offsets=_relative(shared.start, source.offsets),
        lengths=torch.Size(shared.lengths),
    )


def _from_columns(
    fqn: str, columns: ChunkColumns, local_chunks: Sequence[ChunkStorageMetadata]
) -> list[ReadItem] | None:
    """The same, with only those of the stored chunks as objects that are needed; None if something is not covered."""
    items: list[ReadItem] = []
    for position, target in enumerate(local_chunks):
        rows = columns.touching(target)
        if len(rows) == 1:
            source = columns.chunk(rows[0])
            if source == target:
                start = _start(len(target.sizes))
                items.append(
                    ReadItem(
                        LoadItemType.TENSOR,
                        MetadataIndex(fqn, target.offsets, position),
                        start,
                        MetadataIndex(fqn, source.offsets, rows[0]),
                        start,
                        source.sizes,
                    )
                )
                continue
        sources = [columns.chunk(row) for row in rows]
        found = overlaps([target], sources)
        if missing_part([target], sources, target.sizes, found) is not None:
            return None
        items += [_item(fqn, local_chunks, position, sources[one.source], rows[one.source], one) for one in found]
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
