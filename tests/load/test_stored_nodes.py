"""The tree of a checkpoint as nodes: keys, who took what, and the names by which a state finds things."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.refs import PerRankValues, TensorRef
from holdfast._load.renaming import rename
from holdfast._load.stored_nodes import StoredNode


def ref(key: str) -> TensorRef:
    return TensorRef(key, dtype_named("float32"), (2,))


def keys(root: StoredNode) -> list[str]:
    return [leaf.key for leaf in root.leaves()]


def test_leaves_have_the_keys_of_the_format():
    tree = {"a": {"b": 1, 3: 2}, "plain": [1, [2]], "list": [ref("x"), 5], "e": {}, "r": PerRankValues((1, {"q": 2}))}
    assert keys(StoredNode.of(tree)) == ["a.b", "a.3", "plain", "list.0", "list.1", "e", "r.0", "r.1.q"]
    assert keys(StoredNode.of({"a.b": 1, "a": {"b": 2}, "c": 3})) == ['["a.b"]', '["a"]["b"]', "c"]
    assert keys(StoredNode.of(5)) == [""]


def test_to_take_a_part_of_a_leaf_is_to_take_the_leaf():
    root = StoredNode.of({"plain": [{"lr": 1}, {"lr": 2}], "list": [ref("x"), 5]})
    rate = root.child("plain").child(1).child("lr")
    assert rate.value == 2
    assert not rate.is_leaf
    rate.take()
    root.child("list").child(0).take()
    assert [(leaf.key, leaf.taken) for leaf in root.leaves()] == [("plain", True), ("list.0", True), ("list.1", False)]


def test_children_are_found_by_type_by_text_and_through_dots():
    root = StoredNode.of({1: "int", "1": "text", "2": "two", "a.b.c": 3, "x": {"y": {"z.w": 4}}})
    assert root.child("1").value == "text"
    assert root.child(2).value == "two"
    assert root.child("a").child("b").child("c").value == 3
    assert root.child("a.b").child("c").value == 3
    assert root.child("a").value == {"b.c": 3}
    assert root.child("x.y.z").child("w").value == 4
    assert root.child("x.y.z.w").value == 4
    assert root.child(1).value == "int"
    assert root.child(np.int64(1)) is None, "it might be either"
    assert root.child("a.b.d") is None
    assert root.child("nothing") is None
    assert root.child(7) is None
    assert StoredNode.of([ref("a"), ref("b")]).child(1).value == ref("b")


def test_names_of_wrappers_are_looked_through_if_only_one_key_can_be_meant():
    root = StoredNode.of({"module.a.w": 1, "b.w": 2, "module.c": 3, "_orig_mod.c": 4})
    assert root.child("a.w").value == 1
    assert root.child("_orig_mod.b.w").value == 2
    assert root.child("c") is None


def renamed(tree: Any, names: dict[str, str]) -> tuple[StoredNode, dict[str, str]]:
    return rename(StoredNode.of(tree), names.get)


def test_what_is_renamed_as_a_whole_stays_what_it_is():
    ranks = PerRankValues(({"s": 1}, {"s": 2}))
    tree = {"old": {"ranks": ranks, "list": [ref("x"), 5]}, "rest": 1}
    root, moved = rename(StoredNode.of(tree), lambda key: key.replace("old", "new"))
    assert root.value == {"rest": 1, "new": {"ranks": ranks, "list": [ref("x"), 5]}}
    assert root.child("new").child("ranks").is_per_rank
    assert moved["old.ranks.1.s"] == "new.ranks.1.s"
    assert keys(root) == ["rest", "old.ranks.0.s", "old.ranks.1.s", "old.list.0", "old.list.1"], "stored keys stay"


def test_parts_of_lists_and_of_values_per_rank_can_be_renamed():
    tree = {"r": PerRankValues(({"s": 1}, {"s": 2})), "l": [{"a": ref("x")}, 5]}
    root, _ = renamed(tree, {"r.0.s": "r.0.t", "r.1.s": "r.1.t", "l.0.a": "l.0.b"})
    assert root.value == {"r": PerRankValues(({"t": 1}, {"t": 2})), "l": [{"b": ref("x")}, 5]}


def test_a_key_that_moves_away_leaves_no_empty_place():
    root, _ = renamed({"a": {"x": 1}, "b": {"y": 2}}, {"a.x": "b.x"})
    assert root.value == {"b": {"y": 2, "x": 1}}
    root, _ = renamed(
        {"a": {"x": 1, "z": {"u": 1}}, "b": {"y": 2, "z": {"v": 2}}, "e": {}}, {"a.x": "b.x", "a.z.u": "b.z.u"}
    )
    assert root.value == {"b": {"y": 2, "x": 1, "z": {"v": 2, "u": 1}}, "e": {}}
    root, _ = renamed({"a": 1}, {"a": "b.c.d"})
    assert root.child("b").child("c").child("d").value == 1


def test_names_collide_only_if_two_keys_end_up_with_the_same():
    with pytest.raises(ValueError, match="both 'a' and 'b' the key 'b'"):
        renamed({"a": 1, "b": 2}, {"a": "b"})
    root, moved = renamed({"a": 1, "b": 2}, {"a": "b", "b": "a"})
    assert root.value == {"b": 1, "a": 2}
    assert moved == {"a": "b", "b": "a"}


def test_nothing_renamed_is_the_same_tree():
    root = StoredNode.of({"a": 1})
    assert rename(root, lambda key: None) == (root, {})
    assert rename(root, lambda key: key) == (root, {})


names = st.text("ab.", min_size=1, max_size=4).filter(lambda text: not text.startswith(".") and not text.endswith("."))
trees = st.recursive(
    st.integers(0, 9),
    lambda inner: st.dictionaries(st.sampled_from(["a", "b", "c", 1, 2]), inner, min_size=1, max_size=3),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))


@given(trees, st.data())
def test_every_leaf_is_found_under_its_new_key(tree, data):
    root = StoredNode.of(tree)
    leaves = list(root.leaves())
    new = data.draw(
        st.lists(st.sampled_from(["a", "b", "x", "a.b", "x.y", "x.y.z", "b.c.d", "q"]), min_size=1, unique=True)
    )
    wanted = {leaf.key: name for leaf, name in zip(leaves, new, strict=False)}
    everything = [wanted.get(leaf.key, leaf.key) for leaf in leaves]
    is_clear = len(set(everything)) == len(everything) and not any(
        one != other and other.startswith(f"{one}.") for one in everything for other in everything
    )
    if not is_clear:
        return
    moved, _ = rename(root, wanted.get)
    assert sorted(map(id, moved.leaves())) == sorted(map(id, leaves)), "no leaf is lost or doubled"
    for leaf in leaves:
        assert moved.child(wanted.get(leaf.key, leaf.key)) is leaf
