"""Divisions of tensors, against cutting them one after the other."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._base.boxes import Box
from holdfast._base.divisions import Cut, Division
from tests.properties import examples


@st.composite
def divided_shapes(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    cuts = draw(st.lists(st.builds(Cut, st.integers(0, len(shape) - 1), st.integers(1, 4)), max_size=3))
    return shape, Division(tuple(cuts), (1,) * len(cuts))


def cut_by_hand(shape, cuts):
    """The cells of all parts, by numbering the cells of a tensor and chunking it."""
    parts = [np.arange(math.prod(shape)).reshape(shape)]
    for dim, count in cuts:
        parts = [chunk for part in parts for chunk in _chunks(part, dim, count)]
    return parts


def _chunks(part, dim, count):
    length = -(-part.shape[dim] // count)
    return [part.take(range(*slice(n * length, (n + 1) * length).indices(part.shape[dim])), dim) for n in range(count)]


@settings(max_examples=examples(300))
@given(divided_shapes())
def test_the_boxes_are_what_cutting_gives(divided):
    shape, division = divided
    cells = np.arange(math.prod(shape)).reshape(shape)
    offsets, sizes = division.boxes(shape)
    by_hand = cut_by_hand(shape, division.cuts)
    assert len(offsets) == len(by_hand) == division.part_count
    for at, lengths, expected in zip(offsets, sizes, by_hand, strict=True):
        found = cells[tuple(slice(a, a + n) for a, n in zip(at, lengths, strict=True))]
        assert found.shape == expected.shape
        assert (found == expected).all()


@settings(max_examples=examples(300))
@given(divided_shapes(), st.data())
def test_the_parts_of_a_box_are_those_that_share_cells_with_it(divided, data):
    shape, division = divided
    offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
    sizes = tuple(data.draw(st.integers(0, size - at)) for at, size in zip(offsets, shape, strict=True))
    wanted = set(
        np.arange(math.prod(shape))
        .reshape(shape)[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
        .ravel()
        .tolist()
    )
    expected = [
        number
        for number, part in enumerate(cut_by_hand(shape, division.cuts))
        if wanted.intersection(part.ravel().tolist())
    ]
    assert division.overlapping(shape, Box(offsets, sizes)).tolist() == expected


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_the_ranks_of_the_parts_are_those_of_a_mesh(outer, middle, inner):
    mesh = np.random.default_rng(0).permutation(outer * middle * inner).reshape(outer, middle, inner)
    # Cut by the last dimension of the mesh, then by the first one, and replicated over the one between them.
    division = Division(
        (Cut(0, inner), Cut(1, outer)), (1, middle * inner), ((middle, inner),), tuple(mesh.ravel().tolist())
    )
    rows = division.ranks_with()
    for number, (last, first) in enumerate(itertools.product(range(inner), range(outer))):
        assert rows[number].tolist() == mesh[first, :, last].tolist()


def test_counting_ranks_goes_on_in_a_circle():
    division = Division((Cut(0, 4),), (1,))
    assert division.ranks_with(first=3, world_size=5).ravel().tolist() == [3, 4, 0, 1]
    assert division.ranks_with(np.array([2]), first=3, world_size=5).tolist() == [[0]]
