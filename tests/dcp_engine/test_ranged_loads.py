"""Loads of DCP files in ranges: only what is needed is read, whole chunks are checked, damage leaves no half tensor."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast.dcp as dcp
from holdfast._dcp import reader as reader_module
from holdfast._dcp.load_planner import DefaultLoadPlanner
from holdfast._dcp.planner import keeps_items_apart
from holdfast._dcp.source import DcpSource
from holdfast._formats.dcp.plan import LoadPlan, ReadItem
from holdfast._formats.source import ReadRequest
from holdfast.dcp.filesystem import FileSystem, FileSystemReader
from holdfast.errors import CheckpointException, DamagedCheckpointError, HoldfastError
from tests.dcp.states import LIBRARIES, save
from tests.formats.regions import every_kind, requests_for, wrong
from tests.properties import examples
from tests.torches import ALONE

BOTH = pytest.mark.parametrize("library", LIBRARIES)
MIB = 1 << 20


@pytest.fixture
def all_in_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are read as large ones are, and by several threads."""
    monkeypatch.setattr(reader_module, "MERGE_GAP", 0)
    monkeypatch.setattr(reader_module, "STRAIGHT_FROM", 0)
    monkeypatch.setattr(reader_module, "SEVERAL_READERS_FROM", 0)


@pytest.fixture(scope="module")
def every_tensor(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    places = {}
    for library in LIBRARIES:
        places[library] = tmp_path_factory.mktemp(library)
        save(library, dict(KINDS), places[library], no_dist=True)
    return places


KINDS = every_kind()


@BOTH
@given(data=st.data())
@settings(max_examples=examples(60))
def test_any_region_of_any_tensor_is_read_in_ranges(
    library: str, every_tensor: dict[str, Path], data: st.DataObject
) -> None:
    source = DcpSource(every_tensor[library])
    requests = data.draw(requests_for(source))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_module, "MERGE_GAP", 0)
        patch.setattr(reader_module, "STRAIGHT_FROM", 0)
        patch.setattr(reader_module, "SEVERAL_READERS_FROM", 0)
        source.read(requests, verify=data.draw(st.booleans()))
    assert wrong(requests, KINDS) == []


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True], ids=["as stored", "transposed"])
@pytest.mark.usefixtures("all_in_ranges")
def test_tensors_of_any_kind_in_memory_are_filled(
    tmp_path: Path, library: str, dtype: torch.dtype, transposed: bool
) -> None:
    saved = torch.randn(40, 60)
    save(library, {"w": saved, "t": saved.T}, tmp_path, no_dist=True)
    state = {"w": torch.zeros(40, 60, dtype=dtype), "t": torch.zeros(60, 40, dtype=dtype)}
    if transposed:
        state = {"w": torch.zeros(60, 40, dtype=dtype).T, "t": torch.zeros(40, 60, dtype=dtype).T}

    dcp.load(state, checkpoint_id=tmp_path, no_dist=True, planner=DefaultLoadPlanner(dtype_change="ignore"))

    assert torch.equal(state["w"], saved.to(dtype))
    assert torch.equal(state["t"], saved.T.to(dtype))


@BOTH
def test_a_large_tensor_is_read_straight_into_its_memory_by_several_threads(tmp_path: Path, library: str) -> None:
    saved = {f"layer{number}": torch.randn(5 * MIB + number) for number in range(3)}
    save(library, saved, tmp_path, no_dist=True)
    state = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
    reader = FileSystemReader(tmp_path)

    dcp.load(state, storage_reader=reader, no_dist=True)

    assert all(torch.equal(state[key], saved[key]) for key in saved)
    assert reader.bytes_read == sum(tensor.nbytes for tensor in saved.values())


# --- only what is needed ---------------------------------------------------------------------------------------------


class CountingStream:
    """A stream that adds up what is read from it."""

    def __init__(self, stream: Any, counts: dict[str, int]) -> None:
        self._stream = stream
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def readinto(self, buffer: Any) -> int:
        count: int = self._stream.readinto(buffer)
        self._counts["read"] = self._counts.get("read", 0) + count
        return count


