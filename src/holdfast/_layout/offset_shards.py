"""Shards of a part of a tensor, seen at their place in the whole.

Under FSDP1 over tensor parallelism a rank's optimizer state is a ShardedTensor whose size is that of the rank's
tensor-parallel part. The checkpoint stores the whole tensor. What a planner needs to know to fill the one from the
other is where the part begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast._compat.sharded_tensors import ShardedTensor
from holdfast._compat.tensors import wrapper_subclass
from holdfast._formats.dcp.metadata import ChunkStorageMetadata, MetadataIndex
from holdfast._layout.sharded_tensors import LocalShard, local_shards
from holdfast._layout.tensor_items import size_and_dtype
from holdfast.errors import StateMismatchError


class OffsetShards(torch.Tensor):
    """Looks to planners like the whole tensor, of which this rank holds the shards of ``part``.

    It has no data of its own. Planners that ask for its chunks and for their memory need to know nothing of the offset.
    """

    part: ShardedTensor
    _shards: list[LocalShard]

    @staticmethod
    def __new__(
        cls: type[OffsetShards], part: ShardedTensor, offset: Sequence[int], size: torch.Size, key: str = ""
    ) -> OffsetShards:
        """See ``part`` at ``offset`` of a tensor of ``size``. ``key`` is for messages."""
        part_size, dtype = size_and_dtype(part)
        _refuse_part_outside(key, offset, part_size, size)
        self: OffsetShards = wrapper_subclass(cls, size, dtype)
        self.part = part
        self._shards = [
            LocalShard(torch.Size(map(sum, zip(shard.offsets, offset, strict=True))), shard.sizes, shard.tensor)
            for shard in local_shards(part)
        ]
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Nothing can be computed with it."""
        raise NotImplementedError(f"{func} needs data, which is in the shards of the part and not here")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The boxes of the whole that this rank holds."""
        return [ChunkStorageMetadata(shard.offsets, shard.sizes) for shard in self._shards]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of the box that begins where ``index`` says."""
        for shard in self._shards:
            if shard.offsets == index.offset:
                return shard.tensor
        held = [tuple(shard.offsets) for shard in self._shards]
        raise ValueError(f"'{index.fqn}' has shards at offsets {held} on this rank, none at {index.offset}")


def _refuse_part_outside(key: str, offset: Sequence[int], part: Sequence[int], whole: Sequence[int]) -> None:
    """Raise if a part of this size at this offset is not inside of the whole."""
    fits = len(offset) == len(part) == len(whole) and all(
        start >= 0 and start + length <= size for start, length, size in zip(offset, part, whole, strict=True)
    )
    if not fits:
        text = (
            f"the model's part at offsets {list(offset)} of sizes {list(part)} is not inside of the stored tensor of "
            f"size {list(whole)}"
        )
        raise StateMismatchError(
            f"{key}: {text}. Load into the model that the checkpoint is of.",
            shapes={key: (torch.Size(whole), torch.Size(part))},
        )
