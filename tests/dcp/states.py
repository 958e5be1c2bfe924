"""What the tests of the drop-in save and load with either library: tensors whose elements say where they belong."""

from __future__ import annotations

import inspect
import math
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import holdfast.dcp as ours
from tests.sharding import dtensor_of
from tests.torches import ALONE, RANK_LOCAL

LIBRARIES = {"ours": ours, "stock": stock}
DIRECTIONS = [("ours", "ours"), ("ours", "stock"), ("stock", "ours")]
"""Who saves and who loads. What stock does with its own files is not ours to test."""


def save(library: str, state: dict[str, Any], path: str | Path, **options: Any) -> Any:
    return LIBRARIES[library].save(state, checkpoint_id=path, **_known(library, options))


def load(library: str, state: dict[str, Any], path: str | Path, **options: Any) -> None:
    if library == "stock" and "use_collectives" not in inspect.signature(stock.save).parameters:
        assert not any(Path(path).glob("__*.metadata")), RANK_LOCAL
    LIBRARIES[library].load(state, checkpoint_id=path, **_known(library, options))


def _known(library: str, options: dict[str, Any]) -> dict[str, Any]:
    """Without ``no_dist`` if stock has no such option and does the same anyway."""
    if library == "stock" and not ALONE and not dist.is_initialized():
        return {name: value for name, value in options.items() if name != "no_dist"}
    return options


def numbered(*shape: int, start: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without two equal elements."""
    return torch.arange(start, start + math.prod(shape)).reshape(shape).to(dtype)


def blank(like: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor of the same shape and dtype, with content that none of the tests saves."""
    return of_bytes(torch.full((like.numel() * like.dtype.itemsize,), 0xA5, dtype=torch.uint8), like.dtype, like.shape)


def of_bytes(data: torch.Tensor, dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """The tensor that consists of these bytes, whatever they mean in its dtype."""
    shape = tuple(shape)
    if dtype == torch.bool:
        return (data & 1).bool().reshape(shape)
    if not data.numel():
        return torch.empty(shape, dtype=dtype)
    return data.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, bit by bit: unlike `==` this tells NaNs and zeros of either sign apart."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype.itemsize == 1:
        plain = plain.view(torch.uint8)  # torch can view every dtype of one byte, but not copy it
    # Not `reshape`: a single element may have any stride, and could not be viewed as bytes then.
    return plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def differing(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """The keys whose tensors are not bit by bit what they should be."""
    assert found.keys() == expected.keys()
    return [key for key in expected if not same_bits(found[key], expected[key])]


def read_index(path: str | Path, name: str = ".metadata") -> Any:
    """The index of a checkpoint, as stock torch reads it."""
    with open(Path(path) / name, "rb") as file:
        return pickle.load(file)


def change_index(path: str | Path, change: Callable[[Any], None], name: str = ".metadata") -> None:
    """Rewrite an index the way stock torch writes it."""
    metadata = read_index(path, name)
    change(metadata)
    with open(Path(path) / name, "wb") as file:
        pickle.dump(metadata, file)


# --- layouts: the ways in which ranks may hold a matrix ------------------------------------------------------------

_ON_A_LINE: dict[str, Placement] = {
    "replicated": Replicate(),
    "rows": Shard(0),
    "columns": Shard(1),
    "last dimension": Shard(-1),
}
_ON_A_GRID: dict[str, tuple[Placement, Placement]] = {
    "blocks": (Shard(0), Shard(1)),
    "blocks across": (Shard(1), Shard(0)),
    "rows twice": (Shard(0), Shard(0)),
    "hsdp": (Replicate(), Shard(0)),
    "replicated columns": (Shard(1), Replicate()),
}
LAYOUTS = ["plain", *_ON_A_LINE, *_ON_A_GRID, "all but the last rank", "two shards per rank", "one rank has all"]


class Layouts:
    """Lays full tensors out over all ranks. Every rank has the full tensor; no data is sent."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._line = init_device_mesh("cpu", (self.world_size,))
        self._grid = init_device_mesh(
            "cpu", (self.world_size // 2, 2) if self.world_size % 2 == 0 else (1, self.world_size)
        )
        self._few = DeviceMesh("cpu", list(range(max(1, self.world_size - 1))))

    def lay_out(self, layout: str, full: torch.Tensor) -> torch.Tensor:
        if layout == "plain":
            return full.clone()
        if layout in _ON_A_LINE:
            return distributed(full, self._line, [_ON_A_LINE[layout]])
        if layout in _ON_A_GRID:
            return distributed(full, self._grid, _ON_A_GRID[layout])
        if layout == "all but the last rank":
            return distributed(full, self._few, [Shard(0)])
        if layout == "two shards per rank":
            return sharded_tensor(full, self._stripes(full.shape[1]))
        assert layout == "one rank has all", layout
        mine = self.rank == self.world_size - 1
        return sharded_tensor(full, [((0, 0), tuple(full.shape))] if mine else [])

    def _stripes(self, width: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Columns, dealt out to the ranks in turn, first to last and then last to first."""
        cuts = [width * n // (2 * self.world_size) for n in range(2 * self.world_size + 1)]
        places = (self.rank, 2 * self.world_size - 1 - self.rank)
        return [((0, cuts[n]), (-1, cuts[n + 1] - cuts[n])) for n in places if cuts[n] < cuts[n + 1]]


def distributed(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's part of a tensor that every rank has."""
    return dtensor_of(full.clone(), mesh, placements)


def sharded_tensor(full: torch.Tensor, boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> ShardedTensor:
    """A ShardedTensor with this rank's boxes, given as offsets and sizes; a size of -1 is all there is."""
    shards = []
    for offsets, sizes in boxes:
        slices = tuple(slice(o, o + n if n >= 0 else None) for o, n in zip(offsets, sizes, strict=True))
        shards.append(LocalShard.from_tensor_and_offsets(full[slices].clone(), list(offsets), dist.get_rank()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch would rather see a DTensor
        return init_from_local_shards(shards, list(full.shape))


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What this rank holds of a tensor."""
    if isinstance(tensor, ShardedTensor):
        return [part for shard in tensor.local_shards() for part in parts(shard.tensor)]
    if isinstance(tensor, DTensor):
        return [] if tensor.device_mesh.get_coordinate() is None else [tensor.to_local()]
    return [tensor]


def same_parts(one: torch.Tensor, other: torch.Tensor) -> bool:
    mine, theirs = parts(one), parts(other)
    return len(mine) == len(theirs) and all(map(same_bits, mine, theirs))
