"""Whole model files out of parts: every dtype and layout, with little memory, all or nothing."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import holdfast.dcp as dcp
from holdfast._formats import box_reads
from holdfast._formats import tensor_places as filling
from holdfast._formats.hf_folder import model_files as hf_model_files
from holdfast._formats.safetensors.torch_dtypes import BY_NAME
from holdfast.dcp._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from holdfast.dcp.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from holdfast.errors import CheckpointNotFoundError, DamagedCheckpointError, InvalidPlanError
from tests.dcp.states import differing, of_bytes
from tests.properties import examples
from tests.rank_pool import RankPool
from tests.torches import ALONE, stock_module

INDEX = "model.safetensors.index.json"


def shard(number: int) -> str:
    return f"shard-{number:05d}-model-00001-of-00001.safetensors"


def write_parts(path: Path, number: int, parts: dict[str, tuple[torch.Tensor, list[int]]]) -> None:
    path.mkdir(exist_ok=True)
    told = {key: {"saved_offsets": offsets} for key, (_, offsets) in parts.items()}
    tensors = {key: tensor.contiguous() for key, (tensor, _) in parts.items()}
    save_file(tensors, path / shard(number), {"DCP_SHARDING_INFO": json.dumps(told), "format": "pt"})


def whole(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values())):
        found |= load_file(path / name)
    return found


def test_every_dtype_and_a_number_without_dimensions_come_out_right(tmp_path: Path) -> None:
    """Stock torch makes zeros of tensors without dimensions, and fails for integers, booleans and complex numbers."""
    full = {}
    for name, dtype in BY_NAME.items():
        full[name] = of_bytes(torch.arange(6 * 4 * dtype.itemsize, dtype=torch.uint8), dtype, (6, 4))
    full |= {"number": torch.tensor(2.5), "integer": torch.tensor(3), "empty": torch.empty(0, 2)}
    parts = tmp_path / "parts"
    columns = {key: tensor for key, tensor in full.items() if tensor.dim() and tensor.numel()}
    cut = {key: tensor.view(torch.uint8).view(6, 4, -1) for key, tensor in columns.items()}

    def slice_of(key: str, start: int, stop: int) -> torch.Tensor:
        return cut[key][:, start:stop].contiguous().view(columns[key].dtype).view(6, stop - start)

    write_parts(parts, 1, {key: (slice_of(key, 0, 1), [0, 0]) for key in columns})
    write_parts(parts, 2, {
        **{key: (slice_of(key, 1, 4), [0, 1]) for key in columns},
        **{key: (full[key], [0] * full[key].dim()) for key in ("number", "integer", "empty")},
    })  # fmt: skip

    consolidate_safetensors_files(parts, tmp_path / "whole", {key: 1 + n % 3 for n, key in enumerate(full)})

    assert differing(whole(tmp_path / "whole"), full) == []


@st.composite
def tilings(draw: st.DrawFn) -> tuple[torch.Tensor, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A tensor, and boxes that tile it."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        long = [dim for dim, size in enumerate(sizes) if size > 1]
        if not long:
            boxes.append((offsets, sizes))
            continue
        dim = draw(st.sampled_from(long))
        at = draw(st.integers(1, sizes[dim] - 1))
        boxes.append((offsets, (*sizes[:dim], at, *sizes[dim + 1 :])))
        second = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        boxes.append((second, (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])))
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).reshape(shape)
    return full, boxes


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tiling=tilings(), buffer=st.integers(2, 40), gap=st.integers(0, 8))
def test_any_tiling_comes_together_with_any_buffer(
    tiling: tuple[torch.Tensor, list[tuple[tuple[int, ...], tuple[int, ...]]]],
    buffer: int,
    gap: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    full, boxes = tiling
    path = tmp_path_factory.mktemp("tiling")
    for number, (offsets, sizes) in enumerate(boxes):
        part = filling.narrowed(full, offsets, sizes)
        write_parts(path, number + 1, {"w": (part, list(offsets))})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_model_files, "WRITE_BUFFER_BYTES", buffer)
        patch.setattr(box_reads, "MERGE_GAP", gap)
        consolidate_safetensors_files(path, path / "whole")

    assert torch.equal(whole(path / "whole")["w"], full)


def test_stock_torch_reads_what_came_together_and_we_read_what_it_brought_together(tmp_path: Path) -> None:
    full = {"a": torch.randn(6, 4), "b": torch.randn(3)}
    write_parts(tmp_path, 1, {"a": (full["a"][:2], [0, 0])})
    write_parts(tmp_path, 2, {"a": (full["a"][2:], [2, 0]), "b": (full["b"], [0])})
    consolidate_safetensors_files(tmp_path, tmp_path / "ours", {"a": 1, "b": 2})
    stock_function = stock_module("_consolidate_hf_safetensors").consolidate_safetensors_files

    (tmp_path / "theirs").mkdir()
    stock_function(str(tmp_path), str(tmp_path / "theirs"), {"a": 1, "b": 2})

    found = {key: torch.zeros_like(tensor) for key, tensor in full.items()}
    stock.load(found, storage_reader=stock.HuggingFaceStorageReader(str(tmp_path / "ours")), **ALONE)
    assert differing(found, full) == []
    found = {key: torch.zeros_like(tensor) for key, tensor in full.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(tmp_path / "theirs"), no_dist=True)
    assert differing(found, full) == []
    names = [sorted(file.name for file in (tmp_path / folder).iterdir()) for folder in ("ours", "theirs")]
    assert names[0] == names[1]
    indexes = [json.loads((tmp_path / folder / INDEX).read_text()) for folder in ("ours", "theirs")]
    assert indexes[0] == indexes[1]


def test_files_tell_that_they_are_of_torch_as_transformers_demands(tmp_path: Path) -> None:
    write_parts(tmp_path, 1, {"a": (torch.ones(2), [0])})
    consolidate_safetensors_files(tmp_path, tmp_path)

    with safe_open(tmp_path / "model-00001-of-00001.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("function", [consolidate_safetensors_files, consolidate_safetensors_files_on_every_rank])
def test_a_mapping_is_optional_and_the_same_folder_will_do(function: Any, tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(tmp_path, save_distributed=True)
    dcp.save({"a": torch.ones(2), "b": torch.ones(3)}, storage_writer=writer, no_dist=True)

    for _ in range(2):  # the second time there are whole files beside the parts
        function(tmp_path, tmp_path)

        assert {file.name for file in tmp_path.iterdir()} == {shard(1), INDEX, "model-00001-of-00001.safetensors"}
        state = {"a": torch.zeros(2), "b": torch.zeros(3)}
        dcp.load(state, storage_reader=HuggingFaceStorageReader(tmp_path), no_dist=True)
        assert state["a"].tolist() == [1, 1]


def test_model_files_of_an_earlier_call_are_removed_and_nothing_else(tmp_path: Path) -> None:
    write_parts(tmp_path, 1, {"a": (torch.ones(2), [0]), "b": (torch.ones(2), [0])})
    target = tmp_path / "whole"
    consolidate_safetensors_files(tmp_path, target, {"a": 1, "b": 2})
    (target / "config.json").write_text("{}")
    (target / shard(7)).write_text("parts of somebody")
    (target / "model-00001-of-00001.safetensors.0badcafe.tmp").write_text("left by a call that died")

    consolidate_safetensors_files(tmp_path, target)

    expected = {"config.json", shard(7), INDEX, "model-00001-of-00001.safetensors"}
    assert {file.name for file in target.iterdir()} == expected


def test_inputs_are_never_removed_even_if_they_are_called_like_outputs(tmp_path: Path) -> None:
    for number in (1, 2):
        write_parts(tmp_path, number, {"w": (torch.full((2,), float(number)), [2 * number - 2])})
        (tmp_path / shard(number)).rename(tmp_path / f"model-{number:05d}-of-00002.safetensors")

    consolidate_safetensors_files(tmp_path, tmp_path)

    assert whole(tmp_path)["w"].tolist() == [1, 1, 2, 2]
    assert len(list(tmp_path.glob("model-0000?-of-00002.safetensors"))) == 2


# --- refusals --------------------------------------------------------------------------------------------------------


def test_tensors_that_the_mapping_lacks_are_named(tmp_path: Path) -> None:
    """Stock torch leaves them out without a word."""
    write_parts(tmp_path, 1, {key: (torch.ones(1), [0]) for key in "abc"})

    with pytest.raises(InvalidPlanError, match="a, c") as refused:
        consolidate_safetensors_files(tmp_path, tmp_path / "whole", {"b": 1})
    assert refused.value.problems == ["a", "c"]
    assert not (tmp_path / "whole").exists()


def test_parts_that_do_not_tile_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    write_parts(tmp_path, 1, {"a": (torch.ones(2), [1])})

    with pytest.raises(DamagedCheckpointError, match=r"'a' has chunks that do not tile it: 2 of its 3 elements"):
        consolidate_safetensors_files(tmp_path, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_nothing_to_consolidate_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="sharded"):
        consolidate_safetensors_files(tmp_path, tmp_path / "whole")
    with pytest.raises(ValueError, match="at least 1 thread"):
        consolidate_safetensors_files(tmp_path, tmp_path / "whole", None, 0)


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_in_any_thread_leaves_the_folder_as_it_was(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parts(tmp_path, 1, {key: (torch.ones(2), [0]) for key in "abcd"})
    target = tmp_path / "whole"
    consolidate_safetensors_files(tmp_path, target)
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    original = hf_model_files.read_region

    def failing(*args: Any, key: str, **kwargs: Any) -> None:
        if key == "c":
            raise OSError(5, "Input/output error")
        original(*args, key=key, **kwargs)

    monkeypatch.setattr(hf_model_files, "read_region", failing)
    with pytest.raises(OSError, match="Input/output error"):
        consolidate_safetensors_files(tmp_path, target, {"a": 1, "b": 2, "c": 3, "d": 4}, threads)

    assert {file.name: file.read_bytes() for file in target.iterdir()} == before


# --- what it takes ---------------------------------------------------------------------------------------------------


def peak_while_consolidating(path: Path) -> tuple[int, int]:
    """Bytes by which the memory of this process grew, and the size of the tensor."""
    from holdfast._formats.safetensors.header import plan_header

    size = 96 << 20
    for number in range(2):  # two halves, side by side: every row of the whole is made of both
        header, start = plan_header(
            [("w", "U8", (1 << 12, size >> 13))],
            {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0, number * (size >> 13)]}})},
        )
        with open(path / shard(number + 1), "wb") as file:
            file.write(start)
            file.truncate(len(start) + header.tensors["w"].nbytes)
    write_parts(path / "small", 1, {"small": (torch.ones(2), [0])})
    consolidate_safetensors_files(path / "small", path / "warm up")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = peak_memory()
    consolidate_safetensors_files(path, path / "whole")
    return peak_memory() - before, size


def peak_memory() -> int:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="asks Linux for the peak of memory")
def test_a_large_tensor_takes_no_more_than_a_buffer_of_memory(ranks: RankPool, tmp_path: Path) -> None:
    ((grown, size),) = ranks(1).run(peak_while_consolidating, tmp_path, process_group=False)

    assert grown < size / 3


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 60
    for number in range(count):
        write_parts(tmp_path, number + 1, {"w": (torch.full((2, 1), float(number)), [0, number])})
    most = 0
    original = hf_model_files.read_region

    def counting(*args: Any, **kwargs: Any) -> None:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")))
        original(*args, **kwargs)

    already = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(hf_model_files, "read_region", counting)
    consolidate_safetensors_files(tmp_path, tmp_path / "whole")

    assert most - already < count - 10
    assert whole(tmp_path / "whole")["w"].tolist() == [[float(number) for number in range(count)]] * 2
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > count, "or else this shows nothing"


@pytest.mark.parametrize("threads", [1, 2])
def test_parts_that_a_save_replaces_meanwhile_are_not_mixed(tmp_path, monkeypatch, threads) -> None:
    mapping = {"a": 1, "b": 2}

    def save(value: float) -> None:
        state = {key: torch.full((4,), value) for key in mapping}
        writer = HuggingFaceStorageWriter(tmp_path / "parts", mapping, save_distributed=True)
        dcp.save(state, storage_writer=writer, no_dist=True)

    save(1.0)
    write, replaced = hf_model_files._write_model_file, []

    def write_after_a_save(*args: Any) -> None:
        if not replaced:
            replaced.append(True)
            save(2.0)
        write(*args)

    monkeypatch.setattr(hf_model_files, "_write_model_file", write_after_a_save)
    with pytest.raises(DamagedCheckpointError, match="a save has replaced it meanwhile"):
        consolidate_safetensors_files(tmp_path / "parts", tmp_path / "whole", mapping, num_threads=threads)
    assert not (tmp_path / "whole" / INDEX).exists()


def consolidate_different_folders(folders: list[Path], output: Path) -> str:
    with pytest.raises(dcp.CheckpointException) as caught:
        consolidate_safetensors_files_on_every_rank(folders[torch.distributed.get_rank()], output)
    return str(caught.value)


def test_ranks_that_see_different_parts_write_nothing(ranks: RankPool, tmp_path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder, value in zip(folders, (1.0, 2.0), strict=True):
        writer = HuggingFaceStorageWriter(folder, save_distributed=True)
        dcp.save({"a": torch.full((4,), value)}, storage_writer=writer, no_dist=True)
    for error in ranks(2).run(consolidate_different_folders, folders, tmp_path / "whole"):
        assert "RankDisagreementError" in error
    assert list((tmp_path / "whole").iterdir()) == []
