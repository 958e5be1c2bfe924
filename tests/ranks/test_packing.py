"""What travels between ranks arrives as it was, and is never pickled in one long go."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast._base.boxes import Box
from holdfast._dcp.data_files import StoredResult, ValueNeedingPickle
from holdfast._dcp.storage import WriteResult
from holdfast._formats.dcp.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    Seal,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)
from holdfast._formats.dcp.plan import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType
from holdfast._layout.descriptions import TensorDescription
from holdfast._ranks import packing
from holdfast._ranks.packing import pack, unpack

few_words = st.text(max_size=3)
numbers = st.integers(0, 1 << 40)
sizes = st.lists(st.integers(0, 300), max_size=3).map(torch.Size)
indexes = st.builds(MetadataIndex, few_words, st.none() | sizes, st.none() | numbers)
dtypes = st.sampled_from([torch.float32, torch.int8, torch.float8_e4m3fn])
properties = st.builds(
    TensorProperties,
    dtypes,
    st.sampled_from([torch.strided, torch.sparse_coo]),
    st.booleans(),
    st.sampled_from([torch.contiguous_format, torch.channels_last]),
)
chunks = st.builds(ChunkStorageMetadata, sizes, sizes)
items = st.builds(
    WriteItem,
    indexes,
    st.sampled_from(WriteItemType),
    st.none() | st.builds(BytesIOWriteData, numbers),
    st.none() | st.builds(TensorWriteData, chunks, properties, sizes),
)
seals = st.builds(Seal, numbers, numbers, numbers, numbers)
places = st.builds(
    _StorageInfo, few_words, numbers, numbers, st.none() | st.lists(few_words, max_size=2), st.none() | seals
)
results = st.one_of(
    st.builds(WriteResult, indexes, numbers, places),
    st.builds(StoredResult, indexes, numbers, places, st.none() | dtypes),
    st.builds(ValueNeedingPickle, indexes, numbers, places, needs=few_words),
)
entries = st.builds(BytesStorageMetadata) | st.builds(
    TensorStorageMetadata, properties, sizes, st.lists(chunks, max_size=2)
)
paths = st.dictionaries(few_words, st.lists(few_words | numbers, max_size=3).map(tuple), max_size=6)
plans = st.builds(
    SavePlan,
    st.lists(items, max_size=6),
    st.none() | few_words,
    st.none() | paths,
    replica_digests=st.dictionaries(indexes, st.binary(max_size=2), max_size=6),
)
indices_of_checkpoints = st.builds(
    Metadata, st.dictionaries(few_words, entries, max_size=6), paths, st.dictionaries(indexes, places, max_size=6)
)
places_in_tensors = st.lists(st.integers(0, 9), max_size=3).map(tuple)
descriptions = st.builds(
    TensorDescription,
    few_words,
    st.sampled_from(["float32", "int8"]),
    places_in_tensors,
    st.sampled_from(["sharded", "replicated"]),
    st.lists(st.builds(Box, places_in_tensors, places_in_tensors), max_size=2).map(tuple),
    numpy=st.none() | st.just("<f4"),
    tied_to=st.none() | few_words,
    digests=st.lists(st.binary(max_size=2), max_size=2).map(tuple),
)
messages = st.one_of(
    st.lists(descriptions, max_size=6),
    st.lists(st.lists(st.builds(Box, places_in_tensors, places_in_tensors) | few_words, max_size=3).map(tuple)),
    st.tuples(few_words, plans),
    st.lists(results, max_size=6),
    indices_of_checkpoints,
    st.lists(st.lists(items, max_size=6), max_size=3),
    st.recursive(st.none() | few_words | numbers, lambda inner: st.lists(inner) | st.dictionaries(few_words, inner)),
)


def arrived(message: Any, at_once: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "RECORDS_AT_ONCE", at_once)
        sent = pack(message)
    return unpack(sent)


def described(value: Any) -> Any:
    """Everything about a value, with the types that ``==`` overlooks and the attributes that it does not compare."""
    if isinstance(value, (list, tuple)):
        return type(value), [described(member) for member in value]
    if isinstance(value, dict):
        return type(value), [(described(key), described(member)) for key, member in value.items()]
    if hasattr(value, "__dict__") and not isinstance(value, WriteItemType):
        return type(value), {name: described(member) for name, member in vars(value).items()}
    return type(value), value


@given(messages, st.integers(1, 7))
def test_messages_arrive_as_pickle_alone_would_bring_them(message, at_once):
    assert described(arrived(message, at_once)) == described(pickle.loads(pickle.dumps(message)))


def test_long_lists_and_dicts_are_pickled_in_parts_wherever_they_are():
    count = 3 * packing.RECORDS_AT_ONCE
    keys = [f"tensor{number}" for number in range(count)]
    message = {"plan": SavePlan([], planner_data={key: (key,) for key in keys}), "keys": keys, "again": keys}
    rest, long_ones = pickle.loads(pack(message))
    assert len(rest) < 500
    assert [(kind, len(parts)) for kind, parts in long_ones] == [(dict, 3), (list, 3)]
    came = unpack(pack(message))
    assert came == message
    assert came["keys"] is came["again"]  # as pickle alone would have it


def test_lists_and_dicts_of_many_records_travel_as_columns_and_others_do_not():
    count = packing.COLUMNS_FROM + 1
    boxes = [Box((number,), (1,)) for number in range(count)]
    message = {
        "boxes": boxes,
        "few": boxes[:-1],
        "by name": {str(box): box for box in boxes},
        "names": dict.fromkeys(boxes),
    }
    _, taken_out = pickle.loads(pack(message))
    assert [kind for kind, _ in taken_out] == [list, dict]
    assert described(unpack(pack(message))) == described(message)


def test_entries_that_arrive_do_not_share_what_can_be_changed():
    shared = TensorProperties()
    came = arrived([TensorStorageMetadata(shared, torch.Size([1]), []) for _ in range(3)], 1)
    came[0].properties.requires_grad = True
    assert [entry.properties.requires_grad for entry in came] == [True, False, False]


@dataclass
class Friend:
    """Somebody else's class."""

    friends: list[Any]


