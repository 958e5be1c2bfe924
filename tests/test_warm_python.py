"""Programs of a warm Python behave like those of a cold one."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.warm_python import warm_python

PYTHONS = pytest.mark.parametrize("python", ["warm", "cold"])


def command(python: str, *arguments: str | Path) -> list[str]:
    return [*(warm_python() if python == "warm" else [sys.executable]), *map(str, arguments)]


def run(python: str, *arguments: str | Path, **options) -> tuple[int, str, str]:
    done = subprocess.run(
        command(python, *arguments), capture_output=True, text=True, timeout=60, check=False, **options
    )
    return done.returncode, done.stdout, done.stderr


PROGRAM = """
import atexit, os, sys
atexit.register(print, "the end")
print(__name__, sys.argv, os.getcwd(), os.environ.get("X"), "holdfast" in sys.modules, input())
def later(): return sys.modules["__main__"].later is later
print(later(), file=sys.stderr)
"""


@PYTHONS
def test_a_program_has_its_arguments_folder_environment_and_streams(tmp_path, python):
    options = {"cwd": tmp_path, "env": {"X": "1"}, "input": "hello\n"}
    assert run(python, "-c", PROGRAM, "a", "b c", **options) == (
        0,
        f"__main__ ['-c', 'a', 'b c'] {tmp_path} 1 False hello\nthe end\n",
        "True\n",
    )


@PYTHONS
def test_a_script_knows_its_file_and_finds_its_neighbours(tmp_path, python):
    (tmp_path / "neighbour.py").write_text("word = 'found'")
    script = tmp_path / "script.py"
    script.write_text("import sys, neighbour; print(__file__, sys.argv, neighbour.word, __name__)")
    assert run(python, script, "x") == (0, f"{script} {[str(script), 'x']} found __main__\n", "")


@PYTHONS
@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("1 / 0", 1),
        ("import os; os._exit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import signal; signal.raise_signal(signal.SIGTERM)", -signal.SIGTERM),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
)
def test_it_ends_with_the_status_of_the_program(python, program, status):
    assert run(python, "-c", program)[0] == status


@PYTHONS
def test_a_thread_is_waited_for_and_what_it_prints_arrives(python):
    program = """
        import threading, time
        threading.Thread(target=lambda: (time.sleep(0.2), print("late"))).start()
    """
    assert run(python, "-c", textwrap.dedent(program)) == (0, "late\n", "")


@PYTHONS
def test_signals_reach_the_program(python):
    program = """
        import signal, time
        signal.signal(15, lambda *_: (print("asked", flush=True), exit(4)))
        print("up", flush=True)
        time.sleep(50)
    """
    line = command(python, "-c", textwrap.dedent(program))
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.communicate(timeout=30)[0] == "asked\n"
        assert process.returncode == 4


@PYTHONS
def test_a_kill_ends_the_program(python):
    program = "import time; print('up', flush=True); time.sleep(500)"
    with subprocess.Popen(command(python, "-c", program), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        assert process.communicate(timeout=30)[0] == b""  # the pipe ends when the program does


def test_torch_is_there_without_an_import():
    program = "import sys; print('torch' in sys.modules, 'holdfast' in sys.modules)"
    assert run("warm", "-c", program) == (0, "True False\n", "")
