"""Whole programs that end while saves are pending: finished within the time that there is, or named.

One interpreter imports torch and forks a child for each program. A child runs to its own end, as any interpreter does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import holdfast
import holdfast.dcp as dcp
from tests.warm_python import warm_python

PROGRAMS = {
    "in time": """
        dcp.async_save(state, storage_writer=Held(folder))
    """,
    "in time, error": """
        dcp.async_save(state, storage_writer=Held(folder))
        raise SystemError("the program failed")
    """,
    "in time, ctrl-c": """
        dcp.async_save(state, storage_writer=Held(folder))
        signal.raise_signal(signal.SIGINT)
    """,
    "too late": """
        os.environ["HOLDFAST_DRAIN_SECONDS"] = "0.01"
        dcp.async_save(state, storage_writer=Stuck(folder))
        print("all done")
    """,
    "too late, error": """
        os.environ["HOLDFAST_DRAIN_SECONDS"] = "0.01"
        dcp.async_save(state, storage_writer=Stuck(folder))
        raise SystemError("the program failed")
    """,
    "too late, ctrl-c": """
        os.environ["HOLDFAST_DRAIN_SECONDS"] = "0.01"
        dcp.async_save(state, storage_writer=Stuck(folder))
        signal.raise_signal(signal.SIGINT)
    """,
    "too late, exit code": """
        os.environ["HOLDFAST_DRAIN_SECONDS"] = "0"
        dcp.async_save(state, storage_writer=Stuck(folder))
        sys.exit(7)
    """,
    "several": """
        os.environ["HOLDFAST_DRAIN_SECONDS"] = "0.01"
        dcp.async_save(state, checkpoint_id=folder + "-finished").result()
        failed = dcp.async_save(state, storage_writer=Failing(folder + "-failed"))
        dcp.async_save(state, storage_writer=Stuck(folder + "-stuck"))
        dcp.async_save(state, checkpoint_id=folder + "-waiting")
        while not failed.done():
            pass
    """,
    "native": """
        holdfast.async_save(state, HeldStore(folder))
    """,
    "native, too late": """
        os.environ["HOLDFAST_DRAIN_SECONDS"] = "0.01"
        holdfast.async_save(state, StuckStore(folder))
    """,
    "for ever": """
        os.environ["HOLDFAST_DRAIN_SECONDS"] = "inf"
        dcp.async_save(state, storage_writer=Held(folder))
    """,
    "thread that lives on": """
        def save_later():
            until_the_main_thread_is_over()
            holdfast.async_save(state, folder)
        threading.Thread(target=save_later).start()
    """,
    "exit function": """
        atexit.register(holdfast.async_save, state, folder, optimizers=optimizer)
    """,
    "exit function, fails": """
        open(folder, "w").close()
        atexit.register(holdfast.async_save, state, folder)
    """,
    "setting broken meanwhile": """
        dcp.async_save(state, storage_writer=Held(folder))
        writing.wait()
        os.environ["HOLDFAST_DRAIN_SECONDS"] = "soon"
    """,
}

RUNNER = """
import atexit, json, os, signal, sys, threading, traceback
from concurrent.futures import ThreadPoolExecutor
import torch
import holdfast
import holdfast.dcp as dcp
from holdfast.stores import LocalStore

def until_the_program_ends():
    main = threading.main_thread().ident
    while "wait_until_idle" not in (at.f_code.co_name for at, _ in traceback.walk_stack(sys._current_frames()[main])):
        threading.Event().wait(0.01)

def until_the_main_thread_is_over():
    threading.main_thread().join()

def for_ever():
    with ThreadPoolExecutor(1) as pool:  # Python waits for its threads, whatever they wait for
        pool.submit(threading.Event().wait).result()

writing = threading.Event()

