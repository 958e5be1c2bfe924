"""How a manager saves: which parts, with which options, in which process, and what happens when a save fails."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import warnings

import pytest
import torch

import holdfast
from holdfast._background.futures import forget_failures, take_unreported_failures
from holdfast._manager.run_file import RunFile
from holdfast._manager.steps import folder_of
from holdfast._save.async_save import begin_save
from holdfast.errors import NotDeletedError, PreflightError, SaveInProgressError, StorageFullError
from holdfast.stores import LocalRoot, root_at
from tests.manager.managed import MoodyRoot, MoodyStore, a_run, is_state_of, restored_from, state_of, steps_in, train
from tests.warm_python import warm_python


def a_training() -> dict[str, object]:
    torch.manual_seed(7)
    model = torch.nn.Linear(64, 64)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "parts": [{"optim": optim}]}


def train_step(training) -> None:
    optim = training["parts"][0]["optim"]
    training["model"](torch.ones(2, 64)).square().sum().backward()
    optim.step()
    optim.zero_grad()


# --- what is saved ------------------------------------------------------------------------------------------------


def test_metadata_of_the_manager_and_of_the_call(tmp_path):
    with holdfast.CheckpointManager(tmp_path, save_options={"metadata": {"git": "1a2b3c", "who": "all"}}) as manager:
        manager.save(1, state_of(1), metadata={"who": "me"})
    (info,) = manager.steps()
    assert info.metadata == {"git": "1a2b3c", "who": "me"}
    with pytest.raises(ValueError, match="belongs to the manager"):
        holdfast.CheckpointManager(tmp_path, save_options={"metadata": {"holdfast": 1}})


@pytest.mark.parametrize("async_save", [True, False])
def test_save_options(tmp_path, async_save):
    options = {"exclude": "*.frozen", "cast": {"model.*": torch.bfloat16}, "max_file_size": 4096}
    with holdfast.CheckpointManager(tmp_path, background=async_save, save_options=options) as manager:
        manager.save(1, {"model": {"w": torch.ones(8000), "frozen": torch.ones(5)}, "step": 1})
    saved = holdfast.open(tmp_path / folder_of(1))
    assert sorted(saved.keys()) == ["model.w", "step"]
    assert saved["model.w"].dtype == torch.bfloat16
    assert len(list((tmp_path / folder_of(1)).glob("data-*"))) == 4


@pytest.mark.parametrize("async_save", [True, False])
def test_a_set_of_parts_is_saved_whole_or_not_at_all(tmp_path, async_save):
    with holdfast.CheckpointManager(
        tmp_path, run_options=holdfast.RunOptions(parts=["model", "seen"]), background=async_save
    ) as manager:
        manager.save(1, state_of(1))
        for wrong in ({"model": {}}, {**state_of(2), "more": 1}, [1, 2]):
            with pytest.raises(ValueError, match=r"has the parts \['model', 'seen'\].*Nothing was saved"):
                manager.save(2, wrong)
    assert steps_in(tmp_path) == [1]


# --- in the background --------------------------------------------------------------------------------------------


def test_the_state_is_that_of_the_call(tmp_path):
    state = state_of(1)
    with holdfast.CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        state["model"]["weight"].zero_()
    assert is_state_of(restored_from(tmp_path)[1], 1)


def test_with_overlap_the_optimizers_are_found_and_their_steps_wait(tmp_path, monkeypatch):
    training, given = a_training(), []

    def begin(state, store, options, how, group, **others):
        given.append(how.optimizers)
        return begin_save(state, store, options, how, group, **others)

    monkeypatch.setattr("holdfast._manager.saver.begin_save", begin)
    expected = {}
    with holdfast.CheckpointManager(
        tmp_path, every_steps=1, background=holdfast.Background(overlap=True, when_busy="copy")
    ) as manager:
        for step in range(1, 6):
            train_step(training)
            expected[step] = training["model"].weight.detach().clone()
            manager.maybe_save(step, training)
    assert given == [[training["parts"][0]["optim"]]] * 5
    for step, weight in expected.items():
        assert torch.equal(holdfast.open(tmp_path / folder_of(step))["model.weight"][:], weight)


def test_overlap_without_an_optimizer_is_warned_of_once(tmp_path):
    with holdfast.CheckpointManager(tmp_path, every_steps=1, background=holdfast.Background(overlap=True)) as manager:
        with pytest.warns(RuntimeWarning, match="no torch.optim.Optimizer in the state") as told:
            train(manager, range(1, 4))
        assert len(told) == 1
        assert told[0].filename.endswith("managed.py")
    assert steps_in(tmp_path) == [1, 2, 3]


def test_how_to_copy_is_passed_on(tmp_path, monkeypatch):
    given = []

    def begin(state, path, make_options, how, group, **others):
        given.append((how.check_tearing, how.memory_budget))
        return begin_save(state, path, make_options, how, group, **others)

    monkeypatch.setattr("holdfast._manager.saver.begin_save", begin)
    options = {"memory_budget": 100_000_000}
    with holdfast.CheckpointManager(
        tmp_path, background=holdfast.Background(check_tearing=True), save_options=options
    ) as manager:
        manager.save(1, state_of(1))
    assert given == [(True, 100_000_000)]


def test_without_overlap_all_is_copied_in_the_call(tmp_path):
    training = a_training()
    with holdfast.CheckpointManager(tmp_path) as manager:
        pending = manager.save(1, training)
        assert pending.staged.done()
        assert not training["parts"][0]["optim"]._optimizer_step_pre_hooks


def test_a_writer_process_saves_and_the_run_is_kept_in_order(tmp_path):
    events: list[holdfast.Event] = []
    background = holdfast.Background(writer="process")
    with (
        holdfast.subscribe(events.append),
        holdfast.CheckpointManager(tmp_path, every_steps=1, keep_last=2, background=background) as manager,
    ):
        train(manager, range(1, 4))
    assert steps_in(tmp_path) == [2, 3]
    assert [event.step for event in events if event.name == "save.write"] == [1, 2, 3]
    assert is_state_of(restored_from(tmp_path)[1], 3)


def test_a_writer_process_cannot_save_to_memory(tmp_path):
    manager = holdfast.CheckpointManager(f"memory://{tmp_path}", background=holdfast.Background(writer="process"))
    with pytest.raises(ValueError, match="memory of this process"):
        manager.save(1, state_of(1))
    manager.close()


class SlowRoot(MoodyRoot):
    """A disk on which data are not written before the test lets them be."""

    def __init__(self, folder) -> None:
        super().__init__(folder)
        self.go_on = threading.Event()

    def child(self, name):
        if threading.current_thread() is not threading.main_thread():
            self.go_on.wait(60)
        return MoodyStore(self, name)


def test_when_busy(tmp_path):
    root = SlowRoot(tmp_path)
    with holdfast.CheckpointManager(root, background=holdfast.Background(when_busy="error")) as manager:
        manager.maybe_save(1, state_of(1))
        first = manager.save(1, state_of(1))
        with pytest.raises(SaveInProgressError):
            manager.save(2, state_of(2))
        root.go_on.set()
        first.result()
        manager.save(2, state_of(2))
    assert steps_in(tmp_path) == [1, 2]


def test_a_save_now_comes_after_those_that_are_pending(tmp_path):
    root = SlowRoot(tmp_path)
    with holdfast.CheckpointManager(root) as manager:
        manager.save(1, state_of(1))
        threading.Timer(0.2, root.go_on.set).start()
        manager.save(2, state_of(2), wait=True)
        assert [info.step for info in manager.steps()] == [1, 2]


def test_wait_returns_when_all_is_committed(tmp_path):
    root = SlowRoot(tmp_path)
    with holdfast.CheckpointManager(root) as manager:
        pending = manager.save(1, state_of(1))
        assert not pending.done()
        assert manager.steps() == []
        threading.Timer(0.2, root.go_on.set).start()
        manager.wait()
        assert pending.done()
        assert [info.step for info in manager.steps()] == [1]


# --- failures -----------------------------------------------------------------------------------------------------


def test_a_failed_save_is_raised_by_the_next_one_and_the_run_goes_on_after_that(tmp_path, moody):
    moody.failing = {1}
    with holdfast.CheckpointManager(moody) as manager:
        failed = manager.save(1, state_of(1))
        with pytest.raises(OSError, match="Input/output"):
            failed.result()
        with pytest.raises(OSError, match=r"Input/output error.*step-00000001"):
            manager.save(2, state_of(2))
        manager.save(3, state_of(3))
        manager.wait()
    assert steps_in(tmp_path) == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["holdfast-run.json", folder_of(3)]
    assert take_unreported_failures() == []


def test_a_failed_save_is_raised_by_wait_once(moody):
    moody.failing = {1}
    with holdfast.CheckpointManager(moody) as manager:
        manager.save(1, state_of(1))
        with pytest.raises(OSError, match="Input/output"):
            manager.wait()
        manager.wait()
        moody.failing = set()
        manager.save(2, state_of(2))


def test_a_failed_save_is_raised_at_the_end_and_the_last_step_is_saved(tmp_path, moody):
    moody.failing = {2}
    with pytest.raises(OSError, match="Input/output"), holdfast.CheckpointManager(moody, every_steps=2) as manager:
        train(manager, range(1, 4))
    assert steps_in(tmp_path) == [3]
    assert restored_from(tmp_path)[0].step == 3  # and the run is free for others


@pytest.mark.parametrize("on_failure", ["error", "warn"])
def test_a_last_step_whose_own_save_failed_is_saved_at_the_end(tmp_path, moody, on_failure):
    told = pytest.raises(OSError, match="Input/output")
    if on_failure == "warn":
        told = pytest.warns(RuntimeWarning, match="step 4 was saved at the second attempt only: OSError")
    moody.failing = {4}
    with (
        told,
        holdfast.CheckpointManager(
            moody, every_steps=2, background=holdfast.Background(on_failure=on_failure)
        ) as manager,
    ):
        train(manager, range(1, 4))
        manager.maybe_save(4, state_of(4), metrics={"loss": 0.25}).exception()
        moody.failing = set()
    assert steps_in(tmp_path) == [2, 4]
    assert is_state_of(restored_from(tmp_path)[1], 4)
    assert manager.latest().metrics == {"loss": 0.25}


def test_a_last_step_that_fails_twice_is_reported_as_the_first_failure(tmp_path, moody, caplog):
    moody.failing = {2}
    with (
        pytest.warns(RuntimeWarning, match="step 2 was not saved: OSError"),
        holdfast.CheckpointManager(moody, every_steps=2, background=holdfast.Background(on_failure="warn")) as manager,
    ):
        train(manager, range(1, 3))
    assert moody.failures == 2
    assert "step 2 could not be saved at the second attempt either" in caplog.text
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize("go_back", [True, False])
def test_a_step_that_failed_is_not_saved_again_if_the_state_may_be_another_by_now(tmp_path, moody, go_back):
    moody.failing = {2}
    manager = holdfast.CheckpointManager(moody, background=holdfast.Background(on_failure="warn"), every_steps=2)
    manager.save(1, state_of(1), wait=True)
    if go_back:
        manager.maybe_save(2, state_of(2)).exception()
        manager.restore(state_of(0))
    else:
        manager.save(2, state_of(2)).exception()  # who calls this need not tell of the steps after it
    moody.failing = set()
    with pytest.warns(RuntimeWarning, match="step 2 was not saved"):
        manager.close()
    assert steps_in(tmp_path) == [1]


def test_several_failures_are_all_reported(moody, caplog):
    moody.failing = {1, 2}
    manager = holdfast.CheckpointManager(moody, background=holdfast.Background(when_busy="copy"))
    manager.save(1, state_of(1))
    manager._saver.pending.raise_failures = lambda: None  # as if it had not ended yet
    manager.save(2, state_of(2))
    with pytest.raises(OSError, match="step-00000001"):
        manager.close()
    assert "step 2 was not saved either: OSError" in caplog.text


def test_failures_can_be_warnings(tmp_path, moody):
    moody.failing = {1, 3}
    with holdfast.CheckpointManager(moody, background=holdfast.Background(on_failure="warn")) as manager:
        manager.save(1, state_of(1)).exception()
        with pytest.warns(RuntimeWarning, match="step 1 was not saved: OSError: .*Input/output"):
            manager.save(2, state_of(2))
        manager.wait()
        manager.save(3, state_of(3))
        with pytest.warns(RuntimeWarning, match="step 3 was not saved"):
            manager.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            manager.close()
    assert steps_in(tmp_path) == [2]


def test_the_programs_own_error_is_not_masked_by_that_of_a_save(moody):
    moody.failing = {1}

    def program() -> None:
        with holdfast.CheckpointManager(moody) as manager:
            manager.save(1, state_of(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    (told,) = take_unreported_failures()  # by the next call of the library, or at the end of the program
    assert "step-00000001 failed" in told
    forget_failures()


def test_a_failed_save_now_is_raised_now(tmp_path, moody):
    moody.failing = {1}
    with holdfast.CheckpointManager(moody, background=False, save_at_end=False) as manager:
        with pytest.raises(OSError, match="Input/output"):
            manager.save(1, state_of(1))
        assert not (tmp_path / folder_of(1)).exists()
        manager.save(2, state_of(2))
    assert steps_in(tmp_path) == [2]


def test_a_failed_replacement_leaves_the_old_one(tmp_path, moody):
    a_run(tmp_path, 1)
    moody.failing = {1}
    manager = holdfast.CheckpointManager(moody, background=False)
    with pytest.raises(OSError, match="Input/output"):
        manager.save(1, state_of(99))
    manager.close()
    assert is_state_of(restored_from(tmp_path)[1], 1)


# --- full disks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_save", [True, False])
def test_on_a_full_disk_the_last_checkpoint_stays(tmp_path, moody, async_save):
    a_run(tmp_path, 1, 2)
    moody.full = {3}

    def program() -> None:
        with holdfast.CheckpointManager(moody, background=async_save) as manager:
            manager.save(3, state_of(3))

    with pytest.raises(StorageFullError, match=r"no space for .*step-00000003") as raised:
        program()
    assert (raised.value.path, raised.value.rank) == (str(tmp_path / folder_of(3)), 0)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [folder_of(1), folder_of(2)]
    assert restored_from(tmp_path)[0].step == 2


class FreedByDeletion(MoodyRoot):
    """A disk with room for a few steps."""

    def __init__(self, folder, room_for=2):
        super().__init__(folder)
        self.room_for = room_for

    def child(self, name):
        folders = [
            path for path in self.folder.iterdir() if path.is_dir() and path.name != name and any(path.iterdir())
        ]
        self.full = {3} if len(folders) >= self.room_for else set()
        return MoodyStore(self, name)


@pytest.mark.parametrize("async_save", [True, False])
def test_on_a_full_disk_it_is_reported_how_much_the_save_before_needed(moody, async_save):
    with holdfast.CheckpointManager(moody, background=async_save, save_at_end=False) as manager:
        saved = manager.save(1, state_of(1))
        needed = (saved.result() if async_save else saved).bytes_written
        moody.full = {2}
        with pytest.raises(StorageFullError) as raised:
            manager.save(2, state_of(2), wait=True)
    assert raised.value.needed == needed > 4000


@pytest.mark.parametrize("async_save", [True, False])
def test_on_a_full_disk_the_oldest_goes_if_that_is_wanted(tmp_path, async_save, caplog):
    a_run(tmp_path, 1, 2)
    root = FreedByDeletion(tmp_path)
    with (
        caplog.at_level(logging.WARNING),
        holdfast.CheckpointManager(
            root, background=async_save, on_full_disk=holdfast.OnFullDisk(action="prune")
        ) as manager,
    ):
        manager.save(3, state_of(3))
    assert root.failures == 1
    assert steps_in(tmp_path) == [2, 3]
    assert "step-00000001 was deleted" in caplog.text


def test_on_a_full_disk_the_best_is_the_last_to_go(tmp_path):
    with holdfast.CheckpointManager(tmp_path, background=False) as manager:
        for step, loss in ((1, 0.1), (2, 0.9)):
            manager.save(step, state_of(step), metrics={"loss": loss})
        manager.save(4, state_of(4))
    root = FreedByDeletion(tmp_path, room_for=3)
    on_full_disk = holdfast.OnFullDisk(action="prune")
    best = holdfast.keep.best(1, "loss")
    with holdfast.CheckpointManager(
        root, keep_last=10, keep=best, on_full_disk=on_full_disk, background=False
    ) as manager:
        manager.save(3, state_of(3))
    assert steps_in(tmp_path) == [1, 3, 4]


def test_on_a_full_disk_the_one_that_was_saved_last_stays(tmp_path):
    a_run(tmp_path, 10, 20, 30)
    root = FreedByDeletion(tmp_path, room_for=3)
    with holdfast.CheckpointManager(
        root, on_full_disk=holdfast.OnFullDisk(action="prune"), background=False
    ) as manager:
        manager.restore(state_of(0), step=10)
        manager.delete(10)
        manager.save(2, state_of(2))
        manager.save(3, state_of(3))
    assert steps_in(tmp_path) == [2, 3, 30]


def test_on_a_full_disk_a_deletion_that_failed_earlier_does_not_count(tmp_path, monkeypatch):
    a_run(tmp_path, 1, 2, 4)
    remove, broken = LocalRoot.remove, True

    def no_removal(self, name):
        if broken and name == folder_of(1):
            raise OSError(5, "Input/output error")
        return remove(self, name)

    monkeypatch.setattr(LocalRoot, "remove", no_removal)
    root = FreedByDeletion(tmp_path)  # of step 1 only an empty folder is left
    with holdfast.CheckpointManager(
        root, on_full_disk=holdfast.OnFullDisk(action="prune"), background=False
    ) as manager:
        with pytest.raises(NotDeletedError):
            manager.delete(1)
        manager.save(3, state_of(3))
        broken = False
    assert steps_in(tmp_path) == [3, 4]


def test_a_dry_run_prunes_nothing(tmp_path):
    a_run(tmp_path, 1, 2)
    manager = holdfast.CheckpointManager(
        FreedByDeletion(tmp_path),
        background=False,
        on_full_disk=holdfast.OnFullDisk(action="prune"),
        keep=holdfast.Retention(dry_run=True),
    )
    with pytest.raises(StorageFullError):
        manager.save(3, state_of(3))
    manager.close()
    assert steps_in(tmp_path) == [1, 2]


def test_preflight_tells_of_this_manager(tmp_path, capsys):
    with holdfast.CheckpointManager(tmp_path, keep_last=2, save_at_end=False) as manager:
        report = manager.preflight(state_of(1))
    assert report.tensor_count == 1
    assert capsys.readouterr().out == f"{report}\n"
    assert steps_in(tmp_path) == []
    assert os.listdir(tmp_path) == ["holdfast-run.json"]
    assert RunFile(root_at(tmp_path)).read().unfinished == {}


def test_a_preflight_is_reported_to_subscribers(tmp_path):
    events = []
    with holdfast.subscribe(events.append), holdfast.CheckpointManager(tmp_path) as manager:
        manager.preflight(state_of(1))
        with pytest.raises(PreflightError):
            manager.preflight({"no": object()})
    first, second = (event for event in events if event.verb == "preflight")
    assert (first.path, first.error, first.detail["problems"]) == (str(tmp_path), None, [])
    assert second.error.startswith("PreflightError")
    assert len(second.detail["problems"]) == 1


def test_what_a_killed_preflight_left_is_removed_by_the_next_job_and_nothing_else(tmp_path):
    program = f"""
import os, signal
import holdfast
from holdfast._manager import preflight
preflight._Preflight._start_writer = lambda self: os.kill(os.getpid(), signal.SIGKILL)
with holdfast.CheckpointManager({str(tmp_path)!r}) as manager:
    manager.preflight({{}})
"""
    assert subprocess.run([*warm_python(), "-c", program], check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("preflight-*")
    assert list(left.iterdir())
    other = tmp_path / "preflight-0123456789ab"
    other.mkdir()
    (other / "rank-0").write_text("not by this run")
    with holdfast.CheckpointManager(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["holdfast-run.json", other.name]
    assert [path.name for path in other.iterdir()] == ["rank-0"]
