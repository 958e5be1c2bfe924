"""What ranks have under the same names: whether it is the same, and who has what if not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._ranks.differences import Differing, describe_differing, differing, refuse_different_kinds
from holdfast.errors import ReplicaMismatchError

seen_by_ranks = st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2))), max_size=5)


@given(seen_by_ranks)
def test_names_with_several_contents_are_found_with_each_content_and_its_ranks(ranks):
    found = differing((name, rank, content) for rank, seen in enumerate(ranks) for name, content in seen)
    for name in "abc":
        contents = {content for seen in ranks for other, content in seen if other == name}
        if len(contents) < 2:
            assert name not in found
            continue
        holders = {
            content: [rank for rank, seen in enumerate(ranks) if (name, content) in seen] for content in contents
        }
        assert found[name] == holders
        firsts = [holders[content][0] for content in found[name]]
        assert firsts == sorted(firsts)


def test_long_lists_of_keys_and_ranks_are_cut_short():
    keys = [Differing(f"k{n}", ((0,), tuple(range(1, 30)))) for n in range(50)]
    text = describe_differing(keys, "So it is.")
    assert "50 key(s)" in text
    assert "and 30 more" in text
    assert "(29 in all)" in text
    assert len(text.splitlines()) == 23
    assert text.endswith("So it is.")


def test_kinds_are_named_with_their_ranks():
    refuse_different_kinds({}, "")
    with pytest.raises(ReplicaMismatchError, match=r"'w': a value on ranks 0,2; a list .*\n.*Rename it") as caught:
        refuse_different_kinds({"w": {"a value": [0, 2], "a list": [1]}}, "Rename it.")
    assert caught.value.keys == {"w": "a value on ranks 0,2; a list on ranks 1"}
