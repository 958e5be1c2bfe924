"""The end of a program with saves pending: whole scripts in interpreters of their own.

Starting one takes seconds, most of them for importing torch, so all scripts are started when the first test asks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast.dcp as dcp

PREAMBLE = """
import os, sys, threading, time
import torch
import holdfast.dcp as dcp
from holdfast.dcp.state_dict_saver import AsyncCheckpointerType

folder = sys.argv[1]

class Slow(dcp.FileSystemWriter):
    waits = threading.Event()

    def write_data(self, plan, planner):
        self.waits.set()
        threading.Event().wait(0.5)          # still running when the script has ended
        return super().write_data(plan, planner)

class Failing(Slow):
    def write_data(self, plan, planner):
        super().write_data(plan, planner)
        raise OSError("the disk is gone")

state = {"n": torch.tensor(1), "m": torch.ones(3)}
"""

SCRIPTS = {
    "pending": """
        dcp.async_save(state, storage_writer=Slow(folder, thread_count=2))
        state["n"].fill_(-1)
    """,
    "after an error": """
        saved = dcp.async_save(state, storage_writer=Slow(folder))
        raise SystemError("the program failed")
    """,
    "queued": """
        dcp.async_save({"n": torch.tensor(-1)}, storage_writer=Slow(folder))
        dcp.async_save(state, checkpoint_id=folder)
        sys.exit(3)
    """,
    "failed": """
        import atexit
        atexit.register(lambda: print("other exit functions run"))
        saved = dcp.async_save(state, storage_writer=Failing(folder))
    """,
    "failed and thrown away": """
        dcp.async_save(state, storage_writer=Failing(folder))
    """,
    "failed and seen": """
        saved = dcp.async_save(state, storage_writer=Failing(folder))
        assert "the disk is gone" in str(saved.exception())
    """,
    "forked": """
        dcp.async_save(state, storage_writer=Slow(folder))
        Slow.waits.wait()  # or a lock of the C library that torch takes in that thread may stay locked in the child
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            sys.exit(os.waitstatus_to_exitcode(status))
        dcp.async_save(state, checkpoint_id=folder + "-child")
    """,
    "interrupted": """
        import signal, traceback
        class Endless(dcp.FileSystemWriter):
            def write_data(self, plan, planner):
                main = threading.main_thread().ident
                while "wait_until_idle" not in "".join(traceback.format_stack(sys._current_frames()[main])):
                    pass  # the program has not ended yet
                signal.pthread_kill(main, signal.SIGINT)
                threading.Event().wait()
        saved = dcp.async_save(state, storage_writer=Endless(folder))
    """,
    "process": """
        print("the script runs")  # and nothing keeps it from running again
        saved = dcp.async_save(state, checkpoint_id=folder, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    """,
    "process, own class": """
        class Planner(dcp.DefaultSavePlanner):
            pass
        if __name__ == "__main__":
            print("the script runs")
            dcp.async_save(
                state,
                checkpoint_id=folder,
                planner=Planner(),
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
    """,
    "process, own class, not guarded": """
        class Planner(dcp.DefaultSavePlanner):
            pass
        print("the script runs")
        dcp.async_save(
            state, checkpoint_id=folder, planner=Planner(), async_checkpointer_type=AsyncCheckpointerType.PROCESS
        )
    """,
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, subprocess.Popen[str]]]]:
    root = tmp_path_factory.mktemp("scripts")
    started = {}
    for name, body in SCRIPTS.items():
        script = root / f"{name}.py"
        lines = [line[8:] for line in body.splitlines()]
        script.write_text(PREAMBLE + "\n".join(lines))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script), str(root / name)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started[name] = (root / name, subprocess.Popen(command, text=True, env=environment, **pipes))
    yield started
    for _, process in started.values():
        process.kill()
        process.communicate()


def outcome(scripts: dict[str, tuple[Path, subprocess.Popen[str]]], name: str) -> tuple[int, str, str, Path]:
    folder, process = scripts[name]
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err, folder


def saved_number(folder: Path) -> int:
    state = {"n": torch.tensor(0)}
    dcp.load(state, checkpoint_id=folder)
    return int(state["n"])


def test_a_pending_save_is_finished(scripts) -> None:
    code, _, err, folder = outcome(scripts, "pending")
    assert code == 0, err
    assert saved_number(folder) == 1


def test_a_pending_save_is_finished_after_an_uncaught_exception(scripts) -> None:
    code, _, err, folder = outcome(scripts, "after an error")
    assert code == 1
    assert "the program failed" in err
    assert saved_number(folder) == 1


def test_all_queued_saves_are_finished_and_the_exit_code_is_kept(scripts) -> None:
    code, _, err, folder = outcome(scripts, "queued")
    assert code == 3, err
    assert saved_number(folder) == 1


@pytest.mark.parametrize("name", ["failed", "failed and thrown away"])
def test_a_failed_save_that_nobody_saw_makes_the_program_fail(scripts, name) -> None:
    code, out, err, folder = outcome(scripts, name)
    assert code == 1
    assert "the disk is gone" in err
    assert str(folder) in err
    assert ("other exit functions run" in out) == (name == "failed")


def test_a_failed_save_that_was_seen_does_not(scripts) -> None:
    code, _, err, _ = outcome(scripts, "failed and seen")
    assert (code, err) == (0, "")


def test_ctrl_c_while_it_waits_names_what_is_lost(scripts) -> None:
    code, _, err, folder = outcome(scripts, "interrupted")
    assert code == 130
    assert f"these saves were not finished: {folder}" in err


def test_a_forked_child_does_not_wait_for_its_parents_saves(scripts) -> None:
    code, _, err, folder = outcome(scripts, "forked")
    assert code == 0, err
    assert saved_number(folder) == 1
    assert saved_number(folder.with_name("forked-child")) == 1


@pytest.mark.parametrize("name", ["process", "process, own class"])
def test_a_writer_process_finishes_too_and_does_not_run_the_script_again(scripts, name) -> None:
    code, out, err, folder = outcome(scripts, name)
    assert code == 0, err
    assert saved_number(folder) == 1
    assert out == "the script runs\n"


def test_a_class_of_a_script_that_would_run_again_is_refused(scripts) -> None:
    code, out, err, _ = outcome(scripts, "process, own class, not guarded")
    assert code == 1
    assert out == "the script runs\n"
    assert "if __name__ == '__main__':" in err
    assert "not guarded.py" in err


EARLIER = """
import atexit, sys

def last():
    notes.write("an earlier exit function has run\\n")
    print("an earlier exit function runs")

atexit.register(last)
notes = open(sys.argv[1] + ".notes", "w")
"""


def test_a_failed_save_does_not_keep_exit_functions_from_running_that_were_registered_before(tmp_path) -> None:
    """Nor does it lose what they, or the program, have written and not flushed."""
    body = """
notes.write("a line\\n")
atexit.register(lambda: print("a later one runs"))
saved = dcp.async_save(state, storage_writer=Failing(folder))
"""
    script = tmp_path / "script.py"
    script.write_text((EARLIER + PREAMBLE + body).replace("\\\\n", "\\n"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path / "saved")]
    done = subprocess.run(command, text=True, env=environment, capture_output=True, timeout=200, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout == "a later one runs\nan earlier exit function runs\n"
    assert "the disk is gone" in done.stderr
    assert (tmp_path / "saved.notes").read_text() == "a line\nan earlier exit function has run\n"
