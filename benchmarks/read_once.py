"""How often a load reads what several ranks need: layouts in which ranks hold copies, and one in which none do.

A restart after a failure loads the same parameters on all replicas. The bytes that are read from storage, by all ranks
together, are compared with the bytes that are stored. On one machine, whose page cache holds them, a load chooses by
itself that every rank reads; so it is told that the ranks share what they read, as it would be by a slow store.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import MAKERS, OURS, STOCK
from benchmarks.counting import bytes_read_by_this_process
from benchmarks.quiet import quietly
from benchmarks.suite import Suite, remove
from tests.rank_pool import RankPool

LAYOUTS = ("DDP", "HSDP", "FSDP")
TENSORS = 16
DEADLINE = 300.0


def measure_read_once(suite: Suite) -> None:
    """Every layout, saved and loaded by the same ranks."""
    scale = suite.scale
    pool = RankPool(scale.replicated_ranks)
    try:
        for layout in LAYOUTS:
            suite.log(f"bytes read by {scale.replicated_ranks} ranks: {layout}")
            folder = suite.folder / f"read-once-{layout}"
            try:
                by_rank = pool(scale.replicated_ranks).run(
                    _save_and_load, folder, layout, scale.replicated_bytes, deadline=DEADLINE
                )
            finally:
                for name in (OURS, STOCK):
                    remove(folder.with_name(f"{folder.name}-{name}"))
            suite.facts[f"read once {layout}"] = {
                "ranks": scale.replicated_ranks,
                "unique": by_rank[0]["unique"],
                "read": by_rank[0]["read"],  # which is that of all ranks
                "read_by_stock": sum(found["read_by_stock"] for found in by_rank),
            }
    finally:
        pool.close()


# --- what runs in the processes ---


def _save_and_load(folder: Path, layout: str, nbytes: int) -> dict[str, int]:
    """Save with both, load with both, and count."""
    import holdfast

    state = _state(layout, nbytes)
    expected = {key: tensor.to_local().clone() for key, tensor in state.items()}
    found = {"unique": sum(tensor.numel() * tensor.element_size() for tensor in state.values())}
    with quietly():
        for name in (OURS, STOCK):
            place = folder.with_name(f"{folder.name}-{name}")
            contender = MAKERS[name]()
            contender.save(state, place)
            _wipe(state)
            if name == OURS:
                found["read"] = holdfast.load(state, place, share_reads="job").bytes_read
            else:
                found["read_by_stock"] = _counted(lambda contender=contender, place=place: contender.load(state, place))
            wrong = [key for key, tensor in state.items() if not torch.equal(tensor.to_local(), expected[key])]
            assert not wrong, f"{name} loaded something else than was saved: {wrong}"
    return found


def _counted(load: Callable[[], object]) -> int:
    dist.barrier()
    before = bytes_read_by_this_process()
    load()
    return bytes_read_by_this_process() - before


def _wipe(state: dict[str, Any]) -> None:
    for tensor in state.values():
        tensor.to_local().zero_()


def _state(layout: str, nbytes: int) -> dict[str, Any]:
    """Matrices that all ranks have, that are cut over pairs of ranks, or over all."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    size = dist.get_world_size()
    shape = {"DDP": (size,), "HSDP": (size // 2, 2), "FSDP": (size,)}[layout]
    placements = {"DDP": [Replicate()], "HSDP": [Replicate(), Shard(0)], "FSDP": [Shard(0)]}[layout]
    mesh = init_device_mesh("cpu", shape)
    parts = {"DDP": 1, "HSDP": 2, "FSDP": size}[layout]
    number_of_part = dist.get_rank() % parts
    columns = 1024
    rows = max(1, nbytes // TENSORS // columns // 4 // parts)
    state = {}
    for number in range(TENSORS):
        first = number_of_part * rows * columns + number
        local = torch.arange(first, first + rows * columns, dtype=torch.float32).view(rows, columns)
        state[f"layers.{number}.weight"] = DTensor.from_local(local, mesh, placements, run_check=False)
    return state
