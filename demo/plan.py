"""Who does what in the demo: three jobs with one checkpoint, and a job that is killed twice."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

LAYOUT = "DDP" if version("torch").startswith("2.6.") else "FSDP2"
"""How the processes of a job share the model. FSDP2 of torch 2.6 cannot compute on a CPU."""

STEPS = 20
SAVE_AT = 10
EVERY = 3
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

    def arguments(self, checkpoint: Path) -> list[str]:
        """What this job asks of `train.py`."""
        common = ["--seed", str(self.seed), "--steps", str(STEPS)]
        if self.saves:
            return [*common, "--save", str(checkpoint), "--save-at", str(SAVE_AT)]
        return [*common, "--load", str(checkpoint)]


@dataclass(frozen=True, kw_only=True)
class Start(Job):
    """One start of the job that is killed. Whatever it needs to know of earlier ones is in the folder of the run."""

    die_after: int | None = None
    die_in_save: int | None = None

    @property
    def is_doomed(self) -> bool:
        return self.die_after is not None or self.die_in_save is not None

    def arguments(self, checkpoint: Path) -> list[str]:
        """What this start asks of `train.py`; the folder of the run is what it calls its checkpoint."""
        common = ["--seed", str(self.seed), "--steps", str(STEPS), "--folder", str(checkpoint), "--every", str(EVERY)]
        if self.die_after is not None:
            return [*common, "--die-after", str(self.die_after)]
        if self.die_in_save is not None:
            return [*common, "--die-in-save", str(self.die_in_save)]
        return common


WRITER = Job(name="A", world_size=4, seed=1, saves=True)
READERS = (
    Job(name="B", world_size=2, seed=2),
    Job(name="C", world_size=1, seed=3, distributed=False),
)
JOBS = (WRITER, *READERS)

# The first start has the seed of A, whose losses it must repeat. The others must get everything from the checkpoints.
STARTS = (
    Start(name="D", world_size=2, seed=WRITER.seed, die_after=8),
    Start(name="D", world_size=1, seed=4, distributed=False, die_in_save=15),
    Start(name="D", world_size=2, seed=5),
)
