"""Building blocks for planners."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast._compat.sharded_tensors import ShardedTensor, ShardMetadata
from holdfast._dcp.plan_cache import signature
from holdfast._dcp.read_items import create_read_item_for_bytes, create_read_items_for_chunk_list
from holdfast._dcp.state_objects import create_chunk_list as _create_chunk_list
from holdfast._dcp.state_objects import create_write_items as _create_write_items
from holdfast._dcp.state_objects import write_items_of_checkpointable as _get_checkpointable_tensor_write_items
from holdfast._formats.dcp.metadata import (
    STATE_DICT_TYPE,
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from holdfast._formats.dcp.plan import LoadItemType, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from holdfast._layout.materialize import materialize as _init_state_dict

__all__ = [
    "_chunk_for_shard",
    "_compare_save_plans",
    "_contains_usable_plan",
    "_create_chunk_from_dtensor",
    "_create_chunk_from_tensor",
    "_create_chunk_list",
    "_create_default_metadata_only_plan",
    "_create_read_item_for_byteio",
    "_create_read_item_for_tensor",
    "_create_read_items",
    "_create_write_item_for_bytesio",
    "_create_write_item_for_shard",
    "_create_write_item_for_tensor",
    "_create_write_items",
    "_create_write_items_for_dtensor",
    "_get_checkpointable_tensor_write_items",
    "_init_state_dict",
    "_merge_delta_local_plans",
    "_sharded_tensor_metadata",
    "create_read_items_for_chunk_list",
]


def _create_write_item_for_tensor(fqn: str, tensor: torch.Tensor) -> WriteItem:
    """Write ``tensor`` as a whole."""
    chunk = _create_chunk_from_tensor(tensor)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), tensor.size())
    return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.TENSOR, tensor_data=data)


def _create_write_item_for_bytesio(fqn: str, bytes: Any) -> WriteItem:
    """Write a value that is not a tensor."""
    return WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)


def _create_write_items_for_dtensor(fqn: str, tensor: DTensor) -> WriteItem:
    """Write this rank's part of ``tensor``, which must be one chunk; ``_create_write_items`` takes several."""
    (item,) = _create_write_items(fqn, tensor)
    return item


def _create_write_item_for_shard(fqn: str, sharded_tensor: ShardedTensor, shard_md: ShardMetadata) -> WriteItem:
    """Write one shard of a ShardedTensor."""
    data = _sharded_tensor_metadata(sharded_tensor, shard_md)
    return WriteItem(MetadataIndex(fqn, data.chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _sharded_tensor_metadata(sharded_tensor: ShardedTensor, shard_md: ShardMetadata) -> TensorWriteData:
    """What writing one shard of a ShardedTensor takes."""
    whole = sharded_tensor.metadata()
    stated = whole.tensor_properties
    properties = TensorProperties(
        dtype=stated.dtype,
        layout=stated.layout,
        requires_grad=stated.requires_grad,
        memory_format=stated.memory_format,
        pin_memory=stated.pin_memory,
    )
    return TensorWriteData(_chunk_for_shard(shard_md), properties, whole.size)


def _create_chunk_from_tensor(tensor: torch.Tensor) -> ChunkStorageMetadata:
    """The chunk that is the whole tensor."""
    return ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())


def _create_chunk_from_dtensor(tensor: DTensor) -> ChunkStorageMetadata:
    """This rank's part of ``tensor``, which must be one chunk; ``_create_chunk_list`` takes several."""
    (chunk,) = _create_chunk_list(tensor)
    return chunk


def _chunk_for_shard(shard_md: ShardMetadata) -> ChunkStorageMetadata:
    """The chunk that a shard of a ShardedTensor is."""
    return ChunkStorageMetadata(torch.Size(shard_md.shard_offsets), torch.Size(shard_md.shard_sizes))


def _create_read_items(fqn: str, md: STORAGE_TYPES, obj: Any) -> list[ReadItem]:
    """What to read to fill ``obj`` from the stored entry ``md``."""
    if isinstance(md, BytesStorageMetadata):
        return [create_read_item_for_bytes(fqn)]
    if not isinstance(obj, torch.Tensor):
        raise ValueError(  # noqa: TRY004 - the class that stock raises
            f"Invalid checkpoint metadata for {fqn}, expected BytesStorageMetadata but found {type(md)}: '{fqn}' is "
            f"stored as a tensor, which a {type(obj).__name__} cannot take"
        )
    return create_read_items_for_chunk_list(fqn, md, _create_chunk_list(obj))


def _create_read_item_for_tensor(
    dest_index: MetadataIndex, dest_offsets: Any, storage_index: MetadataIndex, storage_offsets: Any, lengths: Any
) -> ReadItem:
    """Copy a region of a stored chunk into a region of a local one."""
    return ReadItem(
        LoadItemType.TENSOR,
        dest_index,
        torch.Size(dest_offsets),
        storage_index,
        torch.Size(storage_offsets),
        torch.Size(lengths),
    )


def _create_read_item_for_byteio(
    dest_index: MetadataIndex, dest_offset: int, storage_index: MetadataIndex, storage_offset: int, length: int
) -> ReadItem:
    """Read a value that is not a tensor."""
    return ReadItem(
        LoadItemType.BYTE_IO,
        dest_index,
        torch.Size([dest_offset]),
        storage_index,
        torch.Size([storage_offset]),
        torch.Size([length]),
    )


def _compare_save_plans(plan: SavePlan, other_plan: SavePlan) -> bool:
    """Whether two plans describe the same layout."""
    return plan.usable == other_plan.usable and signature(plan) == signature(other_plan)


def _contains_usable_plan(delta_plans: list[SavePlan]) -> bool:
    """Whether some rank sent a plan rather than a note that nothing changed."""
    return any(plan.usable for plan in delta_plans)


def _merge_delta_local_plans(cached_plans: list[SavePlan], delta_plans: list[SavePlan]) -> list[SavePlan]:
    """The plans that were sent, and the remembered ones of ranks that sent only a note."""
    return [new if new.usable else old for new, old in zip(delta_plans, cached_plans, strict=True)]


def _create_default_metadata_only_plan(state_dict: STATE_DICT_TYPE) -> SavePlan:
    """A plan that describes a flat state, for building an index without writing.

    Of a ShardedTensor it lists the shards of all ranks, which its own metadata names. Of other tensors it lists what
    this rank holds.
    """
    items: list[WriteItem] = []
    for fqn, value in state_dict.items():
        if isinstance(value, ShardedTensor):
            shards = value.metadata().shards_metadata
            items.extend(_create_write_item_for_shard(fqn, value, shard) for shard in shards)
        else:
            items.extend(_create_write_items(fqn, value))
    return SavePlan(items)
