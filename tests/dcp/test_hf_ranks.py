"""Hugging Face folders written and read by several ranks, and by stock torch."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from safetensors.torch import load_file

import holdfast.dcp as dcp
from holdfast.dcp._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank
from holdfast.dcp.default_planner import DefaultSavePlanner
from holdfast.dcp.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from holdfast.errors import CheckpointException
from tests.dcp.states import LAYOUTS, Layouts, blank, differing, numbered, same_parts
from tests.rank_pool import RankPool

MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "parts": {"save_distributed": True},
    "parts and whole": {"save_distributed": True, "enable_consolidation": True},
}
# How the readers of torch see a tensor of which a rank has several parts, or none, is theirs.
LOADABLE = [layout for layout in LAYOUTS if layout not in ("all but the last rank", "one rank has all")]


def full_state() -> dict[str, torch.Tensor]:
    """One matrix per layout, in various dtypes, and what is no matrix."""
    dtypes = [torch.float32, torch.int64, torch.bfloat16, torch.uint8, torch.complex64]
    state = {
        f"{layout}": numbered(9, 14, start=100 * n, dtype=dtypes[n % len(dtypes)]) for n, layout in enumerate(LAYOUTS)
    }
    return state | {"number": torch.tensor(4.5), "empty": torch.empty(0, 3), "flags": torch.arange(7) % 2 == 0}


def laid_out(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    layouts = Layouts()
    return {key: layouts.lay_out(key if key in LAYOUTS else "plain", tensor) for key, tensor in state.items()}


def save_laid_out(path: Path, options: dict[str, Any]) -> None:
    dcp.save(laid_out(full_state()), storage_writer=HuggingFaceStorageWriter(path, **options))


def load_rotated(path: Path, library: str) -> list[str]:
    """Load every tensor in the layout of the next one. Returns what came out wrong."""
    full = {key: tensor for key, tensor in full_state().items() if key in LAYOUTS}
    layouts = Layouts()
    targets = dict(zip(full, LOADABLE[1:] + LOADABLE, strict=False))
    state = {key: layouts.lay_out(targets[key], blank(full[key])) for key in targets}
    if library == "stock":
        stock.load(state, storage_reader=stock.HuggingFaceStorageReader(str(path)))
    else:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(path, thread_count=2))
    return [key for key in targets if not same_parts(state[key], layouts.lay_out(targets[key], full[key]))]


def read_with_safetensors(path: Path) -> dict[str, torch.Tensor]:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        tensors = load_file(path / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == tensors.keys()
        found |= tensors
    return found


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_any_layout_on_several_ranks_comes_back_in_any_other(
    mode: str, mapped: bool, ranks: RankPool, tmp_path: Path
) -> None:
    """With default options, stock torch lets all ranks write to one file; of two parts of a rank it stores one."""
    options = dict(MODES[mode])
    if mapped:
        options["fqn_to_index_mapping"] = {key: 1 + n % 4 for n, key in enumerate(full_state())}

    ranks(4).run(save_laid_out, tmp_path, options)

    if mode != "parts":
        assert differing(read_with_safetensors(tmp_path), full_state()) == []
        expected = (
            {f"model-{n:05d}-of-00004.safetensors" for n in range(1, 5)}
            if mapped
            else {"model-00001-of-00001.safetensors"}
        )
        expected |= {"model.safetensors.index.json"} | ({"sharded"} if mode == "parts and whole" else set())
        assert {file.name for file in tmp_path.iterdir()} == expected
    assert not list(tmp_path.rglob("*.tmp"))
    for library in ("ours", "stock"):
        for world_size in (1, 3):
            assert ranks(world_size).run(load_rotated, tmp_path, library) == [[]] * world_size


def test_parts_that_are_kept_load_too(ranks: RankPool, tmp_path: Path) -> None:
    ranks(3).run(save_laid_out, tmp_path, MODES["parts and whole"])

    for library in ("ours", "stock"):
        assert ranks(2).run(load_rotated, tmp_path / "sharded", library) == [[]] * 2


def save_with_stock(path: Path, options: dict[str, Any]) -> None:
    state = laid_out(full_state())
    kept = {key: state[key] for key in ("rows", "columns", "blocks", "hsdp")}
    stock.save(kept, storage_writer=stock.HuggingFaceStorageWriter(str(path), **options))


def load_from_stock(path: Path) -> list[str]:
    full, layouts = full_state(), Layouts()
    targets = {"rows": "columns", "columns": "rows", "blocks": "plain", "hsdp": "blocks across"}
    state = {key: layouts.lay_out(layout, blank(full[key])) for key, layout in targets.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path))
    return [key for key in targets if not same_parts(state[key], layouts.lay_out(targets[key], full[key]))]


def test_parts_that_ranks_of_stock_torch_wrote_are_read(ranks: RankPool, tmp_path: Path) -> None:
    ranks(4).run(save_with_stock, tmp_path, {"save_distributed": True})

    assert ranks(3).run(load_from_stock, tmp_path) == [[]] * 3


def consolidate_stock_parts(path: Path, mapping: dict[str, int] | None) -> None:
    consolidate_safetensors_files_on_every_rank(path, path / "whole", mapping)


@pytest.mark.parametrize("mapping", [None, {"rows": 1, "columns": 2, "blocks": 3, "hsdp": 3}])
def test_ranks_share_the_work_of_consolidating(mapping: dict[str, int] | None, ranks: RankPool, tmp_path: Path) -> None:
    ranks(4).run(save_with_stock, tmp_path, {"save_distributed": True})

    ranks(2).run(consolidate_stock_parts, tmp_path, mapping)

    expected = {key: full_state()[key] for key in ("rows", "columns", "blocks", "hsdp")}
    assert differing(read_with_safetensors(tmp_path / "whole"), expected) == []
    assert len(list((tmp_path / "whole").iterdir())) == 1 + (1 if mapping is None else 3)


def fail_to_consolidate_on_rank_1(path: Path) -> str:
    if dist.get_rank() == 1:
        from holdfast._formats.hf_folder import model_files as hf_model_files

        def full_disk(stream: Any) -> None:
            raise OSError(28, "No space left on device")

        hf_model_files.flush_to_disk = full_disk
    try:
        consolidate_safetensors_files_on_every_rank(
            path, path / "whole", {"rows": 1, "columns": 2, "blocks": 3, "hsdp": 3}
        )
    except CheckpointException as error:
        return ", ".join(f"{rank}: {failure[0]}" for rank, failure in error.failures.items())
    finally:
        if dist.get_rank() == 1:
            from holdfast._stores import durable_files as durability

            hf_model_files.flush_to_disk = durability.flush_to_disk
    return "done"


def test_a_rank_that_cannot_consolidate_fails_all_and_leaves_nothing(ranks: RankPool, tmp_path: Path) -> None:
    ranks(4).run(save_with_stock, tmp_path, {"save_distributed": True})

    told = ranks(2).run(fail_to_consolidate_on_rank_1, tmp_path)

    assert told == ["1: [Errno 28] No space left on device"] * 2
    assert list((tmp_path / "whole").iterdir()) == []


def save_replicated(path: Path, lowest: bool) -> int:
    """How many bytes this rank's writer wrote for a model that all ranks have."""
    state = {f"w{n}": torch.full((64, 64), float(n)) for n in range(8)}
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(path), planner=planner)
    return len(os.listdir(path))


