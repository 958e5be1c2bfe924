"""How many bytes a checkpoint of a state will have, and how many a copy of it in memory, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from holdfast.formats.native.json_texts import dumps
from holdfast.formats.native.layout import DATA_ALIGNMENT
from holdfast.planning.agreement import agree
from holdfast.planning.holdings import Holding, dtype_of_whole
from holdfast.planning.named_rows import NamedRows
from holdfast.verbs.capturing import Capture, Captured
from holdfast.verbs.save_options import SaveOptions

if TYPE_CHECKING:
    from holdfast.coordination.collectives import Collectives

_BYTES_PER_CHUNK = 160
"""Of a chunk in the header of its file and in the record, about."""

_BYTES_PER_BLOCK = 4 / (64 << 10)
"""Of digests, for each byte of data."""

_BYTES_PER_CHECKPOINT = 4096
"""Of a record that says nothing."""


@dataclass(frozen=True)
class Share:
    """What one rank has of a state, as descriptions."""

    holdings: Sequence[Holding]
    value_bytes: int
    """Of everything that is not a tensor, as text."""
    copy_bytes: int
    """Of a copy of this rank's tensors."""


@dataclass(frozen=True)
class CheckpointSize:
    """What a checkpoint will be like."""

    nbytes: int
    """In all files, to within some percent."""
    tensor_count: int
    written: Sequence[int]
    """The bytes that each rank writes."""
    copied: Sequence[int]
    """The bytes that each rank has to copy if its state is to go on changing."""


def plain_options(**options: Any) -> SaveOptions:
    """The options of a save for which nothing was said, but for those that are given."""
    names = ("include", "exclude", "cast", "metadata", "max_file_size", "memory_budget")
    said = {**dict.fromkeys(names), "overwrite": False, "check_replicas": True, "allow_pickle": False, **options}
    return SaveOptions.of(**said)


def look_at(state: Any, options: SaveOptions, rank: int, world_size: int) -> Captured:
    """What a save would find in a state. No tensor is read, let alone copied."""
    return Capture.of(replace(options, check_replicas=False), rank, world_size).take(state)


def share_of(captured: Captured) -> Share:
    """A rank's contribution to the size."""
    values = sum(len(dumps(value)) for value in (captured.tree, *captured.own.values()))
    copied = sum(
        prod(box.sizes) * _itemsize(captured.local[holding.key].value)
        for holding in captured.holdings
        if holding.tied_to is None
        for box in holding.boxes
    )
    return Share(NamedRows(captured.holdings), values, copied)


def size_of(shares: Sequence[Share]) -> CheckpointSize:
    """The size of the checkpoint that all ranks save together. Raises if their parts do not fit together."""
    agreed = agree([share.holdings for share in shares])
    written = [sum(chunk.nbytes for chunk in chunks) for chunks in agreed.chunks]
    files = sum(map(bool, written))
    chunk_count = sum(map(len, agreed.chunks))
    around = DATA_ALIGNMENT * files + _BYTES_PER_CHUNK * chunk_count + _BYTES_PER_CHECKPOINT
    values = max(share.value_bytes for share in shares)
    return CheckpointSize(
        nbytes=int(sum(written) * (1 + _BYTES_PER_BLOCK)) + around + values,
        tensor_count=len(agreed.tensors),
        written=written,
        copied=[share.copy_bytes for share in shares],
    )


def checkpoint_size(state: Any, ranks: Collectives, options: SaveOptions | None = None) -> CheckpointSize:
    """What a checkpoint of ``state`` will be like. All ranks call this, each with its own part.

    Example:
        >>> import torch
        >>> from holdfast.coordination.meeting import meeting
        >>> with meeting("a look at the size") as ranks:
        ...     size = checkpoint_size({"weights": torch.ones(1000, 1000)}, ranks)
        >>> size.written, size.copied, 4_000_000 < size.nbytes < 4_100_000
        ([4000000], [4000000], True)
    """
    chosen = options or plain_options()
    return ranks.all_reduce("size", lambda: share_of(look_at(state, chosen, ranks.rank, ranks.world_size)), size_of)


def _itemsize(value: Any) -> int:
    """Of an element as it is in memory now, whatever it is stored as."""
    if isinstance(value, torch.Tensor):
        return dtype_of_whole(value).itemsize
    return int(value.dtype.itemsize) if isinstance(value, np.ndarray) else 1
