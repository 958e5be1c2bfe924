"""Tensor kinds: what each kind of tensor holds on this rank, as items to write, chunks to fill, and local data.

Four kinds are known: plain tensors, DTensor, ShardedTensor, and any tensor subclass that speaks for itself through
the ``__create_write_items__`` / ``__create_chunk_list__`` / ``__get_tensor_shard__`` protocol. Torch's own classes
implement that protocol by returning torch's plan objects, so whatever a hook returns is taken over by its attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from holdfast._base.box_bytes import span_of
from holdfast._base.boxes import Box
from holdfast._compat.dtensors import AsyncCollectiveTensor
from holdfast._compat.sharded_tensors import ShardedTensor
from holdfast._compat.tensors import is_wrapper_subclass, local_part
from holdfast._formats.dcp.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from holdfast._formats.dcp.plan import TensorWriteData, WriteItem, WriteItemType
from holdfast._layout.placements import LocalPiece, dtensor_pieces, is_replicated
from holdfast._layout.sharded_tensors import LocalShard, local_shards
from holdfast._layout.tensor_kinds import is_partitioned, refused
from holdfast.errors import UnsupportedTensorError

WRITE_HOOK = "__create_write_items__"
CHUNKS_HOOK = "__create_chunk_list__"
SHARD_HOOK = "__get_tensor_shard__"


def create_write_items(fqn: str, object: Any) -> list[WriteItem]:
    """What this rank would write for ``object``; one BYTE_IO item if it is not a tensor."""
    if not isinstance(object, torch.Tensor):
        return [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)]
    if speaks_for_itself(object, WRITE_HOOK):
        return [_adopt_write_item(item) for item in getattr(object, WRITE_HOOK)(fqn, object)]
    if isinstance(object, DTensor):
        return _write_items_of_dtensor(fqn, object)
    if isinstance(object, ShardedTensor):
        return [_write_item_of_shard(fqn, object, shard) for shard in local_shards(object)]
    refuse_if_it_has_no_bytes(fqn, object)
    whole = ChunkStorageMetadata(torch.Size([0] * object.dim()), object.size())
    return [_tensor_item(fqn, WriteItemType.TENSOR, object, whole, object.size())]


def create_chunk_list(tensor: torch.Tensor, *, key: str = "") -> list[ChunkStorageMetadata]:
    """The boxes of the logical tensor that this rank's part of ``tensor`` consists of. ``key`` is for messages."""
    if speaks_for_itself(tensor, CHUNKS_HOOK):
        return [_adopt_chunk(chunk) for chunk in getattr(tensor, CHUNKS_HOOK)()]
    if isinstance(tensor, DTensor):
        local = local_tensor(tensor)
        if hasattr(local, CHUNKS_HOOK) and on_this_rank(tensor):
            return [_adopt_chunk(chunk) for chunk in getattr(local, CHUNKS_HOOK)()]
        return [_chunk(piece.offsets, piece.sizes) for piece in dtensor_pieces(tensor, key=key)]
    if isinstance(tensor, ShardedTensor):
        return [ChunkStorageMetadata(shard.offsets, shard.sizes) for shard in local_shards(tensor)]
    return [ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())]


