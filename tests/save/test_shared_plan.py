"""Plans that every rank computes: who writes what, that nothing is missing, and that nobody has much more to do."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast._base.boxes import Box
from holdfast._base.divisions import Cut, Division
from holdfast._base.tiling import tiling_problems
from holdfast._layout.descriptions import TensorDescription
from holdfast._layout.mesh_divisions import division_of_mesh
from holdfast._save.shared_plan import SharedPlan, has_a_rule, share_out
from tests.layout.test_placements import layouts
from tests.properties import examples
from tests.save.thread_ranks import held_by

WORLD = 64  # what no mesh of the property is larger than


def described(key: str, shape, division: Division | None, **fields) -> TensorDescription:
    # What a rank has itself is not looked at, so that one description does for all ranks.
    boxes = (Box((0,) * len(shape), tuple(shape)),)
    return TensorDescription(key, "float32", tuple(shape), "sharded", boxes, division=division, **fields)


@st.composite
def states(draw: st.DrawFn) -> list[TensorDescription]:
    random = draw(st.randoms(use_true_random=False))
    found = []
    for number in range(draw(st.integers(1, 6))):
        shape, mesh_shape, placements = draw(layouts())
        ranks = random.sample(range(WORLD), math.prod(mesh_shape))
        division = division_of_mesh(len(shape), mesh_shape, placements, ranks)
        if division is None or random.random() < 0.2:
            division = Division(copies=((WORLD, 1),))
        found.append(described(f"t{number}", shape, division, from_first_rank=random.random() < 0.1))
    return [one if has_a_rule(one) else one._replace(from_first_rank=False) for one in found]


def plans_of(descriptions, world_size: int, **options) -> list[SharedPlan]:
    return [share_out(descriptions, rank, world_size, **options) for rank in range(world_size)]


@settings(max_examples=examples(30), deadline=None)
@given(states(), st.sampled_from([1, 16, 100, 1 << 30]), st.booleans())
def test_all_ranks_find_the_same_and_write_everything_once_from_what_they_have(descriptions, smallest, cut):
    plans = plans_of(descriptions, WORLD, cut_copies=cut, smallest_share=smallest)
    assert all((plan.tensors, plan.parts) == (plans[0].tensors, plans[0].parts) for plan in plans)
    written: list[list[Box]] = [[] for _ in descriptions]
    for rank, plan in enumerate(plans):
        assert list(plan.chunks) == sorted(plan.chunks, key=lambda chunk: (chunk.tensor, chunk.offsets))
        for chunk in plan.chunks:
            assert chunk.key == descriptions[chunk.tensor].key
            assert chunk.nbytes
            written[chunk.tensor].append(Box(chunk.offsets, chunk.sizes))
            held = held_by(rank, descriptions[chunk.tensor].division, chunk.shape, WORLD)
            assert held is not None
            for at, length, first, size in zip(chunk.offsets, chunk.sizes, *held, strict=True):
                assert first <= at
                assert at + length <= first + size
    for one, boxes in zip(descriptions, written, strict=True):
        assert tiling_problems(boxes, one.shape) == []


@settings(max_examples=examples(30), deadline=None)
@given(states(), st.sampled_from([1, 16, 100]))
def test_the_stored_rule_says_who_wrote_what(descriptions, smallest):
    plans = plans_of(descriptions, WORLD, smallest_share=smallest)
    found = {
        (chunk.tensor, chunk.offsets, chunk.sizes): rank for rank, plan in enumerate(plans) for chunk in plan.chunks
    }
    said = {}
    for number, (ref, (division, first)) in enumerate(zip(plans[0].tensors, plans[0].parts, strict=True)):
        assert not division.copies
        offsets, sizes = division.boxes(ref.shape)
        writers = division.ranks_with(first=first, world_size=WORLD)[:, 0]
        for at, lengths, rank in zip(offsets.tolist(), sizes.tolist(), writers.tolist(), strict=True):
            if all(lengths):
                said[number, tuple(at), tuple(lengths)] = rank
    assert said == found


def loads(descriptions, world_size: int, **options) -> list[int]:
    return [sum(chunk.nbytes for chunk in plan.chunks) for plan in plans_of(descriptions, world_size, **options)]


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 12), st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=20))
@example(10, [(5, 7), (14, 6)])
def test_what_all_ranks_have_is_balanced_by_bytes(world_size, shapes):
    """The parts of a tensor go to ranks that follow each other, so that one may get a part more than the least busy."""
    everywhere = Division(copies=((world_size, 1),))
    descriptions = [described(f"t{number}", shape, everywhere) for number, shape in enumerate(shapes)]
    found = loads(descriptions, world_size, smallest_share=64)
    total = sum(4 * math.prod(shape) for shape in shapes)
    largest = max(
        chunk.nbytes for plan in plans_of(descriptions, world_size, smallest_share=64) for chunk in plan.chunks
    )
    assert sum(found) == total
    assert max(found) <= total / world_size + 2 * largest


def test_one_large_tensor_that_all_have_is_written_by_all():
    assert loads([described("w", (64, 100), Division(copies=((8, 1),)))], 8, smallest_share=100) == [3200] * 8


def test_groups_of_shards_that_several_have_share_them_too():
    hsdp = Division((Cut(0, 4),), (1,), ((4, 4),))
    assert loads([described("w", (64, 100), hsdp)], 16, smallest_share=100) == [1600] * 16
    inner = Division((Cut(0, 4),), (4,), ((4, 1),))
    assert loads([described("w", (64, 100), inner)], 16, smallest_share=100) == [1600] * 16
    apart = Division((Cut(0, 2),), (4,), ((2, 8), (4, 1)))
    few = loads([described(f"w{n}", (64, 100), apart) for n in range(2)], 16, smallest_share=100)
    assert few == [3200] * 16


def test_small_tensors_are_kept_whole_and_spread():
    everywhere = Division(copies=((4, 1),))
    plans = plans_of([described(f"t{n}", (10,), everywhere) for n in range(8)], 4)
    assert [[chunk.sizes for chunk in plan.chunks] for plan in plans] == [[(10,), (10,)]] * 4


def test_ranks_that_have_shards_of_their_own_to_write_get_less_of_the_rest():
    mine = Division((Cut(0, 2),), (1,), (), (0, 1))
    everywhere = Division(copies=((4, 1),))
    descriptions = [described("own", (20,), mine), described("a", (10,), everywhere), described("b", (10,), everywhere)]
    assert loads(descriptions, 4) == [40, 40, 40, 40]


def test_copies_that_nobody_compares_are_not_mixed():
    everywhere = Division(copies=((4, 1),))
    assert sorted(loads([described("w", (64,), everywhere)], 4, smallest_share=1, cut_copies=False)) == [0, 0, 0, 256]
    assert sorted(loads([described("w", (64,), everywhere)], 4, smallest_share=1)) == [64] * 4


def test_what_the_first_rank_has_is_written_by_the_first_rank():
    everywhere = Division(copies=((4, 1),))
    buffers = [described(f"b{n}", (64,), everywhere, from_first_rank=True) for n in range(3)]
    assert loads(buffers, 4, smallest_share=1) == [3 * 256, 0, 0, 0]


def test_a_share_is_one_run_of_bytes():
    everywhere = Division(copies=((8, 1),))
    for shape in [(2, 3, 8), (1, 50), (7, 3), (3, 1, 9)]:
        for plan in plans_of([described("w", shape, everywhere)], 8, smallest_share=4):
            for chunk in plan.chunks:
                cells = np.arange(math.prod(shape)).reshape(shape)
                box = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
                found = cells[box].ravel()
                assert (np.diff(found) == 1).all()


def test_names_of_one_tensor_are_stored_once():
    everywhere = Division(copies=((2, 1),))
    descriptions = [described("a", (4,), everywhere), described("b", (4,), everywhere, tied_to="a")]
    plan = share_out(descriptions, 0, 2)
    assert plan.ties == {"b": "a"}
    assert [ref.key for ref in plan.tensors] == ["a"]


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "tp+fsdp", "ddp"])
def test_thousands_of_ranks_take_no_list_of_all_chunks(layout):
    world_size, count = 16384, 50
    division = {
        "fsdp": Division((Cut(0, world_size),), (1,)),
        "hsdp": Division((Cut(0, 8),), (1,), ((world_size // 8, 8),)),
        "tp+fsdp": Division((Cut(0, 8), Cut(0, world_size // 8)), (1, 8)),
        "ddp": Division(copies=((world_size, 1),)),
    }[layout]
    descriptions = [described(f"t{number}", (20000, 512), division) for number in range(count)]
    plan_of = partial(share_out, descriptions, world_size=world_size)
    plan = plan_of(rank=7)
    assert plan.parts == plan_of(rank=world_size - 1).parts
    assert len({id(parts.division) for parts in plan.parts}) == 1  # one rule for all
    assert len(plan.chunks) <= count
