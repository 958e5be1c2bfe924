"""`holdfast.dcp.filesystem`: the parts that other people's writers and readers are built from."""

from __future__ import annotations

import io
import queue
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import holdfast.dcp as dcp
from holdfast._dcp import device_copies
from holdfast._dcp.device_copies import HostCopy
from holdfast.dcp.filesystem import (
    FileSystem,
    SerializationFormat,
    _generate_uuid,
    _item_size,
    _OverlappingCpuLoader,
    _SerialCpuLoader,
    _split_by_size_and_type,
    _StorageReaderTransforms,
    _StorageWriterTransforms,
    _write_files_from_queue,
    _write_item,
)
from holdfast.dcp.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from holdfast.dcp.planner import LoadItemType, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType


def planned(state: dict[str, Any]) -> tuple[dcp.DefaultSavePlanner, SavePlan]:
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    (plan,), _ = planner.create_global_plan([planner.create_local_plan()])
    return planner, planner.finish_plan(plan)


def shard_item(name: str, rows: int, *, of: int) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([rows, 4]))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size([of, 4]))
    return WriteItem(MetadataIndex(name, [0, 0]), WriteItemType.SHARD, tensor_data=data)


# Sizes


def test_the_size_of_an_item_is_that_of_its_chunk_and_not_of_the_whole_tensor() -> None:
    assert _item_size(shard_item("s", 2, of=1000)) == 2 * 4 * 4


def test_items_are_shared_out_by_the_bytes_that_each_writes() -> None:
    # Stock counts full tensors and would give the shard, which is tiny, a bin of its own.
    items = [shard_item("shard", 1, of=1000), *(shard_item(f"t{n}", 100, of=100) for n in range(4))]

    bins = _split_by_size_and_type(2, items)

    assert sorted(sum(map(_item_size, share)) for share in bins) == [2 * 1600, 2 * 1600 + 16]
    assert _split_by_size_and_type(1, items) == [items]


def test_uuids_are_fresh_texts() -> None:
    assert _generate_uuid() != _generate_uuid()
    assert isinstance(_generate_uuid(), str)


# Loaders


def load_all(loader: Any, objects: Sequence[str]) -> list[tuple[torch.Tensor, str]]:
    for name in objects:
        loader.add(4, name)
    loader.start_loading()
    return list(loader.values())


@pytest.mark.parametrize("kind", [_SerialCpuLoader, _OverlappingCpuLoader])
def test_loaders_hand_out_every_tensor_with_its_object_in_order(kind: type) -> None:
    tensors = {name: torch.full((3,), float(n), requires_grad=True) for n, name in enumerate("abc")}

    loaded = load_all(kind(tensors.__getitem__), "abc")

    assert [name for _, name in loaded] == ["a", "b", "c"]
    assert [tensor.tolist() for tensor, _ in loaded] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    assert not any(tensor.requires_grad for tensor, _ in loaded)


@pytest.mark.parametrize("kind", [_SerialCpuLoader, _OverlappingCpuLoader])
def test_a_view_of_a_large_buffer_comes_without_the_buffer(kind: type) -> None:
    ((tensor, _),) = load_all(kind(lambda _: torch.arange(1000.0)[10:12]), "a")

    assert tensor.tolist() == [10, 11]
    assert tensor.untyped_storage().nbytes() == 8


def test_the_serial_loader_resolves_a_tensor_when_it_is_asked_for() -> None:
    resolved: list[str] = []
    loader = _SerialCpuLoader(lambda name: (resolved.append(name), torch.zeros(1))[1])
    for name in "ab":
        loader.add(4, name)
    loader.start_loading()

    assert resolved == []
    next(loader.values())
    assert resolved == ["a"]


