"""What the visitor sees, scene by scene: introduction, training, checkpoint, losses, state, accidents, verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from checks import LOSS_TOLERANCE, GroupCheck, loss_spread
from fingerprint import MODEL_GROUPS, VALUE_GROUPS, Fingerprint
from jobs import Progress, Report
from plan import AFTER_LOAD, EVERY, JOBS, LAYOUT, READERS, SAVE_AT, STEPS, WRITER, Job, Start
from show import (
    BOLD,
    CHART_HEIGHT,
    DIM,
    GREEN,
    JOB_COLOURS,
    RED,
    SPINNER,
    Screen,
    bar,
    columns,
    outline,
    size,
)

PROBLEMS_SHOWN = 12
LOSS_WIDTH = 18
STATE_WIDTH = 20


def introduce(screen: Screen) -> None:
    screen.line()
    screen.line(f" {screen.paint('Holdfast', BOLD)}  one checkpoint, any number of processes")
    screen.line()
    screen.line(f" A small transformer learns to spell, spread by {LAYOUT} and trained with AdamW.")
    screen.line(f" Job A saves model, optimizer, scheduler and step counter at step {SAVE_AT}. B and C")
    screen.line(" start from other random weights, load that checkpoint and must carry on like A.")
    screen.line()
    for job in JOBS:
        layout = LAYOUT if job.distributed else "no FSDP, no process group"
        deed = "saves" if job.saves else "loads"
        steps = f"steps {job.first_step:>2} to {STEPS}"
        screen.line(f"   {_label(screen, job)}{steps}  {deed} step {SAVE_AT}  {screen.paint(layout, DIM)}")


def running(screen: Screen, job: Job, progress: Progress) -> str:
    """The status line of a job at work."""
    spinner = SPINNER[int(progress.seconds * 8) % len(SPINNER)]
    if progress.loss is not None:
        state = f"step {progress.step:>2}  loss {progress.loss:.3f}"
    else:
        state = "starting" if progress.parameters is None else "ready"
    head = f" {spinner} {_label(screen, job)}{_steps(screen, job, progress)}"
    return f"{head}  {state:<19}{progress.seconds:6.1f} s"


def finished(screen: Screen, job: Job, progress: Progress) -> str:
    """The line that a job leaves behind."""
    tick = screen.paint("✓", GREEN)
    verb, duration = ("saved", progress.saved_in) if job.saves else ("loaded", progress.loaded_in)
    note = screen.paint(f"{verb} in {duration:.2f} s" if duration is not None else f"{verb} nothing", DIM)
    loss = f"loss {progress.loss:.3f}" if progress.loss is not None else "no steps  "
    head = f" {tick} {_label(screen, job)}{_steps(screen, job, progress)}"
    return f"{head}  {loss}{progress.seconds:6.1f} s  {note}"


def _steps(screen: Screen, job: Job, progress: Progress) -> str:
    first = job.first_step if progress.restored is None else progress.restored + 1
    return screen.paint(bar(first, progress.step or 0, STEPS), JOB_COLOURS[job.name])


def show_checkpoint(screen: Screen, checkpoint: Path) -> None:
    sizes = {
        str(path.relative_to(checkpoint)): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file()
    }
    width = max(map(len, sizes), default=0)
    total = f"{len(sizes)} files, {size(sum(sizes.values()))}"
    screen.line()
    screen.line(f"   {screen.paint(checkpoint.name + '/', BOLD)}  {screen.paint(total, DIM)}")
    for position, (name, count) in enumerate(sizes.items(), start=1):
        branch = "└─" if position == len(sizes) else "├─"
        screen.line(f"   {screen.paint(branch, DIM)} {name:<{width}}{size(count):>12}")
    screen.line()


def show_losses(screen: Screen, reports: Mapping[str, Report]) -> None:
    screen.heading("Loss", "every job sees the same global batch at the same step")
    curves = {name: report.losses for name, report in reports.items()}
    _draw_curves(screen, curves)
    screen.line()
    titles = "".join(screen.paint(f"{job.title:>{LOSS_WIDTH}}", JOB_COLOURS[job.name]) for job in JOBS)
    screen.line(f"   step{titles}{screen.paint('spread'.rjust(10), DIM)}")
    for step in (1, SAVE_AT // 2, SAVE_AT, *AFTER_LOAD):
        screen.line(_loss_row(screen, step, [curve.get(step) for curve in curves.values()]).rstrip())


def _loss_row(screen: Screen, step: int, losses: Sequence[float | None]) -> str:
    if step == SAVE_AT:
        return f"   {step:>4}{losses[0]:>{LOSS_WIDTH}.7f}   {screen.paint('◂ checkpoint', BOLD)}"
    cells = "".join(f"{'' if loss is None else format(loss, '.7f'):>{LOSS_WIDTH}}" for loss in losses)
    if step not in AFTER_LOAD:
        return f"   {step:>4}{cells}"
    spread = loss_spread([loss for loss in losses if loss is not None])
    return f"   {step:>4}{cells}{screen.paint((f'{spread:.0e}' if spread else '0').rjust(10), DIM)}"


def _draw_curves(screen: Screen, curves: Mapping[str, Mapping[int, float]]) -> None:
    """Three panels side by side; dots repeat what happened before a job took over."""
    top = max(loss for curve in curves.values() for loss in curve.values() if math.isfinite(loss))
    panels = [_panel(screen, job, curves, top) for job in JOBS]
    for row in range(CHART_HEIGHT):
        tick = f"{top * (CHART_HEIGHT - row) / CHART_HEIGHT:4.1f}" if row % 2 == 0 else "    "
        screen.line(f" {tick} " + "   ".join(panel[row] for panel in panels).rstrip())
    axis = f"└{'─' * (SAVE_AT - 1)}┴{'─' * (STEPS - SAVE_AT)}"
    ticks = f" {'1':<{SAVE_AT - 2}}{SAVE_AT}{STEPS:>{STEPS - SAVE_AT}}"
    titles = "   ".join(screen.paint(f"{job.title:^{STEPS + 1}}", JOB_COLOURS[job.name]) for job in JOBS)
    screen.line("      " + screen.paint("   ".join([axis] * len(JOBS)), DIM))
    screen.line("      " + screen.paint("   ".join([ticks] * len(JOBS)), DIM))
    screen.line(f"      {titles}".rstrip())


def _panel(screen: Screen, job: Job, curves: Mapping[str, Mapping[int, float]], top: float) -> list[str]:
    inherited = [_drawable(curves[WRITER.name].get(step)) for step in range(1, job.first_step)]
    trained = [_drawable(curves[job.name].get(step)) for step in range(job.first_step, STEPS + 1)]
    return [
        screen.paint(f"│{before}", DIM) + screen.paint(own, JOB_COLOURS[job.name])
        for before, own in zip(outline(inherited, top), columns(trained, top), strict=True)
    ]


def _drawable(loss: float | None) -> float:
    """A job gone wrong is still drawn: the checks that follow say what is wrong."""
    return loss if loss is not None and math.isfinite(loss) else 0.0


def show_state(
    screen: Screen,
    saved: Fingerprint,
    coincidences: Mapping[str, list[str]],
    results: Mapping[str, list[GroupCheck]],
) -> None:
    screen.heading("State after loading", "gathered in full, against what A held when it saved")
    titles = "".join(screen.paint(f"{job.title:>{STATE_WIDTH}}", JOB_COLOURS[job.name]) for job in READERS)
    screen.line(f"   {'':<22}{titles}")
    model_tensors = sum(len(saved[group]) for group in MODEL_GROUPS)
    early = [f"{len(coincidences[job.name])} of {model_tensors} identical" for job in READERS]
    cells = "".join(f"{cell:>{STATE_WIDTH - 2}}  " for cell in early).rstrip()
    screen.line(screen.paint(f"   {'model before loading':<22}{cells}", DIM))
    by_group = {job.name: {check.group: check for check in results[job.name]} for job in READERS}
    for group in {check.group: None for job in READERS for check in results[job.name]}:
        cells = "".join(_state_cell(screen, by_group[job.name].get(group)) for job in READERS)
        screen.line(f"   {group:<22}{cells}")


def _state_cell(screen: Screen, check: GroupCheck | None) -> str:
    if check is None:  # a group that A never had and only the other job brought up
        return " " * STATE_WIDTH
    if check.differences:
        return screen.paint(f"{len(check.differences)} of {check.total} DIFFER ✗".rjust(STATE_WIDTH), BOLD, RED)
    return f"{check.total} identical ".rjust(STATE_WIDTH - 1) + screen.paint("✓", GREEN)


def introduce_accidents(screen: Screen) -> None:
    screen.heading("kill -9", f"job D has a CheckpointManager that saves every {EVERY} steps, in the background")


def survived(screen: Screen, start: Start, progress: Progress) -> str:
    """The line that a start of the killed job leaves behind."""
    mark = screen.paint("✗", RED) if start.is_doomed else screen.paint("✓", GREEN)
    begun = "fresh start" if not progress.restored else f"restored step {progress.restored}"
    if start.die_after is not None:
        end = f"kill -9 after step {start.die_after}"
    elif start.die_in_save is not None:
        end = f"kill -9 in the middle of saving step {start.die_in_save}"
    else:
        end = "finished"
    head = f" {mark} {_label(screen, start)}{_steps(screen, start, progress)}"
    return f"{head}  {progress.seconds:6.1f} s  {screen.paint(f'{begun}, {end}', DIM)}"


def show_leftovers(screen: Screen, step: int, files: Sequence[str]) -> None:
    what = f"of step {step} there are {len(files)} files without a record, so nobody takes them for a checkpoint"
    screen.line(f"      {screen.paint(what, DIM)}")


def show_survival(screen: Screen, history: Sequence[Progress], undisturbed: Mapping[int, float]) -> None:
    """The losses of all starts beside those of the job that nobody killed."""
    titles = [f"D · start {number}" for number in range(1, len(history) + 1)]
    cells = "".join(screen.paint(f"{title:>{LOSS_WIDTH}}", JOB_COLOURS["D"]) for title in titles)
    screen.line()
    screen.line(f"   step{screen.paint(f'{WRITER.title:>{LOSS_WIDTH}}', JOB_COLOURS[WRITER.name])}{cells}")
    ends = {step for each in history for step in (min(each.losses, default=1), max(each.losses, default=1))}
    for step in sorted(ends):
        losses = [undisturbed.get(step), *(each.losses.get(step) for each in history)]
        row = "".join(f"{'' if loss is None else format(loss, '.7f'):>{LOSS_WIDTH}}" for loss in losses)
        screen.line(f"   {step:>4}{row}".rstrip())


def conclude(screen: Screen, reports: Mapping[str, Report], seconds: float) -> None:
    saved = reports[WRITER.name].saved
    values = sum(len(saved[group]) for group in VALUE_GROUPS)
    tensors = sum(len(group) for group in saved.values()) - values
    spread = max(loss_spread([report.losses[step] for report in reports.values()]) for step in AFTER_LOAD)
    tick = screen.paint("✓", BOLD, GREEN)
    screen.line()
    for job in READERS:
        screen.line(f" {tick} {tensors} tensors and {values} other values bit-identical on {job.processes}")
    agreement = f"within {spread:.0e} of each other (allowed: {LOSS_TOLERANCE:.0e})"
    screen.line(f" {tick} losses of steps {AFTER_LOAD[0]} to {STEPS} {agreement}")
    screen.line(f" {tick} killed twice, with no committed step lost and the losses of the run that nobody killed")
    screen.line(f" {tick} all in {seconds:.0f} seconds")
    screen.line()


def show_report(screen: Screen, page: Path) -> None:
    screen.line(f" In your own program:  {screen.paint('import holdfast', BOLD)}")
    screen.line(f" In your terminal:     {screen.paint('holdfast --help', BOLD)}")
    screen.line(" In your browser:      the last checkpoint of job D, and what changed in it since its first:")
    screen.line(f"                       {page}")
    screen.line()


def lament_job(screen: Screen, message: str, output: Sequence[str]) -> None:
    screen.heading("Output of the failed job")
    for line in output:
        screen.line(f"   {line}")
    _announce_failure(screen, message)


def lament_checks(screen: Screen, problems: Sequence[str]) -> None:
    screen.line()
    for problem in problems[:PROBLEMS_SHOWN]:
        screen.line(f" {screen.paint('✗', RED)} {problem}")
    if len(problems) > PROBLEMS_SHOWN:
        screen.line(f"   and {len(problems) - PROBLEMS_SHOWN} more")
    found = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    _announce_failure(screen, f"{found} with the state after loading or the losses that follow")


def _announce_failure(screen: Screen, message: str) -> None:
    screen.line()
    screen.line(screen.paint(f" DEMO FAILED: {message}", BOLD, RED))
    screen.line()


def _label(screen: Screen, job: Job) -> str:
    return f"{screen.paint(job.name, BOLD, JOB_COLOURS[job.name])}  {job.processes:<13}"
