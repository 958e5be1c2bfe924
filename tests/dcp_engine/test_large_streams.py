"""Large data files are written past the page cache; what is in them is what stock torch and we have always read."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast.dcp as dcp
from holdfast._dcp import writer as writer_module
from holdfast._dcp.data_files import large_stream
from holdfast._dcp.save_planner import DefaultSavePlanner
from holdfast._stores.durable_files import flush_to_disk
from holdfast._stores.large_files import LargeFile
from holdfast.dcp.filesystem import FileSystem, FileSystemWriter
from holdfast.errors import CheckpointException
from tests.properties import examples
from tests.torches import ALONE

MIB = 1 << 20


@given(
    pieces=st.lists(st.integers(0, 300_000), max_size=12),
    expected=st.sampled_from([1, 4096, 100_000, 5 * MIB]),
    memory=st.sampled_from([1, 200_000, 8 * MIB]),
)
@settings(max_examples=examples(40))
def test_whatever_was_expected_the_file_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[int], expected: int, memory: int
) -> None:
    path = tmp_path_factory.mktemp("stream") / "file"
    written = bytearray()
    with large_stream(path, expected, memory) as stream:
        for number, size in enumerate(pieces):
            piece = bytearray([number % 251]) * size
            assert stream.write(piece) == size
            written += piece
            piece[:] = bytes(size)  # it was taken, so that its memory can be used again
        flush_to_disk(stream)
        assert path.read_bytes() == written
    assert path.read_bytes() == written


def test_a_file_that_is_complete_takes_no_more(tmp_path: Path) -> None:
    with large_stream(tmp_path / "file", 4096, MIB) as stream:
        stream.write(b"all of it")
        stream.complete()
        with pytest.raises(ValueError, match="file is complete, and 4 more bytes were written to it"):
            stream.write(b"more")
    assert (tmp_path / "file").read_bytes() == b"all of it"


STATE = {
    "rows": torch.randn(700, 1000),
    "columns": torch.randn(900, 800).T,
    "strided": torch.randn(600, 1000)[::2, 1::3],
    "conj": torch.randn(300, 300, dtype=torch.complex64).conj(),
    "bytes": torch.randint(0, 255, (3, 1_000_001), dtype=torch.uint8),
    "half": torch.randn(1_000_000).to(torch.bfloat16),
    "scalar": torch.tensor(3.5),
    "none": torch.empty(0, 5),
    "value": {"lr": 0.1, "name": "x" * 100_000},
}


def zeros() -> dict[str, Any]:
    """The state with nothing in it."""
    return {
        key: torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else dict.fromkeys(value)
        for key, value in STATE.items()
    }


@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}, {"sync_files": False}])
@pytest.mark.parametrize("reader", [stock, dcp], ids=["stock", "ours"])
def test_everything_comes_back(
    tmp_path: Path, options: dict[str, Any], reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "holdfast._formats.dcp.blobs.PIECE_BYTES", 100_000
    )  # tensors that lie otherwise are copied in parts
    made = count_direct_files(monkeypatch)

    dcp.save(STATE, storage_writer=FileSystemWriter(tmp_path, **options), no_dist=True)

    assert made
    loaded = zeros()
    reader.load(loaded, checkpoint_id=str(tmp_path), no_dist=True)
    for key, value in STATE.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(loaded[key], value.resolve_conj()), key
    assert loaded["value"] == STATE["value"]


def count_direct_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    real = LargeFile.__init__

    def counting(self: LargeFile, descriptor: int, path: str, *rest: Any) -> None:
        made.append(path)
        real(self, descriptor, path, *rest)

    monkeypatch.setattr(LargeFile, "__init__", counting)
    return made


def test_a_file_system_of_ones_own_gets_all_bytes_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_direct_files(monkeypatch)
    opened: list[str] = []

    class Own(FileSystem):
        def create_stream(self, path: Any, mode: str) -> Any:
            opened.append(f"{Path(path).suffix} {mode}")
            return super().create_stream(path, mode)

    writer = FileSystemWriter(tmp_path)
    writer.fs = Own()
    dcp.save(STATE, storage_writer=writer, no_dist=True)

    assert made == []
    assert ".distcp wb" in opened


def test_a_full_disk_is_reported_with_the_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: LargeFile, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LargeFile, "_write_all", full)

    with pytest.raises(CheckpointException, match=r"No space left on device: '.*\.distcp'"):
        dcp.save(STATE, checkpoint_id=tmp_path, no_dist=True)

    assert list(tmp_path.iterdir()) == []


def test_a_planner_that_makes_tensors_larger_or_smaller_than_planned(tmp_path: Path) -> None:
    class Converting(DefaultSavePlanner):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.dtype = dtype

        def transform_object(self, write_item: Any, object: Any) -> Any:
            return object.to(self.dtype) if isinstance(object, torch.Tensor) else object

    weight = torch.randn(1000, 1000)
    for dtype in (torch.float64, torch.float16):
        path = tmp_path / str(dtype)
        dcp.save({"w": weight}, checkpoint_id=path, planner=Converting(dtype), no_dist=True)
        (file,) = path.glob("*.distcp")
        assert 0 < file.stat().st_size - weight.numel() * dtype.itemsize < 2000
        state = {"w": torch.zeros(1000, 1000, dtype=dtype)}
        stock.load(state, checkpoint_id=str(path), **ALONE)
        assert torch.equal(state["w"], weight.to(dtype))


def test_the_memory_is_shared_by_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    granted: list[int] = []
    real = writer_module.large_stream

    def watching(path: Any, expected: int, memory: int) -> Any:
        granted.append(memory)
        return real(path, expected, memory)

    monkeypatch.setattr(writer_module, "large_stream", watching)
    state = {f"t{number}": torch.zeros(MIB) for number in range(4)}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path, thread_count=4), no_dist=True)

    assert granted == [writer_module.MEMORY_BUDGET // 4] * 4
