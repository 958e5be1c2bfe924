"""A load keeps to its memory budget: what it allocates beside the state, as the kernel counts it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

import holdfast

PROGRAM = """
import sys, torch, holdfast

path = {path!r}
SMALL, DEFAULT = 1 << 20, 64 << 20
ROWS, COLUMNS = 256, {columns}

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) // 1024

def grown(action):
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    action()
    return status("VmHWM") - before

def load(target, budget=SMALL, **options):
    state = {{"w": target}}
    found = grown(lambda: holdfast.load(state, path + "/large", memory_budget=budget, **options))
    assert state["w"][3, 5] == 3 * COLUMNS + 5, state["w"][3, 5]
    return found

def filled(dtype, transposed=False):
    shape = (COLUMNS, ROWS) if transposed else (ROWS, COLUMNS)
    tensor = torch.full(shape, 7, dtype=dtype)
    return tensor.T if transposed else tensor

def columns():
    return holdfast.open(path + "/large")["w"][:, : COLUMNS // 16]

# Whatever is imported or made once, by every way that is measured.
for dtype in (torch.int32, torch.float64):
    holdfast.load({{"w": torch.zeros(2, 3, dtype=dtype)}}, path + "/small", cast=True, verify_first=True)
holdfast.load({{"w": torch.zeros(3, 2, dtype=torch.int32).T}}, path + "/small")
holdfast.load({{}}, path + "/small")
holdfast.open(path + "/small")["w"][:, :1]

stored = ROWS * COLUMNS * 4 >> 20
target = filled(torch.int32)
print("plain", load(target), 1)
print("verified_first", load(target, verify_first=True), 1)
print("transposed", load(filled(torch.int32, transposed=True)), 1)
target = filled(torch.float32)
print("cast", load(target, cast=True), 1)
print("cast_with_more", load(target, DEFAULT, cast=True), 64)
del target
print("columns", grown(columns) - stored // 16, 64)
print("empty", grown(lambda: holdfast.load({{}}, path + "/large", memory_budget=SMALL)) - stored, 1)
print("verify", grown(lambda: holdfast.open(path + "/large").verify().ok), 64)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for the most memory that was used")
def test_no_way_to_load_allocates_more_than_it_may(tmp_path):
    columns = 1 << 18  # 256 MiB
    holdfast.save({"w": torch.zeros(2, 3, dtype=torch.int32)}, tmp_path / "small")
    holdfast.save({"w": torch.arange(256 * columns, dtype=torch.int32).reshape(256, columns)}, tmp_path / "large")
    program = textwrap.dedent(PROGRAM).format(path=str(tmp_path), columns=columns)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    for file in (tmp_path / "large").iterdir():
        file.unlink()
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert len(rows) == 8
    assert [row for row in rows if int(row[1]) > int(row[2]) + 64] == [], f"beyond the budget, of {rows}"
    grown = {row[0]: int(row[1]) for row in rows}
    assert max(grown["plain"], grown["cast"], grown["verified_first"]) < 4, f"a small budget is felt, of {rows}"


@pytest.mark.parametrize("budget", [0, -1, 1000, 1.5, True, "64 things", "1KB"])
def test_a_budget_that_is_none_is_refused(tmp_path, budget):
    holdfast.save({"w": torch.ones(3)}, tmp_path / "a")
    with pytest.raises((ValueError, TypeError), match="memory_budget"):
        holdfast.load({"w": torch.zeros(3)}, tmp_path / "a", memory_budget=budget)


@pytest.mark.parametrize("cast", [False, True])
def test_the_smallest_budget_loads_everything(tmp_path, cast):
    content = {"w": torch.rand(700, 1000), "small": torch.rand(3), "columns": torch.rand(500, 900)}
    holdfast.save(content, tmp_path / "a")
    dtype = torch.float64 if cast else torch.float32
    state = {"w": torch.zeros(700, 1000, dtype=dtype), "small": torch.zeros(3, dtype=dtype)}
    state["columns"] = torch.zeros(900, 500, dtype=dtype).T
    holdfast.load(state, tmp_path / "a", cast=cast, memory_budget=256 << 10)
    assert all(torch.equal(state[key], tensor.to(dtype)) for key, tensor in content.items())
