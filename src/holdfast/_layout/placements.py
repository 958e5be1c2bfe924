"""Layouts: which boxes of the full tensor a rank's local data consists of, and where they are in the local data.

A DTensor is split along its dimensions by the dimensions of a mesh. Splitting follows ``torch.chunk``: all parts have
the size of the first one, except that the last ones may be smaller or empty.

If several mesh dimensions split the same tensor dimension, the order of the splits decides who holds what. It is from
left to right, unless the tensor says otherwise. FSDP2 over tensor parallelism splits in the opposite order, and writes
this down as ``_StridedShard``, whose split factor is the number of parts that are already there when it splits. The
same class can also be meant literally: cut into ``split_factor`` parts, take my share of each. That is how a view
describes a dimension it has flattened, and then the local data is several separate intervals of the dimension.

Both meanings agree while all sizes divide evenly. Which one holds is not a guess: it is what DTensor itself uses to
redistribute (``full_tensor`` included), namely an order of splits if the factors can be read as one and no order is
given beside them, else literally.

Before 2.10, DTensor has no rule for literal strided shards of uneven sizes (2.8 and 2.9 split them in one way and put
them together in another), so these are refused there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from holdfast._compat.dtensors import ShardOrder, given_shard_order, placements_of, splits_parts_of_their_own_sizes
from holdfast._compat.dtensors import StridedShard as _StridedShard
from holdfast._compat.tensors import local_part
from holdfast.errors import UnsupportedTensorError


class LocalPiece(NamedTuple):
    """A box of the full tensor that a rank holds, and where in its local tensor the box starts."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]


class MeshSplit(NamedTuple):
    """A dimension of a mesh that splits a dimension of a tensor, which it first cuts into ``factor`` parts."""

    mesh_dim: int
    factor: int


class _Interval(NamedTuple):
    """Consecutive indices of one dimension, the last one excluded."""

    first: int
    last: int


class _Split(NamedTuple):
    """One step of splitting a dimension: cut into ``factor`` parts, each of them into ``ways``, keep one of those."""

    ways: int
    mine: int
    factor: int


def dtensor_pieces(dtensor: DTensor, *, key: str = "") -> list[LocalPiece]:
    """The pieces that this rank's local tensor consists of; none if the rank is not in the tensor's mesh.

    An empty shard is one piece without elements. ``key`` names the tensor in errors.
    """
    mesh, placements = dtensor.device_mesh, placements_of(dtensor)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    order = given_shard_order(dtensor)
    found = tuple(local_part(dtensor).shape)
    asked = (
        tuple(dtensor.shape),
        tuple(mesh.shape),
        tuple(coordinate),
        tuple(map(said_by, placements)),
        None if order is None else tuple((dim, tuple(mesh_dims)) for dim, mesh_dims in order.items()),
        found,
    )
    known = _known_pieces.get(asked)
    if known is not None:
        return list(known)
    _refuse_partial(placements, key)
    if not splits_parts_of_their_own_sizes():
        _refuse_uneven_strides(dtensor, placements, key)
    pieces = local_pieces(dtensor.shape, mesh.shape, coordinate, placements, shard_order=order)
    expected = _local_shape(pieces)
    if found != expected:
        raise UnsupportedTensorError(
            f"{_name(key)} holds local data of shape {list(found)} at coordinate {list(coordinate)} of a mesh of shape "
            f"{list(mesh.shape)}, but the placements {list(placements)} of a tensor of shape "
            f"{list(dtensor.shape)} put {list(expected)} there, so it is unclear where the data belongs. Make "
            "the tensor with redistribute() from a replicated one, or split it as torch.chunk does and give "
            "DTensor.from_local the shape of the full tensor.",
            key=key,
            kind="DTensor with another local shape than its placements say",
        )
    if len(_known_pieces) >= _MOST_KNOWN:
        _known_pieces.clear()
    _known_pieces[asked] = tuple(pieces)
    return pieces


_MOST_KNOWN = 4096
_known_pieces: dict[object, tuple[LocalPiece, ...]] = {}
"""What was found out for tensors of some layout and local shape. Models have many of each."""


def said_by(placement: Placement) -> tuple[object, ...]:
    """All that a placement says. Torch takes some for equal that are not."""
    return type(placement), getattr(placement, "dim", None), getattr(placement, "split_factor", None)


