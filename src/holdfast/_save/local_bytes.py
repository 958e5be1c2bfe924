"""The bytes of the chunks that a rank writes, out of the tensors that it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from holdfast._base.boxes import Box
from holdfast._base.garbage import no_garbage_collection
from holdfast._base.tuning import MEMORY_BUDGET, PIECE_BYTES, SHARE_OF_A_PIECE
from holdfast._formats.native.layout import ChunkToWrite, FileLayout
from holdfast._formats.native.read_plan import bytes_at
from holdfast._formats.native.writing import Bytes, ChunkBytes, OpenChunks, Run
from holdfast._formats.tensor_bytes import gather, is_plain_contiguous
from holdfast._layout.descriptions import WritableTensor


def bytes_of(
    local: Mapping[str, WritableTensor], memory_budget: int | None = None, *, private: bool = False
) -> OpenChunks:
    """Where the bytes of chunks of these tensors, given by key, come from.

    ``private`` if they are copies, which nobody changes.
    """
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
            run = _runs(tensors) if private else None
        return nullcontext(ChunkBytes(pieces, lambda number, buffer: gather(tensors, number, buffer), run))

    return open_chunks


def _stored_as_it_is(held: WritableTensor) -> Any:
    return held.value if held.stored_dtype is None else None


def _runs(tensors: Sequence[tuple[Any, int]]) -> Run:
    """Which of these tensors, each with the number of its bytes that are stored, are one behind the other in memory."""
    addresses = [
        tensor.data_ptr()
        if isinstance(tensor, torch.Tensor) and is_plain_contiguous(tensor) and tensor.nbytes == nbytes
        else None
        for tensor, nbytes in tensors
    ]
    runs: dict[int, tuple[int, int]] = {}
    """Where each begins, and how many tensors and bytes it has."""
    begin, reach = 0, None
    for number, (address, (_, nbytes)) in enumerate(zip(addresses, tensors, strict=True)):
        if address is None or address != reach:
            begin, length = number, 0
        reach = None if address is None else address + nbytes
        length += nbytes
        if address is not None:
            runs[begin] = number + 1 - begin, length

    def run(number: int) -> tuple[int, Bytes] | None:
        address = addresses[number]
        if address is None or number not in runs:
            return None
        count, nbytes = runs[number]
        return count, bytes_at(address, nbytes)

    return run
