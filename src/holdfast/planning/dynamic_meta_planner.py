"""A load planner for storages that cannot tell what they hold: the state itself says what is expected there."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast.planning.load_planner import DefaultLoadPlanner


class DynamicMetaLoadPlanner(DefaultLoadPlanner):
    """Loads like ``DefaultLoadPlanner``; if the storage has no index, it expects exactly what the state has.

    Only tensors can be expected in this way. ``BroadcastingTorchSaveReader`` reads the index out of its file, so that
    with it values are loaded too, and missing keys and wrong shapes are found before anything is changed.
    """

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the state, and describe it if nobody else has described what is stored."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if metadata is None or (not metadata.state_dict_metadata and metadata.planner_data is None):
            entries: Any = {key: _whole(key, value) for key, value in self.state_dict.items()}
            self.metadata = Metadata(entries)


def _whole(key: str, tensor: Any) -> TensorStorageMetadata:
    """A tensor that is stored in one piece, of the size that it has on all ranks together."""
    if not isinstance(tensor, torch.Tensor):
        raise RuntimeError(  # noqa: TRY004 - the type that callers know from torch
            f"Non-tensor value identified at {key}. At this time DynamicMetaLoadPlanner only supports loading Tensors."
        )
    whole = ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.size(), [whole])
