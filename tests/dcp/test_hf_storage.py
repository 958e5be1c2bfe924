"""Hugging Face folders in one process: the files, what stock torch and safetensors make of them, what is refused."""

from __future__ import annotations

import inspect
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import holdfast.dcp as dcp
from holdfast._dcp import hf_reader
from holdfast._formats.ranged_files import StreamRanges
from holdfast._formats.safetensors.torch_dtypes import BY_NAME
from holdfast.dcp import _consolidate_hf_safetensors as consolidation
from holdfast.dcp import _hf_utils as utils
from holdfast.dcp import hf_storage as storage
from holdfast.dcp import quantized_hf_storage as quantized
from holdfast.dcp.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from holdfast.dcp.filesystem import FileSystemReader, FileSystemWriter
from holdfast.dcp.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from holdfast.dcp.metadata import MetadataIndex, TensorStorageMetadata
from holdfast.errors import (
    CheckpointException,
    DamagedCheckpointError,
    InvalidPlanError,
    UnsupportedTensorError,
    UnsupportedValueError,
)
from tests.dcp.states import bits, blank, differing, of_bytes
from tests.torches import ALONE, stock_module

stock_consolidation = stock_module("_consolidate_hf_safetensors")
stock_utils = stock_module("_hf_utils")
stock_storage = stock_module("hf_storage")
stock_quantized = stock_module("quantized_hf_storage")

INDEX = "model.safetensors.index.json"
UNKNOWN_TO_STOCK = {"F4", "F8_E8M0"}
"""Element types that the reader of stock torch does not know."""
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "parts": {"save_distributed": True},
    "parts and whole": {"save_distributed": True, "enable_consolidation": True},
    "consolidation alone": {"enable_consolidation": True},
}


def save(state: dict[str, Any], path: Path, **options: Any) -> Any:
    return dcp.save(state, storage_writer=HuggingFaceStorageWriter(path, **options), no_dist=True)


def load(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path, **options), no_dist=True)


def blanks(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: blank(tensor) for key, tensor in state.items()}


def loaded(state: dict[str, torch.Tensor], path: Path, **options: Any) -> dict[str, torch.Tensor]:
    found = blanks(state)
    load(found, path, **options)
    return found


def files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def cause(raised: pytest.ExceptionInfo[CheckpointException], rank: int = 0) -> BaseException:
    return raised.value.failures[rank][0]


def all_kinds(without: set[str] = frozenset()) -> dict[str, torch.Tensor]:
    """A tensor of every dtype, and of every odd shape."""
    state = {}
    for name, dtype in BY_NAME.items():
        if name not in without:
            data = torch.arange(6 * 4 * dtype.itemsize, dtype=torch.uint8)
            state[f"dtype.{name}"] = of_bytes(data, dtype, (6, 4))
    shared = torch.arange(12.0)
    return state | {
        "number": torch.tensor(3.5),
        "integer": torch.tensor(7),
        "flag": torch.tensor(True),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "every other": torch.arange(10)[::2],
        "tied.a": shared,
        "tied.b": shared,
        "view": shared[3:7],
        "expanded": torch.tensor([5.0]).expand(4),
        "conjugate": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        "grad": torch.nn.Parameter(torch.ones(3)),
    }


# --- the files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_tensor_comes_back(mode: str, tmp_path: Path) -> None:
    state = all_kinds()

    save(state, tmp_path, **MODES[mode])

    assert differing(loaded(state, tmp_path), state) == []


@pytest.mark.parametrize("mode", MODES)
def test_stock_torch_and_safetensors_read_what_is_written(mode: str, tmp_path: Path) -> None:
    state = all_kinds(UNKNOWN_TO_STOCK)

    save(state, tmp_path, **MODES[mode])

    found = blanks(state)
    stock.load(found, storage_reader=stock.HuggingFaceStorageReader(str(tmp_path)), **ALONE)
    assert differing(found, state) == []
    (file,) = tmp_path.glob("*.safetensors")
    assert differing(load_file(file), state) == []


@pytest.mark.parametrize("options", [{}, {"save_distributed": True}])
def test_what_stock_torch_wrote_is_read(options: dict[str, Any], tmp_path: Path) -> None:
    state = {"a": torch.randn(4, 3), "b": torch.tensor(2.0), "c": torch.arange(5), "d": torch.tensor([True, False])}
    stock.save(state, storage_writer=stock.HuggingFaceStorageWriter(str(tmp_path), **options), **ALONE)

    assert differing(loaded(state, tmp_path), state) == []
    assert (
        differing(
            dcp.state_dict_loader._load_state_dict_from_keys(storage_reader=HuggingFaceStorageReader(tmp_path)), state
        )
        == []
    )


