"""Checkpoints of tensors that are divided over ranks by any rule, or by none, as those ranks would write them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np

from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.layout import ChunkToWrite
from holdfast._formats.native.names import new_generation
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.stored_parts import PartsByRule, StoredParts
from holdfast._formats.native.writing import CheckpointContents, ChunkBytes, Existing, commit_checkpoint, write_chunks
from holdfast._stores.store import Store

Rows = list[tuple[tuple[int, ...], tuple[int, ...], int]]


def rows_of(parts: StoredParts, shape: tuple[int, ...], world_size: int) -> Rows:
    """The parts that have elements: offsets, sizes, rank."""
    if isinstance(parts, PartsByRule):
        offsets, sizes = parts.division.boxes(shape)
        ranks = parts.division.ranks_with(first=parts.first, world_size=world_size)[:, 0]
    else:
        offsets, sizes, ranks = parts
    rows = zip(offsets.tolist(), sizes.tolist(), ranks.tolist(), strict=True)
    return [(tuple(at), tuple(size), rank) for at, size, rank in rows if 0 not in size]


def write_divided(
    store: Store,
    arrays: Mapping[str, np.ndarray],
    parts: Mapping[str, StoredParts],
    world_size: int,
    *,
    max_file_size: int | None = None,
    generation: str | None = None,
    written: Mapping[str, Any] | None = None,
) -> None:
    """Write and commit arrays of unsigned ints."""
    generation = generation or new_generation()
    refs = [TensorRef(key, dtype_named(str(array.dtype)), array.shape, "sharded") for key, array in arrays.items()]
    shares: list[list[ChunkToWrite]] = [[] for _ in range(world_size)]
    for number, ref in enumerate(refs):
        for offsets, sizes, rank in rows_of(parts[ref.key], ref.shape, world_size):
            shares[rank].append(ChunkToWrite(number, ref.key, ref.dtype, ref.shape, offsets, sizes))

    def pieces(chunk: ChunkToWrite) -> list[np.ndarray]:
        box = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        return [np.frombuffer(np.ascontiguousarray(arrays[chunk.key][box]).tobytes(), np.uint8)]

    files = []
    for rank, share in enumerate(shares):
        files += write_chunks(
            store,
            share,
            lambda layout: nullcontext(ChunkBytes(pieces)),
            generation=generation,
            rank=rank,
            max_file_size=max_file_size,
            writers=sum(map(bool, shares)),
        )
    tree = {ref.key: {"$": "tensor", "key": ref.key} for ref in refs}
    contents = CheckpointContents(refs, tree, {}, written or {}, [parts[ref.key] for ref in refs], world_size)
    commit_checkpoint(store, Existing(None, frozenset()), files, contents, generation)
