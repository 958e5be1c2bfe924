"""Layouts, against torch: its own splitting of tensors, real ranks, FSDP2 itself, and what stock DCP records."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    _dtensor_spec,
    _utils,
    distribute_tensor,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast._base.boxes import Box, first_overlap, uncovered, volume
from holdfast._compat.dtensors import splits_parts_of_their_own_sizes
from holdfast._layout.placements import LocalPiece, dtensor_pieces, is_replicated, local_pieces
from holdfast.errors import UnsupportedTensorError
from tests.rank_pool import RankPool
from tests.sharding import dtensor_of, mesh_of_all_ranks, sharded, whole
from tests.torches import clear_sharding_cache, fsdp2_splits_unevenly, since

PARTIAL = "Any checkpointing related operations are not supported for DTensor with partial placements!"


def for_all(*strategies):
    """Hypothesis' `given`, on however slow a machine."""
    return lambda test: settings(deadline=None)(given(*strategies)(test))


def coordinates(mesh_shape: Sequence[int]) -> Iterable[tuple[int, ...]]:
    return itertools.product(*map(range, mesh_shape))


def box_in(tensor, offsets, sizes):
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]


def assert_pieces_are(local: torch.Tensor, pieces: Sequence[LocalPiece], full: torch.Tensor) -> None:
    """Every element of the local tensor is in one piece, and each piece holds its box of the full tensor."""
    places = [Box(piece.local_offsets, piece.sizes) for piece in pieces]
    assert first_overlap(places) is None
    assert sum(volume(piece.sizes) for piece in pieces) == local.numel()
    for piece in pieces:
        assert torch.equal(box_in(local, piece.local_offsets, piece.sizes), box_in(full, piece.offsets, piece.sizes))


# --- any layout --------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn, strided: bool = True) -> tuple[list[int], list[int], list[Placement]]:
    """A shape, the shape of a mesh, and placements."""
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    dims = st.integers(-len(shape), len(shape) - 1)
    kinds = [st.just(Replicate()), dims.map(Shard), dims.map(Shard)]
    if strided:
        kinds.append(st.builds(lambda dim, sf: _StridedShard(dim, split_factor=sf), dims, st.integers(1, 6)))
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    return shape, mesh_shape, [draw(st.one_of(kinds)) for _ in mesh_shape]


@for_all(layouts())
def test_the_pieces_of_all_ranks_tile_the_tensor(layout):
    shape, mesh_shape, placements = layout
    held = np.zeros(shape, int)
    for coordinate in coordinates(mesh_shape):
        if not any(c for c, p in zip(coordinate, placements, strict=True) if isinstance(p, Replicate)):
            for piece in local_pieces(shape, mesh_shape, coordinate, placements):
                box_in(held, piece.offsets, piece.sizes)[...] += 1
    assert (held == 1).all()


@for_all(layouts())
def test_replicas_hold_the_same_pieces_and_nobody_else_does(layout):
    shape, mesh_shape, placements = layout
    holders: dict[tuple[LocalPiece, ...], int] = {}
    for coordinate in coordinates(mesh_shape):
        pieces = tuple(local_pieces(shape, mesh_shape, coordinate, placements))
        if volume(pieces[0].sizes):
            holders[pieces] = holders.get(pieces, 0) + 1
    copies = math.prod(n for n, p in zip(mesh_shape, placements, strict=True) if isinstance(p, Replicate))
    assert set(holders.values()) <= {copies}
    assert is_replicated(mesh_shape, placements) == (copies > 1)


