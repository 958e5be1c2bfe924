"""What does not fit is collected over keys and ranks, and raised as one error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._state.mismatches import Mismatches
from holdfast.errors import HoldfastError, OptimizerMismatchError, StateMismatchError

keys = st.sampled_from("abcd")
found_by_a_rank = st.builds(
    Mismatches,
    missing=st.lists(keys, unique=True),
    unexpected=st.lists(keys, unique=True),
    shapes=st.dictionaries(keys, st.tuples(st.just((1,)), st.just((2,)))),
    dtypes=st.dictionaries(keys, st.tuples(st.just("int8"), st.sampled_from(["int16", "int32"]))),
    kinds=st.dictionaries(keys, st.sampled_from(["is a list", "is a set"])),
    uncovered=st.dictionaries(keys, st.just("no chunk covers it")),
)


@given(st.lists(found_by_a_rank, max_size=4))
def test_what_any_rank_found_is_raised_once_and_the_lowest_rank_has_the_word(ranks):
    whole = Mismatches()
    for found in ranks:
        whole.add(found)
    names = ("missing", "unexpected", "shapes", "dtypes", "kinds", "uncovered")
    expected = {name: list(dict.fromkeys(key for found in ranks for key in getattr(found, name))) for name in names}
    if not any(expected.values()):
        whole.raise_if_any("here")
        return
    with pytest.raises(StateMismatchError) as caught:
        whole.raise_if_any("here", {"missing": "Rename them.", "shapes": "Reshape them."})
    assert {name: list(getattr(caught.value, name)) for name in names} == expected
    for name in ("dtypes", "kinds"):
        firsts = {key: text for found in reversed(ranks) for key, text in getattr(found, name).items()}
        assert getattr(caught.value, name) == firsts
    first, *lines, last = str(caught.value).splitlines()
    count = sum(map(len, expected.values()))
    assert first.startswith("here does not fit")
    assert f"({count} problem{'s' * (count > 1)})" in first
    assert len(lines) == count
    assert ("Rename them." in last, "Reshape them." in last) == (bool(expected["missing"]), bool(expected["shapes"]))


def test_errors_of_one_kind_stay_of_that_kind_and_others_become_mismatches():
    error = OptimizerMismatchError("another class.", problems=["class"])
    with pytest.raises(OptimizerMismatchError, match=r"^another class\. Nothing was changed\.$"):
        Mismatches(errors={"a": error, "b": error}).raise_if_any("here")
    with pytest.raises(StateMismatchError, match="'a': another class") as caught:
        Mismatches(missing=["x"], errors={"a": error}).raise_if_any("here")
    assert caught.value.kinds == {"a": "another class."}
    with pytest.raises(StateMismatchError):
        Mismatches(errors={"a": error, "b": HoldfastError("other")}).raise_if_any("here")
