"""Distributed tensors, saved by some processes and loaded by more or fewer: gloo, all on this machine.

A turn lasts from when the first process leaves a barrier until the last one has finished.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import page_cache
from benchmarks.contenders import OURS, STOCK
from benchmarks.counting import DIGEST_BLOCK, CountingLocalStore, bytes_in, bytes_twice, separate_ranges
from benchmarks.quiet import quietly
from benchmarks.rounds import Measure, one_line
from benchmarks.suite import Suite, remove

Span = tuple[float, float]
"""When a process began and when it ended, on the clock that all processes share."""

Spans = dict[str, list[Span | str]]
"""Those of each contender, one for each round, or what went wrong."""

NAMES = (OURS, STOCK)


def measure_resharding(suite: Suite) -> None:
    """All pairs of world sizes."""
    scale, ranks = suite.scale, suite.ranks
    what = (suite.folder, scale.resharded_bytes, scale.resharded_tensors)
    suite.log("resharding")
    try:
        for size in scale.world_sizes:
            suite.measures[f"resharding save by {size}"] = _combined(
                f"resharding: save by {size}",
                scale.resharded_bytes,
                ranks(size).run(_save, *what, scale.fewest_rounds, deadline=300.0),
            )
        for before, after in itertools.permutations(scale.world_sizes, 2):
            suite.measures[f"resharding {before} to {after}"] = _combined(
                f"resharding: {before} to {after}",
                scale.resharded_bytes,
                ranks(after).run(_load, *what, scale.fewest_rounds, before, deadline=300.0),
            )
            suite.facts[f"resharding {before} to {after}"] = _sum(ranks(after).run(_load_and_count, *what, before))
    finally:
        for size in scale.world_sizes:
            for name in NAMES:
                remove(_folder(suite.folder, name, size))


def _combined(title: str, nbytes: int, by_rank: list[Spans]) -> Measure:
    """A round lasts until the slowest process is done."""
    result = Measure(title, nbytes, {name: [] for name in NAMES})
    for name in NAMES:
        for answers in zip(*(spans[name] for spans in by_rank), strict=True):
            reasons = [answer for answer in answers if isinstance(answer, str)]
            if reasons:
                result.failed[name] = f"failed: {reasons[0]}"
            else:
                result.samples[name].append(max(end for _, end in answers) - min(begin for begin, _ in answers))
        if name in result.failed:
            result.samples[name].clear()
    return result


def _sum(by_rank: list[dict[str, int]]) -> dict[str, int]:
    return {key: sum(rank[key] for rank in by_rank) for key in by_rank[0]} | {"digest_block": DIGEST_BLOCK}


# --- what runs in the processes ---


def _first_calls(folder: Path) -> None:
    """Save and load a few bytes with each contender. The first calls with a process group, which is a new one for every
    job here and lasts as long as the training elsewhere, set up what they need."""
    state = _state(1 << 16, 2, filled=True)
    for name in NAMES:
        path = _folder(folder, f"first {name}", dist.get_world_size())
        _saver(name)(state, path)
        _loader(name)(state, path)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)


def _save(folder: Path, nbytes: int, tensors: int, rounds: int) -> Spans:
    """Save with each contender by turns, each time to a folder that is new."""
    state = _state(nbytes, tensors, filled=True)

    def turn(name: str) -> Span | str:
        path = _folder(folder, name, dist.get_world_size())
        if dist.get_rank() == 0:
            remove(path)
        return _timed(_saver(name), state, path)

    return _by_turns(folder, rounds, turn)


def _load(folder: Path, nbytes: int, tensors: int, rounds: int, written_by: int) -> Spans:
    """Load with each contender by turns what it has saved, from the page cache."""
    state = _state(nbytes, tensors, filled=False)
    expected = _state(nbytes, tensors, filled=True)

    def turn(name: str) -> Span | str:
        path = _folder(folder, name, written_by)
        if dist.get_rank() == 0:
            page_cache.fill(path)
        for tensor in state.values():
            tensor.to_local().zero_()
        span = _timed(_loader(name), state, path)
        if any(not torch.equal(state[key].to_local(), expected[key].to_local()) for key in state):
            return span if isinstance(span, str) else "loaded something else than was saved"
        return span

    return _by_turns(folder, rounds, turn)


def _by_turns(folder: Path, rounds: int, turn: Callable[[str], Span | str]) -> Spans:
    spans: Spans = {name: [] for name in NAMES}
    with quietly():
        _first_calls(folder)
        for number in range(rounds):
            for name in NAMES if number % 2 else reversed(NAMES):
                spans[name].append(turn(name))
    return spans


def _load_and_count(folder: Path, nbytes: int, tensors: int, written_by: int) -> dict[str, int]:
    """Load with Holdfast, and count what this process reads."""
    import holdfast

    state = _state(nbytes, tensors, filled=False)
    store = CountingLocalStore(_folder(folder, OURS, written_by))
    holdfast.load(state, store)
    reads = store.data_reads()
    return {
        "needed": sum(tensor.to_local().nbytes for tensor in state.values()),
        "read": bytes_in(reads),
        "read_twice": bytes_twice(reads),
        "ranges": separate_ranges(reads),
    }


def _timed(call: Callable[[Any, Path], object], state: Any, path: Path) -> Span | str:
    dist.barrier()
    began = time.monotonic()
    try:
        call(state, path)
    except Exception as error:
        return one_line(error)
    return began, time.monotonic()


def _saver(name: str) -> Callable[[Any, Path], object]:
    if name == OURS:
        import holdfast

        return holdfast.save
    import torch.distributed.checkpoint as dcp

    return lambda state, path: dcp.save(state, checkpoint_id=path)


def _loader(name: str) -> Callable[[Any, Path], object]:
    if name == OURS:
        import holdfast

        return holdfast.load
    import torch.distributed.checkpoint as dcp

    return lambda state, path: dcp.load(state, checkpoint_id=path)


def _state(nbytes: int, tensors: int, *, filled: bool) -> dict[str, Any]:
    """Matrices, cut into as many parts by rows as there are processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    columns = 1024 if nbytes >= 32 << 20 else 128
    rows = nbytes // tensors // columns // 4 // world_size
    state = {}
    for number in range(tensors):
        local = torch.zeros(rows, columns)
        if filled:  # by where an element is in the whole tensor, and so alike for any number of processes
            first = rank * rows * columns + number
            local.copy_((torch.arange(first, first + rows * columns) % (1 << 20)).view(rows, columns))
        state[f"layers.{number}.weight"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return state


def _folder(folder: Path, name: str, size: int) -> Path:
    return folder / f"resharding-{name.replace(' ', '-')}-{size}"
