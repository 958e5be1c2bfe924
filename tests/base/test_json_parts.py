"""JSON that is made in parts is the JSON that is made at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._base import json_parts as json_texts
from holdfast._base.json_parts import dumps

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: (
        st.lists(children, max_size=8)
        | st.dictionaries(st.text(), children, max_size=8)
        | st.lists(children, max_size=4).map(tuple)
    ),
    max_leaves=60,
)


@given(value=values, at_once=st.integers(0, 12), small=st.integers(0, 8))
def test_the_parts_make_the_whole(value, at_once, small):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_texts, "ENTRIES_AT_ONCE", at_once)
        patch.setattr(json_texts, "SMALL", small)
        assert dumps(value) == json.dumps(value, separators=(",", ":"))


@pytest.mark.parametrize("wrap", [lambda tree: tree, lambda tree: {"model": tree}, lambda tree: [1, tree], list])
def test_large_trees_are_encoded_in_small_parts(monkeypatch, wrap):
    """Nothing else runs while Python's encoder does."""
    encoded: list[Any] = []
    original = json.dumps
    monkeypatch.setattr(json, "dumps", lambda value, **options: encoded.append(value) or original(value, **options))
    tree = wrap({f"layer{number}": {"$": "tensor", "key": f"layer{number}"} for number in range(20_000)})
    assert json.loads(dumps(tree)) == tree
    assert max(map(len, encoded)) <= json_texts.ENTRIES_AT_ONCE


def test_what_is_no_number_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumps({"loss": float("nan")})
