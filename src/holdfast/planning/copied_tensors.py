"""What one rank holds of a tensor, as private copies of its parts: nothing but the save knows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.boxes import Box
from holdfast.planning.holdings import Bytes, digest_pieces, part_of
from holdfast.planning.small_tensors import digest_of_small
from holdfast.planning.tensor_pieces import array_pieces, tensor_pieces


class CopiedTensor(NamedTuple):
    """Takes the place of a ``LocalTensor``. Its parts are plain tensors on the CPU, or one numpy array.

    >>> copied = CopiedTensor("w", ((Box((2,), (2,)), torch.tensor([1, 2], dtype=torch.uint8)),))
    >>> [piece.tolist() for piece in copied.pieces(Box((3,), (1,)), 1024)]
    [[2]]
    """

    key: str
    parts: tuple[tuple[Box, Any], ...]
    """Each with its place in the tensor."""
    stored_dtype: torch.dtype | None = None

    @property
    def value(self) -> Any:
        """The copy, if there is one only."""
        return self.parts[0][1] if len(self.parts) == 1 else None

    def pieces(self, box: Box, largest: int) -> Iterator[Bytes]:
        """The stored form of a box that lies in one of the parts."""
        held, part = self._around(box)
        chosen = part_of(part, box, held.offsets)
        if isinstance(chosen, np.ndarray):
            return array_pieces(chosen, largest)
        return tensor_pieces(chosen, largest, self.stored_dtype)

    def digest(self, box: Box) -> bytes:
        """Of the content of a part."""
        _, part = self._around(box)
        if isinstance(part, np.ndarray):
            return digest_pieces(array_pieces(part))
        return digest_of_small(part) or digest_pieces(tensor_pieces(part))

    def _around(self, box: Box) -> tuple[Box, Any]:
        for held, part in self.parts:
            inside = all(
                first <= start and start + length <= first + size
                for first, size, start, length in zip(held.offsets, held.sizes, box.offsets, box.sizes, strict=True)
            )
            if inside:
                return held, part
        raise AssertionError(f"this rank was asked for a part of {self.key!r} that it does not hold: {box}")