@pytest.mark.parametrize("options", [
    {},
    {"fqn_to_index_mapping": {"a": 1, "b": 2, "c": 2, "not there": 4}},
    {"save_distributed": True},
    {"save_distributed": True, "fqn_to_index_mapping": {"a": 1, "b": 2, "c": 2}},
    {"save_distributed": True, "enable_consolidation": True, "fqn_to_index_mapping": {"a": 1, "b": 2, "c": 2}},
])  # fmt: skip
def test_files_index_and_notes_are_those_of_stock_torch(options: dict[str, Any], tmp_path: Path) -> None:
    state = {"a": torch.randn(4, 3), "b": torch.ones(2), "c": torch.zeros(2, 2, dtype=torch.bfloat16)}
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"

    save(state, ours, **options)
    stock.save(state, storage_writer=stock.HuggingFaceStorageWriter(str(theirs), **options), **ALONE)

    assert files(ours) == files(theirs)
    for name in files(ours):
        if name == INDEX:
            index, expected = (json.loads((folder / name).read_text()) for folder in (ours, theirs))
            assert index["metadata"].pop("holdfast_save_id")
            assert index == expected
            assert "\n  " in (ours / name).read_text(), "indented, as stock torch does"
        else:
            with safe_open(ours / name, "pt") as mine, safe_open(theirs / name, "pt") as other:
                assert set(mine.keys()) == set(other.keys())
                notes, expected_notes = mine.metadata(), other.metadata() or {"format": "pt"}
            assert json.loads(notes.pop("HOLDFAST_SAVE"))["id"]
            for note in (notes, expected_notes):
                if "DCP_SHARDING_INFO" in note:
                    note["DCP_SHARDING_INFO"] = json.loads(note["DCP_SHARDING_INFO"])
            assert notes == expected_notes


def test_a_loader_that_goes_by_the_index_finds_everything(tmp_path: Path) -> None:
    """As transformers does it: the index says which files there are, every file says that it is of torch."""
    state = all_kinds()
    save(state, tmp_path, fqn_to_index_mapping={key: 1 + n % 3 for n, key in enumerate(state)})
    index = json.loads((tmp_path / INDEX).read_text())

    found: dict[str, torch.Tensor] = {}
    for name in set(index["weight_map"].values()):
        with safe_open(tmp_path / name, "pt") as file:
            assert file.metadata()["format"] == "pt"
        found |= load_file(tmp_path / name)

    assert differing(found, state) == []
    assert index["weight_map"].keys() == state.keys()
    assert index["metadata"]["total_size"] == sum(len(bits(tensor)) for tensor in state.values())


