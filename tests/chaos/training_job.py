"""A training job that may be killed at any moment, and what it has at every step if it is not.

All arithmetic is exact: whole numbers and powers of two, in doubles. So the state of a step is the same bit for bit
whatever the number of processes, and one wrong bit in a checkpoint is a wrong bit in all steps that follow.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.lr_scheduler import StepLR

import holdfast
from tests.chaos.deadly_root import Deadly, DeadlyRoot

STEPS = 12
EVERY = 2
KEEP = 2
SHAPES = {"embedding": (37, 128), "block": (65, 64)}  # rows that no two processes share evenly
PATIENCE = timedelta(seconds=60)


class Training:
    """Two sharded weights and a replicated one, an optimizer with momentum, a schedule, and a position in the data."""

    def __init__(self, seed: int, mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.model = nn.ParameterDict({name: self._sharded(_numbers(shape, seed)) for name, shape in SHAPES.items()})
        self.model["scale"] = nn.Parameter(_numbers((8,), seed))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)
        self.scheduler = StepLR(self.optimizer, step_size=5, gamma=0.5)
        self.data = {"position": 0}

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer, "sched": self.scheduler, "data": self.data}

    def advance(self, step: int) -> float:
        """Train a step. Returns the loss over all shards."""
        assert step == self.data["position"] + 1
        sharded = sum((_local(self.model[name]) * self._batch(name, step)).sum() for name in SHAPES)
        replicated = (self.model["scale"] * _numbers((8,), step)).sum()
        self.optimizer.zero_grad()
        (sharded + replicated).backward()
        total = sharded.detach().clone()
        if self.mesh is not None:
            dist.all_reduce(total)
        self.optimizer.step()
        self.scheduler.step()
        self.data["position"] = step
        return (total + replicated.detach()).item()

    def digest(self) -> str:
        """Of everything, gathered. A collective call if there are processes."""
        found = hashlib.sha256()
        for name, parameter in sorted(self.model.items()):
            momentum = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
            for tensor in (parameter, momentum):
                whole = torch.zeros(0) if tensor is None else _whole(tensor)
                found.update(f"{name} {tuple(whole.shape)} ".encode() + whole.numpy().tobytes())
        rates = [group["lr"] for group in self.optimizer.param_groups]
        found.update(repr((rates, self.scheduler.last_epoch, self.data)).encode())
        return found.hexdigest()[:16]

    def _sharded(self, whole: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(whole if self.mesh is None else distribute_tensor(whole, self.mesh, [Shard(0)]))

    def _batch(self, name: str, step: int) -> torch.Tensor:
        whole = _numbers(SHAPES[name], step)
        return whole if self.mesh is None else distribute_tensor(whole, self.mesh, [Shard(0)]).to_local()


def _numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return ((torch.arange(count, dtype=torch.float64) * 7 + seed * 13) % 11 - 5).reshape(shape)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@dataclass(frozen=True)
class Undisturbed:
    """What a run has that nobody kills."""

    losses: Mapping[int, float]
    digests: Mapping[int, str]


@functools.cache
def undisturbed() -> Undisturbed:
    training, losses, digests = Training(seed=0), {}, {}
    for step in range(1, STEPS + 1):
        losses[step] = training.advance(step)
        digests[step] = training.digest()
    return Undisturbed(losses, digests)


@dataclass(frozen=True)
class Job:
    """How to start a job once."""

    root: Path
    scratch: Path
    """Its own: what it logs, and how its processes meet."""
    world_size: int
    writer: str = "thread"
    overlap: bool = False
    when_busy: str = "wait"
    deadly: Deadly | None = None
    victim: int = 0
    """The rank whose process has the deadly operation."""
    pause_after: int | None = None
    """A step after which it waits for the file ``go``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the manager."""

    @property
    def go(self) -> Path:
        return self.scratch / "go"

    def log(self, rank: int) -> Path:
        return self.scratch / f"rank-{rank}.log"

    def output(self, rank: int) -> Path:
        return self.scratch / f"rank-{rank}.out"


def run(job: Job, rank: int) -> None:
    """One process of a job."""
    _redirect_output(job.output(rank))
    log = os.open(job.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(*facts: object) -> None:
        os.write(log, (" ".join(map(str, facts)) + "\n").encode())  # in the file at once, whatever happens next

    try:
        _train(job, rank, note)
    except BaseException as error:
        note("failed", type(error).__name__, str(error).partition("\n")[0])
        traceback.print_exc()
        sys.exit(1)


def _train(job: Job, rank: int, note: Any) -> None:
    mesh = None
    if job.world_size > 1:
        meeting_point = dist.FileStore(str(job.scratch / "store"), job.world_size)
        dist.init_process_group("gloo", store=meeting_point, rank=rank, world_size=job.world_size, timeout=PATIENCE)
        mesh = DeviceMesh("cpu", list(range(job.world_size)))
    fresh_seed = 0 if not any(job.root.glob("step-*/holdfast.json")) else 99  # a restart must not profit from its seed
    training = Training(fresh_seed, mesh)
    root = DeadlyRoot(job.root, job.deadly if rank == job.victim else None)
    background = holdfast.Background(writer=job.writer, overlap=job.overlap, when_busy=job.when_busy)
    settings = {"every_steps": EVERY, "keep_last": KEEP, "background": background, **job.options}
    with holdfast.CheckpointManager(root, **settings) as manager:
        note("opened")
        restored = manager.restore(training.state())
        first = 1 if restored is None else restored.step + 1
        note("restored", 0 if restored is None else restored.step, training.digest() if restored else "-")
        for step in range(first, STEPS + 1):
            loss = training.advance(step)
            note("step", step, loss.hex())
            while step == job.pause_after and not job.go.exists():
                time.sleep(0.005)
            saved = manager.maybe_save(step, training.state(), metrics={"loss": loss})
            if isinstance(saved, holdfast.PendingSave):
                saved.committed.add_done_callback(functools.partial(_note_commit, note, step))
            elif saved is not None:
                note("committed", step)
            if manager.should_stop:
                note("stopped", step)
                break
        manager.wait()
    if training.data["position"] == STEPS:
        note("finished", training.digest())
    if job.world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def _note_commit(note: Any, step: int, committed: Any) -> None:
    if committed.exception() is None:
        note("committed", step)


def _redirect_output(path: Path) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
