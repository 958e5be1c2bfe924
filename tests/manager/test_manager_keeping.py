"""Which checkpoints of a real run stay: policies at work, metrics, pins, and deletions by hand."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from contextlib import nullcontext
from datetime import datetime, timedelta, timezone

import pytest
import torch

import holdfast
from holdfast import keep
from holdfast._base import provenance
from holdfast._manager import run as run_module
from holdfast._manager import step_deletion
from holdfast._manager.run import Run
from holdfast._manager.run_file import RunFile
from holdfast._manager.step_deletion import Deleter
from holdfast._manager.steps import folder_of
from holdfast.errors import CheckpointExistsError, CheckpointNotFoundError, DamagedCheckpointError, NotDeletedError
from holdfast.stores import root_at
from tests.manager.managed import a_run, damage_data, restored_from, state_of, steps_in

LOSSES = {1: 9.0, 2: 3.0, 3: 5.0, 4: 2.0, 5: float("nan"), 6: 8.0, 7: 7.0}


def run_with_losses(root, **options) -> list[int]:
    """The steps that are there after each save."""
    with holdfast.CheckpointManager(root, every_steps=1, **options) as manager:
        for step, loss in LOSSES.items():
            manager.maybe_save(step, state_of(step), metrics={"loss": torch.tensor(loss), "gain": -loss})
            manager.wait()
    return steps_in(root)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep_last": 2}, [6, 7]),
        ({"keep": keep.best(1, "loss")}, [4, 7]),
        ({"keep": keep.best(2, "loss")}, [2, 4, 7]),
        ({"keep": keep.best(1, "gain", "max")}, [4, 7]),
        ({"keep_last": 2, "keep": keep.best(1, "loss") | keep.every(3)}, [3, 4, 6, 7]),
        ({"keep": keep.last(1) | keep.every(5)}, [5, 7]),
        ({"keep": keep.every(4), "keep_last": 3}, [4, 5, 6, 7]),
        ({"keep": holdfast.Retention(policy=keep.every(4)), "keep_last": 3}, [4, 5, 6, 7]),
        ({"keep": keep.everything().within(max_age=timedelta(microseconds=1))}, [7]),
        ({"keep": keep.everything().within(max_bytes="1B")}, [7]),
    ],
)
def test_policies_in_a_run(tmp_path, options, kept):
    assert run_with_losses(tmp_path, **options) == kept
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [folder_of(step) for step in kept]


def test_metrics_are_numbers_again_and_the_best_is_found(tmp_path):
    run_with_losses(tmp_path)
    manager = holdfast.CheckpointManager(tmp_path)
    metrics = {info.step: info.metrics for info in manager.steps()}
    assert metrics[2] == {"loss": 3.0, "gain": -3.0}
    assert metrics[5]["loss"] != metrics[5]["loss"]  # not a number, and no reason not to save
    assert (manager.best("loss").step, manager.best("loss", "max").step, manager.best("gain", "max").step) == (4, 1, 4)
    assert manager.best("accuracy") is None
    assert manager.latest().step == 7


def test_metrics_that_are_no_numbers_are_refused_and_nothing_is_saved(tmp_path):
    with holdfast.CheckpointManager(tmp_path, save_at_end=False) as manager:
        for wrong in ("low", torch.ones(2), None, 10**400):
            with pytest.raises(TypeError, match="the metric 'loss' must be a number"):
                manager.save(1, state_of(1), metrics={"loss": wrong})
        with pytest.raises(TypeError, match="metrics is a dict"):
            manager.save(1, state_of(1), metrics=[0.5])
    assert steps_in(tmp_path) == []


def test_a_better_one_that_comes_later_takes_the_place(tmp_path):
    with holdfast.CheckpointManager(tmp_path, keep=holdfast.keep.best(1, "loss"), keep_last=1) as manager:
        seen = []
        for step, loss in enumerate([5.0, 4.0, 6.0, 3.0, 9.0], start=1):
            manager.save(step, state_of(step), metrics={"loss": loss})
            manager.wait()
            seen.append([info.step for info in manager.steps()])
    assert seen == [[1], [2], [2, 3], [4], [4, 5]]


def test_pinned_steps_stay_until_they_are_unpinned(tmp_path):
    with holdfast.CheckpointManager(tmp_path, keep_last=1, every_steps=1) as manager:
        manager.maybe_save(1, state_of(1))
        manager.wait()
        holdfast.CheckpointManager(tmp_path).pin(1)  # as from another program: nothing else is touched
        manager.maybe_save(2, state_of(2))
        manager.maybe_save(3, state_of(3))
        manager.wait()
        assert [(info.step, info.pinned) for info in manager.steps()] == [(1, True), (3, False)]
        manager.unpin(1)
        assert [info.step for info in manager.would_delete()] == [1]
        manager.maybe_save(4, state_of(4))
    assert steps_in(tmp_path) == [4]
    with pytest.raises(CheckpointNotFoundError, match="There are: 4"):
        manager.pin(1)


def test_delete_deletes_pinned_ones_too_and_only_what_the_run_saved(tmp_path):
    a_run(tmp_path, 1, 2, 3)
    holdfast.save(state_of(5), tmp_path / folder_of(5))
    with holdfast.CheckpointManager(tmp_path) as manager:
        manager.pin(2)
        manager.delete(2)
        assert [info.step for info in manager.steps()] == [1, 3, 5]
        with pytest.raises(CheckpointNotFoundError, match="There are: 1, 3, 5"):
            manager.delete(2)
        with pytest.raises(ValueError, match="not saved by this run"):
            manager.delete(5)
    assert steps_in(tmp_path) == [1, 3, 5]
    assert not (tmp_path / folder_of(2)).exists()


def test_what_could_not_be_deleted_is_reported(tmp_path, moody, monkeypatch):
    a_run(tmp_path, 1, 2)

    def refuse(self, names):
        raise PermissionError(13, "Permission denied", "a file")

    with holdfast.CheckpointManager(moody) as manager:
        monkeypatch.setattr("holdfast.stores.LocalStore.delete", refuse)
        with pytest.raises(NotDeletedError, match=r"step-00000001 was not deleted: .*Permission denied") as raised:
            manager.delete(1)
        assert raised.value.path == str(tmp_path / folder_of(1))
        monkeypatch.undo()
        manager.delete(1)
    assert steps_in(tmp_path) == [2]


def test_a_dry_run_tells_and_deletes_nothing_but_by_hand(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with holdfast.CheckpointManager(
        tmp_path, keep_last=1, every_steps=1, keep=holdfast.Retention(dry_run=True)
    ) as manager:
        for step in (1, 2, 3):
            manager.maybe_save(step, state_of(step))
        manager.wait()
        assert [info.step for info in manager.would_delete()] == [1, 2]
        assert [info.step for info in manager.steps()] == [1, 2, 3]
        told = [record.message.split(" at ")[0] for record in caplog.records if "would be deleted" in record.message]
        assert told == ["step 1", "step 1", "step 2"]
        assert "deleted 5" not in caplog.text
        manager.delete(2)
    assert steps_in(tmp_path) == [1, 3]


@pytest.mark.parametrize("fails", [False, True])
def test_deletions_are_reported_to_the_last_one(tmp_path, monkeypatch, fails):
    events: list[holdfast.Event] = []
    delete = Deleter.delete

    def delete_late(self, doomed):
        time.sleep(0.2)  # the block ends before
        return delete(self, doomed)

    monkeypatch.setattr(Deleter, "delete", delete_late)

    def program() -> None:
        with (
            holdfast.subscribe(events.append),
            holdfast.CheckpointManager(tmp_path, keep_last=1, every_steps=1) as manager,
        ):
            for step in (1, 2):
                manager.maybe_save(step, state_of(step))
            if fails:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        program()
    (told,) = [event for event in events if event.name == "delete"]
    assert (told.step, told.path, told.detail["outcome"]) == (1, str(tmp_path / folder_of(1)), "deleted")
    assert told.nbytes > 4000


def damage_what_is_committed(root, monkeypatch, *steps) -> None:
    note = Run._note

    def damaged_meanwhile(self, step):
        if step in steps:
            damage_data(root, step)
        note(self, step)

    monkeypatch.setattr(Run, "_note", damaged_meanwhile)


@pytest.mark.parametrize("async_save", [True, False])
def test_nothing_is_deleted_for_a_checkpoint_that_turns_out_to_be_damaged(tmp_path, monkeypatch, async_save):
    a_run(tmp_path, 1)
    damage_what_is_committed(tmp_path, monkeypatch, 2)
    manager = holdfast.CheckpointManager(
        tmp_path, keep_last=1, keep=holdfast.Retention(verify_before_delete=True), background=async_save
    )
    with manager:
        manager.save(2, state_of(2))
        with pytest.raises(DamagedCheckpointError, match="step-00000002"):
            manager.wait()
        assert [info.step for info in manager.steps() if info.set_aside] == [2]
        assert (manager.latest().step, steps_in(tmp_path)) == (1, [1, 2])
        manager.save(3, state_of(3))  # it is told once
    assert steps_in(tmp_path) == [2, 3]
    assert restored_from(tmp_path)[0].step == 3


def test_damage_that_is_found_before_a_deletion_is_reported_by_the_next_save(tmp_path, monkeypatch):
    a_run(tmp_path, 1)
    damage_what_is_committed(tmp_path, monkeypatch, 2)
    with holdfast.CheckpointManager(
        tmp_path, keep_last=1, keep=holdfast.Retention(verify_before_delete=True), background=False
    ) as manager:
        manager.save(2, state_of(2))
        manager._run.wait_for_deletions()
        with pytest.raises(DamagedCheckpointError, match="step-00000002"):
            manager.save(3, state_of(3))
        manager.save(3, state_of(3))
    assert steps_in(tmp_path) == [2, 3]


def test_damage_that_is_found_before_a_deletion_may_be_a_warning(tmp_path, monkeypatch):
    a_run(tmp_path, 1)
    damage_what_is_committed(tmp_path, monkeypatch, 2)
    manager = holdfast.CheckpointManager(
        tmp_path,
        keep_last=1,
        keep=holdfast.Retention(verify_before_delete=True),
        background=holdfast.Background(on_failure="warn"),
    )
    with pytest.warns(RuntimeWarning, match="step 2 was not saved: DamagedCheckpointError"), manager:
        manager.save(2, state_of(2))
    assert steps_in(tmp_path) == [1, 2]


def test_a_checkpoint_that_this_run_did_not_save_is_not_replaced(tmp_path):
    holdfast.save({"weight": torch.ones(2)}, tmp_path / folder_of(2), metadata={"by": "hand"})
    with holdfast.CheckpointManager(tmp_path, save_at_end=False, background=False) as manager:
        manager.save(1, state_of(1))
        with pytest.raises(CheckpointExistsError, match=r"was not saved by this run .*Move it away"):
            manager.save(2, state_of(2))
        assert RunFile(manager.root).read().unfinished == {}  # or a restart would tidy up there
        manager.save(3, state_of(3))
    assert holdfast.open(tmp_path / folder_of(2)).metadata == {"by": "hand"}
    assert steps_in(tmp_path) == [1, 2, 3]


def test_a_damaged_checkpoint_of_others_is_not_replaced_and_one_of_ours_is(tmp_path):
    a_run(tmp_path, 1)
    holdfast.save({"weight": torch.ones(2)}, tmp_path / folder_of(2))
    for step in (1, 2):
        (tmp_path / folder_of(step) / "holdfast.json").write_text("{}")
    with holdfast.CheckpointManager(tmp_path, save_at_end=False, background=False) as manager:
        manager.save(1, state_of(1))
        with pytest.raises(CheckpointExistsError, match="cannot be read"):
            manager.save(2, state_of(2))
        assert [info.step for info in manager.steps() if info.is_usable] == [1]


def test_a_set_aside_step_stays_and_does_not_count(tmp_path):
    a_run(tmp_path, 1, 2, 3)
    damage_data(tmp_path, 3)
    with holdfast.CheckpointManager(tmp_path, keep_last=2, every_steps=1) as manager:
        assert manager.restore(state_of(0)).step == 2
        manager.maybe_save(4, state_of(4))
    assert steps_in(tmp_path) == [2, 3, 4]
    assert holdfast.CheckpointManager(tmp_path).latest().step == 4


def test_after_going_back_to_an_older_step_what_is_saved_then_stays(tmp_path):
    with holdfast.CheckpointManager(tmp_path, keep_last=2, every_steps=10) as manager:
        for step in (10, 20, 30):
            manager.maybe_save(step, state_of(step))
        manager.wait()
        manager.delete(30)
        manager.restore(state_of(0), step=20)
        manager.save(25, state_of(25))
    assert steps_in(tmp_path) == [20, 25]


class ClockThatIsWrong:
    def __init__(self, hours):
        self.hours = hours

    def now(self, zone):
        return datetime.now(zone) + timedelta(hours=self.hours)


@pytest.mark.parametrize("hours", [-24, 0])
def test_what_was_saved_just_now_stays_though_neither_its_number_nor_its_clock_is_the_newest(
    tmp_path, monkeypatch, hours
):
    a_run(tmp_path, 10, 20, 30)
    monkeypatch.setattr(provenance, "datetime", ClockThatIsWrong(hours))
    with holdfast.CheckpointManager(tmp_path, keep_last=2, save_at_end=False) as manager:
        manager.restore(state_of(0), step=10)
        manager.save(11, state_of(11))
        manager.wait()
        assert [info.step for info in manager.steps()] == [11, 20, 30]
        assert manager.would_delete() == []
        manager.save(12, state_of(12))
        manager.wait()
        assert [info.step for info in manager.steps()] == [12, 20, 30]


def test_without_a_rule_a_save_does_not_look_at_all_that_were_saved_before(moody):
    a_run(moody, 1, 2, 3, 4, 5)
    with holdfast.CheckpointManager(moody, background=False) as manager:
        moody.bytes_read.clear()
        manager.save(6, state_of(6))
        read_by_one = dict(moody.bytes_read)
        for step in range(7, 20):
            manager.save(step, state_of(step))
        moody.bytes_read.clear()
        manager.save(20, state_of(20))
    assert moody.bytes_read == pytest.approx(read_by_one, rel=0.05)


def test_a_pin_of_what_was_removed_by_hand_can_be_undone(tmp_path):
    a_run(tmp_path, 1, 2)
    with holdfast.CheckpointManager(tmp_path) as manager:
        manager.pin(1)
        shutil.rmtree(tmp_path / folder_of(1))
        manager.unpin(1)
        with pytest.raises(CheckpointNotFoundError):
            manager.unpin(1)
    a_run(tmp_path, 1)
    assert [info.pinned for info in holdfast.CheckpointManager(tmp_path).steps()] == [False, False]


@pytest.mark.parametrize("by_another_process", [False, True])
def test_a_step_that_is_just_being_deleted_cannot_be_pinned(tmp_path, monkeypatch, by_another_process):
    a_run(tmp_path, 1)
    invalidate, deleting = step_deletion._invalidate, threading.Event()

    def slowly(store):
        deleting.set()
        wait_for_pin(tmp_path, 1)
        return invalidate(store)

    monkeypatch.setattr(step_deletion, "_invalidate", slowly)
    with holdfast.CheckpointManager(tmp_path, keep_last=1, background=False) as manager:
        manager.save(2, state_of(2))
        assert deleting.wait(30)
        with pytest.raises(CheckpointNotFoundError, match="step 1"):
            (holdfast.CheckpointManager(tmp_path) if by_another_process else manager).pin(1)
    assert RunFile(manager.root).read().pinned == frozenset()


def wait_for_pin(root, step) -> None:
    deadline = time.monotonic() + 30
    while step not in RunFile(root_at(root)).read().pinned:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_pin_does_not_wait_for_ever_for_a_deletion_that_was_given_up(tmp_path, monkeypatch):
    a_run(tmp_path, 1)
    run_file = RunFile(root_at(tmp_path))
    run_file.claim("a job that will be killed")
    run_file.begin("a job that will be killed", {folder_of(1): "0123456789abcdef"})
    monkeypatch.setattr(run_module, "_LONGEST_DELETION", 0.05)
    holdfast.CheckpointManager(tmp_path).pin(1)
    assert run_file.read().pinned == {1}


class ClockAhead(datetime):
    """A clock that is a year ahead."""

    @classmethod
    def now(cls, tz=None):
        return datetime.now(tz) + timedelta(days=365)


@pytest.mark.parametrize(
    "options",
    [
        {"keep": keep.everything().within(max_age=timedelta(days=2))},
        {"keep": keep.newer_than(timedelta(days=2))},
    ],
)
def test_one_save_with_a_clock_a_year_ahead_deletes_nothing(tmp_path, monkeypatch, options):
    a_run(tmp_path, 1, 2, 3)
    with monkeypatch.context() as ahead:
        for module in ("_base.provenance", "_manager.run"):
            ahead.setattr(f"holdfast.{module}.datetime", ClockAhead)
        a_run(tmp_path, 4, **options)
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    assert holdfast.CheckpointManager(tmp_path).steps()[-1].saved_at > datetime.now(timezone.utc) + timedelta(days=300)
    a_run(tmp_path, 5, 6, 7, **options)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
