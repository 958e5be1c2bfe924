"""Distributed tensors, saved by some processes and loaded by more or fewer: gloo, all on this machine."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import page_cache
from benchmarks.contenders import OURS, STOCK
from benchmarks.counting import DIGEST_BLOCK, CountingLocalStore, bytes_in, bytes_twice, separate_ranges
from benchmarks.quiet import quietly
from benchmarks.rank_turns import Answers, Taken, add_both, timed
from benchmarks.scales import MIB
from benchmarks.suite import Suite, remove

NAMES = (OURS, STOCK)

DEADLINE = 300.0


def measure_resharding(suite: Suite) -> None:
    """All pairs of world sizes."""
    scale = suite.scale
    suite.log("resharding")
    pairs = list(itertools.permutations(scale.world_sizes, 2))
    measure_pairs(suite, "resharding", scale.resharded_bytes, scale.world_sizes, pairs)


def measure_exchanges(suite: Suite) -> None:
    """States of several sizes between two numbers of processes, and by the larger one alone."""
    more, fewer = suite.scale.exchanged_by
    for nbytes in suite.scale.exchanged_bytes:
        suite.log(f"{nbytes // MIB} MiB between {more} and {fewer} processes")
        pairs = [(more, fewer), (fewer, more), (more, more)]
        measure_pairs(suite, f"{nbytes // MIB} MiB", nbytes, (more, fewer), pairs)


def measure_pairs(
    suite: Suite, part: str, nbytes: int, savers: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> None:
    """Saves by some numbers of processes, and loads of what one number of them saved by another, or by as many."""
    scale, ranks, measures = suite.scale, suite.ranks, suite.measures
    what = (suite.folder, nbytes, scale.resharded_tensors)
    try:
        for size in savers:
            answers = ranks(size).run(_save, *what, scale.most_rounds, deadline=DEADLINE)
            add_both(measures, f"{part} save by {size}", f"{part}: save by {size}", nbytes, answers)
        for before, after in pairs:
            key, title = f"{part} {before} to {after}", f"{part}: {before} to {after}"
            answers = ranks(after).run(_load, *what, scale.most_rounds, before, deadline=DEADLINE)
            add_both(measures, key, title, nbytes, answers)
            suite.facts[key] = _sum(ranks(after).run(_load_and_count, *what, before))
    finally:
        for size in savers:
            for name in NAMES:
                remove(_folder(suite.folder, name, size))


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


def _save(folder: Path, nbytes: int, tensors: int, rounds: int) -> Answers:
    """Save with each contender by turns, each time to a folder that is new."""
    state = _state(nbytes, tensors, filled=True)

    def turn(name: str) -> Taken | str:
        path = _folder(folder, name, dist.get_world_size())
        if dist.get_rank() == 0:
            remove(path)
        return timed(_saver(name), state, path)

    return _by_turns(folder, rounds, turn)


def _load(folder: Path, nbytes: int, tensors: int, rounds: int, written_by: int) -> Answers:
    """Load with each contender by turns what it has saved, from the page cache."""
    state = _state(nbytes, tensors, filled=False)
    expected = _state(nbytes, tensors, filled=True)

    def turn(name: str) -> Taken | str:
        path = _folder(folder, name, written_by)
        if dist.get_rank() == 0:
            page_cache.fill(path)
        for tensor in state.values():
            tensor.to_local().zero_()
        taken = timed(_loader(name), state, path)
        if any(not torch.equal(state[key].to_local(), expected[key].to_local()) for key in state):
            return taken if isinstance(taken, str) else "loaded something else than was saved"
        return taken

    return _by_turns(folder, rounds, turn)


def _by_turns(folder: Path, rounds: int, turn: Callable[[str], Taken | str]) -> Answers:
    answers: Answers = {name: [] for name in NAMES}
    with quietly():
        _first_calls(folder)
        for name in NAMES:
            turn(name)  # which gets the memory that the others use again
        for number in range(rounds):
            for name in NAMES if number % 2 else reversed(NAMES):
                answers[name].append(turn(name))
    return answers


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
