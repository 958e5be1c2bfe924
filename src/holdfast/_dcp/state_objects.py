"""What a flat state holds under its keys, for planners: every kind of tensor, and values.

``_layout/tensor_items.py`` knows the kinds that tensors are by class. Here the kind comes in that tensors are by
attributes, and errors get the words that programs for DCP look for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast._compat.sharded_tensors import ShardedTensor
from holdfast._formats.dcp.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from holdfast._formats.dcp.plan import TensorWriteData, WriteItem, WriteItemType
from holdfast._formats.tensor_bytes import is_plain_contiguous
from holdfast._layout import tensor_items
from holdfast._layout.checkpointable import FIELDS, CheckpointableTensor, chunks_of, is_checkpointable, shard_of
from holdfast._layout.tensor_kinds import is_dtensor, is_partitioned


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what most are: dense, contiguous in memory, and nothing more to be said about it.

    It takes a few questions, where it takes many to tell apart all kinds that there are.
    """
    return (
        type(tensor) in _ORDINARY
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and is_plain_contiguous(tensor)
        and not hasattr(tensor, FIELDS[0])
        and not is_partitioned(tensor)
    )


_ORDINARY = (torch.Tensor, torch.nn.Parameter)


def create_write_items(fqn: str, object: Any) -> list[WriteItem]:
    """What this rank would write for ``object``; one BYTE_IO item if it is not a tensor."""
    # A class that answers for itself comes first, here and below.
    if is_checkpointable(object) and not hasattr(type(object), tensor_items.WRITE_HOOK):
        return write_items_of_checkpointable(fqn, object)
    return tensor_items.create_write_items(fqn, object)


def write_items_of_checkpointable(fqn: str, tensor: CheckpointableTensor) -> list[WriteItem]:
    """One item per part."""
    chunks = chunks_of(tensor)  # which refuses what is not a tensor
    local: Any = tensor
    tensor_items.refuse_if_it_has_no_bytes(fqn, local)
    return [
        WriteItem(
            MetadataIndex(fqn, chunk.offsets, position),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk, TensorProperties.create_from_tensor(local), torch.Size(tensor.global_shape)
            ),
        )
        for position, chunk in enumerate(chunks)
    ]


def create_chunk_list(tensor: torch.Tensor, *, key: str = "") -> list[ChunkStorageMetadata]:
    """The boxes of the logical tensor that this rank's part of ``tensor`` consists of. ``key`` is for messages."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(  # noqa: TRY004 - the class that stock raises
            f"Unsupported Type, expecting one of [Tensor, DTensor, ShardedTensor], but got {type(tensor)}"
        )
    if is_checkpointable(tensor) and not hasattr(type(tensor), tensor_items.CHUNKS_HOOK):
        return chunks_of(tensor)
    return tensor_items.create_chunk_list(tensor, key=key)


def size_and_dtype(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    """Those of the full tensor."""
    size, dtype = tensor_items.size_and_dtype(tensor)
    if is_checkpointable(tensor) and not hasattr(type(tensor), tensor_items.CHUNKS_HOOK):
        size = torch.Size(tensor.global_shape)
    return size, dtype


def find_tensor_shard(tensor: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
    """The local data of the chunk that ``index`` names."""
    if is_checkpointable(tensor) and not hasattr(type(tensor), tensor_items.SHARD_HOOK):
        return shard_of(tensor, index)
    try:
        return tensor_items.find_tensor_shard(tensor, index)
    except ValueError as error:
        if hasattr(type(tensor), tensor_items.SHARD_HOOK) or is_dtensor(tensor):
            raise
        raise ValueError(f"{_why_not_found(tensor, index)}. {error}") from None


def find_state_dict_object(state_dict: Mapping[str, Any], index: MetadataIndex) -> Any:
    """The value, or the local part of the tensor, that ``index`` names in a flat state."""
    if index.fqn not in state_dict:
        raise ValueError(f"Could not find FQN: '{index.fqn}'")
    value = state_dict[index.fqn]
    if isinstance(value, torch.Tensor):
        return find_tensor_shard(value, index)
    if index.offset is not None:
        raise ValueError(f"{_why_not_found(value, index)}. It is a {type(value).__name__}, which has no chunks.")
    return value


def _why_not_found(value: Any, index: MetadataIndex) -> str:
    """In words that programs match."""
    if not isinstance(value, ShardedTensor):
        return f"FQN: '{index.fqn}' is not a ShardedTensor, can't find by offset: '{index.offset}'"
    if index.offset is None:
        return f"Cannot lookup '{index.fqn}': it is a ShardedTensor and no offset was provided"
    return f"Could not find shard at '{index.offset}' for FQN: '{index.fqn}'"
