"""The rules of meshes, against the pieces that single ranks hold, and against what DTensor gives them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, _dtensor_spec
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast._base.boxes import volume
from holdfast._base.divisions import Cut, Division
from holdfast._compat.tensors import local_part
from holdfast._layout.mesh_divisions import division_of_mesh, dtensor_division
from holdfast._layout.placements import dtensor_pieces, local_pieces
from tests.layout.test_placements import (
    SizesOnly,
    box_in,
    coordinates,
    each_rank_in_turn,
    layouts,
    shard_fully_as_every_rank,
)
from tests.properties import examples
from tests.rank_pool import RankPool
from tests.sharding import dtensor_of
from tests.torches import since


def held_by_rule(division: Division, shape: Sequence[int], world_size: int) -> dict[int, tuple]:
    """The box that each rank has, without those that have no cells."""
    offsets, sizes = division.boxes(shape)
    held: dict[int, tuple] = {}
    for at, lengths, ranks in zip(offsets, sizes, division.ranks_with(world_size=world_size), strict=True):
        for rank in ranks.tolist():
            assert rank not in held
            held[rank] = tuple(at.tolist()), tuple(lengths.tolist())
    return {rank: box for rank, box in held.items() if volume(box[1])}


def held_by_pieces(shape, mesh_shape, placements, ranks, order=None) -> dict[int, tuple]:
    mesh = np.array(ranks).reshape(mesh_shape)
    held = {}
    for coordinate in coordinates(mesh_shape):
        pieces = local_pieces(shape, mesh_shape, coordinate, placements, shard_order=order)
        assert len(pieces) == 1
        if volume(pieces[0].sizes):
            held[int(mesh[coordinate])] = pieces[0].offsets, pieces[0].sizes
    return held


@settings(max_examples=examples(300), deadline=None)
@given(layouts(), st.randoms(use_true_random=False))
def test_the_rule_of_a_mesh_says_what_each_of_its_ranks_holds(layout, random):
    shape, mesh_shape, placements = layout
    world_size = math.prod(mesh_shape) + 2  # of which not all are in the mesh
    ranks = random.sample(range(world_size), math.prod(mesh_shape))
    division = division_of_mesh(len(shape), mesh_shape, placements, ranks)
    if division is None:
        assert any(isinstance(placement, _StridedShard) for placement in placements)
        return
    assert held_by_rule(division, shape, world_size) == held_by_pieces(shape, mesh_shape, placements, ranks)


@settings(max_examples=examples(200), deadline=None)
@given(layouts())
def test_only_what_may_be_several_boxes_has_no_rule(layout):
    shape, mesh_shape, placements = layout
    if division_of_mesh(len(shape), mesh_shape, placements, range(math.prod(mesh_shape))) is None:
        # Of a shape that is large enough, some rank has several boxes.
        large = [64 * math.prod(mesh_shape) * 720] * len(shape)
        assert any(len(local_pieces(large, mesh_shape, at, placements)) > 1 for at in coordinates(mesh_shape))


@st.composite
def orders_of_splits(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    return [draw(st.integers(0, 40)), 2], mesh_shape, draw(st.permutations(range(len(mesh_shape))))


@settings(max_examples=examples(200), deadline=None)
@given(orders_of_splits())
def test_splits_in_any_order_have_a_rule(layout):
    shape, mesh_shape, order = layout
    ranks = range(math.prod(mesh_shape))
    plain: list[Placement] = [Shard(0)] * len(mesh_shape)
    division = division_of_mesh(2, mesh_shape, plain, ranks, shard_order={0: order})
    assert division is not None
    assert held_by_rule(division, shape, len(ranks)) == held_by_pieces(shape, mesh_shape, plain, ranks, {0: order})


@since(_dtensor_spec, "ShardOrderEntry")
@settings(max_examples=examples(200), deadline=None)
@given(orders_of_splits())
def test_an_order_that_is_written_as_strided_shards_has_a_rule(layout):
    shape, mesh_shape, order = layout
    ranks = range(math.prod(mesh_shape))
    entry = _dtensor_spec.ShardOrderEntry(0, tuple(order))
    plain = (Shard(0),) * len(mesh_shape)
    strided = DTensorSpec._convert_shard_order_to_StridedShard((entry,), plain, SizesOnly(mesh_shape))
    division = division_of_mesh(2, mesh_shape, strided, ranks)
    assert division is not None
    assert held_by_rule(division, shape, len(ranks)) == held_by_pieces(shape, mesh_shape, strided, ranks)


def test_dimensions_of_one_rank_leave_nothing_in_the_rule():
    division = division_of_mesh(2, (1, 2, 1), (Replicate(), Shard(1), _StridedShard(0, split_factor=3)), range(2))
    assert division == Division((Cut(1, 2),), (1,), (), (0, 1))


def test_replication_over_neighbouring_dimensions_is_one():
    rule = Division((), (), ((6, 1),), tuple(range(6)))
    assert division_of_mesh(1, (2, 3), (Replicate(), Replicate()), range(6)) == rule
    assert division_of_mesh(1, (6,), (Replicate(),), range(6)) == rule
    apart = division_of_mesh(1, (2, 2, 3), (Replicate(), Shard(0), Replicate()), range(12))
    assert apart is not None
    assert apart.copies == ((2, 6), (3, 1))


# --- real ranks --------------------------------------------------------------------------------------------------


def check_against(tensor, full, *, members=None) -> Division:
    """That the rule and the data of this rank agree. Returns the rule."""
    world_size = dist.get_world_size() if members is None else len(members)
    me = dist.get_rank() if members is None else members.index(dist.get_rank())
    division = dtensor_division(tensor, world_size, members)
    assert division is not None
    assert dtensor_division(tensor, world_size, members) is division  # made once
    held = held_by_rule(division, full.shape, world_size).get(me)
    local = local_part(tensor).detach()
    if held is None:
        assert local.numel() == 0
        assert not any(volume(piece.sizes) for piece in dtensor_pieces(tensor))
    else:
        assert torch.equal(box_in(full, *held), local)
    return division


def compare_rules_with_what_is_held():
    """Random meshes with ranks in any order, of which a rank may not be a part."""
    random = np.random.default_rng(7)
    rules = []
    for _ in range(40):
        size = int(random.integers(1, 5))
        ranks = random.permutation(4)[:size]
        mesh_shape = [(size,), (1, size), (size, 1)] + ([(2, 2), (2, 1, 2)] if size == 4 else [])
        mesh = DeviceMesh("cpu", torch.tensor(ranks.tolist()).view(mesh_shape[random.integers(len(mesh_shape))]))
        full = torch.arange(math.prod(shape := random.integers(0, 8, 2).tolist())).view(shape)
        placements = [[Shard(0), Shard(1), Replicate()][random.integers(3)] for _ in mesh.shape]
        rules.append(check_against(dtensor_of(full, mesh, placements), full))
    return rules


def test_the_rule_is_what_distributed_tensors_hold_and_all_ranks_know_it(ranks: RankPool):
    rules = ranks(4).run(compare_rules_with_what_is_held)
    assert rules == [rules[0]] * 4
    assert any(rule.ranks is not None for rule in rules[0])


def rules_of_slices():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(10).view(5, 2)
    return [check_against(dtensor_of(full, mesh[name], [Shard(0)]), full).ranks for name in ("dp", "tp")]


def test_a_slice_of_a_mesh_has_the_ranks_of_the_slice(ranks: RankPool):
    assert ranks(4).run(rules_of_slices) == [[(0, 2), (0, 1)], [(1, 3), (0, 1)], [(0, 2), (2, 3)], [(1, 3), (2, 3)]]


def rules_within_a_group():
    full = torch.arange(7)
    tensor = dtensor_of(full, DeviceMesh("cpu", [3, 1]), [Shard(0)])
    too_few = dtensor_division(tensor, 2, (0, 3))
    within = None if dist.get_rank() in (0, 2) else check_against(tensor, full, members=(1, 3))
    return too_few, within


def test_ranks_are_counted_among_those_that_save(ranks: RankPool):
    rule = Division((Cut(0, 2),), (1,), (), (1, 0))
    assert ranks(4).run(rules_within_a_group) == [(None, None), (None, rule), (None, None), (None, rule)]


def rule_of_a_flattened_view():
    mesh = init_device_mesh("cpu", (2,))
    flattened = dtensor_of(torch.arange(24).view(3, 8), mesh, [Shard(1)]).view(-1)
    return dtensor_division(flattened, 2), flattened.placements[0].is_replicate()


def test_a_flattened_view_has_no_rule(ranks: RankPool):
    rules = ranks(2).run(rule_of_a_flattened_view)
    if rules[0][1]:
        pytest.skip("the installed torch gathers what is flattened, and so needs no strided shards")
    assert rules == [(None, False)] * 2


def rules_as_every_rank(mesh_shape, names):
    full = torch.arange(math.prod(mesh_shape) * 3 + 1)
    rules = []
    for mesh in each_rank_in_turn(mesh_shape, names):
        rules += [
            (placements, check_against(dtensor_of(full, mesh, placements), full))
            for placements in itertools.product([Shard(0), Replicate()], repeat=len(mesh_shape))
        ]
    return len(rules), len({str(rule) for rule in rules})


@pytest.mark.parametrize("mesh_shape", [(12,), (3, 4), (2, 3, 2)])
def test_rules_of_more_ranks_than_there_are_processes(ranks: RankPool, mesh_shape):
    (counts,) = ranks(1).run(rules_as_every_rank, mesh_shape, ("a", "b", "c")[: len(mesh_shape)], process_group=False)
    kinds = 2 ** len(mesh_shape)
    assert counts == (math.prod(mesh_shape) * kinds, kinds)


def fsdp_rules_as_every_rank(mesh_shape, names, sizes):
    held = shard_fully_as_every_rank(mesh_shape, names, sizes)
    placements = [_StridedShard(0, split_factor=mesh_shape[1]), Shard(0)]
    for size in sizes:
        division = division_of_mesh(2, mesh_shape, placements, range(math.prod(mesh_shape)))
        by_rule = held_by_rule(division, (size, 2), math.prod(mesh_shape))
        by_fsdp = {n: (p.offsets, p.sizes) for n, p in enumerate(held[size]) if volume(p.sizes)}
        assert by_rule == by_fsdp
    return True


@pytest.mark.parametrize("mesh_shape", [(3, 2), (3, 4)])
def test_fsdp_over_tensor_parallelism_follows_its_rule_for_uneven_sizes_too(ranks: RankPool, mesh_shape):
    sizes = (1, 5, 7, 9, 27)
    assert ranks(1).run(fsdp_rules_as_every_rank, mesh_shape, ("dp", "tp"), sizes, process_group=False) == [True]
