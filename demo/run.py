"""The demo: a checkpoint written by 4 processes continues on 2 processes and on 1, and a run survives kill -9.

    python demo/run.py [--out DIR] [--report FILE]

Three training jobs run one after the other (`train.py`); this script starts them, draws what happens and
checks it. A fourth one is killed between two steps and in the middle of a save, and started again on another number of
processes. The demo ends with exit code 0 only if the state after loading is bit-identical to the state that was saved,
the losses agree, and no kill has cost a committed step. Last, it writes a page about the checkpoints of that run.
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
from accidents import RECORD
from checks import compare_losses, compare_states, lost_steps, right_before_loading
from jobs import JobFailed, Progress, Report, run_job, run_until_killed
from plan import AFTER_LOAD, READERS, SAVE_AT, STARTS, STEPS, WRITER, Job, Start
from show import DIM, Screen

import holdfast

REPORT = Path(__file__).resolve().parent.parent / "build" / "demo-report.html"


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
            tell_the_story(screen, directory, args.report)
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


def tell_the_story(screen: Screen, directory: Path, page: Path) -> None:
    started = time.monotonic()
    checkpoint = directory / f"step-{SAVE_AT}"
    scenes.introduce(screen)

    screen.heading("Training")
    reports = {WRITER.name: train(screen, WRITER, checkpoint)}
    scenes.show_checkpoint(screen, checkpoint)
    for job in READERS:
        reports[job.name] = train(screen, job, checkpoint)

    scenes.show_losses(screen, reports)
    check(screen, reports)
    kill_and_restart(screen, directory / "run", reports[WRITER.name])
    write_report(directory / "run", page)
    scenes.conclude(screen, reports, time.monotonic() - started)
    scenes.show_report(screen, page)


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


def kill_and_restart(screen: Screen, run: Path, undisturbed: Report) -> None:
    """Start a job three times, of which it survives the last one, and compare it with one that nobody killed."""
    scenes.introduce_accidents(screen)
    history = [start_again(screen, start, run) for start in STARTS]

    curve: dict[int, float] = {}
    problems = lost_steps([(each.restored, each.committed) for each in history])
    for number, each in enumerate(history, start=1):
        curve |= each.losses
        seen = range(min(each.losses, default=1), max(each.losses, default=0) + 1)
        problems += compare_losses({WRITER.name: undisturbed.losses, f"D, start {number}": each.losses}, seen)
    problems += compare_losses({WRITER.name: undisturbed.losses, "D": curve}, range(1, STEPS + 1))
    scenes.show_survival(screen, history, undisturbed.losses)
    if problems:
        raise CheckFailed(problems)


def start_again(screen: Screen, start: Start, run: Path) -> Progress:
    """One start of the job that is killed, behind a live status line."""

    def show(now: Progress) -> None:
        screen.status(scenes.running(screen, start, now))

    progress = run_until_killed(start, run, show) if start.is_doomed else run_job(start, run, show).progress
    screen.line(scenes.survived(screen, start, progress))
    if start.die_in_save is not None:
        left = files_of(run / f"step-{start.die_in_save:08d}")
        scenes.show_leftovers(screen, start.die_in_save, left)
        if not left or RECORD in left:
            raise CheckFailed([f"the kill came too early or too late, and left {', '.join(left) or 'nothing'}"])
    return progress


def write_report(run: Path, page: Path) -> None:
    """A page about the last checkpoint of the killed job, and what changed in it since the first one that is kept."""
    first, *_, last = sorted(path.parent for path in run.glob(f"*/{RECORD}"))
    page.parent.mkdir(parents=True, exist_ok=True)
    with holdfast.open(last) as checkpoint:
        checkpoint.report(compare=first, verify=True).save(page)


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


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
    parser = argparse.ArgumentParser(description="Save on 4 processes, continue on 2 and on 1, survive kill -9.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the files here (default: remove them)")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        default=REPORT,
        help="where the page goes (default: build/demo-report.html)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
