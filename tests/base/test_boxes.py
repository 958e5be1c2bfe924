"""Box geometry, against masks of cells counted one by one."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._base import boxes as module
from holdfast._base.boxes import Box, cut, first_overlap, out_of_bounds, overlap, overlaps, place_of, uncovered, volume

SIDE = 7


@contextlib.contextmanager
def everything_is_many() -> Iterator[None]:
    """Make the few boxes of a test take the way of many: through arrays, and in batches of a handful."""
    with mock.patch.multiple(module, _FEW_PAIRS=0, _FAN_OUT=2, _BATCH_ROWS=5, _BATCH_PAIRS=12):
        yield


def for_all(*strategies, **named):
    """Hypothesis' `given`, on however slow a machine."""
    return lambda test: settings(deadline=None)(given(*strategies, **named)(test))


either_way = pytest.mark.parametrize("way", [contextlib.nullcontext, everything_is_many], ids=["few", "many"])


@st.composite
def boxes_of(draw: st.DrawFn, ndim: int, max_size: int = 12) -> list[Box]:
    """Boxes in a small space, some of them empty, many of them touching or overlapping."""
    side = st.integers(0, SIDE).flatmap(lambda low: st.tuples(st.just(low), st.integers(0, SIDE - low)))
    sides = draw(st.lists(st.lists(side, min_size=ndim, max_size=ndim), max_size=max_size))
    return [Box(tuple(low for low, _ in box), tuple(size for _, size in box)) for box in sides]


@st.composite
def tiling(draw: st.DrawFn, ndim: int) -> list[Box]:
    """A grid with irregular cuts, in any order, perhaps with a cell missing."""
    edges = [sorted({0, SIDE, *draw(st.lists(st.integers(0, SIDE), max_size=4))}) for _ in range(ndim)]
    cells = [
        Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell))
        for cell in itertools.product(*(list(itertools.pairwise(cuts)) for cuts in edges))
    ]
    shuffled = draw(st.permutations(cells))
    return shuffled[draw(st.integers(0, 1)) :]


space = st.integers(0, 3).flatmap(lambda ndim: st.tuples(boxes_of(ndim), boxes_of(ndim)))
crowd = st.integers(0, 3).flatmap(lambda ndim: st.one_of(boxes_of(ndim), tiling(ndim)))
scene = st.integers(0, 3).flatmap(
    lambda ndim: st.tuples(
        boxes_of(ndim).filter(bool).map(lambda some: some[0]), st.one_of(boxes_of(ndim), tiling(ndim))
    )
)


def mask(box: Box, side: int = SIDE) -> np.ndarray:
    cells = np.zeros((side,) * len(box.offsets), bool)
    cells[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] = True
    return cells


def region(start: tuple[int, ...], lengths: tuple[int, ...]) -> np.ndarray:
    return mask(Box(start, lengths))


def grid(*sides: tuple[int, int]) -> list[Box]:
    """Boxes of equal size; per dimension how many there are and how long each one is."""
    return [
        Box(tuple(i * length for i, (_, length) in zip(cell, sides, strict=True)), tuple(n for _, n in sides))
        for cell in itertools.product(*(range(count) for count, _ in sides))
    ]


# --- two boxes ---------------------------------------------------------------------------------------------------


def test_volume_is_the_number_of_cells():
    assert [volume(sizes) for sizes in [(3, 4), (3, 0), ()]] == [12, 0, 1]


@for_all(space)
def test_the_overlap_of_two_boxes_is_their_common_cells(lists):
    for a, b in itertools.product(*lists):
        common = mask(a) & mask(b)
        found = overlap(a.offsets, a.sizes, b.offsets, b.sizes)
        if found is None:
            assert not common.any()
        else:
            assert min(found[1], default=1) > 0
            assert (region(*found) == common).all()


def test_boxes_without_dimensions_always_match():
    assert overlap((), (), (), ()) == ((), ())


def test_boxes_of_different_dimensions_are_refused():
    with pytest.raises(ValueError, match="longer"):
        overlap((0,), (1,), (0, 0), (1, 1))


# --- lists of boxes ----------------------------------------------------------------------------------------------


@either_way
@for_all(lists=space)
def test_overlaps_are_all_pairs_with_common_cells(way, lists):
    targets, sources = lists
    with way():
        found = overlaps(targets, sources)
    pairs = [
        (t, s)
        for t, target in enumerate(targets)
        for s, source in enumerate(sources)
        if (mask(target) & mask(source)).any()
    ]
    assert sorted((o.target, o.source) for o in found) == pairs
    for o in found:
        assert (region(o.start, o.lengths) == (mask(targets[o.target]) & mask(sources[o.source]))).all()


