"""Save and load: stock torch.distributed.checkpoint against holdfast.dcp, one process, this machine's disk.

How it measures:

- The contenders take turns within each repetition, in an order that alternates, so that a slow moment of the
  disk hits all of them. Medians and the full range are shown; a first repetition is not counted.
- A save counts until the data is durable: both libraries sync their files by default.
- `load, cold` reads files that were dropped from the page cache, `load, cached` reads them again right after.
  Destinations are allocated, and their memory touched, beforehand.
- Every load is compared with what was saved, outside the measured time.
- `plain file` writes, syncs and reads the same bytes as one file, with no checkpoint around them: the disk's
  own speed, for scale. It has no part in the ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

State = dict[str, torch.Tensor]
Seconds = dict[str, dict[str, dict[str, list[float]]]]  # workload -> operation -> contender -> one per repetition

OPERATIONS = ("save", "load, cold", "load, cached")


class Dcp:
    """A module with the API of torch.distributed.checkpoint."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def save(self, state: State, path: Path) -> None:
        self._module.save(state, checkpoint_id=path)

    def load(self, state: State, path: Path) -> None:
        self._module.load(state, checkpoint_id=path)


class PlainFile:
    """One file, one write after the other, one fsync."""

    def save(self, state: State, path: Path) -> None:
        path.mkdir()
        with open(path / "data", "wb", buffering=0) as file:
            for view in _views(state):
                file.write(view)
            os.fsync(file.fileno())

    def load(self, state: State, path: Path) -> None:
        with open(path / "data", "rb", buffering=0) as file:
            for view in _views(state):
                file.readinto(view)


Contender = Dcp | PlainFile


def main() -> None:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # being stopped leaves no checkpoints behind
    silence()
    contenders = find_contenders()
    workloads = {
        f"{args.megabytes} MB in 100 tensors": make_state(100, args.megabytes * 10**6),
        "2,000 tensors of 1 KB": make_state(2000, 2000 * 1024),
    }
    seconds: Seconds = {}
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=args.dir) as folder:
        for name, state in workloads.items():
            seconds[name] = measure(contenders, state, Path(folder), args.repetitions)
    print_table(seconds, list(contenders))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "seconds": seconds}, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure save and load against stock torch.")
    parser.add_argument("--repetitions", type=int, default=7, help="measured repetitions (default: 7)")
    parser.add_argument("--megabytes", type=int, default=512, help="size of the large state (default: 512)")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where to write; must be a disk, not tmpfs")
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    return parser.parse_args()


def silence() -> None:
    """Both libraries remark on a save without a process group, on every save."""
    warnings.simplefilter("ignore", UserWarning)
    logging.disable(logging.WARNING)


def find_contenders() -> dict[str, Contender]:
    contenders: dict[str, Contender] = {"stock": Dcp(importlib.import_module("torch.distributed.checkpoint"))}
    try:
        holdfast_dcp = importlib.import_module("holdfast.dcp")
    except ImportError as error:
        print(f"holdfast.dcp cannot be imported ({error}): measuring without it\n")
    else:
        contenders["holdfast"] = Dcp(holdfast_dcp)
    contenders["plain file"] = PlainFile()
    return contenders


def make_state(tensors: int, total_bytes: int) -> State:
    """Random numbers: neither compression nor sparse files help."""
    generator = torch.Generator().manual_seed(0)
    length = total_bytes // tensors // 4
    return {f"layers.{index}.weight": torch.randn(length, generator=generator) for index in range(tensors)}


def measure(
    contenders: dict[str, Contender], state: State, folder: Path, repetitions: int
) -> dict[str, dict[str, list[float]]]:
    seconds: dict[str, dict[str, list[float]]] = {
        operation: {name: [] for name in contenders} for operation in OPERATIONS
    }
    for repetition in range(repetitions + 1):
        order = list(contenders) if repetition % 2 else list(reversed(contenders))
        for name in order:
            taken = measure_once(contenders[name], state, folder / "checkpoint")
            if repetition:
                for operation in OPERATIONS:
                    seconds[operation][name].append(taken[operation])
    return seconds


def measure_once(contender: Contender, state: State, path: Path) -> dict[str, float]:
    taken: dict[str, float] = {}
    os.sync()  # nobody pays for what others left in the page cache
    with stopwatch(taken, "save"):
        contender.save(state, path)
    for operation in ("load, cold", "load, cached"):
        destination = {key: torch.empty_like(value).fill_(0) for key, value in state.items()}
        if operation == "load, cold":
            drop_from_cache(path)
        with stopwatch(taken, operation):
            contender.load(destination, path)
        if not all(torch.equal(destination[key], state[key]) for key in state):
            raise SystemExit(f"{type(contender).__name__}: the loaded state differs from the saved one")
    shutil.rmtree(path)
    return taken


@contextlib.contextmanager
def stopwatch(taken: dict[str, float], operation: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    taken[operation] = time.perf_counter() - start


def drop_from_cache(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())  # the kernel only drops pages that are on disk
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def print_table(seconds: Seconds, contenders: list[str]) -> None:
    compared = "holdfast" in contenders
    title = "median ms (lowest to highest)"
    print(f"{title:<40}" + "".join(f"{name:>26}" for name in contenders) + "   stock/holdfast" * compared)
    for workload, operations in seconds.items():
        print(workload)
        for operation, by_contender in operations.items():
            cells = "".join(f"{describe(by_contender[name]):>26}" for name in contenders)
            print(f"  {operation:<38}{cells}{ratio(by_contender) if compared else ''}")


def describe(samples: list[float]) -> str:
    middle, low, high = (1000 * value for value in (statistics.median(samples), min(samples), max(samples)))
    return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"


def ratio(by_contender: dict[str, list[float]]) -> str:
    """How many times faster than stock the median is."""
    value = statistics.median(by_contender["stock"]) / statistics.median(by_contender["holdfast"])
    return f"{value:>16.2f}x"


def machine() -> dict[str, str | int | None]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "cpus": os.cpu_count(),
    }


def _views(state: State) -> Iterator[memoryview]:
    """The bytes of each tensor, writable in place."""
    for tensor in state.values():
        yield memoryview(tensor.numpy()).cast("B")


if __name__ == "__main__":
    main()