class Device:
    """Stands in for an accelerator, which these machines lack: copies are done when somebody waits for them."""

    def __init__(self) -> None:
        self.under_way = 0
        self.most_under_way = 0

    def begin_copy(self, tensor: torch.Tensor, stream: Any) -> HostCopy:
        assert stream is not None
        self.under_way += tensor.nbytes
        self.most_under_way = max(self.most_under_way, self.under_way)
        host = torch.full_like(tensor, -1)

        def finish() -> None:
            host.copy_(tensor)
            self.under_way -= tensor.nbytes

        return HostCopy(host, tensor, SimpleNamespace(synchronize=finish))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(device_copies, "begin_copy", device.begin_copy)
    return device


def test_the_overlapping_loader_keeps_copies_under_way_up_to_its_limit(device: Device) -> None:
    loader = _OverlappingCpuLoader(
        lambda n: torch.full((25,), float(n)), SimpleNamespace(device=torch.device("cpu")), 300
    )
    for number in range(10):
        loader.add(100, number)
    loader.start_loading()
    assert device.under_way == 300

    loaded = list(loader.values())

    assert device.most_under_way == 300
    assert device.under_way == 0
    assert [tensor.unique().tolist() for tensor, _ in loaded] == [[n] for n in range(10)]


def test_a_tensor_above_the_limit_is_copied_alone(device: Device) -> None:
    loader = _OverlappingCpuLoader(
        lambda n: torch.full((1000,), float(n)), SimpleNamespace(device=torch.device("cpu")), 10
    )

    assert [tensor[0].item() for tensor, _ in load_all(loader, [0, 1, 2])] == [0, 1, 2]  # type: ignore[list-item]
    assert device.most_under_way == 4000


def test_a_device_without_streams_is_copied_from_without_getting_ahead() -> None:
    assert device_copies.stream_for_copies(torch.device("meta")) is None


def test_a_writer_copies_ahead_where_there_is_an_accelerator(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    begin = device.begin_copy
    monkeypatch.setattr(device_copies, "begin_copy", lambda tensor, stream: begin(tensor, stream or object()))
    state = {name: torch.full((25,), float(n)) for n, name in enumerate("abcdef")} | {"v": 1}

    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, per_thread_copy_ahead=300))

    assert device.most_under_way == 300
    monkeypatch.undo()
    target = {name: torch.zeros(25) for name in "abcdef"}
    dcp.load(target, checkpoint_id=tmp_path)
    assert all(torch.equal(target[name], state[name]) for name in target)


def test_copying_ahead_can_be_turned_off(device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)

    dcp.save({"a": torch.ones(1)}, storage_writer=dcp.FileSystemWriter(tmp_path, per_thread_copy_ahead=0))

    assert device.most_under_way == 0


# Transforms


