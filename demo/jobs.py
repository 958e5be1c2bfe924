"""Start a training job as its own processes, follow its progress, and say clearly how it ended."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fingerprint import Fingerprint
from plan import Job, Start

WORKER = Path(__file__).with_name("train.py")
DEADLINE_SECONDS = 120.0
GRACE_SECONDS = 10.0
POLL_SECONDS = 0.1

# What torch prints in a healthy run. Any other line becomes a remark that the visitor sees.
KNOWN_NOISE = tuple(
    re.compile(pattern)
    for pattern in (
        r"^\s*$",
        r"assuming the intent is to (save|load) in a single process",  # true: job C has no process group
        r"^\[Gloo\] Rank \d+ is connected",
        r"\[c10d\] The .*socket",  # the rendezvous tries IPv6 first, or finds no name for this machine
    )
)


class JobFailed(Exception):
    """A job did not finish; carries all that it printed."""

    def __init__(self, job: Job, reason: str, output: list[str]) -> None:
        super().__init__(f"job {job.name} ({job.processes}) {reason}")
        self.output = output


@dataclass(kw_only=True)
class Progress:
    """How far a running job has come."""

    started: float = field(default_factory=time.monotonic)
    parameters: int | None = None
    step: int | None = None
    loss: float | None = None
    saved_in: float | None = None
    loaded_in: float | None = None
    losses: dict[int, float] = field(default_factory=dict)
    restored: int | None = None
    committed: set[int] = field(default_factory=set)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def take(self, line: str) -> bool:
        """Read a progress line of the worker; False if the line is something else."""
        match line.split():
            case ["::ready", parameters]:
                self.parameters = int(parameters)
            case ["::step", step, loss]:
                self.step, self.loss = int(step), float(loss)
                self.losses[self.step] = self.loss
            case ["::restored", step]:
                self.restored = int(step)
            case ["::committed", step]:
                self.committed.add(int(step))
            case ["::saved", seconds]:
                self.saved_in = float(seconds)
            case ["::loaded", seconds]:
                self.loaded_in = float(seconds)
            case _:
                return False
        return True


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a finished job left behind."""

    progress: Progress
    remarks: list[str]
    losses: dict[int, float]
    fresh: Fingerprint = field(default_factory=dict)
    saved: Fingerprint = field(default_factory=dict)
    loaded: Fingerprint = field(default_factory=dict)


def run_job(job: Job, checkpoint: Path, on_progress: Callable[[Progress], None]) -> Report:
    """Run ``job`` to its end; raise `JobFailed` if it crashes, is killed or takes too long.

    ``on_progress`` is called often, also while the job is silent.
    """
    report = checkpoint.with_name(f"job-{job.name.lower()}.json")
    end = _follow(job, [*job.arguments(checkpoint), "--report", str(report)], on_progress)
    if end.returncode != 0:
        raise JobFailed(job, _ending(end.returncode, end.progress), end.output)
    return _read_report(report, end.progress, _remarks(end.chatter))


def run_until_killed(job: Start, run: Path, on_progress: Callable[[Progress], None]) -> Progress:
    """Run ``job`` until it is killed, as planned; raise `JobFailed` if it ends in any other way."""
    end = _follow(job, [*job.arguments(run), "--report", os.devnull], on_progress)
    # torchrun reports a killed worker, and ends with a code of its own.
    was_killed = end.returncode == -signal.SIGKILL or any("SIGKILL" in line for line in end.output)
    if not was_killed:
        raise JobFailed(job, f"was to be killed, and {_ending(end.returncode, end.progress)}", end.output)
    return end.progress


@dataclass(frozen=True, kw_only=True)
class End:
    """How the processes of a job ended, and what they said."""

    returncode: int
    progress: Progress
    output: list[str]
    chatter: list[str]
    """Of the output, what is no progress."""


def _follow(job: Job, arguments: list[str], on_progress: Callable[[Progress], None]) -> End:
    progress = Progress()
    output: list[str] = []
    chatter: list[str] = []
    process = _start(job, arguments)
    lines, reader = _read_in_background(process)
    try:
        while (line := _next_line(lines)) is not _END:
            if progress.seconds > DEADLINE_SECONDS:
                raise JobFailed(job, f"was still running after {DEADLINE_SECONDS:.0f} s", output)
            if line is None and process.poll():
                break  # the launcher is dead, and orphans of it may keep the output open
            if isinstance(line, str):
                output.append(line)
                if not progress.take(line):
                    chatter.append(line)
            on_progress(progress)
    finally:
        _stop(process)
        reader.join(GRACE_SECONDS)
    return End(returncode=process.returncode, progress=progress, output=output, chatter=chatter)


_END = object()


def _start(job: Job, arguments: list[str]) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.world_size}"]
    return subprocess.Popen(
        [sys.executable, *(launcher if job.distributed else []), str(WORKER), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # Ctrl-C reaches only the runner, which then stops the job in order
    )


def _read_in_background(process: subprocess.Popen[str]) -> tuple[queue.Queue[object], threading.Thread]:
    """Reading in a thread lets the caller keep its display and its deadline while the job is silent."""
    lines: queue.Queue[object] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line.rstrip("\n"))
        lines.put(_END)

    thread = threading.Thread(target=read, name="job-output", daemon=True)
    thread.start()
    return lines, thread


def _next_line(lines: queue.Queue[object]) -> object:
    try:
        return lines.get(timeout=POLL_SECONDS)
    except queue.Empty:
        return None


def _stop(process: subprocess.Popen[str]) -> None:
    """Wait for a job that has closed its output, end any other. torchrun passes SIGTERM on to its workers."""
    try:
        if process.stdout is not None and not process.stdout.closed:
            process.terminate()
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _remarks(chatter: list[str]) -> list[str]:
    """Drop known noise, each with the indented source line that Python prints below a warning."""
    remarks = []
    noise = False
    for line in chatter:
        noise = (noise and line.startswith("  ")) or any(known.search(line) for known in KNOWN_NOISE)
        if not noise:
            remarks.append(line)
    return remarks


def _ending(returncode: int, progress: Progress) -> str:
    where = "before its first step" if progress.step is None else f"after step {progress.step}"
    how = f"was killed by signal {-returncode}" if returncode < 0 else f"failed with exit code {returncode}"
    return f"{how}, {where}"


def _read_report(path: Path, progress: Progress, remarks: list[str]) -> Report:
    content = json.loads(path.read_text(encoding="utf-8"))
    losses = {int(step): loss for step, loss in content.pop("losses").items()}
    return Report(progress=progress, remarks=remarks, losses=losses, **content)
