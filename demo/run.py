"""The demo: a checkpoint written by 4 processes continues on 2 processes and on 1, bit for bit.

    python demo/run.py [--out DIR]

Three training jobs run one after the other (`train.py`); this script starts them, draws what happens and
checks it. It ends with exit code 0 only if the state after loading is bit-identical to the state that was
saved and the losses agree.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import scenes
from checks import compare_losses, compare_states, right_before_loading
from jobs import JobFailed, Report, run_job
from plan import AFTER_LOAD, READERS, SAVE_AT, WRITER, Job
from show import DIM, Screen


class CheckFailed(Exception):
    """The jobs ran, and what they show is wrong."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(f"{len(problems)} problems found")
        self.problems = problems


def main() -> int:
    args = parse_arguments()
    screen = Screen()
    # The default action would end this process on the spot and leave its job running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with working_directory(args.out) as directory:
        try:
            tell_the_story(screen, directory / f"step-{SAVE_AT}")
        except JobFailed as failure:
            scenes.lament_job(screen, str(failure), failure.output)
            return 1
        except CheckFailed as failure:
            scenes.lament_checks(screen, failure.problems)
            return 1
        except KeyboardInterrupt:
            screen.line(" Interrupted.")
            return 130
    return 0


def tell_the_story(screen: Screen, checkpoint: Path) -> None:
    started = time.monotonic()
    scenes.introduce(screen)

    screen.heading("Training")
    reports = {WRITER.name: train(screen, WRITER, checkpoint)}
    scenes.show_checkpoint(screen, checkpoint)
    for job in READERS:
        reports[job.name] = train(screen, job, checkpoint)

    scenes.show_losses(screen, reports)
    check(screen, reports)
    scenes.conclude(screen, reports, time.monotonic() - started)


def train(screen: Screen, job: Job, checkpoint: Path) -> Report:
    """Run a job behind a live status line; its summary stays on the screen."""
    report = run_job(job, checkpoint, lambda now: screen.status(scenes.running(screen, job, now)))
    screen.line(scenes.finished(screen, job, report.progress))
    for remark in report.remarks:
        screen.line(f"      {screen.paint(remark, DIM)}")
    return report


def check(screen: Screen, reports: dict[str, Report]) -> None:
    """Show how the state came back, then fail if anything is not as it was."""
    saved = reports[WRITER.name].saved
    coincidences = {job.name: right_before_loading(saved, reports[job.name].fresh) for job in READERS}
    results = {job.name: compare_states(saved, reports[job.name].loaded) for job in READERS}
    scenes.show_state(screen, saved, coincidences, results)

    problems = [f"job {name}: {coincidence}" for name, found in coincidences.items() for coincidence in found]
    for name, groups in results.items():
        problems += [f"job {name}: {difference}" for group in groups for difference in group.differences]
    problems += compare_losses({name: report.losses for name, report in reports.items()}, AFTER_LOAD)
    if problems:
        raise CheckFailed(problems)


@contextmanager
def working_directory(chosen: Path | None) -> Iterator[Path]:
    """The directory the user asked for, or one that is gone afterwards."""
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        yield chosen
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as temporary:
        yield Path(temporary)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Save on 4 processes, continue on 2 and on 1.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the files here (default: remove them)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