@contextmanager
def opened(path: Any, mode: str, counts: dict[str, int]) -> Iterator[Any]:
    with open(path, mode) as stream:
        yield CountingStream(stream, counts)


def slices(library: str, path: Path) -> tuple[torch.Tensor, DcpSource]:
    tensor = torch.arange(1024 * 2048, dtype=torch.int32).view(1024, 2048)
    save(library, {"w": tensor, "other": torch.ones(MIB)}, path, no_dist=True)
    return tensor, DcpSource(path)


@BOTH
def test_a_slice_of_rows_reads_those_rows_and_nothing_else(tmp_path: Path, library: str) -> None:
    tensor, source = slices(library, tmp_path)
    into = np.empty((100, 2048), source.tensors["w"].dtype.carrier)

    count = source.read([ReadRequest("w", (300, 0), (100, 2048), into)])

    assert np.array_equal(into.view("<i4"), tensor[300:400].numpy())
    assert count == into.nbytes


@BOTH
def test_a_slice_of_columns_reads_no_byte_twice_and_only_the_rows_it_touches(tmp_path: Path, library: str) -> None:
    tensor, source = slices(library, tmp_path)
    left, right = (np.empty((10, 8), source.tensors["w"].dtype.carrier) for _ in range(2))

    count = source.read([ReadRequest("w", (20, 4), (10, 8), left), ReadRequest("w", (20, 1000), (10, 8), right)])

    assert np.array_equal(left.view("<i4"), tensor[20:30, 4:12].numpy())
    assert np.array_equal(right.view("<i4"), tensor[20:30, 1000:1008].numpy())
    assert count <= 10 * 2048 * 4


@BOTH
def test_what_a_count_says_is_what_the_system_reads(tmp_path: Path, library: str) -> None:
    _, source = slices(library, tmp_path)
    into = np.empty((512, 2048), source.tensors["w"].dtype.carrier)
    before = read_by_this_process()

    count = source.read([ReadRequest("w", (0, 0), (512, 2048), into)])

    assert count == into.nbytes
    assert read_by_this_process() - before <= 1.1 * into.nbytes


def read_by_this_process() -> int:
    """Bytes that this process has asked the system for."""
    return int(
        next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar")).split()[1]
    )


@BOTH
def test_other_file_systems_are_read_in_ranges_too(tmp_path: Path, library: str) -> None:
    tensor, _ = slices(library, tmp_path)
    counts: dict[str, int] = {}

    class Counting(FileSystem):
        def create_stream(self, path: Any, mode: str) -> Any:
            return opened(path, mode, counts)

    reader = FileSystemReader(tmp_path)
    reader.fs = Counting()

    class FirstRows(DefaultLoadPlanner):
        """Asks for ten rows."""

        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            item = plan.items[0]
            return type(plan)(
                [
                    type(item)(
                        item.type,
                        item.dest_index,
                        item.dest_offsets,
                        item.storage_index,
                        torch.Size([7, 0]),
                        torch.Size([10, 2048]),
                    )
                ]
            )

        def lookup_tensor(self, index: Any) -> torch.Tensor:
            return super().lookup_tensor(index)[:10]

    state = {"w": torch.zeros(1024, 2048, dtype=torch.int32)}
    dcp.load(state, storage_reader=reader, planner=FirstRows(), no_dist=True)

    assert torch.equal(state["w"][:10], tensor[7:17])
    assert not state["w"][10:].any()
    assert 0 < counts["read"] <= 10 * 2048 * 4 + 4 * 4096


# --- damage ----------------------------------------------------------------------------------------------------------


def damage(path: Path, tensor: torch.Tensor, element: int) -> None:
    """Change a byte of a stored tensor."""
    content = tensor.numpy().tobytes()
    for file in path.glob("*.distcp"):
        data = bytearray(file.read_bytes())
        at = data.find(content[:4096])
        if at >= 0:
            data[at + element * tensor.itemsize] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError("the tensor is in none of the files")


