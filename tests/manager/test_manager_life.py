"""The life of a manager: opening, other jobs, closing, looking only, and arguments that make no sense."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import textwrap
import threading
import warnings
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.errors import RunInUseError, RunTakenError
from holdfast.stores import LocalStore, Root
from tests.manager.managed import (
    MoodyRoot,
    a_run,
    damage_data,
    is_state_of,
    not_by_python,
    restored_from,
    state_of,
    steps_in,
    train,
)
from tests.warm_python import warm_python

# --- other jobs ---------------------------------------------------------------------------------------------------


def hold_the_run(root, opened, end) -> None:
    with holdfast.CheckpointManager(root):
        opened.set()
        end.wait(60)


def test_a_second_job_gets_an_error_that_the_run_is_in_use(tmp_path):
    context = multiprocessing.get_context("fork")
    opened, end = context.Event(), context.Event()
    job = context.Process(target=hold_the_run, args=(tmp_path, opened, end))
    job.start()
    assert opened.wait(60)
    with pytest.raises(RunInUseError, match="take_over=True") as raised, holdfast.CheckpointManager(tmp_path):
        pass
    assert raised.value.pid == job.pid
    end.set()
    job.join()
    with holdfast.CheckpointManager(tmp_path) as manager:
        assert manager.run_id


def test_after_a_take_over_the_old_job_saves_no_more(tmp_path):
    with holdfast.CheckpointManager(tmp_path, every_steps=1) as old:
        old.maybe_save(1, state_of(1))
        old.wait()
        with pytest.raises(RunInUseError, match="not closed"), holdfast.CheckpointManager(tmp_path):
            pass
        with holdfast.CheckpointManager(tmp_path, run_options=holdfast.RunOptions(take_over=True)) as new:
            assert new.run_id == old.run_id
            assert new.restore(state_of(0)).step == 1
            pending = old.save(2, state_of(2))
            with pytest.raises(RunTakenError, match="no longer saves or deletes"):
                pending.result()
            with pytest.raises(RunTakenError):
                old.wait()
            with pytest.raises(RunTakenError):
                old.save(3, state_of(3), wait=True)
            with pytest.raises(RunTakenError):
                old.delete(1)
            new.save(4, state_of(4))
        old._unsaved = None
    assert steps_in(tmp_path) == [1, 4]


def test_the_run_has_an_id_that_can_be_asked_for(tmp_path):
    with holdfast.CheckpointManager(tmp_path, run_options=holdfast.RunOptions(run_id="experiment-7")) as manager:
        assert manager.run_id == "experiment-7"
    with (
        pytest.raises(ValueError, match="holds the run 'experiment-7'"),
        holdfast.CheckpointManager(tmp_path, run_options=holdfast.RunOptions(run_id="other")),
    ):
        pass


# --- places -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_save", [True, False])
def test_runs_in_memory(tmp_path, async_save):
    place = f"memory://{tmp_path}"
    with holdfast.CheckpointManager(place, every_steps=1, keep_last=2, background=async_save) as manager:
        train(manager, range(1, 5))
    assert steps_in(place) == [3, 4]
    assert is_state_of(restored_from(place)[1], 4)


class WatchedFolder(Root):
    """A root of one's own, with names of its own."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.location = f"shelf:{folder}"

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.folder / "shelf")

    def child(self, name: str) -> LocalStore:
        return LocalStore(self.folder / f"box {name}")

    def children(self) -> list[str]:
        return [path.name.removeprefix("box ") for path in self.folder.glob("box *")]

    def remove(self, name: str) -> bool:
        try:
            (self.folder / f"box {name}").rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def test_a_root_of_ones_own(tmp_path):
    root = WatchedFolder(tmp_path)
    with holdfast.CheckpointManager(root, every_steps=1, keep_last=2) as manager:
        train(manager, range(1, 5))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["box step-00000003", "box step-00000004", "shelf"]
    assert is_state_of(restored_from(root)[1], 4)


# --- opening and closing ------------------------------------------------------------------------------------------


