"""Reads a region of a row-major tensor in a stream into a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.boxes import Box
from holdfast.storage.byte_ranges import StreamRanges, refuse_short_chunk
from holdfast.storage.chunk_reads import ChunkRead, Wanted
from holdfast.storage.tensor_places import TensorPlace


def read_region(
    stream: Any,
    position: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    region: Box,
    target: torch.Tensor,
    *,
    source: str,
    key: str,
) -> None:
    """Fill ``target`` with a region of the tensor of this shape and dtype that begins at ``position`` of the stream."""
    file = StreamRanges(stream, source)
    wanted = [Wanted(region, TensorPlace(target, dtype, key))]
    reading = ChunkRead(file, position, shape, dtype.itemsize, wanted)
    refuse_short_chunk(file, position, reading.nbytes, source, key)
    for run in reading.stretches():
        reading.read(run, summed=False)
