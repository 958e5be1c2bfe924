"""Loads of files of other formats keep to their memory budget too, as the kernel counts it."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file

import holdfast.dcp
from tests.torches import ALONE

FORMATS = ["dcp", "stock", "stock_turned", "torch", "safetensors"]

PROGRAM = """
import sys, torch, holdfast

folder, *FORMATS = sys.argv[1:]
BUDGET = 1 << 20
ROWS, COLUMNS = 128, 1 << 18

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) // 1024

def grown(action):
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    action()
    return status("VmHWM") - before

state = {"w": torch.full((ROWS, COLUMNS), 7, dtype=torch.float32)}
for form in FORMATS:
    large, small = f"{folder}/{form}/large", f"{folder}/{form}/small"
    # Whatever is imported or made once, by every way that is measured.
    holdfast.load({"w": torch.zeros(2, 3, dtype=torch.float64)}, small, cast=True, verify_first=True)
    state["w"].fill_(7)
    print(form, "cast", grown(lambda: holdfast.load(state, large, cast=True, memory_budget=BUDGET)))
    assert state["w"][3, 5] == 3 * COLUMNS + 5
    print(form, "first", grown(lambda: holdfast.load(state, large, cast=True, memory_budget=BUDGET, verify_first=True)))
    print(form, "verify", grown(lambda: holdfast.open(large).verify().ok))
"""


def save(form, tensor, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if form == "dcp":
            holdfast.dcp.save({"w": tensor}, checkpoint_id=path, no_dist=True)
        elif form == "stock":
            stock.save({"w": tensor}, checkpoint_id=path, **ALONE)
        elif form == "stock_turned":
            stock.save({"w": tensor.T.contiguous().T}, checkpoint_id=path, **ALONE)
        elif form == "torch":
            torch.save({"w": tensor}, path)
        else:
            save_file({"w": tensor}, path)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for the most memory that was used")
@pytest.mark.long
def test_a_large_tensor_is_converted_and_checked_in_little_memory(tmp_path):
    content = torch.arange(128 << 18, dtype=torch.int32).reshape(128, 1 << 18)  # 128 MiB, twice what is allowed
    for form in FORMATS:
        (tmp_path / form).mkdir()
        save(form, content, tmp_path / form / "large")
        save(form, torch.zeros(2, 3, dtype=torch.int32), tmp_path / form / "small")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *FORMATS]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    for file in tmp_path.rglob("*"):
        if file.is_file():
            file.unlink()
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert len(rows) == 3 * len(FORMATS)
    assert [row for row in rows if int(row[2]) > 1 + 64] == [], f"beyond the budget, of {rows}"
    assert [row for row in rows if row[1] != "verify" and int(row[2]) > 10] == [], f"a small budget is felt, of {rows}"
