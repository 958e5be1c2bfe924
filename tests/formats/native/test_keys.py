"""Keys and leaves: every part of a state has one name, and no two parts have the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._formats.native.refs import PerRankValues
from holdfast._formats.native.values import Encoder, key_of, keys_of, leaves
from holdfast.errors import DamagedCheckpointError
from tests.properties import examples

TENSOR = {"$": "tensor", "key": "k"}


def found_in(stored):
    return [(leaf.key, leaf.path) for leaf in leaves(stored)]


def test_a_key_is_the_path_with_dots():
    assert key_of(("model", "layer.0.weight")) == "model.layer.0.weight"
    assert key_of(("optimizer", "state", 3, "exp_avg")) == "optimizer.state.3.exp_avg"


def test_two_paths_that_would_share_a_key_are_written_in_brackets():
    assert keys_of([("a.b",), ("c",), ("a", "b")]) == ['["a.b"]', "c", '["a"]["b"]']
    assert keys_of([("a", 0), ("a", "0")]) == ['["a"][0]', '["a"]["0"]']


def test_a_path_that_is_given_twice_is_no_collision():
    assert keys_of([("a", "b"), ("a", "b")]) == ["a.b", "a.b"]
    assert keys_of([("a", "b"), ("a.b",), ("a", "b")]) == ['["a"]["b"]', '["a.b"]', '["a"]["b"]']


def test_a_text_that_looks_like_a_path_in_brackets_does_not_pass_for_one():
    paths = [("a.b",), ("a", "b"), ('["a.b"]',), ('["a"]["b"]',)]

    assert keys_of(paths) == ['["a.b"]', '["a"]["b"]', '["[\\"a.b\\"]"]', '["[\\"a\\"][\\"b\\"]"]']


@pytest.mark.parametrize(
    ("part", "text"),
    [(0.5, "[0.5]"), (None, "[null]"), (True, "[true]"), ((1, "a"), '[{"$":"tuple","items":[1,"a"]}]')],
)
def test_other_keys_of_dicts_are_their_typed_values_in_brackets(part, text):
    assert key_of(("a", part)) == '["a"]' + text


def test_keys_are_texts_that_utf_8_can_hold():
    key = key_of(("a", "\ud800"))

    assert key.encode() == b'["a"][{"$":"str","base64":"7aCA"}]'
    assert key_of(("ä",)) == "ä"
    assert key_of(("ä", None)) == '["ä"][null]'


def test_an_int_of_thousands_of_digits_can_be_a_key():
    assert key_of((10**5000,)).startswith('[{"$":"int","hex":"')


parts = st.text(st.sampled_from('a.[]"0\\\ud83d\ude00😀'), max_size=3) | st.integers(0, 2) | st.none() | st.just(0.5)


@settings(max_examples=examples(300))
@given(st.lists(st.lists(parts, max_size=3).map(tuple), max_size=8, unique=True))
def test_different_paths_have_different_keys_in_any_order(paths):
    keys = keys_of(paths)

    assert len(set(keys)) == len(paths)
    assert keys_of(reversed(paths)) == keys[::-1]
    "".join(keys).encode()


def test_leaves_come_in_order_with_path_key_and_value():
    tree = {"w": TENSOR, "lr": 0.1, "deep": {"$": "OrderedDict", "items": [[1, {"x": TENSOR}], ["s", "text"]]}}

    found = list(leaves(tree))

    assert [leaf.path for leaf in found] == [("w",), ("lr",), ("deep", 1, "x"), ("deep", "s")]
    assert [leaf.key for leaf in found] == ["w", "lr", "deep.1.x", "deep.s"]
    assert [leaf.node for leaf in found] == [TENSOR, 0.1, TENSOR, "text"]
    assert [leaf.is_tensor for leaf in found] == [True, False, True, False]


@pytest.mark.parametrize("wrap", [lambda items: items, lambda items: {"$": "tuple", "items": items}])
def test_a_list_without_tensors_is_a_leaf_and_one_with_tensors_is_opened(wrap):
    assert found_in({"a": wrap([0.9, {"b": wrap([1])}, wrap([])])}) == [("a", ("a",))]
    assert found_in({"a": wrap([0.9, {"b": TENSOR, "c": [1, [2]]}])}) == [
        ("a.0", ("a", 0)),
        ("a.1.b", ("a", 1, "b")),
        ("a.1.c", ("a", 1, "c")),
    ]


def test_a_value_per_rank_opens_the_lists_around_it():
    tree = {"a": [5, {"$": "per_rank", "ranks": [1, [2]]}], "b": {"$": "per_rank", "ranks": [TENSOR, TENSOR]}}

    assert [key for key, _ in found_in(tree)] == ["a.0", "a.1.0", "a.1.1", "b.0", "b.1"]
    assert found_in({"a": [{"$": "per_rank", "ranks": []}]}) == [("a.0", ("a", 0))]


def test_fields_are_opened_and_sets_are_not():
    fields = {"x": TENSOR, "y": {"$": "set", "items": [1]}}
    tree = {
        "d": {"$": "dataclass", "type": "m:C", "fields": fields},
        "n": {"$": "namedtuple", "type": "m:N", "fields": {}},
    }

    assert [key for key, _ in found_in(tree)] == ["d.x", "d.y", "n"]


@pytest.mark.parametrize("empty", [{}, [], {"$": "dict", "items": []}, {"$": "tuple", "items": []}])
def test_empty_containers_are_leaves(empty):
    assert found_in({"a": empty}) == [("a", ("a",))]
    assert found_in(empty) == [("", ())]


def test_a_state_that_is_a_tensor_is_one_leaf():
    assert found_in(TENSOR) == [("", ())]


def test_leaves_of_tied_weights_have_keys_of_their_own_and_one_tensor():
    found = list(leaves({"a": TENSOR, "b": TENSOR}))

    assert [(leaf.key, leaf.node["key"]) for leaf in found] == [("a", "k"), ("b", "k")]


def test_the_keys_given_while_encoding_are_those_of_the_leaves():
    array = np.zeros(1)
    state = {"a.b": array, "a": {"b": [array, 1], 0: array, "0": array}, "r": PerRankValues((array, [1]))}

    stored = Encoder(lambda path, tensor: None).encode(state)

    found = list(leaves(json.loads(json.dumps(stored))))
    assert [leaf.node["key"] for leaf in found if leaf.is_tensor] == [leaf.key for leaf in found if leaf.is_tensor]
    assert len({leaf.key for leaf in found}) == len(found) == 7


@pytest.mark.parametrize(
    "stored",
    [
        {"$": []},
        {"$": "tensor"},
        {"$": "tensor", "key": None},
        {"$": "tuple", "items": 1},
        {"$": "per_rank"},
        {"$": "dict", "items": [1]},
        {"$": "Counter", "items": [[1, 2, 3]]},
        {"$": "dict", "items": [[{"$": "int", "hex": "z"}, 1]]},
        {"$": "dict", "items": [[TENSOR, 1]]},
        {"$": "dict", "items": [[{"$": "tuple", "items": [TENSOR]}, 1]]},
        {"$": "dict", "items": [[{"$": "future", "of": TENSOR}, 1]]},
        {"$": "dataclass", "fields": []},
    ],
)
def test_a_malformed_tree_is_damage(stored):
    with pytest.raises(DamagedCheckpointError):
        list(leaves({"a": stored}))
