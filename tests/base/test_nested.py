"""Nested state as flat keys and back, by the rules of stock DCP."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import _nested_dict as stock_nested
from torch.distributed.checkpoint import _traverse as stock

from holdfast._base import nested as trees
from tests.properties import examples

TENSORS = [torch.zeros(2), torch.nn.Parameter(torch.zeros(1)), torch.zeros(0, dtype=torch.int8)]

# Few different names, and some with dots, so that two leaves may end up with the same key.
names = st.sampled_from(["a", "b", "a.b", "b.0", "", "weight", "0", "1"])
keys = names | st.integers(0, 2) | st.booleans() | st.sampled_from([None, (1, 2), 1.5])
leaves = st.sampled_from(
    [*TENSORS, 1, None, "text", (), (TENSORS[0], 1), {1, 2}, b"bytes", 2.5, torch.Size([1]), ({"a": 1},)]
)


def dicts_of(values: Any, some_keys: Any = keys, max_size: int = 4) -> st.SearchStrategy[Any]:
    plain = st.dictionaries(some_keys, values, max_size=max_size)
    return plain | plain.map(OrderedDict) | plain.map(MappingProxyType)


nested = st.recursive(leaves, lambda inner: dicts_of(inner) | st.lists(inner, max_size=3), max_leaves=12)
states = st.dictionaries(keys, nested, max_size=5)
# Without keys that collide or that are no strings, so that a state can be rebuilt.
plain_nested = st.recursive(
    leaves,
    lambda inner: (
        st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=4)
        | st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=12,
)
plain_states = st.dictionaries(st.sampled_from("abcd"), plain_nested, max_size=4)

rules = st.sampled_from(
    [
        trees.is_tensor,
        None,
        lambda value: True,
        lambda value: False,
        lambda value: isinstance(value, str),
        lambda value: isinstance(value, (dict, list)),
        lambda value: isinstance(value, tuple),
    ]
)


def outcome(function, *args) -> Any:
    """What a call returns, or the error it raises."""
    try:
        return "returned", function(*args)
    except ValueError as error:
        return "raised", str(error)


def identities(result: Any) -> Any:
    """Leaves by identity: a copy would not do."""
    kind, value = result
    if kind == "raised":
        return result
    flat, paths = value
    return [(name, id(leaf)) for name, leaf in flat.items()], list(paths.items())


@settings(max_examples=examples(150))
@given(states)
@example({"a": {"b": 1}, "a.b": 2})
@example({"l": [[], [[]], [{}]], "e": {}, "t": (TENSORS[0],)})
@example({1: {"x": 1}, "1": {"y": 1}})
def test_keys_paths_and_leaves_are_those_of_stock(state):
    ours = outcome(trees.flatten_state_dict, state)
    assert identities(ours) == identities(outcome(stock_nested.flatten_state_dict, state))


@settings(max_examples=examples(150))
@given(states, rules)
def test_leaves_are_visited_in_the_order_of_stock_whatever_the_rule_for_lists(state, rule):
    for name in ("traverse_state_dict", "traverse_state_dict_v_2_3"):
        visits = []
        for module in (trees, stock):
            seen: list[Any] = []
            getattr(module, name)(state, lambda path, value, seen=seen: seen.append((path, id(value))), rule)
            visits.append(seen)
        assert visits[0] == visits[1], name


@settings(max_examples=examples(50))
@given(states)
def test_the_default_rules_of_traversal_are_those_of_stock(state):
    for name in ("traverse_state_dict", "traverse_state_dict_v_2_3"):
        ours, theirs = [], []
        getattr(trees, name)(state, lambda path, value: ours.append((path, id(value))))  # noqa: B023
        getattr(stock, name)(state, lambda path, value: theirs.append((path, id(value))))  # noqa: B023
        assert ours == theirs


def test_two_leaves_of_one_key_are_refused_by_name():
    with pytest.raises(ValueError, match=r"^duplicated flatten key a\.b$"):
        trees.flatten_state_dict({"a": {"b": 1}, "a.b": 2})


def at(root: Any, location: tuple[Any, ...]) -> Any:
    for item in location:
        root = root[item]
    return root


@settings(max_examples=examples(150))
@given(states, st.sampled_from([trees.flatten, trees.flatten_v_2_3]))
def test_locations_lead_to_the_leaves_by_the_real_keys(state, flatten):
    kind, flat = outcome(flatten, state)
    if kind == "raised":
        return
    assert flat.values.keys() == flat.paths.keys() == flat.locations.keys()
    for name, leaf in flat.values.items():
        location, path = flat.locations[name], flat.paths[name]
        assert at(state, location) is leaf
        assert tuple(map(str, location)) == tuple(map(str, path))
        assert trees.flat_name(path) == name


@settings(max_examples=examples(50))
@given(plain_states)
def test_unflatten_undoes_flatten_as_stock_does(state):
    flat, paths = trees.flatten_state_dict(state)
    rebuilt = trees.unflatten_state_dict(flat, paths)
    assert rebuilt == stock_nested.unflatten_state_dict(flat, paths)
    if all(leaf != [] for leaf in flat.values()):
        assert rebuilt == state


@settings(max_examples=examples(50))
@given(plain_states, st.randoms(use_true_random=False))
def test_leaves_of_a_list_may_arrive_in_any_order(state, random):
    flat, paths = trees.flatten_state_dict(state)
    shuffled = list(flat.items())
    random.shuffle(shuffled)
    assert trees.unflatten_state_dict(dict(shuffled), paths) == state


path_items = st.sampled_from(["a", "b"]) | st.integers(0, 3)
paths = st.tuples(st.sampled_from(["a", "b"]), st.lists(path_items, max_size=3)).map(lambda p: (p[0], *p[1]))


@settings(max_examples=examples(150))
@given(st.lists(st.tuples(paths, st.sampled_from([1, "text", None, b"x"])), max_size=6))
def test_elements_are_set_as_stock_sets_them(assignments):
    ours, theirs = {}, {}
    for path, value in assignments:
        try:
            stock.set_element(theirs, path, value)
        except Exception:  # paths that run through each other's leaves: not defined
            return
        trees.set_element(ours, path, value)
        assert ours == theirs


@settings(max_examples=examples(150))
@given(st.dictionaries(st.sampled_from("ab"), plain_nested, max_size=3), paths)
def test_elements_are_found_where_stock_finds_them(state, path):
    missing = object()
    try:
        expected = stock.get_element(state, path, missing)
    except IndexError:  # one behind the end of a list, which stock does not guard against
        expected = missing
    assert trees.get_element(state, path, missing) is expected


@settings(max_examples=examples(50))
@given(states)
def test_every_leaf_is_found_at_its_location(state):
    kind, flat = outcome(trees.flatten, state)
    if kind == "returned":
        for name, leaf in flat.values.items():
            assert trees.get_element(state, flat.locations[name], object()) is leaf


@pytest.mark.parametrize("place", [{1, 2}, "text", (1, 2), b"bytes", torch.zeros(3), 5, None, [1]])
def test_what_is_no_element_is_the_default(place):
    assert trees.get_element({"a": place}, ("a", 1), "default") == "default"
    assert trees.get_element({"a": place}, ("a", "x")) is None


@settings(max_examples=examples(50))
@given(states, st.data())
def test_a_leaf_is_replaced_in_place_under_its_real_key(state, data):
    kind, flat = outcome(trees.flatten, state)
    replaceable = [
        name
        for name, location in (flat.locations.items() if kind == "returned" else ())
        if not isinstance(at(state, location[:-1]), MappingProxyType)
    ]
    if not replaceable:
        return
    name = data.draw(st.sampled_from(replaceable))
    location = flat.locations[name]
    container, before = at(state, location[:-1]), len(at(state, location[:-1]))
    marker = object()
    trees.set_element(state, location, marker)
    assert at(state, location) is marker
    assert len(container) == before


@pytest.mark.parametrize("flatten", [trees.flatten, trees.flatten_v_2_3, trees.flatten_state_dict])
def test_nothing_holds_on_to_tensors_once_a_flat_state_is_gone(flatten):
    tensor = torch.zeros(2)
    seen = weakref.ref(tensor)
    gc.collect()
    gc.disable()
    try:
        flat = flatten({"a": [{"b": tensor}]})
        del tensor, flat
        assert seen() is None
    finally:
        gc.enable()