class Scrambled:
    """A transform that is not its own inverse and does not commute: rotates bytes, then marks both ends."""

    def __init__(self, step: int) -> None:
        self.step = step

    def get_descriptor(self) -> str:
        return f"scrambled/{self.step}"

    def transform_to(self, output: Any) -> Any:
        step = self.step

        class Writer(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    output.write(b"<%d:" % step + bytes((byte + step) % 256 for byte in self.getvalue()) + b">")
                    output.close()
                super().close()

        return Writer()

    def transform_from(self, input: Any) -> Any:
        data = input.read()
        mark = b"<%d:" % self.step
        assert data.startswith(mark), f"undone in the wrong order: {data[:8]!r}"
        return io.BytesIO(bytes((byte - self.step) % 256 for byte in data[len(mark) : -1]))


class Registry:
    def from_descriptor_list(self, descriptors: Sequence[str]) -> list[Scrambled]:
        return [Scrambled(int(text.split("/")[1])) for text in descriptors]


VALUE_ITEM = WriteItem(MetadataIndex("v"), WriteItemType.BYTE_IO)
READ_ITEM = ReadItem(
    LoadItemType.BYTE_IO, MetadataIndex("v"), torch.Size([0]), MetadataIndex("v"), *[torch.Size([0])] * 2
)


def test_transforms_are_applied_recorded_and_undone_in_matching_order() -> None:
    file = io.BytesIO()
    stream, recorded = _StorageWriterTransforms([Scrambled(1), Scrambled(7)]).transform_save_stream(VALUE_ITEM, file)
    stream.write(b"some ")
    stream.write(b"bytes")
    stream.close()

    assert not file.closed
    assert recorded == ["scrambled/7", "scrambled/1"]  # the order in which the bytes passed, as stock records it
    stored = io.BytesIO(file.getvalue())
    assert (
        _StorageReaderTransforms(Registry()).transform_load_stream(READ_ITEM, recorded, stored).read() == b"some bytes"
    )


def test_without_transforms_bytes_pass_as_they_are_and_closing_leaves_the_file_open() -> None:
    file = io.BytesIO()
    stream, recorded = _StorageWriterTransforms().transform_save_stream(VALUE_ITEM, file)
    with io.BufferedWriter(stream) as buffered:  # stock's stream says that it cannot be written to
        buffered.write(b"plain")

    assert (file.getvalue(), recorded, file.closed) == (b"plain", [], False)
    raw = io.BytesIO(b"x")
    assert _StorageReaderTransforms().transform_load_stream(READ_ITEM, [], raw) is raw


@pytest.mark.parametrize("count", [1, 2])
def test_a_checkpoint_with_transforms_is_read_back(tmp_path: Path, count: int) -> None:
    extensions = [Scrambled(3), Scrambled(5)][:count]
    state = {"t": torch.arange(5), "v": {"x": "text"}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=extensions))
    target = {"t": torch.zeros(5, dtype=torch.int64), "v": {"x": ""}}

    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path, Registry()))

    assert target["t"].tolist() == [0, 1, 2, 3, 4]
    assert target["v"] == {"x": "text"}


def test_a_reader_without_a_registry_names_the_transforms_it_lacks(tmp_path: Path) -> None:
    dcp.save({"t": torch.ones(1)}, storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=[Scrambled(3)]))

    with pytest.raises(dcp.CheckpointException, match=r"scrambled/3.*extension registry"):
        dcp.load({"t": torch.ones(1)}, checkpoint_id=tmp_path)


# Writing by hand, as subclasses of the writer do


def test_items_can_be_written_one_by_one_behind_each_other() -> None:
    planner, plan = planned({"t": torch.arange(3.0), "v": [1, 2]})
    file = io.BytesIO(b"ten bytes!")
    file.seek(10)

    results = [
        _write_item(
            _StorageWriterTransforms(),
            file,
            planner.resolve_data(item),
            item,
            "f.distcp",
            SerializationFormat.TORCH_SAVE,
        )
        for item in plan.items
    ]

    position = 10
    for item, result in zip(plan.items, results, strict=True):
        info = result.storage_data
        assert (result.index, info.relative_path, info.offset) == (item.index, "f.distcp", position)
        assert info.length == result.size_in_bytes
        loaded = torch.load(io.BytesIO(file.getvalue()[position : position + info.length]))
        assert loaded == [1, 2] if item.index.fqn == "v" else torch.equal(loaded, torch.arange(3.0))
        position += info.length
    assert position == len(file.getvalue())


def test_the_crc_that_an_item_is_sealed_with_is_right() -> None:
    planner, plan = planned({"t": torch.arange(3.0)})
    file = io.BytesIO()

    result = _write_item(
        _StorageWriterTransforms(),
        file,
        planner.resolve_data(plan.items[0]),
        plan.items[0],
        "f",
        SerializationFormat.TORCH_SAVE,
    )

    seal = result.storage_data.seal
    payload = file.getvalue()[seal.payload_offset : seal.payload_offset + seal.payload_length]
    assert payload == torch.arange(3.0).numpy().tobytes()
    assert seal.payload_crc == zlib.crc32(payload)


