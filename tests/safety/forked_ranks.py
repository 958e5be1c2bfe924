"""Ranks that live for one function only, forked from the rank of the pool that a body runs on.

They cost a tenth of a second, so that a test can kill one of them at each of a hundred moments.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.safety.syscalls import Watched, watch

_PATIENCE = timedelta(seconds=60)


@dataclass(frozen=True)
class Failure:
    """An exception of a forked rank."""

    type_name: str
    text: str


def run_on_forked_ranks(
    body: Callable[[], Any], world_size: int, *, below: Path, victim: int = 0, kill_at: int | None = None
) -> tuple[list[Any], Watched]:
    """Run `body` on ranks with a gloo group: what each returned, or its `Failure`, or None if it was killed.

    What they change below a folder is watched; with `kill_at`, the rank `victim` is killed just before that change.
    """
    with tempfile.TemporaryDirectory(prefix="forked-") as name:
        scratch = Path(name)

        def rank(number: int) -> None:
            store = dist.FileStore(str(scratch / "store"), world_size)
            dist.init_process_group("gloo", store=store, rank=number, world_size=world_size, timeout=_PATIENCE)
            dist.barrier()
            _report(body, scratch / f"outcome-{number}")

        ranks = [partial(rank, number) for number in range(world_size)]
        watched = watch(ranks, below, victim=victim, kill_at=kill_at)
        outcomes = [scratch / f"outcome-{number}" for number in range(world_size)]
        return [pickle.loads(path.read_bytes()) if path.exists() else None for path in outcomes], watched


def _report(body: Callable[[], Any], path: Path) -> None:
    try:
        outcome = body()
    except Exception as error:
        outcome = Failure(type(error).__name__, str(error))
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(pickle.dumps(outcome))
    unfinished.rename(path)
    if isinstance(outcome, Failure):
        return
    try:
        dist.barrier()  # nobody hangs up on the others
    except RuntimeError:
        os._exit(0)  # one was killed