@either_way
@for_all(lists=space)
def test_overlaps_come_by_target_then_by_the_offsets_of_the_source(way, lists):
    targets, sources = lists
    with way():
        found = overlaps(targets, sources)
    assert found == sorted(found, key=lambda o: (o.target, sources[o.source].offsets, o.source))


@either_way
def test_overlaps_are_plain_integers(way):
    with way():
        (found,) = overlaps([Box((0, 0), (2, 2))], [Box((1, 1), (2, 2))])
    assert found == (0, 0, (1, 1), (1, 1))
    numbers = (found.target, found.source, *found.start, *found.lengths)
    assert {type(number) for number in numbers} == {int}


@either_way
@for_all(boxes=crowd)
def test_first_overlap_is_the_first_pair_with_common_cells(way, boxes):
    masks = [mask(box) for box in boxes]
    pairs = itertools.combinations(range(len(boxes)), 2)
    expected = next(((i, j) for i, j in pairs if (masks[i] & masks[j]).any()), None)
    with way():
        assert first_overlap(boxes) == expected


def test_first_overlap_finds_a_repeated_cell_of_a_grid_and_a_box_across_cells():
    cells = grid((30, 4), (30, 4))
    assert first_overlap(cells) is None
    assert first_overlap([*cells, cells[7]]) == (7, 900)
    assert first_overlap([*cells, Box((2, 2), (3, 3))]) == (0, 900)
    assert first_overlap([*cells, Box((2, 2), (0, 3))]) is None


@either_way
def test_first_overlap_is_the_one_that_comes_first_in_the_list(way):
    left, right = Box((0,), (2,)), Box((2,), (2,))
    chain = [Box((2 * i,), (3,)) for i in range(20)]
    with way():
        assert first_overlap([right, left, left, right]) == (0, 3)
        assert first_overlap(chain) == (0, 1)


def test_boxes_that_start_at_the_same_row_but_end_at_different_ones_are_no_grid():
    short, long = Box((0, 0), (2, 1)), Box((0, 1), (5, 1))
    assert first_overlap([short, long, Box((3, 0), (1, 1))]) is None
    assert first_overlap([short, long, Box((3, 1), (1, 1))]) == (1, 2)


def test_boxes_without_dimensions_overlap_each_other():
    assert first_overlap([Box((), ())]) is None
    assert first_overlap([Box((), ()), Box((), ())]) == (0, 1)


def test_boxes_of_one_list_must_have_the_same_dimensions():
    with pytest.raises(ValueError, match="same number of dimensions"):
        first_overlap([Box((0,), (1,)), Box((0, 0), (1, 1))])


@for_all(st.integers(0, 3).flatmap(lambda ndim: boxes_of(ndim)), st.lists(st.integers(0, SIDE), min_size=3, max_size=3))
def test_out_of_bounds_are_the_boxes_with_a_side_beyond_the_shape(boxes, sides):
    shape = sides[: len(boxes[0].offsets)] if boxes else []
    expected = [
        i
        for i, box in enumerate(boxes)
        if any(o + n > side for o, n, side in zip(box.offsets, box.sizes, shape, strict=True))
    ]
    assert out_of_bounds(boxes, shape) == expected


def test_an_empty_box_may_lie_at_the_end():
    assert out_of_bounds([Box((3, 0), (0, 2))], (3, 2)) == []
    assert out_of_bounds([Box((4, 0), (0, 2))], (3, 2)) == [0]


def test_negative_numbers_and_other_dimensions_are_out_of_bounds():
    good, negative = Box((0, 0), (1, 1)), [Box((-1, 0), (1, 1)), Box((1, 0), (-1, 1))]
    assert out_of_bounds([good, *negative], (3, 2)) == [1, 2]
    assert out_of_bounds([good, *negative, Box((0,), (1,)), Box((0, 0, 0), (1, 1, 1))], (3, 2)) == [1, 2, 3, 4]


@either_way
@for_all(scene=scene)
def test_uncovered_is_a_part_of_the_target_without_pieces_or_there_is_none(way, scene):
    target, pieces = scene
    covered = np.zeros((SIDE,) * len(target.offsets), bool)
    for piece in pieces:
        covered |= mask(piece)
    with way():
        gap = uncovered(target, pieces)
    if gap is None:
        assert covered[mask(target)].all()
    else:
        assert volume(gap.sizes) > 0
        assert mask(target)[mask(gap)].all()
        assert not covered[mask(gap)].any()


