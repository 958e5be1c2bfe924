"""The bytes of the chunks that a rank writes, out of the tensors that it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from holdfast._base.boxes import Box
from holdfast._base.garbage import no_garbage_collection
from holdfast._base.tuning import MEMORY_BUDGET, PIECE_BYTES, SHARE_OF_A_PIECE
from holdfast._formats.native.layout import ChunkToWrite, FileLayout
from holdfast._formats.native.writing import Bytes, ChunkBytes, OpenChunks
from holdfast._formats.tensor_bytes import gather
from holdfast._layout.descriptions import WritableTensor


def bytes_of(local: Mapping[str, WritableTensor], memory_budget: int | None = None) -> OpenChunks:
    """Where the bytes of chunks of these tensors, given by key, come from."""
    budget = MEMORY_BUDGET if memory_budget is None else memory_budget
    converted = min(PIECE_BYTES, budget // SHARE_OF_A_PIECE)  # to fetch, reorder and convert takes several copies

    def pieces(chunk: ChunkToWrite) -> Iterable[Bytes]:
        return local[chunk.key].pieces(Box(chunk.offsets, chunk.sizes), converted)

    def open_chunks(layout: FileLayout) -> AbstractContextManager[ChunkBytes]:
        with no_garbage_collection():
            ends = [*(position for _, position in layout.chunks), layout.table_begin][1:]
            tensors = [
                (_stored_as_it_is(local[chunk.key]), end - position)
                for (chunk, position), end in zip(layout.chunks, ends, strict=True)
            ]
        return nullcontext(ChunkBytes(pieces, lambda number, buffer: gather(tensors, number, buffer)))

    return open_chunks


def _stored_as_it_is(held: WritableTensor) -> Any:
    return held.value if held.stored_dtype is None else None
