"""The wanted part of a state: leaf by leaf, with containers that stay what they are as far as they can."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.refs import PerRankValues, TensorRef, UnregisteredValue
from holdfast._formats.native.trees import NOTHING, pruned


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Record:
    a: Any
    b: Any = 2


def ref(key: str) -> TensorRef:
    return TensorRef(key, dtype_named("float32"), (2,))


def test_pruning_keeps_positions_and_drops_what_is_empty():
    tree = {"a": {"x": 1, "y": 2}, "b": [ref("t"), ref("u")], "c": {"z": 3}, "d": [1, 2], "e": Pair(ref("p"), 5)}
    wanted = {("a", "y"), ("b", 1), ("d",), ("e", "a"), ("e", "b")}
    assert pruned(tree, (), lambda path: path in wanted) == {
        "a": {"y": 2},
        "b": [None, ref("u")],
        "d": [1, 2],
        "e": Pair(ref("p"), 5),
    }
    assert pruned(tree, (), lambda path: False) is NOTHING
    assert pruned(tree, (), lambda path: True) is tree
    ranks = PerRankValues(({"a": 1, "b": 2}, {"a": 3}))
    assert pruned(ranks, (), lambda path: path[-1] == "b") == PerRankValues(({"b": 2}, None))
    assert pruned(defaultdict(list, a=1, b=2), (), lambda path: path == ("a",)) == defaultdict(list, a=1)


def test_of_objects_the_wanted_fields_are_left():
    def only_a(path: tuple[Any, ...]) -> bool:
        return path[-1] == "a"

    name = f"{__name__}:"
    assert pruned(Pair(1, 2), (), only_a) == UnregisteredValue("namedtuple", f"{name}Pair", {"a": 1})
    assert pruned(Record(1), (), only_a) == UnregisteredValue("dataclass", f"{name}Record", {"a": 1})
    stored = UnregisteredValue("dataclass", "elsewhere:Record", {"a": 1, "b": 2})
    assert pruned(stored, (), only_a) == UnregisteredValue("dataclass", "elsewhere:Record", {"a": 1})


def test_what_is_a_tensor_decides_whether_a_list_is_one_leaf():
    mixed = [1, Record(np.zeros(2))]
    assert pruned(mixed, (), lambda path: path == (0,)) is NOTHING
    assert pruned(mixed, (), lambda path: path == (0,), tensors=(np.ndarray,)) == [1, None]
