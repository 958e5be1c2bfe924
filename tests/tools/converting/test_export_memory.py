"""An export takes little memory, however large the checkpoint is: measured as the peak of a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors import safe_open

import holdfast
from tests.tools.converting.formats import load_like_transformers

MB = 1_000_000
PROGRAM = """
import sys
from holdfast._cli.main import run

status = run(["export", *sys.argv[1:], "--quiet"])
assert status == 0
assert "torch" not in sys.modules
print([int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is told by Linux alone")


def peak_of_export(*arguments: str | Path) -> int:
    """The most bytes of memory that the process of the command ever had."""
    program = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    return int(subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def save_shards(path: Path, rows: int, columns: int, count: int) -> None:
    """On every rank: its part of large weights, cut along rows and along columns. Each says where it is."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    state = {}
    for number in range(count):
        dim = number % 2
        sizes = [rows, columns]
        sizes[dim] //= world_size
        local = torch.full(sizes, float(number * 10 + rank))
        state[f"layers.{number}.weight"] = DTensor.from_local(local, mesh, [Shard(dim)])
    holdfast.save({"model": state, "step": 1}, path)


def assert_is_whole(folder: Path, rows: int, columns: int, count: int, ranks: int) -> None:
    """Every weight is what the ranks saved, read by safetensors itself, one at a time."""
    found = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no dict
                found.add(key)
                number = int(key.split(".")[1])
                parts = opened.get_tensor(key).chunk(ranks, number % 2)
                assert sum(part.numel() for part in parts) == rows * columns
                assert all(bool((part == number * 10 + rank).all()) for rank, part in enumerate(parts))
    assert found == {f"layers.{number}.weight" for number in range(count)}


@pytest.fixture
def fast_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory if there is one: how fast files become durable is not the question."""
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def test_a_large_export_takes_hardly_more_memory_than_a_small_one(fast_disk: Path) -> None:
    holdfast.save({"model": {"w": torch.ones(3)}}, fast_disk / "small")
    holdfast.save({"model": {f"{n}.w": torch.full((3500, 3500), float(n)) for n in range(4)}}, fast_disk / "large")

    small = peak_of_export(fast_disk / "small", fast_disk / "small-hf")
    large = peak_of_export(fast_disk / "large", fast_disk / "large-hf", "--max-file-size", "120MB")
    tight = peak_of_export(fast_disk / "large", fast_disk / "tight-hf", "--memory", "8MB", "--no-check")

    assert large < small + 80 * MB  # 64 MiB is what buffers may take
    assert tight < small + 24 * MB
    for name in ("large-hf", "tight-hf"):
        state = load_like_transformers(fast_disk / name)
        assert all(bool((tensor == float(key[0])).all()) for key, tensor in state.items())
        assert len(state) == 4


@pytest.mark.long
def test_4_gb_of_4_ranks_are_exported_with_300_mb(ranks, tmp_path: Path) -> None:
    rows, columns, count = 16_384, 8192, 8
    ranks(4).run(save_shards, tmp_path / "saved", rows, columns, count)
    total = sum(path.stat().st_size for path in (tmp_path / "saved").iterdir())
    assert total > 4_000 * MB

    peak = peak_of_export(tmp_path / "saved", tmp_path / "hf", "--max-file-size", "1GB")

    assert peak < 300 * MB
    assert_is_whole(tmp_path / "hf", rows, columns, count, 4)
