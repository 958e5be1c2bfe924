"""Conversions to DCP and torch.save files: how much memory they take, and what is left of one that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed.checkpoint as stock

import holdfast
from holdfast._base.boxes import Box
from tests.dcp.cut_tensors import CutTensor
from tests.warm_python import warm_python

pytestmark = [
    pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="takes Linux to be measured"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]

MIB = 1 << 20

CONVERTING = """
    import sys
    from pathlib import Path

    import torch

    import holdfast

    def in_use(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))

    def peak(source, target, to, budget):
        Path("/proc/self/clear_refs").write_text("5")
        before = in_use("VmRSS")
        holdfast.convert(path + source, path + target, to=to, memory_budget=budget)
        print(target, in_use("VmHWM") - before)

    path = sys.argv[1] + "/"
    torch.save({"w": torch.ones(9, 9)}, path + "first.pt")
    holdfast.convert(path + "first.pt", path + "first", to="dcp")
    holdfast.convert(path + "first", path + "first again.pt", to="torch")
"""


def peaks(folder: Path, *conversions: tuple[str, str, str, int | None]) -> dict[str, int]:
    """How many bytes a process took at most for each result."""
    lines = [f"peak({source!r}, {target!r}, {to!r}, {budget!r})" for source, target, to, budget in conversions]
    program = textwrap.dedent(CONVERTING) + "\n".join(lines)
    run = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    return {name: int(number) for name, _, number in (line.rpartition(" ") for line in run.stdout.splitlines())}


def save_cut(folder: Path, rows: int) -> torch.Tensor:
    """A matrix that stock DCP has in parts which interleave."""
    whole = torch.arange(rows * 8000, dtype=torch.int32).view(rows, 8000)
    parts = [Box((row, column), (rows // 2, 4000)) for row in (0, rows // 2) for column in (0, 4000)]
    stock.save({"w": CutTensor.of(whole, parts, stock)}, checkpoint_id=folder / "cut")
    return whole


def assert_bounded(folder: Path, rows: int, budget: int | None) -> None:
    whole = save_cut(folder, rows)
    found = peaks(
        folder,
        ("cut", "cut.pt", "torch", 16 * MIB),
        ("cut.pt", "whole", "dcp", 16 * MIB),
        ("whole", "again.pt", "torch", budget),
    )
    budgets = {"again.pt": budget or 64 * MIB}
    assert {name: peak for name, peak in found.items() if peak > budgets.get(name, 16 * MIB) + 32 * MIB} == {}
    for name in ("cut.pt", "again.pt"):
        assert torch.equal(torch.load(folder / name, mmap=True)["w"], whole)


def test_a_tensor_of_interleaving_parts_is_converted_in_pieces() -> None:
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        assert_bounded(Path(folder), rows=3000, budget=16 * MIB)  # 96 MB


@pytest.mark.long
def test_a_huge_one_takes_no_more_memory(tmp_path: Path) -> None:
    assert_bounded(tmp_path, rows=60_000, budget=None)  # 1.9 GB


@pytest.mark.long
def test_many_tensors_take_no_more_memory_than_their_objects(tmp_path: Path) -> None:
    state = {f"layer.{number}": torch.full((8192,), number, dtype=torch.int32) for number in range(20_000)}  # 655 MB
    torch.save(state, tmp_path / "many.pt")
    found = peaks(tmp_path, ("many.pt", "many", "dcp", MIB), ("many", "again.pt", "torch", MIB))
    assert max(found.values()) <= MIB + 32 * MIB + 20_000 * 8192  # some kilobytes for each
    again = torch.load(tmp_path / "again.pt", mmap=True)
    assert all(torch.equal(again[key], tensor) for key, tensor in state.items())


KILLED = """
    import os, signal, sys

    import holdfast

    def die_halfway(done, total):
        if done > total * float(sys.argv[4]):
            os.kill(os.getpid(), signal.SIGKILL)

    holdfast.convert(
        sys.argv[1], sys.argv[2], to=sys.argv[3], overwrite=True, memory_budget=1 << 20, on_progress=die_halfway
    )
"""


def killed(folder: Path, to: str, when: float) -> None:
    """A conversion to ``out`` that is killed: early while it writes, late while it reads back."""
    program = [*warm_python(), "-c", textwrap.dedent(KILLED), str(folder / "native"), str(folder / "out"), to]
    assert subprocess.run([*program, str(when)], timeout=120).returncode == -signal.SIGKILL


def test_a_killed_conversion_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    holdfast.save({"w": torch.arange(1_000_000)}, tmp_path / "native")

    killed(tmp_path, "dcp", when=0.2)

    assert not (tmp_path / "out").exists()
    holdfast.convert(tmp_path / "native", tmp_path / "out", to="dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["native", "out"]
    assert torch.equal(holdfast.open(tmp_path / "out").read()["w"], torch.arange(1_000_000))


def test_a_killed_overwrite_leaves_the_old_result(tmp_path: Path) -> None:
    holdfast.save({"w": torch.arange(1_000_000)}, tmp_path / "native")
    torch.save({"old": torch.ones(3)}, tmp_path / "out")

    killed(tmp_path, "torch", when=0.8)

    assert torch.equal(torch.load(tmp_path / "out")["old"], torch.ones(3))
