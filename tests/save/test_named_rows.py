"""Lists that travel as columns arrive as the lists that they were."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._base.boxes import Box
from holdfast._layout.descriptions import Holding
from holdfast._save import agreement as named_rows
from holdfast._save.agreement import NamedRows

numbers = st.lists(st.integers(0, 9), max_size=3).map(tuple)
holdings = st.builds(
    Holding,
    st.text(max_size=3),
    st.sampled_from(["float32", "int8"]),
    numbers,
    st.sampled_from(["sharded", "replicated"]),
    st.lists(st.builds(Box, numbers, numbers), max_size=2).map(tuple),
    numpy=st.none() | st.just("<f4"),
    tied_to=st.none() | st.text(max_size=2),
    digests=st.lists(st.binary(max_size=2), max_size=2).map(tuple),
)


@given(st.lists(holdings, max_size=6), st.integers(1, 7))
def test_rows_arrive_as_they_were(rows, at_once):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(named_rows, "ENTRIES_AT_ONCE", at_once)
        sent = pickle.dumps(NamedRows(rows))
    arrived = pickle.loads(sent)
    assert arrived == rows
    assert all(type(row) is Holding for row in arrived)
    assert all(type(box) is Box for row in arrived for box in row.boxes)