def test_nothing_is_touched_before_it_is_opened(tmp_path):
    root = tmp_path / "run"
    manager = holdfast.CheckpointManager(root)
    assert (manager.steps(), manager.latest(), manager.best("loss"), manager.would_delete()) == ([], None, None, [])
    assert not manager.should_stop
    manager.close()
    assert not root.exists()
    a_run(root, 1)
    assert [info.step for info in manager.steps()] == [1]


def test_use_without_a_with_block(tmp_path):
    manager = holdfast.CheckpointManager(tmp_path, every_steps=2)
    assert manager.restore(state_of(0)) is None
    train(manager, range(1, 4))
    manager.close()
    manager.close()
    assert steps_in(tmp_path) == [2, 3]


def test_a_program_that_forgets_to_close_has_its_pending_saves(tmp_path):
    program = (
        "import holdfast, torch\n"
        f"manager = holdfast.CheckpointManager({str(tmp_path)!r}, every_steps=1)\n"
        "for step in range(1, 4):\n"
        "    manager.maybe_save(step, {'w': torch.ones(1000) * step})\n"
    )
    ended = subprocess.run([*warm_python(), "-c", program], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert steps_in(tmp_path) == [1, 2, 3]
    with holdfast.CheckpointManager(tmp_path) as manager:  # that job has ended, so it is not in the way
        assert manager.restore({"w": torch.zeros(1000)}).step == 3


def test_after_closing_it_can_only_look(tmp_path):
    with holdfast.CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1))
    uses = [
        lambda: manager.maybe_save(2, state_of(2)),
        lambda: manager.save(2, state_of(2)),
        lambda: manager.restore(state_of(2)),
        lambda: manager.delete(1),
        lambda: manager.preflight(state_of(2)),
        manager.__enter__,
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="was closed; make a new one"):
            use()
    assert [info.step for info in manager.steps()] == [1]


def test_if_opening_fails_the_run_is_free_and_handlers_are_as_before(tmp_path, monkeypatch):
    manager = holdfast.CheckpointManager(tmp_path / "run")
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        not_by_python(patch, signal.SIGUSR1)
        with pytest.raises(RuntimeWarning, match="SIGUSR1 will not be noticed"):
            manager.restore(state_of(0))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with holdfast.CheckpointManager(tmp_path / "run"):
        pass


def test_handlers_of_signals_are_as_before_also_after_an_exception(tmp_path):
    def program() -> None:
        with holdfast.CheckpointManager(tmp_path):
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with holdfast.CheckpointManager(tmp_path, on_signal=None):
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_process_group_that_goes_away_is_noticed_before_ranks_save_on_their_own(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        manager = holdfast.CheckpointManager(tmp_path, save_at_end=False)
        manager._open()
        manager._place_at_opening = (0, 2)  # as in a job of two ranks
        with pytest.raises(RuntimeError, match=r"rank 0 of 2, and now this is rank 0 of 1.*Nothing was saved"):
            manager.save(1, state_of(1))
        manager.close()
    finally:
        dist.destroy_process_group()
    assert steps_in(tmp_path) == []


# --- events -------------------------------------------------------------------------------------------------------


def test_events_and_a_trace(tmp_path):
    events: list[holdfast.Event] = []
    trace = tmp_path / "trace.json"
    with (
        holdfast.subscribe(events.append),
        holdfast.trace_to(trace),
        holdfast.CheckpointManager(tmp_path / "run", every_steps=1) as manager,
    ):
        manager.restore(state_of(0))
        manager.maybe_save(1, state_of(1))
        manager.wait()
        manager.restore(state_of(0))
    holdfast.save(state_of(1), tmp_path / "elsewhere")  # nobody listens any more
    assert [(event.name, event.step) for event in events if event.is_whole] == [
        ("save", 1),
        ("load", 1),
        ("restore", 1),
    ]
    assert events[-1].nbytes > 4000
    assert events[-1].detail == {"lost_steps": 0, "damaged": [], "passed_over": []}
    assert {event.name for event in events} >= {"save.stage", "save.plan", "save.write", "save.commit", "load.read"}
    assert {event.detail.get("reason") for event in events if event.verb == "save"} == {"steps"}
    content = json.loads(trace.read_text())
    named = {each["name"] for each in (content if isinstance(content, list) else content["traceEvents"])}
    assert any("write" in name for name in named)


def test_a_callback_that_fails_does_no_harm(tmp_path):
    def fail(event) -> None:
        raise ZeroDivisionError

    with holdfast.subscribe(fail), holdfast.CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1))
    assert steps_in(tmp_path) == [1]


