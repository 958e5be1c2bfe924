"""Nested states out of leaves and paths that may be anything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._base.nested import flatten
from holdfast._formats.nesting import nested

trees = st.recursive(
    st.integers(),
    lambda inner: (
        st.dictionaries(st.text("ab.", min_size=1, max_size=3), inner, min_size=1, max_size=3)
        | st.lists(st.dictionaries(st.text("ab", min_size=1, max_size=1), inner, min_size=1, max_size=2), min_size=1)
    ),
    max_leaves=10,
)


@given(state=st.dictionaries(st.text("ab", min_size=1, max_size=2), trees, min_size=1, max_size=3))
def test_what_was_flattened_is_nested_again(state: dict[str, Any]) -> None:
    try:
        flat = flatten(state)
    except ValueError:  # two leaves of one name, which no checkpoint can hold
        return

    assert nested(flat.values, flat.paths) == state


@pytest.mark.parametrize("keys", [("a", "a.b"), ("a.b", "a"), ("a.0", "a"), ("a", "a.b.c")])
def test_a_leaf_that_others_lie_below_makes_the_state_flat(keys: tuple[str, ...]) -> None:
    leaves = dict.fromkeys(keys, 1)

    assert nested(leaves, {key: tuple(key.split(".")) for key in keys}) == leaves


def test_a_state_too_deep_to_walk_through_is_flat() -> None:
    path = ("a",) * 5000

    assert nested({".".join(path): 1}, {".".join(path): path}) == {".".join(path): 1}


@pytest.mark.parametrize("path", [None, 7, "ab", (), ("a", None), ("a", 1.5), ("a", True), [["a"]]])
def test_what_is_no_path_makes_the_state_flat(path: Any) -> None:
    assert nested({"ab": 1, "c": 2}, {"ab": path, "c": ("c",)}) == {"ab": 1, "c": 2}


def test_positions_out_of_order_are_put_in_order() -> None:
    assert nested({"a.1": "b", "a.0": "a"}, {"a.1": ("a", 1), "a.0": ("a", 0)}) == {"a": ["a", "b"]}