@either_way
@for_all(boxes=st.integers(0, 3).flatmap(tiling))
def test_uncovered_tells_a_complete_tiling_from_one_with_a_hole(way, boxes):
    target = Box((0,) * len(boxes[0].offsets), (SIDE,) * len(boxes[0].offsets)) if boxes else Box((), ())
    complete = sum(volume(box.sizes) for box in boxes) == volume(target.sizes)
    with way():
        assert (uncovered(target, boxes) is None) == complete


def test_an_empty_target_needs_no_pieces():
    assert uncovered(Box((2, 0), (0, 3)), []) is None


def test_a_target_without_dimensions_needs_one_piece():
    assert uncovered(Box((), ()), []) == Box((), ())
    assert uncovered(Box((), ()), [Box((), ())]) is None


def test_the_hole_in_a_large_grid_is_found():
    cells = grid((40, 3), (40, 5))
    whole = Box((0, 0), (120, 200))
    assert uncovered(whole, cells) is None
    hole = cells.pop(777)
    assert uncovered(whole, cells) == hole
    assert uncovered(whole, [*cells, hole, hole]) is None  # pieces may overlap
    assert uncovered(whole, [*cells, cells[0]]) == hole  # and then their volume says nothing


def test_chunks_that_are_no_boxes_but_have_offsets_and_sizes_will_do():
    torch = pytest.importorskip("torch")
    from holdfast._formats.dcp.metadata import ChunkStorageMetadata

    chunks = [ChunkStorageMetadata(torch.Size([i]), torch.Size([2])) for i in (0, 2)]
    assert first_overlap(chunks) is None
    assert uncovered(Box((0,), (5,)), chunks) == Box((4,), (1,))
    assert overlaps(chunks, [Box((1,), (2,))]) == [(0, 0, (1,), (1,)), (1, 0, (2,), (1,))]


# --- effort ------------------------------------------------------------------------------------------------------


def pairs_looked_at(function, *lists: list[Box]) -> int:
    looked_at = 0

    def counting(rows, groups, count, members=module._Tree._members):
        nonlocal looked_at
        found = members(rows, groups, count)
        looked_at += len(found[0])
        return found

    with mock.patch.object(module._Tree, "_members", staticmethod(counting)):
        function(*lists)
    return looked_at


LAYOUTS = {
    "rows": lambda n: (grid((n, 3), (1, 8)), grid((n // 2, 6), (1, 8))),
    "columns": lambda n: (grid((1, 8), (n, 3)), grid((1, 8), (n // 2, 6))),
    "squares": lambda n: (grid((int(n**0.5), 6), (int(n**0.5), 6)), grid((int(n**0.5), 6), (int(n**0.5) * 2, 3))),
    "cubes": lambda n: (grid(*[(round(n ** (1 / 3)), 4)] * 3),) * 2,
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_effort_of_a_search_grows_with_the_boxes_not_with_the_pairs(layout):
    effort = {n: pairs_looked_at(overlaps, *layout(n)) / n for n in (512, 4096)}
    assert 0 < effort[4096] < 2 * effort[512] < 500


def test_boxes_that_form_no_grid_are_not_compared_each_with_each():
    def brickwork(rows):
        return [Box((row, 2 * column + row % 2), (1, 2)) for row in range(rows) for column in range(rows)]

    assert first_overlap(brickwork(32)) is None
    effort = {n: pairs_looked_at(first_overlap, brickwork(n)) / n**2 for n in (16, 64)}
    assert 0 < effort[64] < 2 * effort[16] < 500


# --- cutting and indexing ----------------------------------------------------------------------------------------


@for_all(st.lists(st.integers(1, 5), max_size=4), st.integers(0, 40), st.integers(0, 9))
def test_parts_of_a_box_are_all_its_cells_in_row_major_order(sizes, most, origin):
    cells = np.arange(int(np.prod(sizes))).reshape(sizes)
    box = Box((origin,) * len(sizes), tuple(sizes))
    parts = list(cut(box, most))
    assert all(volume(part.sizes) <= max(1, most) for part in parts)
    found = [cells[place_of(*part, origin=box.offsets)].reshape(-1) for part in parts]
    assert np.concatenate(found).tolist() == list(range(cells.size))


def test_a_box_of_an_array_without_dimensions_is_the_array_itself():
    array = np.zeros(())
    array[place_of((), ())][...] = 5
    assert array == 5