@pytest.mark.parametrize("lowest", [False, True])
def test_a_model_that_all_ranks_have_is_one_valid_file(lowest: bool, ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(3).run(save_replicated, tmp_path, lowest) == [2, 2, 2]

    expected = {f"w{n}": torch.full((64, 64), float(n)) for n in range(8)}
    assert differing(read_with_safetensors(tmp_path), expected) == []


def save_values_on_rank_1(path: Path) -> str:
    state: dict[str, Any] = {"w": torch.ones(3)}
    if dist.get_rank() == 1:
        state["rank 1's step"] = 7
    try:
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(path))
    except CheckpointException as error:
        return f"{sorted(error.failures)}: {error}"
    return "done"


def test_a_value_on_one_rank_fails_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks(3).run(save_values_on_rank_1, tmp_path / "new")

    assert all(text.startswith("[1]: ") and "rank 1's step" in text for text in told)
    assert not list((tmp_path / "new").glob("*"))


def save_with_a_full_disk_on_rank_1(path: Path) -> str:
    from holdfast._dcp import hf_files
    from holdfast._stores import durable_files as durability

    def full_disk(stream: Any) -> None:
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        hf_files.flush_to_disk = full_disk
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(laid_out(full_state()), storage_writer=HuggingFaceStorageWriter(path))
    except CheckpointException as error:
        return str({rank: str(failure[0]) for rank, failure in error.failures.items()})
    finally:
        hf_files.flush_to_disk = durability.flush_to_disk
    return "done"


def test_a_rank_that_cannot_write_fails_all_and_the_old_model_stays(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save_replicated, tmp_path, False)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    told = ranks(3).run(save_with_a_full_disk_on_rank_1, tmp_path)

    assert told == ["{1: '[Errno 28] No space left on device'}"] * 3
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def save_fewer(path: Path, world_size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"w": Layouts().lay_out("rows", torch.full((12, 2), float(world_size)))}
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(path, save_distributed=True))


def load_rows(path: Path) -> set[float]:
    state = {"w": Layouts().lay_out("columns", torch.zeros(12, 2))}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path))
    return set(state["w"].to_local().flatten().tolist())


def test_parts_of_more_ranks_do_not_outlive_a_save_of_fewer(ranks: RankPool, tmp_path: Path) -> None:
    for world_size in (4, 2):
        ranks(world_size).run(save_fewer, tmp_path, world_size)

    assert len(list(tmp_path.iterdir())) == 2
    assert ranks(2).run(load_rows, tmp_path) == [{2.0}, {2.0}]


def save_to_a_disk_of_its_own(path: Path) -> str:
    """Rank 1 sees another folder under the same path."""
    from holdfast._dcp import hf_files

    original = hf_files.write_part_file
    if dist.get_rank() == 1:
        from holdfast._dcp import hf_writer

        def write_elsewhere(fs: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
            results = original(fs, file, *args, **kwargs)
            os.remove(file.path)
            return results

        hf_writer.write_part_file = write_elsewhere
    try:
        dcp.save({"w": Layouts().lay_out("rows", torch.ones(4, 2))}, storage_writer=HuggingFaceStorageWriter(path))
    except CheckpointException as error:
        return str(error)
    finally:
        if dist.get_rank() == 1:
            hf_writer.write_part_file = original
    return "done"


def test_files_that_the_coordinator_does_not_see_fail_the_save(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks(2).run(save_to_a_disk_of_its_own, tmp_path)

    assert all("shard-00002" in text and "all ranks share" in text for text in told)
    assert list(tmp_path.iterdir()) == []
