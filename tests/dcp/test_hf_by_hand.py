"""Hugging Face storages whose methods a program calls one by one, without ``save`` and ``load``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import holdfast.dcp as dcp
from holdfast.dcp._hf_utils import _HFStorageInfo, _metadata_fn
from holdfast.dcp.filesystem import FileSystem, _StorageInfo
from holdfast.dcp.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from holdfast.dcp.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from holdfast.dcp.planner import TensorWriteData, WriteItem, WriteItemType
from holdfast.dcp.planner_helpers import _create_read_items, _create_write_item_for_bytesio, _create_write_items
from holdfast.dcp.storage import WriteResult
from holdfast.errors import DamagedCheckpointError, InvalidPlanError, UnsupportedValueError

WEIGHTS = {"first": torch.arange(4.0), "second": torch.arange(6.0).reshape(2, 3)}
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def plan_for(state: dict[str, torch.Tensor], storage_data: Any) -> tuple[dcp.SavePlan, dcp.DefaultSavePlanner]:
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(state)
    items = [item for key, tensor in state.items() for item in _create_write_items(key, tensor)]
    return dcp.SavePlan(items, storage_data=storage_data), planner


@pytest.mark.parametrize(
    "storage_data",
    [
        {"fqn_to_index_mapping": {"first": 1, "second": 2}},
        {"fqn_to_file_mapping": {"first": 1, "second": 2}},
        {"fqn_to_file_mapping": {"first": ONE, "second": TWO.removesuffix(".safetensors")}},
        {"first": 1, "second": 2},
    ],
    ids=str,
)
def test_files_are_written_as_the_plan_says_and_then_listed(tmp_path: Path, storage_data: Any) -> None:
    writer = HuggingFaceStorageWriter(str(tmp_path / "new"), {"first": 1, "second": 2})
    writer.fs = FileSystem()
    plan, planner = plan_for(WEIGHTS, storage_data)

    future = writer.write_data(plan, planner)
    future.wait()

    assert future.value() == [
        WriteResult(item.index, WEIGHTS[item.index.fqn].nbytes, _StorageInfo(name, 0, WEIGHTS[item.index.fqn].nbytes))
        for item, name in zip(plan.items, (ONE, TWO), strict=True)
    ]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [ONE, TWO]
    writer.finish(Metadata({}), [future.value()])
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [ONE, TWO, _metadata_fn]
    assert torch.equal(load_file(tmp_path / "new" / TWO)["second"], WEIGHTS["second"])
    state = {key: torch.zeros_like(tensor) for key, tensor in WEIGHTS.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(tmp_path / "new"), no_dist=True)
    assert all(torch.equal(state[key], WEIGHTS[key]) for key in WEIGHTS)


@pytest.mark.parametrize("storage_data", [None, {}])
def test_a_plan_that_says_nothing_means_one_file(tmp_path: Path, storage_data: Any) -> None:
    writer = HuggingFaceStorageWriter(tmp_path)

    results = writer.write_data(*plan_for(WEIGHTS, storage_data)).value()

    assert {result.storage_data.relative_path for result in results} == {"model-00001-of-00001.safetensors"}
    assert set(load_file(tmp_path / "model-00001-of-00001.safetensors")) == set(WEIGHTS)
    assert writer.write_data(dcp.SavePlan([], storage_data=storage_data), dcp.DefaultSavePlanner()).value() == []


def test_results_are_listed_although_others_wrote_the_files(tmp_path: Path) -> None:
    results = [
        WriteResult(MetadataIndex(key), 100, _StorageInfo(f"model-0000{number}-of-00002", 0, 100))
        for number, key in enumerate(WEIGHTS, 1)
    ]
    writer = HuggingFaceStorageWriter(tmp_path)
    (tmp_path / _metadata_fn).write_text("an earlier one")

    writer.finish(Metadata({}), [results[:1], results[1:]])

    assert json.loads((tmp_path / _metadata_fn).read_text()) == {
        "metadata": {"total_size": 200},
        "weight_map": {"first": "model-00001-of-00002", "second": "model-00002-of-00002"},
    }
    assert [path.name for path in tmp_path.iterdir()] == [_metadata_fn]


def rows(start: int) -> tuple[dcp.SavePlan, dcp.DefaultSavePlanner]:
    """Two of four rows of a tensor, as a rank plans them."""

    class OfRows(dcp.DefaultSavePlanner):
        def lookup_object(self, index: MetadataIndex) -> Any:
            return torch.arange(12.0).reshape(4, 3)[start : start + 2]

    chunk = ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([2, 3]))
    data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([4, 3]))
    item = WriteItem(MetadataIndex("w", chunk.offsets), WriteItemType.SHARD, tensor_data=data)
    return dcp.SavePlan([item], storage_data={"shard_index": start // 2 + 1}), OfRows()


@pytest.mark.parametrize("consolidate", [False, True])
def test_parts_of_several_writers_become_one_checkpoint(tmp_path: Path, consolidate: bool) -> None:
    options = {"save_distributed": True, "enable_consolidation": consolidate}
    writers = [HuggingFaceStorageWriter(tmp_path, **options) for _ in range(2)]
    folder = tmp_path / "sharded" if consolidate else tmp_path

    results = [writer.write_data(*rows(2 * rank)).value() for rank, writer in enumerate(writers)]

    names = [f"shard-0000{number}-model-00001-of-00001.safetensors" for number in (1, 2)]
    assert [part[0].storage_data for part in results] == [_StorageInfo(name, 0, 24) for name in names]
    assert sorted(path.name for path in folder.iterdir()) == names
    writers[0].finish(Metadata({}), results)
    state = {"w": torch.zeros(4, 3)}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(tmp_path), no_dist=True)
    assert torch.equal(state["w"], torch.arange(12.0).reshape(4, 3))
    if consolidate:
        whole = load_file(tmp_path / "model-00001-of-00001.safetensors")
        assert torch.equal(whole["w"], state["w"])
    else:
        assert not (tmp_path / _metadata_fn).exists()


def test_plans_of_a_save_say_what_programs_look_for(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(tmp_path, {"first": 1, "second": 2}, save_distributed=True)
    writer.set_up_storage_writer(True)

    plans = writer.prepare_global_plan([dcp.SavePlan([]), dcp.SavePlan([])])

    assert [plan.storage_data["shard_index"] for plan in plans] == [1, 2]
    assert plans[0].storage_data["fqn_to_index_mapping"] == {"first": 1, "second": 2}


def test_what_cannot_be_written_by_hand_is_refused_before_anything_is(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(tmp_path)
    plan, planner = plan_for(WEIGHTS, {"fqn_to_index_mapping": {"first": 1}})
    with pytest.raises(InvalidPlanError, match="second"):
        writer.write_data(plan, planner)
    with pytest.raises(InvalidPlanError, match="storage_data of the plan is a str"):
        writer.write_data(dcp.SavePlan(plan.items, storage_data="text"), planner)
    with pytest.raises(UnsupportedValueError, match="step"):
        writer.write_data(dcp.SavePlan([_create_write_item_for_bytesio("step", 1)], storage_data={}), planner)
    (one, planner), (other, _) = rows(0), rows(2)
    with pytest.raises(InvalidPlanError, match="'w' has several parts in one plan"):
        writer.write_data(dcp.SavePlan(one.items + other.items, storage_data={"shard_index": 1}), planner)

    assert list(tmp_path.iterdir()) == []


def described(path: Path, key: str, tensor: torch.Tensor) -> Metadata:
    chunk = ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())
    info = _HFStorageInfo(str(path), tensor.size(), tensor.dtype)
    entry = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.size(), [chunk])
    return Metadata({key: entry}, storage_data={MetadataIndex(key, chunk.offsets): info})


@pytest.mark.parametrize("threads", [1, 2])
def test_a_file_is_read_as_a_program_describes_it_and_may_appear_later(tmp_path: Path, threads: int) -> None:
    path = tmp_path / "any name.safetensors"
    metadata = described(path, "second", WEIGHTS["second"])
    reader = HuggingFaceStorageReader(tmp_path, thread_count=threads)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    state = {"second": torch.zeros(2, 3)}
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, True)
    plan = dcp.LoadPlan(_create_read_items("second", metadata.state_dict_metadata["second"], state["second"]))

    save_file(WEIGHTS, path)
    reader.read_data(plan, planner).wait()

    assert torch.equal(state["second"], WEIGHTS["second"])
    save_file({"second": WEIGHTS["second"] + 1}, path)  # another file by now
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(plan, planner).wait()
    assert torch.equal(state["second"], WEIGHTS["second"] + 1)
    save_file({"first": WEIGHTS["first"]}, path)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    with pytest.raises(DamagedCheckpointError, match="has no tensor 'second'"):
        reader.read_data(plan, planner)


def test_files_that_appear_between_calls_are_seen(tmp_path: Path) -> None:
    reader = HuggingFaceStorageReader(str(tmp_path))
    save_file({"first": WEIGHTS["first"]}, tmp_path / "a.safetensors")
    before = reader.read_metadata()
    save_file({"second": WEIGHTS["second"]}, tmp_path / "b.safetensors")
    after = reader.read_metadata()

    assert before.state_dict_metadata.keys() == {"first"}
    assert after.state_dict_metadata.keys() == {"first", "second"}
    assert after.storage_data[MetadataIndex("first", [0])] == _HFStorageInfo(
        str(tmp_path / "a.safetensors"), torch.Size([4]), torch.float32
    )
