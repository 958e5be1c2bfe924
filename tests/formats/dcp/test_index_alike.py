"""Tensors of an index that are alike are recognized by their bytes, and read as the machine would read them."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as stock

from holdfast._formats.archives.pickle_machine import Machine
from holdfast._formats.dcp import index_alike
from holdfast._formats.dcp.index import decode_index, encode_index
from holdfast._formats.dcp.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)
from tests.formats.archives.graphs import facts, stock_pickle
from tests.properties import examples


def decode(data: bytes) -> Metadata:
    return decode_index(data, source="/run/.metadata")


def tensor(dtype: torch.dtype, shape: tuple[int, ...], chunks: int = 1) -> TensorStorageMetadata:
    size = torch.Size([*shape[:-1], shape[-1] * chunks]) if shape else torch.Size()
    boxes = [
        ChunkStorageMetadata(
            torch.Size([*[0] * (len(shape) - 1), number * shape[-1]] if shape else []), torch.Size(shape)
        )
        for number in range(chunks)
    ]
    return TensorStorageMetadata(TensorProperties(dtype, requires_grad=chunks == 1), size, boxes)


kinds = st.builds(
    tensor,
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    st.sampled_from([(), (3,), (256,), (70_000, 2), (2, 3, 4, 5), (1 << 40,)]),
    st.sampled_from([1, 1, 1, 2]),
)


@st.composite
def indexes(draw: st.DrawFn) -> Metadata:
    several = draw(st.lists(kinds | st.just(BytesStorageMetadata()), min_size=1, max_size=4))
    chosen = draw(st.lists(st.sampled_from(several), max_size=30))
    described: dict[str, Any] = {f"layer{number}": kind for number, kind in enumerate(chosen)}
    places = {
        MetadataIndex(fqn, chunk.offsets, row): _StorageInfo("__0_0.distcp", row, 10)
        for fqn, kind in described.items()
        for row, chunk in enumerate(getattr(kind, "chunks", []))
    }
    return Metadata(described, None, places, None, "1.0.0")


def apart(metadata: Metadata) -> Metadata:
    """The same, with no object in it twice."""
    return decode(encode_index(metadata))


@given(indexes(), st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_what_is_recognized_is_what_the_machine_reads(metadata: Metadata, by_stock: bool) -> None:
    data = stock_pickle(apart(metadata)) if by_stock else encode_index(metadata)
    fast = decode(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_alike, "_TENSOR", re.compile(b"(?!)"))
        assert facts(decode(data)) == facts(fast)
    assert facts(fast) == facts(metadata)


def many() -> Metadata:
    return Metadata({f"layer{number}": tensor(torch.float32, (256,)) for number in range(300)}, None, {}, None, "1.0.0")


@pytest.mark.parametrize("by_stock", [True, False])
def test_of_tensors_that_are_alike_only_the_first_are_executed(monkeypatch: pytest.MonkeyPatch, by_stock: bool) -> None:
    original, recognized = index_alike._made, []
    monkeypatch.setattr(index_alike, "_made", lambda known: recognized.append(known) or original(known))
    decode(stock_pickle(many()) if by_stock else encode_index(many()))

    assert len(recognized) > 290


def test_tensors_that_are_alike_have_nothing_in_common_that_could_be_changed() -> None:
    entries = list(decode(stock_pickle(many())).state_dict_metadata.values())
    changed, *others = entries[100:]
    assert isinstance(changed, TensorStorageMetadata)
    changed.properties.dtype = torch.int8
    changed.chunks[0].sizes = torch.Size([1])
    changed.chunks.clear()

    assert all(facts(other) == facts(tensor(torch.float32, (256,))) for other in others)


def test_references_to_what_was_recognized_find_it() -> None:
    described = {
        f"layer{number}": stock.TensorStorageMetadata(
            stock.TensorProperties(torch.float32),
            torch.Size([5]),
            [stock.ChunkStorageMetadata(torch.Size([0]), torch.Size([5]))],
        )
        for number in range(20)
    }
    last = described["layer19"]
    described["again"] = last
    index = stock.MetadataIndex("layer19", index=0)
    vars(index)["offset"] = last.chunks[0].offsets
    data = pickle.dumps(stock.Metadata(described, [last.properties, last.chunks, last.size], {index: "here"}), 4)

    found: Any = decode(data)
    entry = found.state_dict_metadata["layer19"]
    assert found.state_dict_metadata["again"] is entry
    assert found.planner_data[0] is entry.properties
    assert found.planner_data[1] is entry.chunks
    assert found.planner_data[2] == entry.size
    assert found.storage_data == {MetadataIndex("layer19", entry.chunks[0].offsets): "here"}


def test_nothing_is_recognized_any_more_when_a_reference_means_something_else() -> None:
    """No pickler writes a slot of the memo twice. A file that does must not be read in another way than by torch."""
    machine = Machine(b"\x80\x02K\x01q\x00K\x02q\x01K\x03q\x00.", lambda *_: None, None)
    machine.scratch["learned"] = True
    machine.run_to(10)  # both slots are written for the first time
    assert machine.memo == [1, 2]
    assert machine.scratch
    machine.run_to(14)
    assert machine.memo == [3, 2]
    assert not machine.scratch