@for_all(layouts())
def test_pieces_fill_the_local_tensor_and_ascend(layout):
    shape, mesh_shape, placements = layout
    for coordinate in coordinates(mesh_shape):
        pieces = local_pieces(shape, mesh_shape, coordinate, placements)
        ends = [np.add(piece.local_offsets, piece.sizes) for piece in pieces]
        local_shape = np.max(ends, axis=0).tolist()
        places = [Box(piece.local_offsets, piece.sizes) for piece in pieces]
        assert first_overlap(places) is None
        assert uncovered(Box((0,) * len(shape), tuple(local_shape)), places) is None
        assert [piece.offsets for piece in pieces] == sorted(piece.offsets for piece in pieces)
        assert len(pieces) == 1 or all(volume(piece.sizes) for piece in pieces)


def split_by_torch(full: torch.Tensor, mesh_shape, coordinate, placements) -> torch.Tensor:
    """What torch gives to a rank if it applies the placements one after the other."""
    local = full
    for ways, mine, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, _StridedShard) and not splits_parts_of_their_own_sizes():
            assume(local.shape[placement.dim] % (ways * placement.split_factor) == 0)  # others are refused
        if not isinstance(placement, Replicate):
            local = placement._split_tensor(local, ways, with_padding=False)[0][mine]
    return local


def positive(placements: Iterable[Placement], ndim: int) -> list[Placement]:
    """The placements with dimensions counted from the front, as torch's inner functions want them."""
    counted_from_front: list[Placement] = []
    for placement in placements:
        if isinstance(placement, _StridedShard):
            placement = _StridedShard(placement.dim % ndim, split_factor=placement.split_factor)
        elif isinstance(placement, Shard):
            placement = Shard(placement.dim % ndim)
        counted_from_front.append(placement)
    return counted_from_front


def left_to_right(placements: Sequence[Placement], ndim: int) -> dict[int, list[int]]:
    order: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(placements):
        if not isinstance(placement, Replicate):
            order.setdefault(placement.dim % ndim, []).append(mesh_dim)
    return order


@for_all(layouts())
def test_placements_applied_from_left_to_right_give_what_torch_splits_off(layout):
    shape, mesh_shape, placements = layout
    full = torch.arange(math.prod(shape)).view(shape)
    order = left_to_right(placements, len(shape))
    for coordinate in coordinates(mesh_shape):
        local = split_by_torch(full, mesh_shape, coordinate, positive(placements, len(shape)))
        pieces = local_pieces(shape, mesh_shape, coordinate, placements, shard_order=order)
        assert_pieces_are(local, pieces, full)


class SizesOnly:
    """As much of a DeviceMesh as torch needs to find the order of splits."""

    def __init__(self, shape):
        self.shape = shape

    def size(self, dim):
        return self.shape[dim]


