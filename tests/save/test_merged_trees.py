"""The trees of all ranks become one, and every place where they differ is known."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast._formats.native.refs import PerRankValues, Slot
from holdfast._formats.native.values import Encoder
from holdfast._ranks.differences import Differing
from holdfast._save.merged_trees import fill_slots, merge_trees, refuse_shared_keys, renamed_tensors, tensor_keys
from holdfast.errors import UnsupportedValueError
from tests.save.random_states import states


def tensor(key: str) -> dict[str, str]:
    return {"$": "tensor", "key": key}


def encoded(state: object) -> object:
    return Encoder(lambda path, value: None, allow_pickle=True).encode(state)


@given(states())
def test_equal_trees_are_one(drawn):
    tree = encoded(drawn.state)
    assert merge_trees([tree, copy.deepcopy(tree), tree]) == (tree, [])


names = st.text("ab", min_size=1, max_size=2)
trees = st.recursive(st.integers(), lambda inner: st.dictionaries(names, inner, max_size=4), max_leaves=10)


@given(st.dictionaries(names, trees, min_size=1), st.data())
def test_parts_of_one_tree_are_put_together_again(tree, data):
    parts = [{}, {}, {}]
    for name, child in tree.items():
        for rank in data.draw(st.sets(st.integers(0, 2), min_size=1)):
            parts[rank][name] = child
    whole, differing = merge_trees(parts)
    assert whole == tree
    assert differing == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("1", 1),
        (None, False),
        ([1], [1, 2]),
        ([1], {"$": "tuple", "items": [1]}),
        ({"$": "tuple", "items": [1]}, {"$": "tuple", "items": [1, 2]}),
        ({"$": "dict", "items": []}, {"$": "OrderedDict", "items": []}),
        ({"$": "defaultdict", "items": [], "factory": "int"}, {"$": "defaultdict", "items": [], "factory": "list"}),
        ({"$": "set", "items": [1]}, {"$": "set", "items": [2]}),
        ({"a": 1}, [1]),
        (tensor("x"), 5),
        (tensor("x"), tensor("y")),
        ({"$": "dataclass", "type": "m:A", "fields": {}}, {"$": "dataclass", "type": "m:B", "fields": {}}),
        ({"$": "namedtuple", "type": "A", "fields": {"a": 1}}, {"$": "namedtuple", "type": "A", "fields": {"b": 1}}),
    ],
)
def test_different_values_are_reported_and_the_lowest_rank_counts(one, other):
    whole, differing = merge_trees([{"deep": {"x": one}}, {"deep": {"x": other}}, {"deep": {"x": copy.deepcopy(one)}}])
    assert whole == {"deep": {"x": one}}
    assert type(whole["deep"]["x"]) is type(one)
    assert differing == [Differing("deep.x", ((0, 2), (1,)))]


def test_differences_are_reported_where_they_are():
    one = {"list": [1, {"a": 2}], "pairs": {"$": "dict", "items": [[1, "x"], ["k", 0]]}}
    other = {"list": [1, {"a": 3}], "pairs": {"$": "dict", "items": [["k", 0], [1, "y"]]}}
    assert [differing.key for differing in merge_trees([one, other])[1]] == ["list.1.a", "pairs.1"]
    assert merge_trees([1, 2])[1] == [Differing("", ((0,), (1,)))]
    assert str(Differing("", ((0,), (1,)))) == "the state: ranks 0 != ranks 1"
    fields = [{"$": "dataclass", "type": "m:A", "fields": {"rate": rate}} for rate in (1, 2)]
    assert merge_trees(fields)[1] == [Differing("rate", ((0,), (1,)))]
    tuples = [{"$": "tuple", "items": [0, rate]} for rate in (1, 2)]
    assert merge_trees(tuples)[1] == [Differing("1", ((0,), (1,)))]


def test_pairs_are_put_together_by_key_and_not_by_place():
    one = {"$": "OrderedDict", "items": [[1, "a"], ["1", "b"]]}
    other = {"$": "OrderedDict", "items": [["1", "b"], [True, "c"]]}
    assert merge_trees([one, other]) == (
        {"$": "OrderedDict", "items": [[1, "a"], ["1", "b"], [True, "c"]]},
        [],
    )


def group(*params: object, lr: float = 0.1) -> dict[str, object]:
    return {"lr": lr, "params": list(params)}


def test_parameters_of_optimizers_are_put_together():
    optimizers = [
        {"optim": {"param_groups": [group("a", "b"), group("x")]}},
        {"optim": {"param_groups": [group("b", "c"), group()]}},
    ]
    assert merge_trees(optimizers) == ({"optim": {"param_groups": [group("a", "b", "c"), group("x")]}}, [])


@pytest.mark.parametrize(
    ("one", "other", "key"),
    [
        ({"param_groups": [group(0)]}, {"param_groups": [group(0, 1)]}, "param_groups.0.params"),
        ({"param_groups": [group("a")]}, {"param_groups": [group("a", lr=0.2)]}, "param_groups.0.lr"),
        ({"param_groups": [group("a")]}, {"param_groups": [group("a"), group("b")]}, "param_groups"),
        ({"groups": [group("a")]}, {"groups": [group("b", "c")]}, "groups.0.params"),
        ({"params": ["a"]}, {"params": ["b", "c"]}, "params"),
    ],
)
def test_other_lists_are_not_put_together(one, other, key):
    assert [differing.key for differing in merge_trees([one, other])[1]] == [key]


def test_references_to_tensors_are_found_and_renamed():
    tree = {
        "a": tensor("a"),
        "l": [tensor("l.0"), {"$": "dict", "items": [[1, tensor("l.1.1")]]}],
        "s": {"$": "set", "items": []},
    }
    assert list(tensor_keys(tree)) == ["a", "l.0", "l.1.1"]
    renamed = renamed_tensors(tree, {"l.1.1": "a"})
    assert list(tensor_keys(renamed)) == ["a", "l.0", "a"]
    assert list(tensor_keys(tree)) == ["a", "l.0", "l.1.1"]
    refuse_shared_keys(tree)
    with pytest.raises(UnsupportedValueError, match="'a' is the key of tensors at two different places") as caught:
        refuse_shared_keys(renamed)
    assert caught.value.key == "a"


def test_values_of_all_ranks_take_their_places():
    tree = encoded({"own": Slot("own"), "list": [Slot("list.0"), 1], "of another save": PerRankValues(("own", 7))})
    assert fill_slots(tree, {"own": [1, 2], "list.0": [None, [3]]}) == {
        "own": {"$": "per_rank", "ranks": [1, 2]},
        "list": [{"$": "per_rank", "ranks": [None, [3]]}, 1],
        "of another save": {"$": "per_rank", "ranks": ["own", 7]},
    }


def test_places_that_differ_are_reported_by_the_keys_of_the_checkpoint(tmp_path):
    def state(value: int) -> dict[Any, Any]:
        return {"a": {5: {"b": value}, ("x", 1): value}, "deeper": {True: {None: value}}, "[": value}

    _, differing = merge_trees([encoded(state(1)), encoded(state(2))])
    holdfast.save(state(1), tmp_path / "x")
    assert [one.key for one in differing] == list(holdfast.open(tmp_path / "x"))
