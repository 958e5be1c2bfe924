"""Conversions and memory: none of them takes more than its budget, however large and however stored a tensor is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock

import holdfast.dcp as dcp
from holdfast._base.boxes import Box
from tests.dcp.cut_tensors import CutTensor

pytestmark = [
    pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="takes Linux to be measured"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]

MIB = 1 << 20
CUTS = [Box((row, column), (3000, 4500)) for row in range(0, 9000, 3000) for column in (0, 4500)]

CONVERTING = """
    import sys
    from pathlib import Path

    import torch

    from holdfast.dcp.format_utils import dcp_to_torch_save, torch_save_to_dcp

    def in_use(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))

    def peak(convert, source, target, budget):
        Path("/proc/self/clear_refs").write_text("5")
        before = in_use("VmRSS")
        convert(path + source, path + target, memory_budget=budget)
        print(target, in_use("VmHWM") - before)

    path = sys.argv[1] + "/"
    torch.save({"w": torch.ones(9, 9)}, path + "first.pt")
    torch_save_to_dcp(path + "first.pt", path + "first")
    dcp_to_torch_save(path + "first", path + "first.pt")

    peak(dcp_to_torch_save, "cut by us", "cut by us.pt", None)
    peak(dcp_to_torch_save, "cut by stock", "cut by stock.pt", 16 << 20)
    peak(torch_save_to_dcp, "cut by us.pt", "whole", 16 << 20)
    peak(dcp_to_torch_save, "turned by stock", "turned by stock.pt", None)
    peak(torch_save_to_dcp, "turned.pt", "turned", None)
    peak(torch_save_to_dcp, "many.pt", "many", 1 << 20)
    peak(dcp_to_torch_save, "many", "many again.pt", 1 << 20)
"""


def large() -> torch.Tensor:
    """309 MiB."""
    return torch.arange(81_000_000, dtype=torch.int32).view(9000, 9000)


def turned() -> torch.Tensor:
    """143 MiB."""
    return torch.arange(37_500_000, dtype=torch.int32).view(7500, 5000).t()


def many() -> dict[str, torch.Tensor]:
    """94 MiB."""
    return {f"layer.{number}": torch.full((8192,), number, dtype=torch.int32) for number in range(3000)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("large")
    dcp.save({"w": CutTensor.of(large(), CUTS, dcp)}, checkpoint_id=path / "cut by us")
    stock.save({"w": CutTensor.of(large(), CUTS, stock)}, checkpoint_id=path / "cut by stock")
    stock.save({"w": turned()}, checkpoint_id=path / "turned by stock")
    torch.save({"w": turned()}, path / "turned.pt")
    torch.save(many(), path / "many.pt")
    yield path
    shutil.rmtree(path)  # pytest would keep all of this for a while


@pytest.fixture(scope="module")
def peaks(folder: Path) -> dict[str, int]:
    """How many bytes a process took at most for each result."""
    program = [sys.executable, "-c", textwrap.dedent(CONVERTING), str(folder)]
    run = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    lines = [line.rpartition(" ") for line in run.stdout.splitlines()]
    return {name: int(number) for name, _, number in lines}


def loaded(path: Path) -> torch.Tensor:
    found: torch.Tensor = torch.load(path, mmap=True)["w"]
    return found


def test_chunks_that_interleave_are_put_together_in_pieces(folder: Path, peaks: dict[str, int]) -> None:
    assert peaks["cut by us.pt"] <= (64 + 32) * MIB
    assert peaks["cut by stock.pt"] <= (16 + 32) * MIB
    for name in ("cut by us.pt", "cut by stock.pt"):
        assert torch.equal(loaded(folder / name), large())


def test_a_large_tensor_of_a_file_is_written_in_pieces(folder: Path, peaks: dict[str, int]) -> None:
    assert peaks["whole"] <= (16 + 32) * MIB
    found = {"w": torch.zeros(9000, 9000, dtype=torch.int32)}
    dcp.load(found, checkpoint_id=folder / "whole")
    assert torch.equal(found["w"], large())


def test_a_tensor_that_lies_in_another_order_is_turned_in_pieces(folder: Path, peaks: dict[str, int]) -> None:
    assert peaks["turned by stock.pt"] <= (64 + 32) * MIB
    assert peaks["turned"] <= (64 + 32) * MIB
    assert torch.equal(loaded(folder / "turned by stock.pt"), turned())
    found = {"w": torch.zeros(5000, 7500, dtype=torch.int32)}
    dcp.load(found, checkpoint_id=folder / "turned")
    assert torch.equal(found["w"], turned())


def test_small_tensors_are_not_in_memory_together(folder: Path, peaks: dict[str, int]) -> None:
    assert max(peaks["many"], peaks["many again.pt"]) <= (1 + 32) * MIB
    found, expected = torch.load(folder / "many again.pt"), many()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
