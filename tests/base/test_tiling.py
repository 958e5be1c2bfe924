"""Chunks that tile a tensor are found to do so, and what is wrong with others is named."""

from __future__ import annotations

import itertools
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._base.boxes import Box, overlaps
from holdfast._base.tiling import missing_part, refuse_bad_tiling, tiling_problems
from holdfast.errors import InvalidPlanError


@st.composite
def scenes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes: cells of a grid, some of which may be missing, repeated, moved or made longer."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    cuts = [sorted({0, size, *draw(st.sets(st.integers(0, size), max_size=2))}) for size in shape]
    cells = itertools.product(*(itertools.pairwise(along) if len(along) > 1 else [(0, 0)] for along in cuts))
    boxes = [Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell)) for cell in cells]
    for change in draw(st.lists(st.sampled_from(["drop", "repeat", "move", "grow"]), max_size=2)):
        if not boxes:
            break
        at = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes.pop(at) if change != "repeat" else boxes[at]
        dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
        if change == "move":
            offsets = tuple(low + (along == dim) for along, low in enumerate(offsets))
        elif change == "grow":
            sizes = tuple(size + (along == dim) for along, size in enumerate(sizes))
        if change != "drop":
            boxes.append(Box(offsets, sizes))
    return shape, boxes


def cells_of(box: Box) -> list[tuple[int, ...]]:
    sides = [range(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True)]
    return list(itertools.product(*sides))


@given(scenes())
def test_what_is_wrong_with_a_tiling_is_what_counting_its_cells_finds(scene):
    shape, boxes = scene
    counted = [cell for box in boxes for cell in cells_of(box)]
    limits = [all(low + n <= size for low, n, size in zip(*box, shape, strict=True)) for box in boxes]
    problems = tiling_problems(boxes, shape)
    assert sum("outside" in problem for problem in problems) == limits.count(False)
    assert any("overlap" in problem for problem in problems) == (len(counted) != len(set(counted)))
    if all(limits) and len(counted) == len(set(counted)):
        assert bool(problems) == (len(counted) != prod(shape))
        assert tiling_problems(boxes, shape, may_have_gaps=True) == []
        for problem in problems:
            assert problem.startswith(f"{len(counted)} of its {prod(shape)} elements")


def test_a_chunk_of_another_number_of_dimensions_is_outside_and_does_not_hide_an_overlap():
    boxes = [Box((0,), (2,)), Box((0, 0), (2, 2)), Box((1, 0), (1, 2))]
    outside, overlap = tiling_problems(boxes, (2, 2))
    assert outside == "chunk [offsets [0], sizes [2]] is outside of a tensor of shape [2, 2]"
    assert overlap == "chunks [offsets [0, 0], sizes [2, 2]] and [offsets [1, 0], sizes [1, 2]] overlap"


def test_a_chunk_of_the_whole_size_at_another_place_is_outside():
    assert tiling_problems([Box((1,), (2,))], (2,)) == [
        "chunk [offsets [1], sizes [2]] is outside of a tensor of shape [2]"
    ]


def test_chunks_are_named_as_the_caller_wants():
    files = ["x", "y"]
    boxes = [Box((0,), (2,)), Box((1,), (1,))]
    assert tiling_problems(boxes, (2,), name=lambda number: f"in {files[number]}") == ["chunks in x and in y overlap"]


@given(scenes(), st.data())
def test_a_part_is_missing_exactly_if_a_cell_of_a_target_is_in_no_chunk(scene, data):
    shape, boxes = scene
    corners = st.tuples(*(st.integers(0, size) for size in shape))
    targets = data.draw(st.lists(st.builds(Box, corners, st.tuples(*(st.integers(0, 3) for _ in shape))), max_size=3))
    covered = {cell for box in boxes for cell in cells_of(box)}
    said = missing_part(targets, boxes, shape, overlaps(targets, boxes))
    assert (said is not None) == any(not covered.issuperset(cells_of(target)) for target in targets)


def test_all_problems_are_in_the_fields_and_the_first_in_the_text():
    problems = [f"'w{n}': chunks overlap" for n in range(30)]
    with pytest.raises(InvalidPlanError, match="and 10 more") as caught:
        refuse_bad_tiling(problems, "Look:")
    assert caught.value.problems == problems
    refuse_bad_tiling([], "Look:")