@BOTH
@pytest.mark.parametrize("kind", ["straight", "converted"])
def test_damage_is_raised_and_leaves_zeros_and_not_half_a_tensor(tmp_path: Path, library: str, kind: str) -> None:
    good, bad = torch.randn(100_000), torch.randn(200_000)
    save(library, {"bad": bad, "good": good}, tmp_path, no_dist=True)
    damage(tmp_path, bad, 150_000)
    dtype = torch.float32 if kind == "straight" else torch.float64
    state = {"bad": torch.ones(200_000, dtype=dtype), "good": torch.ones(100_000, dtype=dtype)}
    planner = DefaultLoadPlanner(dtype_change="ignore")

    with pytest.raises(CheckpointException, match=r"'bad'.*CRC.*being read are zero now") as caught:
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True, planner=planner)

    assert isinstance(caught.value.failures[0][0], DamagedCheckpointError)
    assert not state["bad"].any()
    assert torch.equal(state["good"], good.to(dtype)) or bool((state["good"] == 1).all()) or not state["good"].any()
    dcp.load(state, storage_reader=FileSystemReader(tmp_path, verify=False), no_dist=True, planner=planner)
    assert int((state["bad"] != bad).sum()) == 1


def test_damage_leaves_zeros_where_programs_make_tensors_on_the_meta_device(tmp_path: Path) -> None:
    saved = torch.randn(400, 300)
    dcp.save({"w": saved}, checkpoint_id=tmp_path, no_dist=True)
    damage(tmp_path, saved, 100_000)
    state = {"w": torch.ones(300, 400).T}

    with torch.device("meta"), pytest.raises(CheckpointException, match=r"'w'.*CRC.*being read are zero now"):
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)

    assert not state["w"].any()


@BOTH
def test_a_range_is_read_unchecked_and_damage_elsewhere_in_its_chunk_does_not_matter(
    tmp_path: Path, library: str
) -> None:
    tensor, source = slices(library, tmp_path)
    damage(tmp_path, tensor, 0)
    into = np.empty((10, 2048), source.tensors["w"].dtype.carrier)

    source.read([ReadRequest("w", (500, 0), (10, 2048), into)])

    assert np.array_equal(into.view("<i4"), tensor[500:510].numpy())
    whole = np.empty((1024, 2048), source.tensors["w"].dtype.carrier)
    with pytest.raises(HoldfastError, match="CRC"):
        source.read([ReadRequest("w", (0, 0), (1024, 2048), whole)])
    halves = [ReadRequest("w", (0, 0), (512, 2048), whole[:512]), ReadRequest("w", (512, 0), (512, 2048), whole[512:])]
    with pytest.raises(HoldfastError, match="CRC"):
        source.read(halves)


def test_what_stands_around_the_elements_is_checked_before_anything_changes(tmp_path: Path) -> None:
    saved = torch.randn(300_000)
    dcp.save({"w": saved}, checkpoint_id=tmp_path, no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    state = {"w": torch.ones(300_000)}

    with pytest.raises(CheckpointException, match=r"around 'w'.*None of the 1 item"):
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)

    assert bool((state["w"] == 1).all())


def test_a_file_that_is_cut_off_changes_nothing(tmp_path: Path) -> None:
    saved = torch.randn(300_000)
    stock.save({"w": saved}, checkpoint_id=tmp_path, **ALONE)
    (file,) = tmp_path.glob("*.distcp")
    os.truncate(file, file.stat().st_size - 1000)
    state = {"w": torch.ones(300_000)}

    with pytest.raises(CheckpointException, match=r"ends 1000 byte.*too early.*None of the 1 item"):
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)

    assert bool((state["w"] == 1).all())


