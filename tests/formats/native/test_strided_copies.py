"""Boxes are cut into strided copies of bounded span that together are the box."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast._base.box_bytes import row_major_strides, span_of
from holdfast._formats.native.read_plan import StridedCopy, cut_into_strided_copies, mark_blocks


@st.composite
def boxes(draw: st.DrawFn) -> tuple[np.ndarray, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A chunk whose elements say where they are, and a box in it: where it begins, strides, sizes."""
    shape = tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=4)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True))
    chunk = np.arange(int(np.prod(shape)), dtype="<u4").reshape(shape)
    return chunk, offsets, row_major_strides(shape, 4), sizes


def place(offsets: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum(at * stride for at, stride in zip(offsets, strides, strict=True))


@given(boxes(), st.integers(1, 300))
def test_slabs_span_no_more_than_allowed_and_together_fill_the_box(box, largest):
    chunk, offsets, strides, sizes = box
    into = np.full(sizes, 2**32 - 1, "<u4")
    copies = list(cut_into_strided_copies(7, 1000, strides, offsets, into, 3, largest))
    reach = 0
    for copy in copies:
        assert (copy.file, copy.key) == (7, 3)
        assert copy.span <= largest or copy.into.size == 1
        assert copy.span == span_of(copy.into.shape, copy.strides, 4)
        assert copy.begin >= reach, "copies of one box follow each other"
        reach = copy.begin + copy.span
        copy.into[...] = np.ndarray(copy.into.shape, "<u4", chunk.tobytes(), copy.begin - 1000, copy.strides)
    expected = np.ndarray(sizes, "<u4", chunk.tobytes(), place(offsets, strides), strides)
    assert np.array_equal(into, expected)


@given(st.data())
def test_two_boxes_of_a_chunk_are_cut_at_the_same_places(data):
    """So no copy for one crosses the end of a copy for the other, unless it begins in the same part of the chunk."""
    shape = tuple(data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=4)))
    largest = data.draw(st.integers(4, 300))
    strides = row_major_strides(shape, 4)
    whole = list(cut_into_strided_copies(0, 0, strides, (0,) * len(shape), np.zeros(shape, "<u4"), 0, largest))
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(data.draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True))
    for copy in cut_into_strided_copies(0, 0, strides, offsets, np.zeros(sizes, "<u4"), 0, largest):
        around = [one for one in whole if one.begin <= copy.begin and copy.begin + copy.span <= one.begin + one.span]
        assert len(around) == 1


@given(boxes(), st.integers(1, 64))
def test_exactly_the_blocks_with_elements_are_marked(box, block):
    chunk, offsets, strides, sizes = box
    begin = place(offsets, strides)
    copy = StridedCopy(0, begin, span_of(sizes, strides, 4), strides, np.zeros(sizes, "<u4"), 3)
    first = begin // block
    counts = np.zeros((begin + copy.span - 1) // block + 2 - first, np.int32)
    mark_blocks(counts, copy, first, block)
    marked = {first + int(at) for at in np.flatnonzero(np.cumsum(counts) > 0)}
    elements = np.ndarray(sizes, "<u4", chunk.tobytes(), begin, strides).astype(np.int64).ravel() * 4
    assert marked == {int(byte) // block for element in elements for byte in range(element, element + 4)}
