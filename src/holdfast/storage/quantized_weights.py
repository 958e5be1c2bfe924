"""The arithmetics of quantized weights: how a part of one is read and brought to the numbers that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from holdfast.boxes import Box
from holdfast.storage.filling import narrowed
from holdfast.storage.hf_files import _HFStorageInfo
from holdfast.storage.region_reads import read_region

_POSITIVE_FLOATS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
_FOUR_BIT_FLOATS = torch.cat([_POSITIVE_FLOATS, -_POSITIVE_FLOATS])
_EXPONENT_BIAS = 127


class QuantizedWeight(Protocol):
    """A weight that is stored as small numbers, with scales under a key of their own."""

    @property
    def scales(self) -> str:
        """The key of the scales."""

    def loaded_shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """The shape that a chunk of this stored shape is loaded as."""

    def read(
        self, stream: Any, info: _HFStorageInfo, part: Box, at: Sequence[int], scales: torch.Tensor, key: str
    ) -> torch.Tensor:
        """A part of a chunk, as numbers. ``at`` is where it begins in the whole weight, which ``scales`` are of."""


@dataclass(frozen=True)
class BlockScaled:
    """A weight with a factor for every block."""

    scales: str
    block: Sequence[int]
    """The size of a block in every dimension."""

    def loaded_shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """As stored."""
        return tuple(stored)

    def read(
        self, stream: Any, info: _HFStorageInfo, part: Box, at: Sequence[int], scales: torch.Tensor, key: str
    ) -> torch.Tensor:
        """Every element times the factor of its block."""
        stored = torch.empty(part.sizes, dtype=info.dtype)
        read_region(stream, info.position, info.shape, info.dtype, part, stored, source=info.relative_path, key=key)
        factors = scales.float()
        for dim, (start, length, block) in enumerate(zip(at, part.sizes, self.block, strict=True)):
            factors = factors.index_select(dim, torch.arange(start, start + length) // block)
        return stored.float() * factors


@dataclass(frozen=True)
class Mxfp4:
    """A weight of 4-bit floats, two to a byte, with an exponent for every block of ``per_block`` of them."""

    scales: str
    per_block: int

    def loaded_shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """The numbers of all blocks of a row, side by side."""
        return (*stored[:-2], stored[-2] * self.per_block)

    def read(
        self, stream: Any, info: _HFStorageInfo, part: Box, at: Sequence[int], scales: torch.Tensor, key: str
    ) -> torch.Tensor:
        """Whole blocks are read, and what was not asked for is cut off."""
        first = part.offsets[-1] // self.per_block
        count = -(-(part.offsets[-1] + part.sizes[-1]) // self.per_block) - first
        region = Box((*part.offsets[:-1], first, 0), (*part.sizes[:-1], count, info.shape[-1]))
        stored = torch.empty(region.sizes, dtype=torch.uint8)
        read_region(stream, info.position, info.shape, torch.uint8, region, stored, source=info.relative_path, key=key)
        pairs = torch.stack([stored & 0xF, stored >> 4], dim=-1)
        values = _FOUR_BIT_FLOATS[pairs.int()].flatten(-2)
        first_of_whole = at[-1] // self.per_block
        powers = narrowed(scales, (*at[:-1], first_of_whole), (*part.sizes[:-1], count)).double() - _EXPONENT_BIAS
        # In double precision, where no power of two that a byte can tell is too large or too small.
        values = (values * torch.exp2(powers).unsqueeze(-1)).flatten(-2)
        return values.narrow(-1, part.offsets[-1] - first * self.per_block, part.sizes[-1])