def write_from_queue(state: dict[str, Any], folder: Path, **changes: Any) -> list[list[Any]]:
    planner, plan = planned(state)
    files: queue.Queue[Any] = queue.Queue()
    results: queue.Queue[Any] = queue.Queue()
    for number, item in enumerate(plan.items):
        files.put((folder / f"{number}.bin", f"{number}.bin", [item]))
    arguments = {
        "create_stream": FileSystem().create_stream,
        "file_queue": files,
        "result_queue": results,
        "planner": planner,
        "transforms": _StorageWriterTransforms(),
        "inflight_threshhold": 1000,
        "use_fsync": True,
        "thread_count": 1,
        "serialization_format": SerializationFormat.TORCH_SAVE,
    }
    _write_files_from_queue(**{**arguments, **changes})
    return [results.get_nowait() for _ in range(results.qsize())]


def test_files_are_written_from_a_queue_until_it_is_empty(tmp_path: Path) -> None:
    results = write_from_queue({"a": torch.ones(2), "b": "text"}, tmp_path)

    assert [[result.storage_data.relative_path for result in part] for part in results] == [["0.bin"], ["1.bin"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.bin", "1.bin"]
    assert torch.load(tmp_path / "0.bin").tolist() == [1, 1]


def test_an_error_while_writing_from_a_queue_is_raised(tmp_path: Path) -> None:
    def no_space(path: Any, mode: str) -> Any:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_from_queue({"a": torch.ones(2)}, tmp_path, create_stream=no_space)


def test_formats_that_nobody_could_read_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="TORCH_SAVE"):
        write_from_queue({"a": torch.ones(2)}, tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    with pytest.raises(ValueError, match="TORCH_SAVE"):
        dcp.FileSystemWriter(tmp_path / "new", serialization_format=SerializationFormat.SAFETENSORS)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_needs_a_thread(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="thread_count"):
        dcp.FileSystemWriter(tmp_path, thread_count=0)


# How files are laid out


@pytest.mark.parametrize(
    ("options", "files"),
    [({}, 1), ({"thread_count": 3}, 3), ({"single_file_per_rank": False}, 6), ({"sync_files": False}, 1)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_each_way_of_laying_out_files_is_read_by_us_and_by_stock(
    tmp_path: Path, options: dict[str, Any], files: int
) -> None:
    state = {f"t{n}": torch.full((n + 1,), float(n)) for n in range(5)} | {"v": "text"}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, **options))

    assert len(list(tmp_path.glob("*.distcp"))) == files
    for namespace in (dcp, stock):
        target: dict[str, Any] = {f"t{n}": torch.zeros(n + 1) for n in range(5)} | {"v": ""}
        namespace.load(target, checkpoint_id=tmp_path)
        assert all(torch.equal(target[f"t{n}"], state[f"t{n}"]) for n in range(5))
        assert target["v"] == "text"


def test_values_lie_in_front_of_tensors(tmp_path: Path) -> None:
    metadata = dcp.save({"a": torch.ones(2), "z": 1}, checkpoint_id=tmp_path)

    places = {index.fqn: info.offset for index, info in metadata.storage_data.items()}
    assert places["z"] == 0 < places["a"]


def test_the_state_of_a_reader_and_a_writer_can_be_looked_at(tmp_path: Path) -> None:
    writer, reader = dcp.FileSystemWriter(tmp_path), dcp.FileSystemReader(str(tmp_path))
    dcp.save({"a": torch.ones(2)}, storage_writer=writer)
    dcp.load({"a": torch.ones(2)}, storage_reader=reader)

    assert writer.checkpoint_id == writer.path == reader.checkpoint_id == reader.path == tmp_path
    assert (writer.rank, writer.use_collectives) == (reader.rank, reader.use_collectives) == (0, True)
    assert [index.fqn for index in reader.storage_data] == ["a"]
    assert reader.read_metadata().storage_meta.save_id == writer.save_id
    assert reader.read_metadata().storage_meta.load_id == reader.load_id
    before = writer.save_id, reader.load_id
    writer.reset(tmp_path / "other")
    reader.reset(tmp_path / "other")
    assert writer.path == reader.path == tmp_path / "other"
    assert reader.storage_data == {}
    assert (writer.save_id, reader.load_id) != before
    assert writer.save_id != before[0]
    assert reader.load_id != before[1]