# --- looking only -------------------------------------------------------------------------------------------------


def contents(folder) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_read_only_manager_restores_beside_the_job_that_trains(tmp_path):
    with holdfast.CheckpointManager(tmp_path, every_steps=1) as training:
        train(training, range(1, 4))
        training.wait()
        damage_data(tmp_path, 3)
        before = contents(tmp_path)
        state = state_of(0)
        with holdfast.CheckpointManager(
            tmp_path, run_options=holdfast.RunOptions(read_only=True), keep_last=1
        ) as manager:
            assert manager.run_id == training.run_id
            restored = manager.restore(state)
            assert (restored.step, restored.lost_steps, [info.step for info in restored.set_aside]) == (2, 1, [3])
            assert is_state_of(state, 2)
            assert manager.latest().step == 3
            for use in (
                lambda: manager.save(4, state),
                lambda: manager.maybe_save(4, state),
                lambda: manager.delete(1),
                lambda: manager.pin(1),
                lambda: manager.unpin(1),
                lambda: manager.preflight(state),
            ):
                with pytest.raises(RuntimeError, match="read-only"):
                    use()
        assert contents(tmp_path) == before
        training.save(5, state_of(5))
    assert steps_in(tmp_path) == [1, 2, 3, 5]


def test_a_read_only_manager_needs_no_right_to_write(tmp_path):
    a_run(tmp_path / "run", 1)
    before = contents(tmp_path)
    with holdfast.CheckpointManager(tmp_path / "run", run_options=holdfast.RunOptions(read_only=True)) as manager:
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
        assert handlers == [signal.SIG_DFL, signal.SIG_DFL]
        assert manager.restore(state_of(0)).step == 1
    with holdfast.CheckpointManager(tmp_path / "nothing", run_options=holdfast.RunOptions(read_only=True)) as manager:
        assert (manager.run_id, manager.restore(state_of(0))) == ("", None)
    assert contents(tmp_path) == before
    assert os.listdir(tmp_path) == ["run"]


