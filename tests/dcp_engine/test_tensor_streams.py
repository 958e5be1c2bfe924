"""Tensors in chunks of any layout, read as streams and compared with the tensors that were saved."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast.dcp as dcp
from holdfast._base.boxes import Box
from holdfast._base.crc import crc32
from holdfast._dcp import torch_file_conversions as dcp_and_torch_files
from holdfast._dcp.tensor_streams import _OPEN_FILES, TensorStream
from holdfast._dcp.writer import _FileSystemWriter
from holdfast.dcp._extension import ZStandard
from holdfast.errors import DamagedCheckpointError
from tests.dcp.cut_tensors import CutTensor
from tests.properties import examples

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:.*holds a checkpoint")

DTYPES = [torch.int32, torch.int8, torch.complex128, torch.bfloat16]


def grid(cuts: list[list[int]]) -> list[Box]:
    """The boxes between cuts in all dimensions."""
    boxes = [Box((), ())]
    for places in cuts:
        boxes = [Box((*box.offsets, at), (*box.sizes, end - at)) for box in boxes for at, end in pairwise(places)]
    return boxes


@st.composite
def cut_tensors(draw: st.DrawFn) -> CutTensor:
    library = draw(st.sampled_from([dcp, stock]))
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    dtype = draw(st.sampled_from(DTYPES))
    whole = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    order = tuple(draw(st.permutations(range(len(shape)))))
    return CutTensor.of(whole, draw(st.permutations(grid(cuts))), library, order)


def opened(folder: Path, memory: int = 1 << 20) -> dcp_and_torch_files._Export:
    export = dcp_and_torch_files._Export(folder, folder, None, memory)
    export.plan()
    return export


def stream_of(export: dcp_and_torch_files._Export, key: str, like: torch.Tensor) -> Any:
    return export.reader.stream(export.tensor_items[key], like.shape, like.dtype)


def read_in(stream: TensorStream, total: int, lengths: list[int]) -> tuple[bytes, int]:
    content, crc, turn = bytearray(), 0, 0
    while len(content) < total:
        piece = memoryview(bytearray(16 * lengths[turn % len(lengths)]))[: total - len(content)]
        crc = stream.fill_with_crc(len(content), piece, crc)
        content += piece
        turn += 1
    stream.finish()
    return bytes(content), crc


@given(cut_tensors(), st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(1, 8))
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
def test_any_pieces_of_any_layout_are_the_bytes_that_were_saved(
    tmp_path_factory: pytest.TempPathFactory, saved: CutTensor, lengths: list[int], ahead: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    saved.library.save({"w": saved}, checkpoint_id=folder)
    expected = saved.whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes()

    with stream_of(opened(folder, 16 * ahead), "w", saved.whole) as stream:
        assert read_in(stream, len(expected), lengths) == (expected, crc32(expected))


QUARTERS = grid([[0, 4, 8], [0, 4, 8]])


@pytest.mark.parametrize("library", [dcp, stock], ids=["saved by us", "saved by stock"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["rows", "turned"])
def test_a_changed_bit_in_any_chunk_is_reported(tmp_path: Path, library: Any, order: tuple[int, ...]) -> None:
    whole = torch.arange(64.0).view(8, 8)
    library.save({"w": CutTensor.of(whole, QUARTERS, library, order)}, checkpoint_id=tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    content = file.read_bytes()
    for box in QUARTERS:
        first = whole[box.offsets].item()
        neighbour = first + (8 if library is stock and order == (1, 0) else 1)
        at = content.index(torch.tensor([first, neighbour]).numpy().tobytes())
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])

        with pytest.raises(DamagedCheckpointError), stream_of(opened(tmp_path), "w", whole) as stream:
            read_in(stream, 256, [3])


def test_chunks_in_more_files_than_are_open_at_once(tmp_path: Path) -> None:
    whole = torch.arange(3.0 * (_OPEN_FILES + 6)).view(3, -1)
    boxes = grid([[0, 3], list(range(_OPEN_FILES + 7))])
    state = {"w": CutTensor.of(whole, boxes, dcp)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, single_file_per_rank=False))
    before = len(os.listdir("/proc/self/fd"))

    with stream_of(opened(tmp_path), "w", whole) as stream:
        content, _ = read_in(stream, whole.nbytes, [50])
        assert len(os.listdir("/proc/self/fd")) <= before + 2 * _OPEN_FILES

    assert content == whole.numpy().tobytes()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_was_compressed_is_unpacked_beside_the_result(tmp_path: Path) -> None:
    whole = torch.arange(640.0).view(8, 80)
    saved = CutTensor.of(whole, grid([[0, 4, 8], [0, 40, 80]]), dcp)
    dcp.save({"w": saved}, storage_writer=_FileSystemWriter(tmp_path, _extensions=[ZStandard()]))

    with stream_of(opened(tmp_path), "w", whole) as stream:
        content, _ = read_in(stream, whole.nbytes, [7])

    assert content == whole.numpy().tobytes()


def test_elements_of_another_dtype_are_converted(tmp_path: Path) -> None:
    whole = torch.arange(64, dtype=torch.int32).view(8, 8)
    stock.save({"w": CutTensor.of(whole, QUARTERS, stock)}, checkpoint_id=tmp_path)

    export = opened(tmp_path)
    with stream_of(export, "w", whole.double()) as stream:
        content, crc = read_in(stream, 512, [5])

    assert content == whole.double().numpy().tobytes()
    assert crc == crc32(content)
