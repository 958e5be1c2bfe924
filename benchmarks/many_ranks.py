"""Many real processes with many small tensors: what it costs to agree, since the bytes cost nothing.

All processes are forked from one that has imported torch, and share the cores of this machine. So it is their processor
time that counts, added up; the wall time is that of a machine which is far too small for so many.
"""

from __future__ import annotations

import importlib
import pkgutil
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import MAKERS, OURS, OURS_DCP, STOCK
from benchmarks.quiet import quietly
from benchmarks.rank_turns import Answers, Taken, add_both, timed
from benchmarks.suite import Suite
from tests.rank_pool import RankPool

NAMES = (STOCK, OURS, OURS_DCP)
ELEMENTS = 256
"""Of every tensor on every rank: 1 KB."""

FIRST, LATER, LOAD = "first save", "later saves", "load"
VERBS = (FIRST, LATER, LOAD)
ROUNDS = (1, 2, 3)
DEADLINE = 600.0


def measure_many_ranks(suite: Suite) -> None:
    """First saves of a job, the saves after them, and loads, for every number of ranks."""
    scale = suite.scale
    pool = RankPool(max(scale.many_ranks))
    try:
        for size in scale.many_ranks:
            pool(size).run(_import_all, process_group=False)
            for job in range(scale.many_ranks_jobs):
                suite.log(f"{size} ranks with {scale.many_ranks_tensors} tensors each, job {job + 1}")
                names = NAMES if job % 2 == 0 else NAMES[::-1]
                folder = suite.folder / f"many-ranks-{size}"
                try:
                    by_rank = pool(size).run(
                        _job, folder, scale.many_ranks_tensors, names, group_timeout=DEADLINE, deadline=DEADLINE
                    )
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                nbytes = size * scale.many_ranks_tensors * ELEMENTS * 4
                for verb in VERBS:
                    title = f"{size} ranks: {verb}"
                    add_both(suite.measures, title, title, nbytes, [answers[verb] for answers in by_rank])
    finally:
        pool.close()


# --- what runs in the processes ---

_NOT_NEEDED = ("_cli", "_tools", "integrations", "testing", "__main__")


def _import_all() -> None:
    """What a first call would import: a job does it once, however many ranks it has."""
    import holdfast

    for module in pkgutil.walk_packages(holdfast.__path__, "holdfast."):
        if module.name.split(".")[1] not in _NOT_NEEDED:
            importlib.import_module(module.name)


def _job(folder: Path, tensors: int, names: tuple[str, ...]) -> dict[str, Answers]:
    """One job: a process group that is new, the first save with it, three more, and three loads, by each contender."""
    state = _state(tensors)
    expected = {key: tensor.to_local().clone() for key, tensor in state.items()}
    contenders = {name: MAKERS[name]() for name in names}
    answers: dict[str, Answers] = {verb: {name: [] for name in names} for verb in VERBS}
    dist.all_gather_object([None] * dist.get_world_size(), "hello")  # what a job has long done when it first saves
    if dist.get_rank() == 0:
        folder.mkdir()

    def save(name: str, number: int) -> Taken | str:
        return timed(contenders[name].save, state, folder / f"{name}-{number}")

    def load(name: str, number: int) -> Taken | str:
        for tensor in state.values():
            tensor.to_local().zero_()
        taken = timed(contenders[name].load, state, folder / f"{name}-{number}")
        if any(not torch.equal(tensor.to_local(), expected[key]) for key, tensor in state.items()):
            return taken if isinstance(taken, str) else "loaded something else than was saved"
        return taken

    with quietly():
        for name in names:
            answers[FIRST][name].append(save(name, 0))
        for number in ROUNDS:
            for name in names[::-1] if number % 2 else names:
                answers[LATER][name].append(save(name, number))
        for number in ROUNDS:
            for name in names[::-1] if number % 2 else names:
                answers[LOAD][name].append(load(name, number))
    dist.barrier()
    return answers


def _state(tensors: int) -> dict[str, Any]:
    """Vectors, each cut into as many parts as there are processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    first = dist.get_rank() * ELEMENTS
    return {
        f"layers.{number}.weight": DTensor.from_local(
            torch.arange(first, first + ELEMENTS, dtype=torch.float32) + number, mesh, [Shard(0)], run_check=False
        )
        for number in range(tensors)
    }
