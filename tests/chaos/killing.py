"""Starts training jobs, kills them, starts them again on other numbers of processes, and looks at what is left."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import holdfast
from holdfast._manager.run_file import RunFile
from holdfast._manager.steps import list_steps
from holdfast._stores.roots import LocalRoot
from tests.chaos.training_job import EVERY, KEEP, STEPS, Job, Training, run, undisturbed
from tests.safety.native_checkpoints import needless_files

DEADLINE = 90.0
_POLL = 0.002


@dataclass(frozen=True)
class Log:
    """What one process of a job has told."""

    lines: Sequence[Sequence[str]]

    def facts(self, event: str) -> list[Sequence[str]]:
        return [line[1:] for line in self.lines if line[0] == event]

    @property
    def committed(self) -> set[int]:
        return {int(step) for (step,) in self.facts("committed")}

    @property
    def steps(self) -> list[int]:
        return [int(step) for step, _ in self.facts("step")]

    @property
    def restored(self) -> tuple[int, str] | None:
        found = self.facts("restored")
        return (int(found[0][0]), found[0][1]) if found else None

    @property
    def finished(self) -> str | None:
        found = self.facts("finished")
        return found[0][0] if found else None

    @property
    def failure(self) -> str | None:
        found = self.facts("failed")
        return " ".join(found[0]) if found else None


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    job: Job
    exit_codes: Sequence[int | None]

    @property
    def logs(self) -> list[Log]:
        return [read_log(self.job.log(rank)) for rank in range(self.job.world_size)]

    @property
    def was_killed(self) -> bool:
        return -9 in self.exit_codes

    @property
    def is_finished(self) -> bool:
        return all(code == 0 for code in self.exit_codes)

    def story(self) -> str:
        told = [f"{self.job}: exit codes {self.exit_codes}"]
        for rank in range(self.job.world_size):
            files = (path for path in (self.job.log(rank), self.job.output(rank)) if path.exists())
            told.extend(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in files)
        return "\n".join(told)


def read_log(path: Path) -> Log:
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    return Log([line.split(" ") for line in whole.splitlines()])


@contextmanager
def started(job: Job) -> Iterator[list[BaseProcess]]:
    """The processes of a job. None of them outlives the ``with`` block."""
    job.scratch.mkdir(parents=True)
    context = multiprocessing.get_context("forkserver")  # which the fixture `ranks` has prepared
    processes: list[BaseProcess] = [context.Process(target=run, args=(job, rank)) for rank in range(job.world_size)]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def run_job(job: Job, kill: Callable[[list[BaseProcess]], None] | None = None) -> Ended:
    """Run a job until all of its processes have ended. ``kill`` may do something to them meanwhile.

    Processes that lose one of the others have to end by themselves.
    """
    end = time.monotonic() + DEADLINE
    with started(job) as processes:
        if kill is not None:
            kill(processes)
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        ended = Ended(job, [process.exitcode for process in processes])
    assert None not in ended.exit_codes, f"a process did not end\n{ended.story()}"
    return ended


@dataclass
class RandomKill:
    """Kills some ranks a little after one of them has begun with a step."""

    job: Job
    after_step: int
    delay: float
    victims: Sequence[int]

    def __call__(self, processes: list[BaseProcess]) -> None:
        while all(process.is_alive() for process in processes):
            if any(step >= self.after_step for step in read_log(self.job.log(self.victims[0])).steps):
                break
            time.sleep(_POLL)
        time.sleep(self.delay)
        for victim in self.victims:
            processes[victim].kill()


@dataclass
class Supervisor:
    """Starts one run again and again until it has finished, and checks what every start finds."""

    root: Path
    scratch: Path
    attempts: list[Ended] = field(default_factory=list)

    def attempt(self, job: Job, kill: Callable[[list[BaseProcess]], None] | None = None) -> Ended:
        committed_before = self.committed()
        ended = run_job(job, kill)
        self.attempts.append(ended)
        self._check_restored(ended, committed_before)
        self._check_losses(ended)
        self._check_folder()
        return ended

    def next_scratch(self) -> Path:
        return self.scratch / f"attempt-{len(self.attempts)}"

    def committed(self) -> set[int]:
        """All steps that a job has reported as committed."""
        return {step for ended in self.attempts for log in ended.logs for step in log.committed}

    def _check_restored(self, ended: Ended, committed_before: set[int]) -> None:
        newest = max(committed_before, default=0)
        for log in ended.logs:
            if log.restored is None:
                continue  # killed before that
            step, digest = log.restored
            assert step >= newest, f"step {newest} was committed and step {step} was restored\n{self.story()}"
            expected = undisturbed().digests[step] if step else "-"
            assert digest == expected, f"the state of step {step} is wrong\n{self.story()}"

    def _check_losses(self, ended: Ended) -> None:
        for log in ended.logs:
            for step, loss in log.facts("step"):
                assert float.fromhex(loss) == undisturbed().losses[int(step)], f"step {step}\n{self.story()}"
            assert log.finished in (None, undisturbed().digests[STEPS]), self.story()

    def _check_folder(self) -> None:
        """Whatever is committed is intact and right, and the newest of what was reported as committed is there."""
        root = LocalRoot(self.root)
        steps = list_steps(root, RunFile(root).read())
        assert [info for info in steps if info.set_aside or info.damage] == [], self.story()
        assert max(self.committed(), default=0) <= max((info.step for info in steps), default=0), self.story()
        for info in steps:
            with holdfast.open(info.path) as checkpoint:
                assert checkpoint.verify().ok
                assert checkpoint.metadata["holdfast"]["step"] == info.step
            training = Training(seed=99)
            holdfast.load(training.state(), info.path)
            assert training.digest() == undisturbed().digests[info.step], f"step {info.step}\n{self.story()}"

    def check_finished(self) -> None:
        """The run has ended well, and only what belongs to it is left."""
        assert self.attempts[-1].is_finished, self.story()
        newest = [f"step-{STEPS - EVERY * number:08d}" for number in reversed(range(KEEP))]
        assert sorted(path.name for path in self.root.iterdir()) == ["holdfast-run.json", *newest], self.story()
        assert [needless_files(self.root / name) for name in newest] == [set()] * KEEP, self.story()

    def story(self) -> str:
        return "\n\n".join(ended.story() for ended in self.attempts)