def local_pieces(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    *,
    shard_order: ShardOrder | None = None,
) -> list[LocalPiece]:
    """The pieces of a tensor of this shape that the rank at ``coordinate`` of the mesh holds, by offsets.

    With ``shard_order``, splits happen in that order and strided shards are literal. Without, strided shards are read
    as the order of the splits if they can be.

    >>> local_pieces((6, 4), (2, 2), (1, 0), (Shard(0), Shard(1)))
    [LocalPiece(offsets=(3, 0), sizes=(3, 2), local_offsets=(0, 0))]
    """
    if not len(mesh_shape) == len(coordinate) == len(placements):
        raise ValueError(
            f"a mesh of shape {list(mesh_shape)} takes a coordinate and placements of as many entries, "
            f"not {list(coordinate)} and {list(placements)}"
        )
    _refuse_partial(placements, key="")
    splits = _splits_of(len(shape), mesh_shape, coordinate, placements, shard_order)
    return _boxes_of([_held(size, splits.get(dim, ())) for dim, size in enumerate(shape)], shape)


def is_replicated(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> bool:
    """Whether other ranks of the mesh hold the same pieces."""
    return any(isinstance(p, Replicate) and size > 1 for size, p in zip(mesh_shape, placements, strict=True))


def _refuse_partial(placements: Iterable[Placement], key: str) -> None:
    if any(isinstance(placement, Partial) for placement in placements):
        raise UnsupportedTensorError(
            f"{_name(key)} has values that still have to be reduced over ranks. Any checkpointing related operations "
            "are not supported for DTensor with partial placements! Call redistribute() to reduce it first.",
            key=key,
            kind="DTensor with partial placements",
        )


def _refuse_uneven_strides(dtensor: DTensor, placements: Sequence[Placement], key: str) -> None:
    """Refuse a literal strided shard if its size does not divide evenly, whatever the shape of the local data."""
    mesh_shape = dtensor.device_mesh.shape
    anywhere = [0] * len(mesh_shape)  # the sizes are the same at every coordinate, as long as they divide evenly
    for dim, splits in _splits_of(dtensor.dim(), mesh_shape, anywhere, placements, None).items():
        shares = 1
        for split in splits:
            if split.factor > 1 and split.ways > 1 and dtensor.shape[dim] % (shares * split.ways * split.factor):
                raise UnsupportedTensorError(
                    f"{_name(key)} of shape {list(dtensor.shape)} has the placements {list(placements)} on a mesh of "
                    f"shape {list(mesh_shape)}. They do not divide dimension {dim} evenly, and torch "
                    f"{torch.__version__} does not define where the data of such strided shards belongs. Make the "
                    "tensor with other placements, or install torch 2.10 or newer.",
                    key=key,
                    kind="DTensor with uneven strided shards",
                )
            shares *= split.ways


def _name(key: str) -> str:
    return f"'{key}'" if key else "A DTensor"


def _sharded_dim(placement: Placement, ndim: int) -> int | None:
    """The tensor dimension that a placement splits, if any."""
    if isinstance(placement, Replicate):
        return None
    if not isinstance(placement, Shard | _StridedShard):
        raise UnsupportedTensorError(
            f"Holdfast does not know what a rank holds under the placement {placement!r}. Call redistribute() to "
            "shard or replicate the tensor.",
            key="",
            kind=f"DTensor with {type(placement).__name__} placement",
        )
    if not -ndim <= placement.dim < ndim:
        raise ValueError(f"the placement {placement!r} shards a dimension that a {ndim}-d tensor does not have")
    return int(placement.dim) % ndim


def _split_factor(placement: Placement) -> int:
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def _splits_of(
    ndim: int,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    shard_order: ShardOrder | None,
) -> dict[int, list[_Split]]:
    """For each sharded dimension of the tensor its splits, one after the other."""
    return {
        dim: [_Split(mesh_shape[split.mesh_dim], coordinate[split.mesh_dim], split.factor) for split in splits]
        for dim, splits in split_order(ndim, mesh_shape, placements, shard_order=shard_order).items()
    }


def split_order(
    ndim: int, mesh_shape: Sequence[int], placements: Sequence[Placement], *, shard_order: ShardOrder | None = None
) -> dict[int, list[MeshSplit]]:
    """For each sharded dimension of a tensor the dimensions of the mesh that split it, one after the other.

    >>> split_order(2, (3, 2), (_StridedShard(0, split_factor=2), Shard(0)))
    {0: [MeshSplit(mesh_dim=1, factor=1), MeshSplit(mesh_dim=0, factor=1)]}
    """
    dims = [_sharded_dim(placement, ndim) for placement in placements]
    factors = [_split_factor(placement) for placement in placements]
    if shard_order is None:
        shard_order = _encoded_order(mesh_shape, dims, factors)
        if shard_order is None:
            shard_order = _left_to_right(dims)
        else:
            factors = [1] * len(factors)  # they said all they had to say
    return {dim: [MeshSplit(m, factors[m]) for m in mesh_dims] for dim, mesh_dims in shard_order.items()}


def _left_to_right(dims: Sequence[int | None]) -> dict[int, list[int]]:
    order: dict[int, list[int]] = {}
    for mesh_dim, dim in enumerate(dims):
        if dim is not None:
            order.setdefault(dim, []).append(mesh_dim)
    return order


def _encoded_order(
    mesh_shape: Sequence[int], dims: Sequence[int | None], factors: Sequence[int]
) -> dict[int, list[int]] | None:
    """The order of splits that the split factors stand for; None if they cannot all be explained by an order.

    A mesh dimension has a factor other than 1 if it splits after mesh dimensions to the right of it: the factor is
    the number of parts these have made. So the order is found by going from right to left, placing each mesh
    dimension behind as many parts as its factor says.
    """
    orders = _left_to_right(dims)
    for dim, mesh_dims in orders.items():
        order: list[int] = []
        for mesh_dim in reversed(mesh_dims):
            parts = itertools.accumulate((mesh_shape[m] for m in order), lambda a, b: a * b, initial=1)
            place = next((i for i, count in enumerate(parts) if count == factors[mesh_dim]), None)
            if place is None:
                return None
            order.insert(place, mesh_dim)
        orders[dim] = order
    return orders


def _held(size: int, splits: Iterable[_Split]) -> list[_Interval]:
    """What remains of a dimension after all splits, in the order of the local data."""
    held = [_Interval(0, size)] if size else []
    for split in splits:
        held = _select(held, _wanted(_total(held), split))
    return held


def _wanted(size: int, split: _Split) -> list[_Interval]:
    """Which of ``size`` local indices one split keeps."""
    wanted = []
    for part in range(split.factor):
        first, last = _chunk(size, split.factor, part)
        mine = _chunk(last - first, split.ways, split.mine)
        if mine.first < mine.last:
            wanted.append(_Interval(first + mine.first, first + mine.last))
    return wanted


def _chunk(size: int, ways: int, index: int) -> _Interval:
    """The part that ``torch.chunk`` gives to ``index``; what it leaves out is empty."""
    length = -(-size // ways)
    first = min(size, length * index)
    return _Interval(first, min(size, first + length))


def _select(held: Sequence[_Interval], wanted: Sequence[_Interval]) -> list[_Interval]:
    """The intervals at the wanted positions of those held, counting positions over all of them. Both ascend."""
    selected: list[_Interval] = []
    h = w = 0
    position = 0  # where held[h] starts, counted over all intervals
    while h < len(held) and w < len(wanted):
        end = position + held[h].last - held[h].first
        low, high = max(wanted[w].first, position), min(wanted[w].last, end)
        if low < high:
            _append(selected, _Interval(held[h].first + low - position, held[h].first + high - position))
        if wanted[w].last < end:
            w += 1
        else:
            position, h = end, h + 1
    return selected


def _append(intervals: list[_Interval], interval: _Interval) -> None:
    """Add a interval, as part of the last one if it continues it."""
    if intervals and intervals[-1].last == interval.first:
        interval = _Interval(intervals.pop().first, interval.last)
    intervals.append(interval)


def _total(intervals: Iterable[_Interval]) -> int:
    return sum(interval.last - interval.first for interval in intervals)


def _boxes_of(held: Sequence[list[_Interval]], shape: Sequence[int]) -> list[LocalPiece]:
    """All combinations of what is held in each dimension."""
    if not all(held):
        # DCP records an empty shard as one chunk behind the end of the dimension it has nothing of.
        firsts = tuple(intervals[0].first if intervals else size for intervals, size in zip(held, shape, strict=True))
        return [LocalPiece(firsts, tuple(map(_total, held)), (0,) * len(held))]
    return [
        LocalPiece(
            tuple(first for first, _, _ in sides), tuple(n for _, n, _ in sides), tuple(at for _, _, at in sides)
        )
        for sides in itertools.product(*map(_sides, held))
    ]


def _sides(held: Sequence[_Interval]) -> list[tuple[int, int, int]]:
    """Per interval: where it starts, how long it is, and where it starts in the local data."""
    sides, local = [], 0
    for first, last in held:
        sides.append((first, last - first, local))
        local += last - first
    return sides


def _local_shape(pieces: Sequence[LocalPiece]) -> tuple[int, ...]:
    ends = [[at + n for at, n in zip(piece.local_offsets, piece.sizes, strict=True)] for piece in pieces]
    return tuple(max(sizes) for sizes in zip(*ends, strict=True))
