"""The bytes of the chunks that a rank writes, out of the tensors that it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from holdfast._base.boxes import Box
from holdfast._base.garbage import no_garbage_collection
from holdfast._base.tuning import MEMORY_BUDGET, PIECE_BYTES, SHARE_OF_A_PIECE
from holdfast._formats.native.layout import ChunkToWrite, FileLayout
from holdfast._formats.native.writing import Bytes, ChunkBytes, OpenChunks
from holdfast._formats.tensor_bytes import SmallTensors, plain_addresses
from holdfast._layout.descriptions import WritableTensor
from holdfast._layout.many_descriptions import LocalTensors


def bytes_of(local: Mapping[str, WritableTensor], memory_budget: int | None = None) -> OpenChunks:
    """Where the bytes of chunks of these tensors, given by key, come from."""
    budget = MEMORY_BUDGET if memory_budget is None else memory_budget
    converted = min(PIECE_BYTES, budget // SHARE_OF_A_PIECE)  # to fetch, reorder and convert takes several copies

    def pieces(chunk: ChunkToWrite) -> Iterable[Bytes]:
        return local[chunk.key].pieces(Box(chunk.offsets, chunk.sizes), converted)

    def open_chunks(layout: FileLayout) -> AbstractContextManager[ChunkBytes]:
        with no_garbage_collection():
            small = SmallTensors(*_in_memory(local, layout.columns.keys), layout.chunk_bytes)
        return nullcontext(ChunkBytes(pieces, small.gather))

    return open_chunks


def _in_memory(local: Mapping[str, WritableTensor], keys: Sequence[str]) -> tuple[Sequence[Any], Sequence[int]]:
    """The tensors of chunks, and where those are that are stored as they are in memory."""
    if isinstance(local, LocalTensors) and local.stored_dtypes is None:  # which has looked at them already
        positions = [local.positions[key] for key in keys]
        values, addresses = local.values_in_order, local.addresses
        return [values[position] for position in positions], [addresses[position] for position in positions]
    held = [local[key] for key in keys]
    tensors = [each.value if each.stored_dtype is None else None for each in held]
    return tensors, plain_addresses(tensors)