class Marked(WriteItem):
    """As custom planners make them."""


class Recipe(WriteItem):
    """Has its own way to travel."""

    def __reduce__(self) -> Any:
        return WriteItem, (MetadataIndex("cooked"), WriteItemType.BYTE_IO)


def test_what_holds_objects_of_other_classes_together_is_kept():
    ring = Friend([])
    ring.friends.append(ring)
    (came, *_) = arrived([ring, ring, ring], 2)
    assert came.friends[0] is came


def test_items_of_subclasses_arrive_as_what_they_are():
    plain = WriteItem(MetadataIndex("plain"), WriteItemType.TENSOR)
    marked = Marked(MetadataIndex("marked"), WriteItemType.SHARD)
    vars(marked)["note"] = "extra"
    cooked = Recipe(MetadataIndex("raw"), WriteItemType.TENSOR)
    came = arrived([plain, marked, cooked, replace(plain, type=WriteItemType.SHARD)], 2)
    assert [type(item) for item in came] == [WriteItem, Marked, WriteItem, WriteItem]
    assert came[1].note == "extra"
    assert [item.index.fqn for item in came] == ["plain", "marked", "cooked", "plain"]


class Fleeting:
    """Whose state is made when it is asked for, and thrown away."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> dict[str, int]:
        return {f"state {self.number}": self.number, "a": 0, "b": 0}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.number = max(state.values())


def test_states_that_are_made_for_the_journey_are_told_apart():
    came = arrived(tuple(Fleeting(number) for number in range(50)), 2)
    assert [fleeting.number for fleeting in came] == list(range(50))


def test_what_does_not_pickle_is_an_error_in_long_lists_too():
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pack([lambda: None] * (packing.RECORDS_AT_ONCE + 1))


def test_lists_that_are_too_deep_for_columns_arrive_as_well(monkeypatch) -> None:
    monkeypatch.setattr(packing, "RECORDS_AT_ONCE", 3)
    deep: list[Any] = []
    for _ in range(400):
        deep = [deep]
    assert unpack(pack([deep, 1, 2, 3, 4])) == [deep, 1, 2, 3, 4]
    endless: list[Any] = [1]
    endless.append(endless)
    arrived = unpack(pack([endless, 1, 2, 3]))
    assert arrived[0][1] is arrived[0]
    assert arrived[1:] == [1, 2, 3]
