"""Who does what in the demo: three jobs, one checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STEPS = 20
SAVE_AT = 10
AFTER_LOAD = range(SAVE_AT + 1, STEPS + 1)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job. Every job has another seed, so that only the checkpoint can make them agree."""

    name: str
    world_size: int
    seed: int
    distributed: bool = True
    saves: bool = False

    @property
    def processes(self) -> str:
        return "1 process" if self.world_size == 1 else f"{self.world_size} processes"

    @property
    def title(self) -> str:
        return f"{self.name} · {self.processes}"

    @property
    def first_step(self) -> int:
        return 1 if self.saves else SAVE_AT + 1

    def arguments(self, checkpoint: Path, report: Path) -> list[str]:
        """What this job asks of `train.py`."""
        common = ["--seed", str(self.seed), "--steps", str(STEPS), "--report", str(report)]
        if self.saves:
            return [*common, "--save", str(checkpoint), "--save-at", str(SAVE_AT)]
        return [*common, "--load", str(checkpoint)]


WRITER = Job(name="A", world_size=4, seed=1, saves=True)
READERS = (
    Job(name="B", world_size=2, seed=2),
    Job(name="C", world_size=1, seed=3, distributed=False),
)
JOBS = (WRITER, *READERS)
