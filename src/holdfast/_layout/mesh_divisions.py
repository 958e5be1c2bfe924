"""DTensors as divisions: which rank of a save has which box, by a rule that every rank knows.

The rule follows from the mesh and the placements, so a rank that is not in the mesh knows it too. It is the same
arithmetic as that of ``placements``, for all ranks at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from holdfast._base.divisions import Cut, Division
from holdfast._compat.dtensors import ShardOrder, given_shard_order, placements_of
from holdfast._layout.placements import said_by, split_order


def dtensor_division(dtensor: DTensor, world_size: int, members: tuple[int, ...] | None = None) -> Division | None:
    """The rule by which a DTensor is divided over the ranks that save it.

    ``members`` are these ranks as the whole job counts them; None for all. The ranks of the rule are positions among
    them. None if there is no rule: a rank would have several boxes, or one that does not save has a part.
    """
    mesh, order = dtensor.device_mesh, given_shard_order(dtensor)
    known = _known.setdefault(mesh, {})
    said = (
        dtensor.dim(),
        tuple(map(said_by, placements_of(dtensor))),
        None if order is None else tuple((dim, tuple(mesh_dims)) for dim, mesh_dims in order.items()),
        world_size,
        members,
    )
    if said not in known:
        ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]
        known[said] = _among(
            division_of_mesh(dtensor.dim(), tuple(mesh.shape), placements_of(dtensor), ranks, shard_order=order),
            world_size,
            members,
        )
    return known[said]


_known: WeakKeyDictionary[DeviceMesh, dict[object, Division | None]] = WeakKeyDictionary()
"""The rules of each mesh: hundreds of tensors have the same one, and a mesh may have thousands of ranks."""


def division_of_mesh(
    ndim: int,
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    ranks: Sequence[int],
    *,
    shard_order: ShardOrder | None = None,
) -> Division | None:
    """The rule for a tensor of ``ndim`` dimensions on a mesh, whose ranks are listed row by row.

    None if strided shards are meant literally, so that a rank has several boxes.

    >>> from torch.distributed.tensor import Shard
    >>> division_of_mesh(2, (2, 3), (Replicate(), Shard(0)), range(6))
    Division(cuts=(Cut(dim=0, parts=3),), steps=(1,), copies=((2, 3),), ranks=(0, 1, 2, 3, 4, 5))
    """
    steps = [math.prod(mesh_shape[mesh_dim + 1 :]) for mesh_dim in range(len(mesh_shape))]
    cuts: list[tuple[Cut, int]] = []
    for dim, splits in sorted(split_order(ndim, mesh_shape, placements, shard_order=shard_order).items()):
        for mesh_dim, factor in splits:
            if mesh_shape[mesh_dim] == 1:
                continue
            if factor > 1:
                return None
            cuts.append((Cut(dim, mesh_shape[mesh_dim]), steps[mesh_dim]))
    copies = [
        (size, step)
        for size, step, placement in zip(mesh_shape, steps, placements, strict=True)
        if isinstance(placement, Replicate) and size > 1
    ]
    return Division(tuple(cut for cut, _ in cuts), tuple(step for _, step in cuts), _joined(copies), tuple(ranks))


def _joined(copies: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbouring dimensions of a mesh as one, so that what is the same is written in the same way."""
    joined: list[tuple[int, int]] = []
    for count, step in copies:
        if joined and joined[-1][1] == count * step:
            count *= joined.pop()[0]
        joined.append((count, step))
    return tuple(joined)


def _among(division: Division | None, world_size: int, members: tuple[int, ...] | None) -> Division | None:
    """The same rule with ranks counted among those that save."""
    if division is None or division.ranks is None:
        return division
    position = {rank: number for number, rank in enumerate(range(world_size) if members is None else members)}
    if not position.keys() >= set(division.ranks):
        return None
    ranks = tuple(position[rank] for rank in division.ranks)
    return division._replace(ranks=None if ranks == tuple(range(world_size)) else ranks)