class Held(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        writing.set()
        until_the_program_ends()
        return super().write_data(plan, planner)

class Stuck(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        for_ever()

class Failing(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        raise OSError("the disk is gone")

class HeldStore(LocalStore):
    def create(self, name, size=None, memory=None):
        until_the_program_ends()
        return super().create(name, size, memory)

class StuckStore(LocalStore):
    def create(self, name, size=None, memory=None):
        for_ever()

state = {"n": torch.tensor(1)}
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
programs, root = json.loads(sys.argv[1]), sys.argv[2]
children = {}
for name, program in programs.items():
    children[name] = os.fork()
    if not children[name]:
        break
if not children[name]:
    for descriptor in (1, 2):
        os.dup2(os.open(f"{root}/{name}.{descriptor}", os.O_CREAT | os.O_WRONLY), descriptor)
    folder = f"{root}/{name}"
    exec(program)
else:
    codes = {name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for name, child in children.items()}
    print(json.dumps(codes))
"""


@dataclass
class Ended:
    code: int
    out: str
    err: str
    folder: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    root = tmp_path_factory.mktemp("programs")
    programs = json.dumps({name: textwrap.dedent(program) for name, program in PROGRAMS.items()})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment.pop("HOLDFAST_DRAIN_SECONDS", None)
    command = [sys.executable, "-c", RUNNER, programs, str(root)]
    done = subprocess.run(command, text=True, env=environment, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr
    texts = {name: [(root / f"{name}.{each}").read_text() for each in (1, 2)] for name in PROGRAMS}
    return {name: Ended(code, *texts[name], root / name) for name, code in json.loads(done.stdout).items()}


def saved_number(folder: Path) -> int:
    state = {"n": torch.tensor(0)}
    dcp.load(state, checkpoint_id=folder)
    return int(state["n"])


@pytest.mark.parametrize(
    ("name", "code"), [("in time", 0), ("in time, error", 1), ("in time, ctrl-c", -2), ("for ever", 0)]
)
def test_a_pending_save_is_finished_and_the_program_ends_as_it_would_have(ended, name: str, code: int) -> None:
    program = ended[name]
    assert program.code == code, program.err
    assert saved_number(program.folder) == 1
    assert "not finished" not in program.err


@pytest.mark.parametrize("name", ["too late", "too late, error", "too late, ctrl-c", "too late, exit code"])
def test_a_save_that_takes_too_long_is_named_and_the_program_fails(ended, name: str) -> None:
    program = ended[name]
    assert program.code == 1, program.err
    assert f"these saves were not finished: {program.folder}\n" in program.err
    assert "HOLDFAST_DRAIN_SECONDS" in program.err
    assert not list(program.folder.glob(".metadata"))


def test_what_the_program_said_is_not_lost(ended) -> None:
    assert ended["too late"].out == "all done\n"
    assert "SystemError: the program failed" in ended["too late, error"].err
    assert "SystemError: the program failed" in ended["in time, error"].err
    assert "KeyboardInterrupt" in ended["too late, ctrl-c"].err


def test_only_what_was_not_finished_is_named_and_failures_are_reported_too(ended) -> None:
    program = ended["several"]
    assert program.code == 1
    assert f"these saves were not finished: {program.folder}-stuck, {program.folder}-waiting\n" in program.err
    assert "several-finished" not in program.err
    assert program.err.count("OSError: the disk is gone") == 1
    assert saved_number(program.folder.with_name("several-finished")) == 1


def test_saves_of_our_own_format_are_finished_or_named_as_well(ended) -> None:
    in_time, too_late = ended["native"], ended["native, too late"]
    assert in_time.code == 0, in_time.err
    state = {"n": torch.tensor(0)}
    holdfast.load(state, in_time.folder)
    assert int(state["n"]) == 1
    assert too_late.code == 1
    assert f"these saves were not finished: {too_late.folder}" in too_late.err


def test_a_setting_that_was_broken_meanwhile_costs_no_save(ended) -> None:
    program = ended["setting broken meanwhile"]
    assert "HOLDFAST_DRAIN_SECONDS='soon' is not understood" in program.err
    assert saved_number(program.folder) == 1


@pytest.mark.parametrize("name", ["thread that lives on", "exit function"])
def test_saves_that_begin_when_the_program_has_ended_are_finished(ended, name: str) -> None:
    program = ended[name]
    assert program.code == 0, program.err
    state = {"n": torch.tensor(0)}
    holdfast.load(state, program.folder)
    assert int(state["n"]) == 1


def test_a_failure_of_such_a_save_is_reported(ended) -> None:
    program = ended["exit function, fails"]
    assert program.code == 1
    assert program.err.count("failed: NotAFolderError") == 1


FIRST_USE = """
import sys, threading
import torch, holdfast

def save():
    threading.main_thread().join()
    holdfast.async_save({"n": torch.tensor(1)}, sys.argv[1])

threading.Thread(target=save).start()
"""


def test_a_program_may_save_for_the_first_time_when_it_has_ended(tmp_path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*warm_python(), "-c", FIRST_USE, str(tmp_path / "x")]
    done = subprocess.run(command, text=True, env=environment, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert holdfast.open(tmp_path / "x").verify().ok