def find_tensor_shard(tensor: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
    """The local data of the chunk that ``index`` names."""
    if speaks_for_itself(tensor, SHARD_HOOK):
        return cast(torch.Tensor, getattr(tensor, SHARD_HOOK)(index))
    if isinstance(tensor, DTensor):
        local = local_tensor(tensor)
        if hasattr(local, SHARD_HOOK):
            return cast(torch.Tensor, getattr(local, SHARD_HOOK)(index))
        return _local_part(local, dtensor_pieces(tensor, key=index.fqn), index)
    if isinstance(tensor, ShardedTensor):
        return _find_local_shard(tensor, index).tensor
    if index.offset is not None and any(index.offset):
        raise ValueError(
            f"'{index.fqn}' is a plain tensor here, which has a chunk at the origin only; "
            f"there is none at offset {tuple(index.offset)}"
        )
    return tensor


def local_chunks(tensor: torch.Tensor, *, key: str = "") -> list[tuple[Box, torch.Tensor]]:
    """The boxes that this rank's part of ``tensor`` consists of, each with its local data."""
    if isinstance(tensor, DTensor) and follows_its_placements(tensor):
        local = local_tensor(tensor)
        return [(Box(piece.offsets, piece.sizes), _narrowed(local, piece)) for piece in dtensor_pieces(tensor, key=key)]
    return [
        (Box(tuple(chunk.offsets), tuple(chunk.sizes)), find_tensor_shard(tensor, MetadataIndex(key, chunk.offsets)))
        for chunk in create_chunk_list(tensor, key=key)
    ]


def may_be_replicated(value: Any) -> bool:
    """Whether other ranks may hold the very same items for ``value``."""
    if isinstance(value, DTensor):
        return is_replicated(tuple(value.device_mesh.shape), value.placements)
    return not isinstance(value, ShardedTensor)


def follows_its_placements(tensor: DTensor) -> bool:
    """Whether nothing but its mesh and placements says what is where: neither its class nor that of its local data."""
    if speaks_for_itself(tensor, CHUNKS_HOOK) or speaks_for_itself(tensor, SHARD_HOOK):
        return False
    local = local_part(tensor)
    return not (hasattr(local, CHUNKS_HOOK) or hasattr(local, SHARD_HOOK))


def on_this_rank(tensor: torch.Tensor) -> bool:
    """False for a DTensor on a mesh that this rank is not part of."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def size_and_dtype(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    """Those of the full tensor. A ShardedTensor that is asked for them itself warns of its own deprecation."""
    if isinstance(tensor, ShardedTensor):
        whole = tensor.metadata()
        return whole.size, whole.tensor_properties.dtype
    return tensor.size(), tensor.dtype


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's data of a DTensor, ready to be read."""
    local = local_part(tensor)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def refuse_if_it_has_no_bytes(fqn: str, tensor: torch.Tensor) -> None:
    """Raise for tensors whose content is not a dense array of elements."""
    kind = None
    if is_partitioned(tensor):
        raise refused([fqn])
    if is_lazy(tensor):
        kind = "a lazy parameter, which has no shape yet"
    elif tensor.is_meta:
        kind = "a tensor on the meta device, which has no data"
    elif tensor.is_nested or tensor.layout != torch.strided:
        kind = f"a {'nested ' if tensor.is_nested else ''}tensor of layout {tensor.layout}"
    elif _is_wrapper(tensor):
        kind = f"of the tensor subclass {type(tensor).__module__}.{type(tensor).__qualname__}"
    elif tensor.is_cpu and tensor.numel() and tensor.data_ptr() == 0 and tensor.untyped_storage().nbytes():
        kind = "a tensor without memory of its own"
    elif _lacks_memory(tensor):
        kind = f"a tensor whose memory was given back: its storage has {tensor.untyped_storage().nbytes()} bytes"
    if kind is not None:
        raise UnsupportedTensorError(
            f"'{fqn}' is {kind}; only dense tensors can be stored. Convert it before saving, or let its class "
            f"implement {WRITE_HOOK}, {CHUNKS_HOOK} and {SHARD_HOOK}.",
            key=fqn,
            kind=kind,
        )


def _lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether elements are past the end of the storage, which can be made smaller while tensors use it."""
    end = tensor.storage_offset() + span_of(tensor.shape, tensor.stride(), 1)
    return tensor.numel() > 0 and end * tensor.itemsize > tensor.untyped_storage().nbytes()


def _is_wrapper(tensor: Any) -> bool:
    """Whether a tensor subclass keeps its data elsewhere than in memory of its own."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    if is_wrapper_subclass(tensor):
        return True
    try:
        plain = tensor.detach()
        return plain.numel() > 0 and torch.Tensor.data_ptr(plain) == 0
    except Exception:  # a subclass may refuse anything, and one that does has nothing to offer us
        return True


def speaks_for_itself(tensor: torch.Tensor, hook: str) -> bool:
    """Whether the tensor's class implements ``hook`` itself; DTensor's own implementation does not count."""
    method = getattr(type(tensor), hook, None)
    return method is not None and method is not getattr(DTensor, hook, None)


def _write_items_of_dtensor(fqn: str, tensor: DTensor) -> list[WriteItem]:
    if not on_this_rank(tensor):
        return []
    local = local_tensor(tensor)
    if hasattr(local, WRITE_HOOK):
        return [_adopt_write_item(item) for item in getattr(local, WRITE_HOOK)(fqn, tensor)]
    pieces = dtensor_pieces(tensor, key=fqn)
    refuse_if_it_has_no_bytes(fqn, local)
    return [
        _tensor_item(fqn, WriteItemType.SHARD, local, _chunk(piece.offsets, piece.sizes), tensor.size())
        for piece in pieces
    ]


def _write_item_of_shard(fqn: str, tensor: ShardedTensor, shard: LocalShard) -> WriteItem:
    refuse_if_it_has_no_bytes(fqn, shard.tensor)
    chunk = ChunkStorageMetadata(shard.offsets, shard.sizes)
    return _tensor_item(fqn, WriteItemType.SHARD, shard.tensor, chunk, tensor.metadata().size)


def _tensor_item(
    fqn: str, kind: WriteItemType, local: torch.Tensor, chunk: ChunkStorageMetadata, full_size: torch.Size
) -> WriteItem:
    properties = TensorProperties.create_from_tensor(local)
    return WriteItem(
        MetadataIndex(fqn, chunk.offsets),
        kind,
        tensor_data=TensorWriteData(chunk, properties, torch.Size(full_size)),
    )


def _chunk(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _local_part(local: torch.Tensor, pieces: list[LocalPiece], index: MetadataIndex) -> torch.Tensor:
    if index.offset is None and len(pieces) == 1:
        return local
    for piece in pieces:
        if index.offset is not None and tuple(piece.offsets) == tuple(index.offset):
            return _narrowed(local, piece)
    held = [tuple(piece.offsets) for piece in pieces]
    raise ValueError(f"'{index.fqn}' has chunks at offsets {held} on this rank, none at {index.offset}")


def _narrowed(local: torch.Tensor, piece: LocalPiece) -> torch.Tensor:
    if piece.sizes != local.shape:
        for dim, (start, length) in enumerate(zip(piece.local_offsets, piece.sizes, strict=True)):
            local = local.narrow(dim, start, length)
    return local


def _find_local_shard(tensor: ShardedTensor, index: MetadataIndex) -> LocalShard:
    if index.offset is None:
        raise ValueError(f"'{index.fqn}' is a ShardedTensor: its chunks are found by offset, and none was given")
    shards = list(local_shards(tensor))
    for shard in shards:
        if shard.offsets == index.offset:
            return shard
    held = [tuple(shard.offsets) for shard in shards]
    raise ValueError(f"'{index.fqn}' has shards at offsets {held} on this rank, none at {tuple(index.offset)}")


def _adopt_chunk(chunk: Any) -> ChunkStorageMetadata:
    return chunk if isinstance(chunk, ChunkStorageMetadata) else _chunk(chunk.offsets, chunk.sizes)


def _adopt_write_item(item: Any) -> WriteItem:
    if isinstance(item, WriteItem):
        return item
    data = item.tensor_data
    properties = data.properties
    return WriteItem(
        MetadataIndex(item.index.fqn, item.index.offset, item.index.index),
        WriteItemType[item.type.name],
        tensor_data=TensorWriteData(
            _adopt_chunk(data.chunk),
            TensorProperties(
                properties.dtype,
                properties.layout,
                properties.requires_grad,
                properties.memory_format,
                properties.pin_memory,
            ),
            torch.Size(data.size),
        ),
    )