def test_nested_states_are_stored_under_their_flat_keys(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    save({"model": model}, tmp_path)

    (file,) = tmp_path.glob("*.safetensors")
    assert load_file(file).keys() == {"model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"}
    other = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    load({"model": other}, tmp_path)
    assert differing(dict(other.state_dict()), dict(model.state_dict())) == []


def test_an_empty_state_makes_an_index_of_nothing(tmp_path: Path) -> None:
    save({}, tmp_path)

    assert json.loads((tmp_path / INDEX).read_text())["weight_map"] == {}
    load({}, tmp_path)


def test_the_result_of_a_save_describes_it_as_stock_torch_does(tmp_path: Path) -> None:
    metadata = save({"w": torch.ones(3)}, tmp_path)

    assert metadata.storage_data is metadata.storage_meta is metadata.version is None
    assert metadata.state_dict_metadata["w"].size == torch.Size([3])


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_make_no_difference(threads: int, tmp_path: Path) -> None:
    state = {f"w{n}": torch.full((n + 1,), float(n)) for n in range(12)}
    mapping = {key: 1 + n % 5 for n, key in enumerate(state)}

    save(
        state, tmp_path, fqn_to_index_mapping=mapping, thread_count=threads, save_distributed=True,
        enable_consolidation=True, thread_count_consolidation=threads,
    )  # fmt: skip

    assert differing(loaded(state, tmp_path, thread_count=threads), state) == []
    assert differing(loaded(state, tmp_path / "sharded", thread_count=threads), state) == []


# --- seams -----------------------------------------------------------------------------------------------------------


class Halving(DefaultSavePlanner):
    """Stores everything as bfloat16."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object).to(torch.bfloat16)


@pytest.mark.parametrize("mode", ["whole", "parts"])
def test_a_planner_may_convert_on_the_way(mode: str, tmp_path: Path) -> None:
    state = {"w": torch.randn(5, 3), "c": torch.ones(2, dtype=torch.float64), "already": torch.ones(2).bfloat16()}

    writer = HuggingFaceStorageWriter(tmp_path, **MODES[mode])
    metadata = dcp.save(state, storage_writer=writer, planner=Halving(), no_dist=True)

    (file,) = tmp_path.glob("*.safetensors")
    assert differing(load_file(file), {key: tensor.bfloat16() for key, tensor in state.items()}) == []
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.properties.dtype == torch.bfloat16


def test_a_planner_may_make_storable_what_is_not(tmp_path: Path) -> None:
    class Real(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return object.real

    writer = HuggingFaceStorageWriter(tmp_path)
    dcp.save({"c": torch.ones(2, dtype=torch.complex128)}, storage_writer=writer, planner=Real(), no_dist=True)

    assert load_file(next(tmp_path.glob("*.safetensors")))["c"].dtype == torch.float64


def test_a_planner_that_changes_shapes_behind_the_plan_is_refused(tmp_path: Path) -> None:
    class Flattening(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return object.flatten()

    with pytest.raises(CheckpointException, match=r"'w'.*shape \[6\].*\[2, 3\]"):
        dcp.save(
            {"w": torch.ones(2, 3)},
            storage_writer=HuggingFaceStorageWriter(tmp_path),
            planner=Flattening(),
            no_dist=True,
        )
    assert files(tmp_path) == []


def test_cached_plans_go_with_every_folder(tmp_path: Path) -> None:
    for step in range(3):
        state = {"w": torch.full((3,), float(step))}
        writer = HuggingFaceStorageWriter(tmp_path / str(step))
        dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True), no_dist=True)
        assert differing(loaded(state, tmp_path / str(step)), state) == []


def test_a_cached_plan_with_values_is_refused_as_well(tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "step": 7}
    for writer in (FileSystemWriter(tmp_path / "dcp"), HuggingFaceStorageWriter(tmp_path / "hf")):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        if isinstance(writer, HuggingFaceStorageWriter):
            with pytest.raises(CheckpointException) as raised:
                dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
            assert isinstance(cause(raised), UnsupportedValueError)
        else:
            dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    assert files(tmp_path / "hf") == []


def test_reset_moves_parts_and_whole_files(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(tmp_path / "first", save_distributed=True, enable_consolidation=True)
    for place in ("first", "second"):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / place, storage_writer=writer, no_dist=True)
        assert writer.consolidated_output_path == tmp_path / place
    expected = [f"model-00001-of-00001{utils.SUFFIX}", INDEX, f"sharded/shard-00001-model-00001-of-00001{utils.SUFFIX}"]
    assert files(tmp_path / "first") == files(tmp_path / "second") == expected


def test_a_reader_follows_reset(tmp_path: Path) -> None:
    for number in (1, 2):
        save({"w": torch.tensor(float(number))}, tmp_path / str(number))
    reader = HuggingFaceStorageReader(tmp_path / "1")
    state = {"w": torch.tensor(0.0)}

    dcp.load(state, checkpoint_id=tmp_path / "2", storage_reader=reader, no_dist=True)

    assert state["w"] == 2


def test_a_save_in_the_background_takes_the_state_of_the_moment(tmp_path: Path) -> None:
    state = {"w": torch.ones(4)}

    future = dcp.async_save(state, storage_writer=HuggingFaceStorageWriter(tmp_path))
    state["w"].zero_()
    future.result()

    assert loaded(state, tmp_path)["w"].tolist() == [1, 1, 1, 1]


def test_a_writer_travels_to_other_processes(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(HuggingFaceStorageWriter(tmp_path, {"w": 1}, save_distributed=True)))

    dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)

    assert files(tmp_path) == [f"shard-00001-model-00001-of-00001{utils.SUFFIX}"]


def test_a_reader_tells_which_save_it_sees(tmp_path: Path) -> None:
    ids = []
    for mode in ("whole", "parts"):
        save({"w": torch.ones(3)}, tmp_path / mode, **MODES[mode])
        meta = HuggingFaceStorageReader(tmp_path / mode).read_metadata().storage_meta
        assert meta is not None
        ids.append(meta.save_id)
    assert None not in ids
    assert ids[0] != ids[1]
    assert ids[0] == json.loads((tmp_path / "whole" / INDEX).read_text())["metadata"]["holdfast_save_id"]


def test_only_the_slices_that_are_needed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"big": torch.arange(1 << 20), "w": torch.ones(3)}, tmp_path)
    read: list[int] = []
    original = StreamRanges.read_into

    def counting(self: StreamRanges, begin: int, buffer: Any) -> None:
        read.append(memoryview(buffer).nbytes)
        original(self, begin, buffer)

    monkeypatch.setattr(StreamRanges, "read_into", counting)
    state = {"w": torch.zeros(3)}
    load(state, tmp_path)

    assert read == [12]
    assert state["w"].tolist() == [1, 1, 1]


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_values_are_refused_by_name_before_anything_is_written(mode: str, tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "step": 7, "config": {"lr": 0.1, "name": "x"}}

    with pytest.raises(CheckpointException) as raised:
        save(state, tmp_path / "new", **MODES[mode])

    error = cause(raised)
    assert isinstance(error, UnsupportedValueError)
    assert error.fields["keys"] == ["config.lr", "config.name", "step"]
    for name in ("config.lr", "config.name", "step", "FileSystemWriter", "Nothing was written"):
        assert name in str(error)
    assert not (tmp_path / "new").exists()


def test_keys_that_the_mapping_lacks_are_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as raised:
        save(
            {"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)},
            tmp_path / "new",
            fqn_to_index_mapping={"b": 1},
        )

    error = cause(raised)
    assert isinstance(error, InvalidPlanError)
    assert error.problems == ["a", "c"]
    assert not (tmp_path / "new").exists()


def test_dtypes_that_files_cannot_hold_are_all_named(tmp_path: Path) -> None:
    state = {
        "fine": torch.ones(2),
        "c": torch.ones(2, dtype=torch.complex128),
        "h": torch.ones(2, dtype=torch.complex32),
    }

    with pytest.raises(CheckpointException) as raised:
        save(state, tmp_path)

    assert isinstance(cause(raised), UnsupportedTensorError)
    assert "'c' (torch.complex128)" in str(cause(raised))
    assert "'h' (torch.complex32)" in str(cause(raised))
    assert files(tmp_path) == []


def test_ranks_that_plan_on_their_own_are_refused(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(tmp_path / "new")
    with pytest.raises(CheckpointException, match="use_collectives=True"):
        dcp.save({"w": torch.ones(1)}, storage_writer=writer, no_dist=True, use_collectives=False)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("make", [
    lambda path: HuggingFaceStorageWriter(path, thread_count=0),
    lambda path: HuggingFaceStorageWriter(path, thread_count_consolidation=0),
    lambda path: HuggingFaceStorageReader(path, thread_count=0),
])  # fmt: skip
def test_no_threads_are_too_few(make: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1 thread"):
        make(tmp_path)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_write_error_in_any_thread_fails_the_save_and_leaves_nothing(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"w": torch.ones(3)}, tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    from holdfast._dcp import hf_files

    original = hf_files.flush_to_disk
    calls: list[Any] = []

    def full_disk(stream: Any) -> None:
        calls.append(stream)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        original(stream)

    monkeypatch.setattr(hf_files, "flush_to_disk", full_disk)
    state = {f"w{n}": torch.zeros(3) for n in range(4)}
    mapping = {key: n + 1 for n, key in enumerate(state)}
    with pytest.raises(CheckpointException, match="No space left"), pytest.warns(UserWarning, match="will replace"):
        save(state, tmp_path, fqn_to_index_mapping=mapping, thread_count=threads)

    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


@pytest.mark.parametrize("threads", [1, 2])
def test_a_read_error_in_any_thread_is_the_error_of_the_load(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{n}": torch.ones(3) for n in range(4)}
    save(state, tmp_path, fqn_to_index_mapping={key: n + 1 for n, key in enumerate(state)})
    original = hf_reader.read_region

    def failing(*args: Any, key: str, **names: Any) -> None:
        if key == "w2":
            raise OSError(5, "Input/output error")
        original(*args, key=key, **names)

    monkeypatch.setattr(hf_reader, "read_region", failing)
    with pytest.raises(CheckpointException, match=r"Input/output error.*item\(s\) of this rank"):
        loaded(state, tmp_path, thread_count=threads)


def test_a_load_planner_with_another_shape_than_planned_is_refused(tmp_path: Path) -> None:
    class Larger(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return torch.zeros(2, 3)

    save({"w": torch.ones(3)}, tmp_path)
    with pytest.raises(CheckpointException, match=r"'w'.*shape \[2, 3\].*\[3\]"):
        dcp.load(
            {"w": torch.zeros(3)}, storage_reader=HuggingFaceStorageReader(tmp_path), planner=Larger(), no_dist=True
        )


def test_a_load_planner_that_asks_for_what_is_not_there_is_refused(tmp_path: Path) -> None:
    class Elsewhere(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            wrong = MetadataIndex("w", torch.Size([1]))
            return replace(plan, items=[replace(item, storage_index=wrong) for item in plan.items])

    save({"w": torch.ones(3)}, tmp_path)
    with pytest.raises(CheckpointException) as raised:
        dcp.load(
            {"w": torch.zeros(3)}, storage_reader=HuggingFaceStorageReader(tmp_path), planner=Elsewhere(), no_dist=True
        )
    assert isinstance(cause(raised), DamagedCheckpointError)


def test_loading_into_other_dtypes_follows_the_planner(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path)
    state = {"w": torch.zeros(3, dtype=torch.float64)}
    with pytest.warns(UserWarning, match="w"):
        load(state, tmp_path)
    assert state["w"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointException, match="int64"):
        load({"w": torch.zeros(3, dtype=torch.int64)}, tmp_path)


# --- the surface -----------------------------------------------------------------------------------------------------

PRIVATE_WORKINGS = {
    "_FqnData", "_InputFileData", "_OutputFileData", "_calculate_max_contiguous_elements",
    "_consolidate_safetensors_files", "_parse_input_metadata", "_process_output_file", "_read_tensor_data",
    "_read_tensor_data_mmap", "_write_data", "_write_metadata", "_write_overall_metadata_file",
    "_write_sub_tensor_to_file_optimized",
}  # fmt: skip
"""How stock torch consolidates inside; ours works differently and has no such steps."""


@pytest.mark.parametrize(("ours", "theirs"), [
    (storage, stock_storage), (quantized, stock_quantized), (consolidation, stock_consolidation), (utils, stock_utils),
])  # fmt: skip
def test_every_name_of_stock_torch_is_there_with_its_parameters(ours: Any, theirs: Any) -> None:
    own = {
        name: value for name, value in vars(theirs).items()
        if getattr(value, "__module__", theirs.__name__) == theirs.__name__
        and not name.startswith("__") and not inspect.ismodule(value) and name != "logger"
    }  # fmt: skip
    assert own.keys() - vars(ours).keys() - PRIVATE_WORKINGS == set()
    for name in own.keys() - PRIVATE_WORKINGS:
        if isinstance(own[name], (str, int, float)):
            assert getattr(ours, name) == own[name]
        elif callable(own[name]):
            expected = inspect.signature(own[name]).parameters
            found = inspect.signature(getattr(ours, name)).parameters
            assert list(found)[: len(expected)] == list(expected)
            for parameter in expected.values():
                if parameter.default is not parameter.empty:
                    assert found[parameter.name].default == parameter.default


def test_classes_derive_as_they_do_in_stock_torch(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(tmp_path)
    assert isinstance(writer, FileSystemWriter)
    assert isinstance(HuggingFaceStorageReader(tmp_path), FileSystemReader)
    assert issubclass(quantized.QuantizedHuggingFaceStorageReader, HuggingFaceStorageReader)
    assert writer.metadata_path == stock.HuggingFaceStorageWriter(str(tmp_path)).metadata_path


def test_small_helpers_do_what_those_of_stock_torch_do(tmp_path: Path) -> None:
    file = tmp_path / "file"
    save_file({"a": torch.ones(3)}, file, {"DCP_SHARDING_INFO": '{"a": {"saved_offsets": [0]}}', "format": "pt"})
    for names in ((1, 3), (2, 3, 4)):
        assert utils._gen_file_name(*names) == stock_utils._gen_file_name(*names)
    with file.open("rb") as ours, file.open("rb") as theirs:
        header = utils._get_safetensors_file_metadata(ours)
        assert header == stock_utils._get_safetensors_file_metadata(theirs)
    for headers in (header[0], {}, {"__metadata__": {}}):
        assert utils._get_dcp_custom_metadata(headers) == stock_utils._get_dcp_custom_metadata(headers)
    assert all(utils._get_dtype(name) == dtype for name, dtype in stock_utils.DTYPE_MAP.items())
    assert utils._get_dtype("BOOL") == torch.bool, "stock torch takes what it does not know for float32"
    with pytest.raises(ValueError, match="nonsense"):
        utils._get_dtype("nonsense")
    info, expected = (library._HFStorageInfo("file", torch.Size([3]), torch.bool) for library in (utils, stock_utils))
    assert vars(expected).items() <= vars(info).items()


@pytest.mark.parametrize("content", [b"\xff" * 8 + b"{}", b"\2", (5).to_bytes(8, "little") + b"[1,2]"])
def test_a_header_without_a_sensible_length_or_content_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)

    with (tmp_path / "file").open("rb") as stream, pytest.raises(DamagedCheckpointError, match="file") as refused:
        utils._get_safetensors_file_metadata(stream)
    assert refused.value.file == str(tmp_path / "file")
