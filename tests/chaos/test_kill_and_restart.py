"""A job that is killed and started again loses no committed step and never has a wrong state.

Each round starts a run, kills it at random moments and at chosen operations of its stores, starts it again on another
number of processes, and so on until it has finished. After every kill, all checkpoints that are there must be intact
and right, and the newest one that the job knew to be committed among them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.chaos.deadly_root import Deadly, Operation
from tests.chaos.killing import RandomKill, Supervisor
from tests.chaos.training_job import STEPS, Job
from tests.rank_pool import RankPool

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
RARELY = 5
WAYS = [
    {},
    {"overlap": True},
    {"writer": "process"},
    {"when_busy": "copy"},
    {"writer": "process", "overlap": True, "when_busy": "copy"},
]


@dataclass(frozen=True)
class Attempt:
    """How a job is started, and how it dies."""

    world_size: int
    way: dict[str, Any]
    deadly: Deadly | None = None
    victims: Sequence[int] = (0,)
    random_kill: tuple[int, float] | None = None
    """After this step has begun, and so many seconds later."""

    def job(self, supervisor: Supervisor) -> Job:
        return Job(
            supervisor.root,
            supervisor.next_scratch(),
            self.world_size,
            deadly=self.deadly,
            victim=self.victims[0],
            **self.way,
        )

    def killer(self, job: Job) -> Callable[[list[BaseProcess]], None] | None:
        return None if self.random_kill is None else RandomKill(job, *self.random_kill, self.victims)


def draw_round(seed: int) -> list[Attempt]:
    """One or two starts that are killed. Neighbouring seeds are killed at different operations, in different ways."""
    rng = random.Random(seed)
    sizes = [1, 2] if seed % 2 else [2, 1]
    way = WAYS[seed % len(WAYS)]
    kinds = [*OPERATIONS, "moment"]
    deaths = [kinds[(seed + number) % len(kinds)] for number in range(1 + seed % 2)]
    return [draw_attempt(rng, size, way, death) for size, death in zip(sizes, deaths, strict=False)]


def draw_attempt(rng: random.Random, world_size: int, way: dict[str, Any], kind: Any) -> Attempt:
    attempt = Attempt(world_size, way, victims=rng.sample(range(world_size), rng.randint(1, world_size)))
    if kind == "moment":
        delay = rng.choice([0.0, 0.001, 0.003, 0.01, 0.03])
        return replace(attempt, random_kill=(rng.randrange(1, STEPS), delay))
    return replace(attempt, **draw_operation(rng, attempt, kind))


def draw_operation(rng: random.Random, attempt: Attempt, kind: Operation) -> dict[str, Any]:
    """An operation that the victim will surely come to, if it starts from the beginning."""
    moment = rng.choice(["before", "half", "after"])
    if kind in ("create", "sync") and moment == "half":
        moment = "after"
    if attempt.way.get("writer") == "process" and kind in ("create", "write", "commit"):
        victim = rng.choice(["program", "writer", "both"])
        return {"deadly": Deadly(kind, rng.randint(1, 3), moment, "writer", victim), "victims": [0]}
    # Only the first rank commits and deletes.
    victims = attempt.victims if kind in ("create", "write") and attempt.way.get("writer") != "process" else [0]
    return {"deadly": Deadly(kind, rng.randint(1, 5 if victims[0] else 15), moment), "victims": victims}


def run_round(seed: int, folder: Path) -> Supervisor:
    supervisor = Supervisor(folder / "run", folder / "scratch")
    attempts = draw_round(seed)
    for attempt in attempts:
        job = attempt.job(supervisor)
        ended = supervisor.attempt(job, attempt.killer(job))
        assert supervisor.attempts[1:] or not ended.is_finished, f"nobody was killed\n{supervisor.story()}"
    last = Attempt(3 - attempts[-1].world_size, attempts[-1].way).job(supervisor)
    # Steps that are not saved again, so that what a kill has left of one stays there if nobody removes it.
    supervisor.attempt(replace(last, options={"every_steps": RARELY}))
    supervisor.check_finished()
    return supervisor


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 55))])
def test_a_killed_job_goes_on_from_its_newest_committed_step(ranks: RankPool, tmp_path: Path, seed: int) -> None:
    run_round(seed, tmp_path)
