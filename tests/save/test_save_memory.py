"""``holdfast.save`` and memory: it takes no more than its budget, and keeps nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

MIB = 1 << 20

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="takes Linux to be measured")

MEASURING = """
    import sys
    from pathlib import Path

    import numpy as np
    import torch

    import holdfast

    def in_use(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))

    path = sys.argv[1]
    holdfast.save({"w": torch.zeros(9, 9).T, "array": np.zeros((3, 3)).T}, path + "/first", cast={"w": "bfloat16"})
"""


def measured(program: str, path: Path) -> list[int]:
    """The numbers that a process of its own prints."""
    whole = textwrap.dedent(MEASURING) + textwrap.dedent(program)
    run = subprocess.run([sys.executable, "-c", whole, str(path)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return [int(number) for number in run.stdout.split()]


PEAKS = """
    def peak(budget, state, cast=None):
        Path("/proc/self/clear_refs").write_text("5")
        before = in_use("VmRSS")
        holdfast.save(state, path + "/saved", cast=cast, memory_budget=budget, overwrite=True)
        print(in_use("VmHWM") - before)

    n = 32 << 20
    flat, square = torch.ones(n), torch.ones(n // 8192, 8192)
    pairs = square.view(torch.complex64)
    gaps = np.dtype([("a", "u1"), ("b", "<f8")], align=True)
    peak(4 << 20, {"double": square[:1024].T, "half": flat}, {"double": "float64", "half": "bfloat16"})
    computed = {"conj": pairs[:1024].conj().T, "negative": pairs[:2048].conj().imag, "steps": flat[: n // 2][::2]}
    peak(4 << 20, computed)
    peak(4 << 20, {"transposed": square[:1024].numpy().T, "gaps": flat[: n // 4].numpy().view(gaps)})
    peak(1 << 20, {f"layer.{number}": flat[number * 256 :][:256] for number in range(20_000)})
"""


def test_a_save_keeps_its_memory_budget(tmp_path):
    cast, computed, arrays, many = measured(PEAKS, tmp_path)
    # To convert any of these as a whole would take 32 MiB at least.
    assert max(cast, computed, arrays) <= (4 + 16) * MIB
    assert many <= (1 + 64) * MIB


SAVING_AGAIN_AND_AGAIN = """
    state = {f"small.{number}": torch.ones(100 + number % 7) for number in range(500)}
    state |= {"large": torch.ones(1 << 20), "transposed": torch.ones(512, 512).T, "model": torch.nn.Linear(64, 64)}
    for number in range(120):
        if number == 20:
            before = in_use("VmRSS")
        holdfast.save(state, path + "/again", overwrite=True)
    print(in_use("VmRSS") - before)
"""


def test_a_hundred_saves_do_not_grow_the_process(tmp_path):
    # It is about memory, and need not wait for a disk.
    with TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else tmp_path) as folder:
        (grown,) = measured(SAVING_AGAIN_AND_AGAIN, Path(folder))
    # All that a save makes for this state is more than 10 MiB.
    assert grown <= 8 * MIB