@st.composite
def orders(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    shape = [draw(st.integers(0, 40)), 2]
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    return shape, mesh_shape, draw(st.permutations(range(len(mesh_shape))))


@since(_dtensor_spec, "ShardOrderEntry")
@for_all(orders())
def test_an_order_of_splits_written_as_strided_shards_is_read_as_that_order(layout):
    shape, mesh_shape, order = layout
    full = torch.arange(math.prod(shape)).view(shape)
    plain = (Shard(0),) * len(mesh_shape)
    entry = _dtensor_spec.ShardOrderEntry(0, tuple(order))
    strided = DTensorSpec._convert_shard_order_to_StridedShard((entry,), plain, SizesOnly(mesh_shape))
    for coordinate in coordinates(mesh_shape):
        local = full
        for mesh_dim in order:
            local = Shard(0)._split_tensor(local, mesh_shape[mesh_dim], with_padding=False)[0][coordinate[mesh_dim]]
        pieces = local_pieces(shape, mesh_shape, coordinate, strided)
        assert len(pieces) == 1
        assert_pieces_are(local, pieces, full)


@since(_dtensor_spec, "ShardOrderEntry")
@for_all(layouts())
def test_strided_shards_are_read_as_an_order_exactly_when_torch_can(layout):
    shape, mesh_shape, placements = layout
    normal = positive(placements, len(shape))
    order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(tuple(normal), SizesOnly(mesh_shape))
    if order is None:
        as_order, meant = placements, left_to_right(placements, len(shape))
    else:
        as_order = [p if isinstance(p, Replicate) else Shard(p.dim) for p in placements]
        meant = {entry.tensor_dim: entry.mesh_dims for entry in order}
    for coordinate in coordinates(mesh_shape):
        expected = local_pieces(shape, mesh_shape, coordinate, as_order, shard_order=meant)
        assert local_pieces(shape, mesh_shape, coordinate, placements) == expected


@since(_utils, "_compute_local_shape_and_global_offset")
@for_all(layouts(strided=False))
def test_plain_shards_lie_where_stock_records_them_empty_ones_too(layout):
    shape, mesh_shape, placements = layout
    for coordinate in coordinates(mesh_shape):
        sizes, offsets = _utils._compute_local_shape_and_global_offset(
            tuple(shape), tuple(mesh_shape), list(coordinate), positive(placements, len(shape))
        )
        (piece,) = local_pieces(shape, mesh_shape, coordinate, placements)
        assert (piece.offsets, piece.sizes) == (offsets, sizes)


# --- particular layouts ------------------------------------------------------------------------------------------


def test_more_ranks_than_rows_leave_the_last_ones_an_empty_piece_at_the_end():
    pieces = [local_pieces((3, 2), (4,), (rank,), [Shard(0)]) for rank in range(4)]
    assert [(p.offsets, p.sizes) for (p,) in pieces] == [
        ((0, 0), (1, 2)),
        ((1, 0), (1, 2)),
        ((2, 0), (1, 2)),
        ((3, 0), (0, 2)),
    ]


def test_a_tensor_without_dimensions_is_one_piece():
    assert local_pieces((), (2,), (1,), [Replicate()]) == [LocalPiece((), (), ())]


def test_a_literal_strided_shard_is_several_pieces():
    pieces = local_pieces((9,), (4,), (1,), [_StridedShard(0, split_factor=2)])
    assert pieces == [LocalPiece((2,), (2,), (0,)), LocalPiece((6,), (1,), (2,))]


def test_stretches_that_continue_each_other_are_one_piece():
    placements = [_StridedShard(0, split_factor=3), Replicate()]
    assert local_pieces((6,), (1, 2), (0, 0), placements) == [LocalPiece((0,), (6,), (0,))]


def test_uneven_shards_of_fsdp_over_tensor_parallelism_are_split_by_tensor_parallelism_first():
    # 7 rows: tensor parallelism makes 0-3 and 4-6, each of which FSDP splits in three.
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    held = {c: local_pieces((7,), (3, 2), c, placements) for c in coordinates((3, 2))}
    stretches = {c: (p.offsets[0], p.offsets[0] + p.sizes[0]) for c, (p,) in held.items()}
    assert stretches == {(0, 0): (0, 2), (1, 0): (2, 4), (2, 0): (7, 7), (0, 1): (4, 5), (1, 1): (5, 6), (2, 1): (6, 7)}


def test_replication_over_one_rank_is_none():
    assert not is_replicated((1, 4), [Replicate(), Shard(0)])
    assert is_replicated((2, 4), [Replicate(), Shard(0)])


def test_partial_placements_are_refused():
    with pytest.raises(ValueError, match=PARTIAL):
        local_pieces((4,), (2,), (0,), [Partial()])


@pytest.mark.parametrize(("shape", "placement"), [((4,), Shard(1)), ((4,), Shard(-2)), ((), Shard(0))])
def test_a_shard_of_a_dimension_that_is_not_there_is_refused(shape, placement):
    with pytest.raises(ValueError, match="does not have"):
        local_pieces(shape, (2,), (0,), [placement])


def test_a_placement_for_each_mesh_dimension_is_needed():
    with pytest.raises(ValueError, match="as many entries"):
        local_pieces((4,), (2, 2), (0, 0), [Shard(0)])


# --- real ranks --------------------------------------------------------------------------------------------------


def counted(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


def check(dtensor: DTensor, full: torch.Tensor, *, as_stock: bool = True) -> list[LocalPiece]:
    pieces = dtensor_pieces(dtensor)
    assert_pieces_are(dtensor._local_tensor.detach(), pieces, full)
    if as_stock:
        recorded = [(tuple(c.offsets), tuple(c.sizes)) for c in dtensor.__create_chunk_list__()]
        held = [(piece.offsets, piece.sizes) for piece in pieces]
        if not hasattr(_utils, "_compute_local_shape_and_global_offset"):  # older ones put empty ones anywhere
            held, recorded = ([(at, n) for at, n in chunks if volume(n)] for chunks in (held, recorded))
        assert held == recorded
    return pieces


def distribute_over_one_dimension():
    mesh = mesh_of_all_ranks()
    for size, placement in itertools.product(range(10), [Shard(0), Shard(1), Shard(-1), Replicate()]):
        full = counted(size, 3)
        check(distribute_tensor(full, mesh, [placement]), full)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_distributed_tensors_hold_their_pieces(ranks: RankPool, world_size):
    ranks(world_size).run(distribute_over_one_dimension)


def distribute_over_two_dimensions():
    mesh = init_device_mesh("cpu", (2, 2))
    for shape, placements in itertools.product(
        [(1, 5), (3, 2), (4, 4), (5, 7), (9, 1)],
        itertools.product([Shard(0), Shard(1), Replicate()], repeat=2),
    ):
        full = counted(*shape)
        check(dtensor_of(full, mesh, placements), full)  # not every torch can send empty parts


def test_distributed_tensors_hold_their_pieces_on_a_2d_mesh(ranks: RankPool):
    ranks(4).run(distribute_over_two_dimensions)


SIZES_OVER_TENSOR_PARALLELISM = range(1, 10) if fsdp2_splits_unevenly() else (4, 8)


def shard_fully_over_tensor_parallelism():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for size in SIZES_OVER_TENSOR_PARALLELISM:
        full = counted(size, 3)
        model = nn.Linear(3, size, bias=False)
        model.weight = nn.Parameter(full.clone())
        parallelize_module(model, mesh["tp"], ColwiseParallel())
        fully_shard(model, mesh=mesh["dp"])
        assert model.weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
        check(model.weight, full)
        assert torch.equal(whole(model.weight), full)
        if splits_parts_of_their_own_sizes() or size % 4 == 0:  # else torch puts it together in another way
            assert torch.equal(model.weight.full_tensor().detach(), full)
        found.append(dtensor_pieces(model.weight))
    return found


def test_fsdp_over_tensor_parallelism_holds_its_pieces(ranks: RankPool):
    held = ranks(4).run(shard_fully_over_tensor_parallelism)
    for size, of_ranks in zip(SIZES_OVER_TENSOR_PARALLELISM, zip(*held, strict=True), strict=True):
        assert sum(volume(piece.sizes) for pieces in of_ranks for piece in pieces) == size * 3


def shard_fully_with_replicas():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for size in (1, 4, 5):
        full = counted(size, 3)
        model = nn.Linear(3, size, bias=False)
        model.weight = nn.Parameter(full.clone())
        fully_shard(model, mesh=mesh)
        check(model.weight, full)
        assert is_replicated(mesh.shape, model.weight.placements)


def test_hsdp_holds_its_pieces(ranks: RankPool):
    ranks(4).run(shard_fully_with_replicas)


def redistribute_to_strided_shards():
    mesh = init_device_mesh("cpu", (2, 2))
    # Older ones split unevenly in a way in which they do not find the data again, or not at all.
    for size in range(1, 10) if splits_parts_of_their_own_sizes() else (4, 8):
        full = counted(size, 3)
        replicated = distribute_tensor(full, mesh, [Replicate(), Replicate()])
        check(replicated.redistribute(placements=[_StridedShard(0, split_factor=2), Shard(0)]), full)


def test_redistributed_tensors_hold_their_pieces(ranks: RankPool):
    ranks(4).run(redistribute_to_strided_shards)


def flatten_a_column_sharded_tensor():
    full = counted(3, 8)
    flat = sharded(full, 1).view(-1)
    assert flat.placements == (_StridedShard(0, split_factor=3),)
    return check(flat, full.view(-1), as_stock=False)


def test_a_flattened_view_holds_one_piece_per_row(ranks: RankPool):
    # Stock records one chunk of 12 elements here, most of which are another rank's.
    held = ranks(2).run(flatten_a_column_sharded_tensor)
    assert held[0] == [LocalPiece((0,), (4,), (0,)), LocalPiece((8,), (4,), (4,)), LocalPiece((16,), (4,), (8,))]
    assert held[1] == [LocalPiece((4,), (4,), (0,)), LocalPiece((12,), (4,), (4,)), LocalPiece((20,), (4,), (8,))]


def distribute_over_some_ranks():
    mesh = DeviceMesh("cpu", [0, 2])
    full = counted(5)
    return check(distribute_tensor(full, mesh, [Shard(0)]), full, as_stock=dist.get_rank() != 1)


def test_a_rank_outside_of_the_mesh_holds_nothing(ranks: RankPool):
    held = ranks(3).run(distribute_over_some_ranks)
    assert held == [[LocalPiece((0,), (3,), (0,))], [], [LocalPiece((3,), (2,), (0,))]]


def build_from_local_data_of_other_sizes():
    mesh = init_device_mesh("cpu", (2,))
    local = counted(1 if dist.get_rank() == 0 else 3)
    dtensor_pieces(DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size([4]), stride=(1,)), key="model.w")


def test_local_data_that_does_not_fit_the_placements_is_refused(ranks: RankPool):
    for outcome, size in zip(ranks(2).run_raw(build_from_local_data_of_other_sizes), (1, 3), strict=True):
        assert isinstance(outcome.error.exception, UnsupportedTensorError)
        assert outcome.error.exception.key == "model.w"
        assert f"'model.w' holds local data of shape [{size}]" in outcome.error.message


def take_pieces_of_a_partial_tensor():
    mesh = init_device_mesh("cpu", (2,))
    dtensor_pieces(DTensor.from_local(counted(2), mesh, [Partial()]), key="model.w")


def test_a_tensor_that_still_has_to_be_reduced_is_refused(ranks: RankPool):
    for outcome in ranks(2).run_raw(take_pieces_of_a_partial_tensor):
        assert isinstance(outcome.error.exception, ValueError)
        assert PARTIAL in outcome.error.message
        assert "'model.w'" in outcome.error.message


# --- more ranks than processes: FSDP2 and DTensor do their splitting without communication -----------------------


def each_rank_in_turn(mesh_shape: Sequence[int], names: Sequence[str]) -> Iterable[DeviceMesh]:
    """Be each rank of a large world, one after the other, with a process group that does nothing."""
    world_size = math.prod(mesh_shape)
    for rank in range(world_size):
        clear_sharding_cache()  # or tensors would get the mesh, and so the coordinate, of the last rank
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            yield init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=tuple(names))
        finally:
            dist.destroy_process_group()
    clear_sharding_cache()


