"""One process of a training job: FSDP2 under torchrun (DDP with torch 2.6), a plain module when started alone.

The parts worth reading are `Training.state`, which names the objects that have to survive a restart, and `train_run`, a
loop that may be killed at any moment. `holdfast.save`, `holdfast.load` and `holdfast.CheckpointManager` do the rest,
whatever the number of processes. `run.py` starts this script.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accidents import DeadlyRoot, die
from fingerprint import Fingerprint, fingerprint
from model import CONTEXT, GLOBAL_BATCH, Speller, batch_slice
from plan import LAYOUT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

import holdfast

PEAK_LR = 4e-3
LR_PERIOD = 30  # longer than the run, so that the learning rate still moves at the last step


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's place among the processes of its job."""

    rank: int
    size: int
    distributed: bool

    @classmethod
    def join(cls) -> World:
        if not dist.is_torchelastic_launched():
            return cls(rank=0, size=1, distributed=False)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        return cls(rank=dist.get_rank(), size=dist.get_world_size(), distributed=True)

    def leave(self) -> None:
        if self.distributed:
            dist.destroy_process_group()

    def mean(self, value: torch.Tensor) -> float:
        if self.distributed:
            dist.all_reduce(value)
        return value.item() / self.size

    def report(self, event: str, *facts: object) -> None:
        """Report progress to the runner, once per job."""
        if self.rank == 0:
            line = " ".join(["::" + event, *map(str, facts)])
            sys.stdout.write(line + "\n")  # at once: commits are printed by another thread
            sys.stdout.flush()


class Training:
    """Everything that has to survive a restart: model, optimizer, scheduler and step counter."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.model = Speller()
        self.compute: torch.nn.Module = self.model
        if world.distributed and LAYOUT == "FSDP2":
            mesh = init_device_mesh("cpu", (world.size,))
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        elif world.distributed:
            self.compute = DistributedDataParallel(self.model)
        self.optimizer = AdamW(self.model.parameters(), lr=PEAK_LR)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=LR_PERIOD)
        self.step = 0

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "step": self.step}

    def save(self, path: Path) -> None:
        holdfast.save(self.state(), path)

    def load(self, path: Path) -> None:
        state = self.state()
        holdfast.load(state, path)
        self.step = state["step"]

    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.model, self.optimizer, self.scheduler, self.step)

    def advance(self) -> float:
        """Train one step and return the loss over the global batch."""
        self.step += 1
        inputs, targets = batch_slice(self.step, self.world.rank, self.world.size)
        loss = F.cross_entropy(self.compute(inputs).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.model.tokens_seen += GLOBAL_BATCH * CONTEXT
        return self.world.mean(loss.detach())


def train_run(training: Training, args: argparse.Namespace, losses: dict[int, float]) -> None:
    """Go on with the run in a folder, wherever that is, and save every few steps in the background."""
    world = training.world
    root = args.folder if args.die_in_save is None else DeadlyRoot(args.folder, args.die_in_save)
    with holdfast.CheckpointManager(root, every_steps=args.every, keep_last=2) as manager:
        state = training.state()
        restored = manager.restore(state)
        training.step = state["step"]
        world.report("restored", restored.step if restored else 0)

        while training.step < args.steps and not manager.should_stop:
            loss = losses[training.step] = training.advance()
            world.report("step", training.step, loss)
            saved = manager.maybe_save(training.step, training.state(), metrics={"loss": loss})
            if isinstance(saved, holdfast.PendingSave):
                saved.committed.add_done_callback(partial(tell_of_commit, world, training.step))
            if training.step == args.die_after and world.rank == world.size - 1:
                die()


def tell_of_commit(world: World, step: int, committed: Future[holdfast.SaveReport]) -> None:
    if committed.exception() is None:
        world.report("committed", step)


def main() -> Training:
    args = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    world = World.join()
    training = Training(world)
    report: dict[str, Any] = {"losses": {}}
    world.report("ready", sum(parameter.numel() for parameter in training.model.parameters()))

    if args.load is not None:
        report["fresh"] = training.fingerprint()
        started = time.perf_counter()
        training.load(args.load)
        world.report("loaded", time.perf_counter() - started)
        report["loaded"] = training.fingerprint()

    if args.folder is not None:
        train_run(training, args, report["losses"])
        report["loaded"] = training.fingerprint()

    while training.step < args.steps:
        loss = training.advance()
        report["losses"][training.step] = loss
        world.report("step", training.step, loss)

        if args.save is not None and training.step == args.save_at:
            report["saved"] = training.fingerprint()
            started = time.perf_counter()
            training.save(args.save)
            world.report("saved", time.perf_counter() - started)

    if world.rank == 0:
        args.report.write_text(json.dumps(report), encoding="utf-8")
    world.leave()
    return training


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="of the initial weights")
    parser.add_argument("--steps", type=int, required=True, help="train until this step")
    parser.add_argument("--save", type=Path, help="write a checkpoint here ...")
    parser.add_argument("--save-at", type=int, help="... after this step")
    parser.add_argument("--load", type=Path, help="start from this checkpoint")
    parser.add_argument("--folder", type=Path, help="go on with the run in this folder ...")
    parser.add_argument("--every", type=int, help="... and save every so many steps")
    parser.add_argument("--die-after", type=int, metavar="STEP", help="the last process kills itself after this step")
    parser.add_argument("--die-in-save", type=int, metavar="STEP", help="the first one, in the middle of this save")
    parser.add_argument("--report", type=Path, required=True, help="write losses and fingerprints here")
    return parser.parse_args()


if __name__ == "__main__":
    # Kept until the end: freeing a DDP model of torch 2.6 waits for a gloo thread that may be waiting for this one.
    training = main()
    # A gloo thread may still be letting go of the last tensor, and if it meets the interpreter's shutdown it
    # aborts the process (seen about once in a hundred runs). All is written by now: leave without a shutdown.
    sys.stdout.flush()
    os._exit(0)
