"""Tensors that one process saves in chunks of any layout, as many ranks together would."""

from __future__ import annotations

from typing import Any

import torch

from holdfast._base.boxes import Box
from holdfast._formats.tensor_places import narrowed


class CutTensor(torch.Tensor):
    """A tensor in boxes."""

    boxes: list[Box]
    library: Any
    """The namespace that saves it: its classes describe the boxes."""
    order: tuple[int, ...] | None
    """The dimensions in the order in which the chunks lie in memory."""

    @staticmethod
    def of(whole: torch.Tensor, boxes: list[Box], library: Any, order: tuple[int, ...] | None = None) -> CutTensor:
        made = whole.as_subclass(CutTensor)
        made.boxes, made.library, made.order = boxes, library, order
        return made

    @property
    def whole(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        planner, metadata = self.library.planner, self.library.metadata
        properties = metadata.TensorProperties(dtype=self.whole.dtype)
        return [
            planner.WriteItem(
                index=metadata.MetadataIndex(fqn, torch.Size(box.offsets)),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    chunk=metadata.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                    properties=properties,
                    size=self.whole.size(),
                ),
            )
            for box in self.boxes
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        (box,) = [box for box in self.boxes if torch.Size(box.offsets) == index.offset]
        chunk = narrowed(self.whole, *box)
        if self.order is None:
            return chunk.contiguous()
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return chunk.permute(self.order).contiguous().permute(back)
