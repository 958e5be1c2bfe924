"""The bytes of the chunks that a rank writes, out of the tensors that it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from holdfast._base.alike import Numbers
from holdfast._base.boxes import Box
from holdfast._base.garbage import no_garbage_collection
from holdfast._base.tuning import MEMORY_BUDGET, PIECE_BYTES, SHARE_OF_A_PIECE
from holdfast._formats.native.layout import ChunkToWrite, FileLayout
from holdfast._formats.native.read_plan import bytes_at
from holdfast._formats.native.writing import Bytes, ChunkBytes, OpenChunks, Run
from holdfast._formats.tensor_bytes import SmallTensors, plain_addresses
from holdfast._layout.descriptions import WritableTensor
from holdfast._layout.many_descriptions import LocalTensors


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
            tensors, addresses = _in_memory(local, layout.columns.keys)
            small = SmallTensors(tensors, addresses, layout.chunk_bytes)
            run = _runs(tensors, addresses, layout.chunk_bytes) if private else None
        return nullcontext(ChunkBytes(pieces, small.gather, run))

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


def _runs(tensors: Sequence[Any], addresses: Sequence[int], nbytes: Numbers) -> Run:
    """Which tensors of chunks are one behind the other in memory, as their chunks are in the file."""
    own = [tensor.nbytes if address else 0 for tensor, address in zip(tensors, addresses, strict=True)]
    begin = np.array(addresses, np.int64)
    # A tensor that is cut has other bytes than each of its parts.
    is_whole = (begin != 0) & (np.array(own, np.int64) == nbytes)
    goes_on = is_whole[1:] & is_whole[:-1] & (begin[1:] == begin[:-1] + nbytes[:-1])
    firsts = np.append(np.flatnonzero(np.append(True, ~goes_on)), len(begin))

    def run(number: int) -> tuple[int, Bytes] | None:
        at = int(np.searchsorted(firsts, number))
        if firsts[at] != number or not is_whole[number]:
            return None
        end = int(firsts[at + 1])
        return end - number, bytes_at(addresses[number], int(nbytes[number:end].sum()))

    return run
