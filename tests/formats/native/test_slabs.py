"""Boxes are cut into slabs of bounded span that together are the box."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.formats.native.slabs import Slab, cut_into_slabs, mark_blocks, row_major_strides, span_of


@st.composite
def boxes(draw: st.DrawFn) -> tuple[np.ndarray, int, tuple[int, ...], tuple[int, ...]]:
    """A chunk whose elements tell where they lie, and a box in it: where it begins, strides, sizes."""
    shape = tuple(draw(st.lists(st.integers(1, 8), max_size=4)))
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True))
    chunk = np.arange(int(np.prod(shape)), dtype="<u4").reshape(shape)
    strides = row_major_strides(shape, 4)
    begin = sum(at * stride for at, stride in zip(offsets, strides, strict=True))
    return chunk, begin, strides, sizes


@given(boxes(), st.integers(1, 300))
def test_slabs_span_no_more_than_allowed_and_together_fill_the_box(box, largest):
    chunk, begin, strides, sizes = box
    into = np.full(sizes, 2**32 - 1, "<u4")
    slabs = list(cut_into_slabs(7, begin + 1000, strides, into, "key", largest))
    reach = 0
    for slab in slabs:
        assert (slab.file, slab.key) == (7, "key")
        assert slab.into is not None
        assert slab.span <= largest or slab.into.size == 1
        assert slab.span == span_of(slab.into.shape, slab.strides, 4)
        assert slab.begin >= reach, "slabs of one box follow each other"
        reach = slab.begin + slab.span
        slab.into[...] = np.ndarray(slab.into.shape, "<u4", chunk.tobytes(), slab.begin - 1000, slab.strides)
    expected = np.ndarray(sizes, "<u4", chunk.tobytes(), begin, strides)
    assert np.array_equal(into, expected)


@given(boxes(), st.integers(1, 64))
def test_exactly_the_blocks_with_elements_are_marked(box, block):
    chunk, begin, strides, sizes = box
    slab = Slab(0, begin, span_of(sizes, strides, 4), strides, np.zeros(sizes, "<u4"), "key")
    first = begin // block
    counts = np.zeros((begin + slab.span - 1) // block + 2 - first, np.int32)
    mark_blocks(counts, slab, first, block)
    marked = {first + int(at) for at in np.flatnonzero(np.cumsum(counts) > 0)}
    elements = np.ndarray(sizes, "<u4", chunk.tobytes(), begin, strides).astype(np.int64).ravel() * 4
    assert marked == {int(byte) // block for element in elements for byte in range(element, element + 4)}


def test_a_part_that_is_only_checked_is_marked_as_a_whole():
    counts = np.zeros(5, np.int32)
    mark_blocks(counts, Slab(0, 150, 120, (), None, ""), 1, 100)
    assert np.cumsum(counts).tolist() == [1, 1, 0, 0, 0]