# --- arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"every_steps": 0}, ValueError, "every_steps=0"),
        ({"every_steps": 1.5}, ValueError, "every_steps=1.5"),
        ({"every_steps": True}, ValueError, "every_steps=True"),
        ({"every_minutes": -1}, ValueError, "every_minutes=-1"),
        ({"every_minutes": "30"}, ValueError, "every_minutes='30'"),
        ({"keep": 3}, TypeError, r"keep takes a holdfast.keep.Policy or a holdfast.Retention, not 3"),
        ({"keep_last": 0}, ValueError, "from 1 on"),
        ({"background": "process"}, TypeError, "background takes a holdfast.Background, not 'process'"),
        ({"on_signal": ["SIGTERM"]}, TypeError, "on_signal takes a holdfast.OnSignal"),
        ({"on_full_disk": "prune"}, TypeError, "on_full_disk takes a holdfast.OnFullDisk, not 'prune'"),
        ({"run_options": "experiment-7"}, TypeError, "run_options takes a holdfast.RunOptions"),
        ({"save_options": {"metadata": {"x": object()}}}, (TypeError, ValueError), "metadata"),
        ({"save_options": {"casts": 1}}, TypeError, "save_options got an unexpected 'casts'; it takes: .*include"),
        ({"save_options": {"overwrite": False}}, TypeError, "'overwrite'"),
        ({"save_options": {"memory_budget": 1}}, ValueError, "memory_budget"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_once(tmp_path, arguments, error, told):
    with pytest.raises(error, match=told):
        holdfast.CheckpointManager(tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("make", "arguments", "error", "told"),
    [
        (holdfast.Background, {"writer": "fork"}, ValueError, "writer must be 'thread' or 'process'"),
        (holdfast.Background, {"when_busy": "skip"}, ValueError, "when_busy must be 'wait', 'copy' or 'error'"),
        (holdfast.Background, {"on_failure": "ignore"}, ValueError, "on_failure must be 'error' or 'warn'"),
        (holdfast.OnFullDisk, {"action": "delete"}, ValueError, "action must be 'error', 'prune' or 'wait'"),
        (holdfast.OnFullDisk, {"wait_seconds": 0}, ValueError, "wait_seconds must be positive"),
        (holdfast.OnSignal, {"signals": ["SIGKILL"]}, ValueError, "SIGKILL"),
        (holdfast.OnSignal, {"signals": "SIGTERM"}, TypeError, "list of names"),
        (holdfast.OnSignal, {"grace_seconds": 0}, ValueError, "grace_seconds"),
        (holdfast.Retention, {"policy": 3}, TypeError, r"policy takes a holdfast.keep.Policy, not 3"),
        (holdfast.RunOptions, {"parts": "model"}, TypeError, "list of names"),
    ],
)
def test_options_that_make_no_sense_are_refused_where_they_are_made(make, arguments, error, told):
    with pytest.raises(error, match=told):
        make(**arguments)


def test_the_manager_has_a_dozen_keywords_and_every_option_a_docstring():
    keywords = list(inspect.signature(holdfast.CheckpointManager).parameters)[1:]
    assert len(keywords) <= 12
    for options in (
        holdfast.Background,
        holdfast.OnFullDisk,
        holdfast.OnSignal,
        holdfast.Retention,
        holdfast.RunOptions,
    ):
        source = ast.parse(textwrap.dedent(inspect.getsource(options))).body[0].body
        for field, text in itertools.pairwise(source):
            if isinstance(field, ast.AnnAssign):
                assert isinstance(text, ast.Expr), ast.unparse(field)
                assert field.value is not None, "there is a default for everything"
        with pytest.raises(FrozenInstanceError):
            setattr(options(), fields(options)[0].name, None)


def test_in_another_thread_it_works_without_signals(tmp_path):
    warned: list[str] = []

    def body() -> None:
        with (
            pytest.warns(RuntimeWarning, match="will not be noticed") as seen,
            holdfast.CheckpointManager(tmp_path) as manager,
        ):
            manager.save(1, state_of(1))
        warned.extend(str(each.message) for each in seen)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert len(warned) == 1
    assert steps_in(MoodyRoot(tmp_path)) == [1]


def in_a_forked_process(body) -> str:
    """What the body returns or raises there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told = body()
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writing, str(told).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return told


def test_a_forked_process_can_look_and_does_no_harm(tmp_path):
    with holdfast.CheckpointManager(tmp_path, background=False, every_steps=10) as manager:
        manager.save(1, state_of(1))
        manager.maybe_save(2, state_of(2))
        assert in_a_forked_process(lambda: [info.step for info in manager.steps()]) == "[1]"
        for change in (
            lambda: manager.save(3, state_of(3)),
            lambda: manager.maybe_save(10, state_of(10)),
            lambda: manager.restore(state_of(0)),
            lambda: manager.delete(1),
        ):
            assert "RuntimeError" in (told := in_a_forked_process(change))
            assert f"belongs to process {os.getpid()}" in told
        assert in_a_forked_process(manager.close) == "None"
        assert in_a_forked_process(lambda: manager.__exit__(SystemExit, SystemExit(), None)) == "None"
        assert steps_in(tmp_path) == [1]
        manager.save(4, state_of(4))  # the run is still ours
        manager.maybe_save(5, state_of(5))
    assert steps_in(tmp_path) == [1, 4, 5]
