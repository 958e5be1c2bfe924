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
from benchmarks.counting import DIGEST_BLOCK, CountingStore, bytes_in, bytes_twice, separate_ranges
from benchmarks.rounds import Measure, one_line
from benchmarks.suite import Suite, remove

Span = tuple[float, float]
"""When a process began and when it ended, on the clock that all processes share."""


def measure_resharding(suite: Suite) -> None:
    """All pairs of world sizes."""
    from tests.ranks import RankPool  # the processes that the tests use, too

    sizes = suite.scale.world_sizes
    pairs = list(itertools.permutations(sizes, 2))
    names = [*(f"save by {size}" for size in sizes), *(f"{before} to {after}" for before, after in pairs)]
    results = {
        name: Measure(f"resharding: {name}", suite.scale.resharded_bytes, {OURS: [], STOCK: []}) for name in names
    }
    suite.measures |= {f"resharding {name}": result for name, result in results.items()}
    suite.log("resharding")
    allowance = suite.allowance(0.1)
    end = time.monotonic() + allowance.seconds
    longest = 0.0
    pool = RankPool()
    try:
        for number in range(allowance.most_rounds):
            began = time.monotonic()
            if number >= min(2, allowance.fewest_rounds) and began + longest > end:
                break
            order = (OURS, STOCK) if number % 2 else (STOCK, OURS)
            for size in sizes:
                _job(pool, size, _save, suite, order, results[f"save by {size}"], size)
            for before, after in pairs:
                _job(pool, after, _load, suite, order, results[f"{before} to {after}"], before)
            longest = max(longest, time.monotonic() - began)
        for before, after in pairs:
            suite.facts[f"resharding {before} to {after}"] = _bytes(pool, suite, before, after)
    finally:
        pool.close()
        for size in sizes:
            for name in (OURS, STOCK):
                remove(_folder(suite.folder, name, size))


def _job(
    pool: Any,
    world_size: int,
    body: Callable[..., dict[str, Span | str]],
    suite: Suite,
    order: tuple[str, ...],
    result: Measure,
    written_by: int,
) -> None:
    """Have all processes do something with each contender, and note what the slowest of them took."""
    order = tuple(name for name in order if name not in result.failed)
    scale = suite.scale
    try:
        spans = pool(world_size).run(
            body, suite.folder, order, written_by, scale.resharded_bytes, scale.resharded_tensors
        )
    except Exception as error:
        result.failed |= {name: f"failed: {one_line(error)}" for name in order}
        return
    for name in order:
        answers = [span[name] for span in spans]
        reasons = [answer for answer in answers if isinstance(answer, str)]
        if reasons:
            result.failed[name] = f"failed: {reasons[0]}"
        else:
            result.samples[name].append(max(end for _, end in answers) - min(begin for begin, _ in answers))


def _bytes(pool: Any, suite: Suite, before: int, after: int) -> dict[str, Any]:
    scale = suite.scale
    by_rank = pool(after).run(
        _load_and_count, _folder(suite.folder, OURS, before), scale.resharded_bytes, scale.resharded_tensors
    )
    return {
        "needed": sum(rank["needed"] for rank in by_rank),
        "read": sum(rank["read"] for rank in by_rank),
        "read_twice": sum(rank["read_twice"] for rank in by_rank),
        "ranges": sum(rank["ranges"] for rank in by_rank),
        "digest_block": DIGEST_BLOCK,
    }


# --- what runs in the processes ---


def _first_calls(folder: Path, order: tuple[str, ...]) -> None:
    """Save and load a few bytes with each contender. The first calls with a process group, which is a new one for every
    job here and lasts as long as the training elsewhere, set up what they need."""
    state = _state(1 << 16, 2, filled=True)
    for name in order:
        path = _folder(folder, f"first {name}", dist.get_world_size())
        _saver(name)(state, path)
        _loader(name)(state, path)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)


def _save(folder: Path, order: tuple[str, ...], size: int, nbytes: int, tensors: int) -> dict[str, Span | str]:
    """Save with each contender, to a folder that is new."""
    _first_calls(folder, order)
    state = _state(nbytes, tensors, filled=True)
    spans: dict[str, Span | str] = {}
    for name in order:
        path = _folder(folder, name, size)
        if dist.get_rank() == 0:
            remove(path)
        spans[name] = _timed(_saver(name), state, path)
    return spans


def _load(folder: Path, order: tuple[str, ...], written_by: int, nbytes: int, tensors: int) -> dict[str, Span | str]:
    """Load with each contender what it has saved, from the page cache."""
    _first_calls(folder, order)
    state = _state(nbytes, tensors, filled=False)
    expected = _state(nbytes, tensors, filled=True)
    spans: dict[str, Span | str] = {}
    for name in order:
        path = _folder(folder, name, written_by)
        if dist.get_rank() == 0:
            page_cache.fill(path)
        for tensor in state.values():
            tensor.to_local().zero_()
        spans[name] = _timed(_loader(name), state, path)
        if any(not torch.equal(state[key].to_local(), expected[key].to_local()) for key in state):
            spans[name] = "loaded something else than was saved"
    return spans


def _load_and_count(path: Path, nbytes: int, tensors: int) -> dict[str, int]:
    """Load with Holdfast, and count what this process reads."""
    import holdfast as hf

    state = _state(nbytes, tensors, filled=False)
    store = CountingStore(path)
    hf.load(state, store)
    ranges = store.data_ranges()
    return {
        "needed": sum(tensor.to_local().nbytes for tensor in state.values()),
        "read": bytes_in(ranges),
        "read_twice": bytes_twice(ranges),
        "ranges": separate_ranges(ranges),
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
        import holdfast as hf

        return hf.save
    import torch.distributed.checkpoint as dcp

    return lambda state, path: dcp.save(state, checkpoint_id=path)


def _loader(name: str) -> Callable[[Any, Path], object]:
    if name == OURS:
        import holdfast as hf

        return hf.load
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
