"""What a start finds: a run that has finished, was asked to stop, or is damaged; or another job that is at work."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import holdfast
from tests.chaos.killing import DEADLINE, Ended, Supervisor, read_log, run_job
from tests.chaos.training_job import STEPS, Job, undisturbed

pytestmark = pytest.mark.usefixtures("ranks")  # which prepares the processes that jobs are forked from


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    return Supervisor(tmp_path / "run", tmp_path / "scratch")


def start(supervisor: Supervisor, world_size: int, **options: object) -> Ended:
    """Run a job of the run to its end."""
    return supervisor.attempt(Job(supervisor.root, supervisor.next_scratch(), world_size, options=options))


def contents(root: Path) -> dict[str, bytes]:
    """All files of checkpoints."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.glob("*/*"))}


def wait_for(job: Job, step: int) -> None:
    end = time.monotonic() + DEADLINE
    while step not in read_log(job.log(0)).steps:
        assert time.monotonic() < end, f"step {step} does not come: {read_log(job.log(0)).lines}"
        time.sleep(0.005)


def test_a_finished_run_is_restored_and_changes_nothing(supervisor: Supervisor) -> None:
    start(supervisor, 1)
    before = contents(supervisor.root)

    (log,) = start(supervisor, 1).logs

    assert (log.restored, log.steps, log.committed) == ((STEPS, undisturbed().digests[STEPS]), [], set())
    assert contents(supervisor.root) == before
    supervisor.check_finished()


def test_a_job_that_is_asked_to_stop_saves_its_step_and_goes_on_from_there(supervisor: Supervisor) -> None:
    job = Job(supervisor.root, supervisor.next_scratch(), 1, pause_after=5)

    def ask_to_stop(processes: list[BaseProcess]) -> None:
        wait_for(job, 5)
        assert processes[0].pid is not None
        os.kill(processes[0].pid, signal.SIGTERM)
        job.go.touch()

    stopped = supervisor.attempt(job, ask_to_stop)
    assert stopped.is_finished, stopped.story()
    assert stopped.logs[0].facts("stopped") == [["5"]]
    assert stopped.logs[0].committed == {2, 4, 5}

    resumed = start(supervisor, 2)
    assert [log.steps[0] for log in resumed.logs] == [6, 6]
    supervisor.check_finished()


def flip_a_byte(folder: Path) -> None:
    file = max(folder.glob("data-*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def lose_a_file(folder: Path) -> None:
    next(folder.glob("data-*")).unlink()


def cut_the_record_off(folder: Path) -> None:
    record = folder / "holdfast.json"
    record.write_bytes(record.read_bytes()[:100])


DAMAGES = [flip_a_byte, lose_a_file, cut_the_record_off]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_trained_again(
    supervisor: Supervisor, damage: Callable[[Path], None]
) -> None:
    start(supervisor, 2)
    damage(supervisor.root / f"step-{STEPS:08d}")

    ended = run_job(Job(supervisor.root, supervisor.next_scratch(), 1))

    (log,) = ended.logs
    assert ended.is_finished, ended.story()
    assert log.restored == (STEPS - 2, undisturbed().digests[STEPS - 2])
    assert log.steps == [STEPS - 1, STEPS]
    assert f"step {STEPS} of {supervisor.root} is damaged" in ended.job.output(0).read_text()
    supervisor.attempts.append(ended)
    supervisor.check_finished()  # the damaged one is replaced


def test_if_all_checkpoints_are_damaged_the_job_refuses_to_begin_anew(supervisor: Supervisor) -> None:
    start(supervisor, 1)
    for folder in supervisor.root.glob("step-*"):
        flip_a_byte(folder)
    before = contents(supervisor.root)

    ended = run_job(Job(supervisor.root, supervisor.next_scratch(), 2))

    assert [log.failure.partition(" ")[0] for log in ended.logs if log.failure] == ["NoUsableCheckpointError"] * 2
    kept = {name: content for name, content in contents(supervisor.root).items() if "set-aside" not in name}
    assert kept == before


def second_job(supervisor: Supervisor, first: Job, **options: object) -> tuple[Ended, Ended]:
    """Start another job when the first one is in the middle of its training; then let that one go on."""
    outcomes = []

    def start_another(processes: list[BaseProcess]) -> None:
        wait_for(first, first.pause_after or 0)
        outcomes.append(run_job(Job(supervisor.root, supervisor.scratch / "second", 2, options=options)))
        first.go.touch()

    ended = supervisor.attempt(first, start_another)
    return ended, outcomes[0]


def test_a_second_job_on_the_same_folder_gets_an_error_and_does_no_harm(supervisor: Supervisor) -> None:
    first = Job(supervisor.root, supervisor.next_scratch(), 1, pause_after=5)

    ended, second = second_job(supervisor, first)

    failures = [log.failure or "" for log in second.logs]
    assert [failure.partition(" ")[0] for failure in failures] == ["RunInUseError"] * 2, second.story()
    assert all(str(supervisor.root) in failure and "another job: process " in failure for failure in failures)
    assert ended.is_finished, ended.story()
    supervisor.check_finished()


def test_a_second_job_may_take_over_and_the_first_one_saves_no_more(supervisor: Supervisor) -> None:
    first = Job(supervisor.root, supervisor.next_scratch(), 1, pause_after=5)

    ended, second = second_job(supervisor, first, run_options=holdfast.RunOptions(take_over=True))

    assert second.is_finished, second.story()
    assert [log.restored for log in second.logs] == [(4, undisturbed().digests[4])] * 2
    (log,) = ended.logs
    assert (log.failure or "").startswith("RunTakenError"), ended.story()
    assert max(log.committed) == 4
    supervisor.attempts.append(second)
    supervisor.check_finished()


def test_a_job_that_was_killed_does_not_keep_others_from_its_folder(supervisor: Supervisor) -> None:
    first = Job(supervisor.root, supervisor.next_scratch(), 1, pause_after=5, options={"background": False})

    def kill(processes: list[BaseProcess]) -> None:
        wait_for(first, 5)
        processes[0].kill()

    assert supervisor.attempt(first, kill).was_killed

    assert [log.restored for log in start(supervisor, 2).logs] == [(4, undisturbed().digests[4])] * 2
    supervisor.check_finished()