def shard_fully_as_every_rank(mesh_shape, names, sizes):
    """FSDP2 over the mesh dimensions called dp, in a tensor that all others have sharded before."""
    outer = tuple(name for name in names if name in ("replicate", "dp"))
    inner = tuple(name for name in names if name not in outer)
    held = {size: [] for size in sizes}
    for mesh in each_rank_in_turn(mesh_shape, names):
        for size in sizes:
            full = counted(size, 2)
            model = nn.Module()
            sharded = dtensor_of(full, mesh[inner], [Shard(0)] * len(inner))
            model.weight = nn.Parameter(sharded)
            fully_shard(model, mesh=mesh[outer])
            held[size] += check(model.weight, full, as_stock=False)
    return held


@pytest.mark.parametrize(
    ("mesh_shape", "names"),
    [
        ((3, 2), ("dp", "tp")),
        ((3, 4), ("dp", "tp")),
        ((2, 3, 2), ("replicate", "dp", "tp")),
        ((2, 2, 3), ("dp", "ep", "tp")),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
def test_uneven_shards_of_fsdp_over_other_parallelism_hold_their_pieces(ranks: RankPool, mesh_shape, names):
    # In these worlds, applying the placements from left to right would be wrong for some of the sizes.
    sizes = (1, 5, 7, 9, 27)
    (held,) = ranks(1).run(shard_fully_as_every_rank, mesh_shape, names, sizes, process_group=False)
    copies = mesh_shape[names.index("replicate")] if "replicate" in names else 1
    for size in sizes:
        rows = [row for p in held[size] for row in range(p.offsets[0], p.offsets[0] + p.sizes[0])]
        assert sorted(rows) == sorted(list(range(size)) * copies)


def split_literally_where_an_order_is_meant():
    """distribute_tensor takes strided shards literally, although the tensor it makes says that they are an order."""
    outcomes = []
    for mesh in each_rank_in_turn((3, 2), ("dp", "tp")):
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        tensor = dtensor_of(counted(7), mesh, placements)
        try:
            (piece,) = dtensor_pieces(tensor)
            if splits_parts_of_their_own_sizes():
                check(tensor, counted(7), as_stock=False)
            outcomes.append(piece.sizes[0])
        except UnsupportedTensorError:
            outcomes.append("refused")
    return outcomes


def test_a_tensor_that_was_not_split_as_it_says_is_refused_where_it_shows(ranks: RankPool):
    (outcomes,) = ranks(1).run(split_literally_where_an_order_is_meant, process_group=False)
    if splits_parts_of_their_own_sizes():
        assert outcomes == [2, 1, 2, 1, "refused", "refused"]
    assert "refused" in outcomes  # and with one rank all of them


def split_literally_and_unevenly():
    """A strided shard on a mesh of one dimension cannot be an order of splits."""
    outcomes = []
    for mesh in each_rank_in_turn((3,), ("dp",)):
        for size in (12, 13):
            full = counted(size)
            local = torch.cat([part.chunk(3)[mesh.get_local_rank()] for part in full.chunk(2)])
            tensor = DTensor.from_local(
                local, mesh, [_StridedShard(0, split_factor=2)], run_check=False, shape=full.shape, stride=(1,)
            )
            try:
                check(tensor, full, as_stock=False)
                outcomes.append(size)
            except UnsupportedTensorError as error:
                outcomes.append(error.kind)
    return outcomes


def test_literal_strided_shards_of_uneven_sizes_are_refused_where_torch_has_no_rule_for_them(ranks: RankPool):
    (outcomes,) = ranks(1).run(split_literally_and_unevenly, process_group=False)
    assert outcomes == [12, 13 if splits_parts_of_their_own_sizes() else "DTensor with uneven strided shards"] * 3


def split_in_an_order_of_its_own():
    for mesh in each_rank_in_turn((2, 3), ("a", "b")):
        a, b = mesh.get_coordinate()
        full = counted(8)
        local = full.chunk(3)[b].chunk(2)[a]
        order = (_dtensor_spec.ShardOrderEntry(0, (1, 0)),)
        spec = DTensorSpec(mesh, (Shard(0), Shard(0)), TensorMeta(full.shape, (1,), full.dtype), shard_order=order)
        check(DTensor(local, spec, requires_grad=False), full, as_stock=False)


@since(_dtensor_spec, "ShardOrderEntry")
def test_a_tensor_with_an_order_of_splits_of_its_own_holds_its_pieces(ranks: RankPool):
    ranks(1).run(split_in_an_order_of_its_own, process_group=False)
