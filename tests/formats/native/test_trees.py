"""Nested states as they come out of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import torch

from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.refs import PerRankValues, TensorRef, UnregisteredValue
from holdfast._formats.native.trees import children_of, hides_tensor, mapped, refs_in, substituted


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Record:
    a: Any
    b: Any = 2


def ref(key: str) -> TensorRef:
    return TensorRef(key, dtype_named("float32"), (2,))


def test_containers_are_opened_and_other_values_are_not():
    assert children_of({"x": 1, 2: 3}) == [("x", 1), (2, 3)]
    assert children_of(Pair(1, 2)) == [("a", 1), ("b", 2)]
    assert children_of(Record(1)) == [("a", 1), ("b", 2)]
    assert children_of(PerRankValues((5, 6))) == [(0, 5), (1, 6)]
    assert children_of([]) == []
    for value in [3, "text", {1, 2}, None, torch.Size([1]), ref("x"), Record, UnregisteredValue("enum", "x", {})]:
        assert children_of(value) is None


def test_tensors_and_values_per_rank_are_found_at_any_depth():
    assert hides_tensor({"a": [Pair(1, (ref("x"),))]})
    assert hides_tensor([Record(PerRankValues((1,)))])
    assert not hides_tensor({"a": [Pair(1, (2, "x"))]})


def test_references_are_found_in_order_and_as_often_as_they_are_there():
    x, y = ref("x"), ref("y")
    tree = {"a": [y, {"b": x}], "c": Record(x), "d": 1}
    assert [found.key for found in refs_in(tree)] == ["y", "x", "x"]


def test_tensors_are_put_in_and_all_containers_keep_their_types():
    default: Any = defaultdict(list, a=ref("d"))
    tree = {
        "pair": Pair(ref("a"), (ref("b"), 1)),
        "record": Record(ref("c")),
        "ordered": OrderedDict([(2, ref("o")), (1, 5)]),
        "default": default,
        "counter": Counter(x=3),
        "ranks": PerRankValues((ref("r0"), ref("r1"))),
    }
    found = substituted(tree, lambda reference: reference.key.upper())
    assert found == {
        "pair": Pair("A", ("B", 1)),
        "record": Record("C"),
        "ordered": OrderedDict([(2, "O"), (1, 5)]),
        "default": {"a": "D"},
        "counter": Counter(x=3),
        "ranks": PerRankValues(("R0", "R1")),
    }
    assert [type(found[key]) for key in tree] == [type(tree[key]) for key in tree]
    assert found["default"].default_factory is list
    assert isinstance(tree["record"].a, TensorRef), "the tree itself stays as it is"
    assert isinstance(default["a"], TensorRef)


def test_what_does_not_change_stays_the_same_object():
    ordered = OrderedDict(a=1)
    assert mapped(ordered, lambda child: child) is ordered
    assert mapped(5, str) == 5