# --- threads and planners --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("all_in_ranges")
def test_planners_are_only_asked_by_the_thread_that_loads(tmp_path: Path) -> None:
    saved = {f"t{number}": torch.randn(20_000) for number in range(30)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    seen: list[tuple[str, str, int]] = []

    class Watching(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            seen.append(("resolve", read_item.dest_index.fqn, threading.get_ident()))
            return super().resolve_tensor(read_item)

        @keeps_items_apart
        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            key = read_item.dest_index.fqn
            seen.append(("commit", key, threading.get_ident()))
            assert torch.equal(tensor, saved[key])

    state = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
    dcp.load(state, checkpoint_id=tmp_path, planner=Watching(), no_dist=True)

    assert {ident for *_, ident in seen} == {threading.get_ident()}
    for key in saved:
        assert [kind for kind, name, _ in seen if name == key] == ["resolve", "commit"]
    ahead = 0
    for kind, *_ in seen:
        ahead += 1 if kind == "resolve" else -1
        assert ahead <= 12, "memory is asked for long before it is filled"


@BOTH
@pytest.mark.usefixtures("all_in_ranges")
def test_a_planner_may_use_the_same_memory_for_all_items(tmp_path: Path, library: str) -> None:
    saved = {f"t{number}": torch.randn(20_000) for number in range(12)}
    save(library, saved, tmp_path, no_dist=True)

    class Borrowing(DefaultLoadPlanner):
        room = torch.empty(20_000)

        def create_local_plan(self) -> LoadPlan:
            plan = super().create_local_plan()
            return replace(plan, items=[half for item in plan.items for half in _halves(item)])

        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return self.room[: read_item.lengths[0]]

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            super().resolve_tensor(read_item).copy_(tensor)

    state = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
    dcp.load(state, checkpoint_id=tmp_path, planner=Borrowing(), no_dist=True)

    assert [key for key in saved if not torch.equal(saved[key], state[key])] == []


@BOTH
@pytest.mark.usefixtures("all_in_ranges")
@pytest.mark.parametrize("by", [1, -1, 500])
def test_a_planner_that_asks_for_what_is_not_in_a_chunk_gets_no_other_bytes(
    tmp_path: Path, library: str, by: int
) -> None:
    save(library, {"w": torch.ones(1000), "z": torch.ones(1000)}, tmp_path, no_dist=True)

    class Astray(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            (item,) = super().create_local_plan().items
            return LoadPlan([replace(item, storage_offsets=torch.Size([by]))])

    state = {"w": torch.zeros(1000)}
    with pytest.raises(CheckpointException, match=r"'w'.*a region at \[-?\d+\] of sizes \[1000\]"):
        dcp.load(state, checkpoint_id=tmp_path, planner=Astray(), no_dist=True)
    assert not state["w"].any()


def _halves(item: ReadItem) -> list[ReadItem]:
    """Two items for the first tensors, one for the others."""
    half = item.lengths[0] // 2
    if item.dest_index.fqn > "t4":
        return [item]
    first = replace(item, lengths=torch.Size([half]))
    return [first, replace(first, storage_offsets=torch.Size([half]), dest_offsets=torch.Size([half]))]


@pytest.mark.usefixtures("all_in_ranges")
def test_inference_tensors_are_filled_in_threads(tmp_path: Path) -> None:
    saved = torch.randn(1000, 10)
    dcp.save({"w": saved}, checkpoint_id=tmp_path, no_dist=True)
    with torch.inference_mode():
        state = {"w": torch.zeros(10, 1000).T}
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        assert torch.equal(state["w"], saved)


@BOTH
def test_no_file_is_ever_mapped(tmp_path: Path, library: str) -> None:
    saved = torch.randn(3 * MIB)
    save(library, {"w": saved}, tmp_path, no_dist=True)
    maps: list[str] = []

    class Looking(DefaultLoadPlanner):
        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            maps.append(Path("/proc/self/maps").read_text())

    dcp.load({"w": torch.zeros(3 * MIB)}, checkpoint_id=tmp_path, planner=Looking(), no_dist=True)

    assert maps
    assert not any(str(tmp_path) in text for text in maps)
