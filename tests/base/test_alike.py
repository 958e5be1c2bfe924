"""Columns of things that are alike but for their keys: the same as a list of these things."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.layout import Chunks, ChunkToWrite
from holdfast._formats.native.refs import TensorRef, TensorRefs

sizes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
dtypes = st.sampled_from(["float32", "int8"]).map(dtype_named)
refs = st.builds(TensorRef, st.text(max_size=3), dtypes, sizes, numpy=st.sampled_from([None, "<f4", [["a", "<f4"]]]))
chunks = st.builds(
    lambda number, key, dtype, shape: ChunkToWrite(number, key, dtype, shape, (0,) * len(shape), shape),
    st.integers(0, 9),
    st.text(max_size=3),
    dtypes,
    sizes,
)

CASES = st.one_of(
    st.tuples(st.just(TensorRefs), st.lists(refs, max_size=6), st.lists(refs, max_size=6)),
    st.tuples(st.just(Chunks), st.lists(chunks, max_size=6), st.lists(chunks, max_size=6)),
)


@given(CASES, st.data())
def test_columns_have_the_items_that_they_were_made_of(case, data):
    kind, items, more = case
    columns = kind.of(items)
    assert list(columns) == items == [columns[position] for position in range(len(items))]
    assert columns == items
    assert list(columns.followed_by(kind.of(more))) == [*items, *more]
    if items:
        positions = data.draw(st.lists(st.integers(0, len(items) - 1), max_size=8))
        assert list(columns.chosen(np.array(positions, np.int64))) == [items[position] for position in positions]
        assert list(columns[1:]) == items[1:]
        assert columns[-1] == items[-1]
    assert sum(columns.how_often()) == len(items)


def test_a_position_behind_the_end_is_refused():
    with pytest.raises(IndexError):
        TensorRefs.of([])[0]


def test_some_can_be_replaced_and_all_others_stay():
    columns = TensorRefs.of([TensorRef(key, dtype_named("int8"), (2,)) for key in "abc"])
    other = TensorRef("b", dtype_named("int8"), (3,))
    assert list(columns.with_others({1: other})) == [columns[0], other, columns[2]]
    assert columns[1].shape == (2,)


def test_things_that_are_alike_are_of_one_kind():
    assert len(TensorRefs.of([TensorRef(key, dtype_named("int8"), (2,)) for key in "abc"]).likes) == 1
