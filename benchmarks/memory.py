"""How much memory a save and a load take beyond the state itself, in a process of its own.

The kernel's high-water mark of the process counts everything: buffers, threads, objects of Python, mapped files.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import states
from benchmarks.contenders import OURS, STOCK
from benchmarks.quiet import silence
from benchmarks.scales import MIB, SCALES, Scale
from benchmarks.suite import Suite

ROOT = Path(__file__).parent.parent


def measure_memory(suite: Suite) -> None:
    """Of Holdfast against its limit, and of stock DCP for comparison."""
    suite.log("memory")
    command = [sys.executable, "-m", "benchmarks.memory", "--scale", suite.scale.name, "--folder", str(suite.folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the process that measures memory failed: {last}")
    suite.facts |= json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """In the process of its own: print the extra bytes of each workload."""
    parser = argparse.ArgumentParser(description="Measure the memory that saves and loads take beyond the state.")
    parser.add_argument("--scale", choices=list(SCALES), default="quick")
    parser.add_argument("--folder", type=Path, default=Path.cwd())
    args = parser.parse_args()
    silence()
    scale = SCALES[args.scale]
    with tempfile.TemporaryDirectory(prefix="memory-", dir=args.folder) as folder:
        # Many small objects first: memory that they leave to the process would hide the growth of those after them.
        ours = _extra_bytes(OURS, scale, Path(folder), [states.small_tensors, states.huge_tensor, states.transformer])
        stock = _extra_bytes(STOCK, scale, Path(folder), [states.huge_tensor, states.transformer])
    print(json.dumps({f"memory {OURS}": ours, f"memory {STOCK}": stock}))


def _extra_bytes(
    name: str, scale: Scale, folder: Path, makers: Sequence[Callable[[Scale], states.State]]
) -> dict[str, Any]:
    save, load, budget = _calls(name)
    few = states.few_bytes()
    save(few, folder / name / "first")  # imports what it needs
    load(few, folder / name / "first")
    found: dict[str, Any] = {"budget": budget, "save": {}, "load": {}}
    for make in makers:
        workload = make.__name__.replace("_", " ")
        state = make(scale)
        gc.collect()
        before = _status("VmRSS")
        found["save"][workload] = _peak(before, save, state, folder / name / workload)
        found["load"][workload] = _peak(before, load, state, folder / name / workload)
        del state
    return found


def _calls(name: str) -> tuple[Callable[..., Any], Callable[..., Any], int | None]:
    """Save, load, and the memory budget that they are given."""
    if name == STOCK:
        import torch.distributed.checkpoint as dcp

        return (
            lambda state, path: dcp.save(state, checkpoint_id=path),
            lambda state, path: dcp.load(state, checkpoint_id=path),
            None,
        )
    import holdfast as hf

    budget = 64 * MIB
    return (
        lambda state, path: hf.save(state, path, memory_budget=budget),
        lambda state, path: hf.load(state, path, memory_budget=budget),
        budget,
    )


def _peak(before: int, call: Callable[..., Any], *arguments: Any) -> int:
    """How far the process grew beyond what it had when there was nothing but the state."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    call(*arguments)
    return max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise KeyError(name)


if __name__ == "__main__":
    main()
