"""When a manager saves: by steps, by the clock, at the end, and never twice what is saved already."""

from __future__ import annotations

import functools
import signal
import warnings
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

import holdfast
from holdfast._manager import manager as module
from holdfast._manager.cadence import Cadence
from holdfast.errors import StorageFullError
from tests.manager.managed import a_run, is_state_of, restored_from, state_of, steps_in, train


@pytest.fixture
def clock(monkeypatch):
    """The clock of managers, which stands still unless a test sets it."""

    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "Cadence", functools.partial(Cadence, clock=clock))
    return clock


@pytest.mark.parametrize("async_save", [True, False])
def test_every_steps_and_the_last_one(tmp_path, async_save):
    with holdfast.CheckpointManager(tmp_path, every_steps=3, background=async_save) as manager:
        train(manager, range(1, 8))
    assert steps_in(tmp_path) == [3, 6, 7]
    assert {info.step: info.metadata for info in holdfast.CheckpointManager(tmp_path).steps()} == {3: {}, 6: {}, 7: {}}
    for step in (3, 6, 7):
        assert is_state_of(holdfast.open(tmp_path / f"step-0000000{step}").read(), step)


def test_what_a_call_returns_tells_whether_it_saved(tmp_path):
    with holdfast.CheckpointManager(tmp_path, every_steps=2) as manager:
        assert manager.maybe_save(1, state_of(1)) is None
        pending = manager.maybe_save(2, state_of(2))
        assert isinstance(pending, holdfast.PendingSave)
        assert pending.result().path == pending.path == str(tmp_path / "step-00000002")
        assert isinstance(manager.save(3, state_of(3), wait=True), holdfast.SaveReport)
    with holdfast.CheckpointManager(tmp_path, every_steps=2, background=False) as manager:
        assert isinstance(manager.maybe_save(4, state_of(4)), holdfast.SaveReport)
        assert isinstance(manager.save(5, state_of(5), wait=False), holdfast.PendingSave)


def test_every_minutes(tmp_path, clock):
    with holdfast.CheckpointManager(tmp_path, every_minutes=10, save_at_end=False) as manager:
        for step in range(1, 8):
            clock.now += 4 * 60
            manager.maybe_save(step, state_of(step))
    assert steps_in(tmp_path) == [3, 6]


def test_steps_and_minutes_together_and_a_save_in_between_begins_the_minutes_anew(tmp_path, clock):
    with holdfast.CheckpointManager(tmp_path, every_steps=5, every_minutes=10, save_at_end=False) as manager:
        for step in range(1, 13):
            clock.now += 4 * 60
            if step == 7:
                manager.save(step, state_of(step))
            manager.maybe_save(step, state_of(step))
    # 3 by the clock, 5 by its number, 7 by hand (and not twice), 10 by both, and 12 would be too early
    assert steps_in(tmp_path) == [3, 5, 7, 10]


def test_the_reason_is_noted_in_the_checkpoint(tmp_path, clock):
    with holdfast.CheckpointManager(tmp_path, every_steps=5, every_minutes=10) as manager:
        for step in range(1, 7):
            clock.now += 4 * 60
            manager.maybe_save(step, state_of(step))
        manager.save(2, state_of(2))
    noted = {step: holdfast.open(tmp_path / f"step-0000000{step}").metadata["holdfast"] for step in steps_in(tmp_path)}
    assert {step: note["reason"] for step, note in noted.items()} == {2: "asked for", 3: "minutes", 5: "steps"}
    assert {note["run"] for note in noted.values()} == {manager.run_id}


def events_of_saves(events: list[holdfast.Event]) -> list[tuple[int | None, str]]:
    return [(event.step, event.detail["reason"]) for event in events if event.name == "save"]


def test_the_last_step_is_saved_once_and_a_saved_one_not_again(tmp_path):
    events: list[holdfast.Event] = []
    with holdfast.subscribe(events.append), holdfast.CheckpointManager(tmp_path, every_steps=2) as manager:
        train(manager, range(1, 5))
    assert events_of_saves(events) == [(2, "steps"), (4, "steps")]
    with holdfast.subscribe(events.append), holdfast.CheckpointManager(tmp_path, every_steps=2) as manager:
        assert manager.restore(state_of(0)).step == 4
    with holdfast.subscribe(events.append), holdfast.CheckpointManager(tmp_path, every_steps=2) as manager:
        manager.restore(state_of(0))
        manager.maybe_save(4, state_of(4))  # as a loop does that begins one too early
    assert events_of_saves(events)[2:] == []
    with holdfast.subscribe(events.append), holdfast.CheckpointManager(tmp_path) as manager:
        train(manager, range(5, 8))
        manager.close()
        manager.close()
    assert events_of_saves(events)[2:] == [(7, "end")]


def test_the_save_at_the_end_has_what_came_with_the_step(tmp_path):
    with warnings.catch_warnings(), holdfast.CheckpointManager(tmp_path) as manager:
        warnings.simplefilter("error")
        loss = torch.tensor(0.5, requires_grad=True) * 1
        manager.maybe_save(1, state_of(1), metrics={"loss": loss}, metadata={"epoch": 3})
    (info,) = manager.steps()
    assert (info.metrics, info.metadata) == ({"loss": 0.5}, {"epoch": 3})


def test_a_loss_is_not_kept_with_all_that_it_was_computed_from(tmp_path):
    with holdfast.CheckpointManager(tmp_path, save_at_end=False) as manager:
        loss = (torch.ones(3, requires_grad=True) * 2).sum()
        alive = weakref.ref(loss)
        manager.maybe_save(1, state_of(1), metrics={"loss": loss})
        del loss
        assert alive() is None


def test_without_a_save_at_the_end_there_is_none(tmp_path):
    with holdfast.CheckpointManager(tmp_path, every_steps=2, save_at_end=False) as manager:
        train(manager, range(1, 4))
    assert steps_in(tmp_path) == [2]


def test_after_going_back_by_hand_the_last_state_is_saved(tmp_path):
    with holdfast.CheckpointManager(tmp_path, every_steps=10) as manager:
        train(manager, range(9, 11))
        train(manager, range(4, 7))
    assert steps_in(tmp_path) == [6, 10]


def test_after_an_exception_nothing_is_saved_but_pending_saves_are_committed(tmp_path):
    class Mistake(Exception):
        pass

    def program() -> None:
        with holdfast.CheckpointManager(tmp_path, every_steps=2) as manager:
            train(manager, range(1, 4))
            raise Mistake

    with pytest.raises(Mistake):
        program()
    assert steps_in(tmp_path) == [2]
    assert restored_from(tmp_path)[0].step == 2  # and the run is free for others


def test_ctrl_c_in_the_block_commits_what_is_pending_and_is_not_masked(tmp_path):
    def program() -> None:
        with holdfast.CheckpointManager(tmp_path, every_steps=2) as manager:
            train(manager, range(1, 4))
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            program()
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps_in(tmp_path) == [2]
    assert restored_from(tmp_path)[0].step == 2


def test_a_signal_saves_the_step_at_once_and_stops(tmp_path):
    before, events = signal.getsignal(signal.SIGTERM), []
    with holdfast.subscribe(events.append), holdfast.CheckpointManager(tmp_path) as manager:
        for step in range(1, 10):
            if step == 4:
                signal.raise_signal(signal.SIGTERM)
                assert not manager.should_stop
            saved = manager.maybe_save(step, state_of(step))
            if manager.should_stop:
                assert isinstance(saved, holdfast.SaveReport)  # committed by now
                break
    assert events_of_saves(events) == [(4, "preemption")]
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_state_is_saved_before_a_stop_even_if_a_save_before_had_failed(tmp_path, moody):
    moody.failing = {2}

    def program() -> None:
        with holdfast.CheckpointManager(moody, every_steps=2) as manager:
            train(manager, range(1, 3))
            signal.raise_signal(signal.SIGTERM)
            manager.maybe_save(3, state_of(3))
            assert manager.should_stop

    with pytest.raises(OSError, match="Input/output"):
        program()
    assert steps_in(tmp_path) == [3]


@pytest.mark.parametrize("wait", [True, False])
def test_a_step_that_is_saved_already_is_not_saved_again_before_a_stop(tmp_path, wait):
    events: list[holdfast.Event] = []
    with holdfast.subscribe(events.append), holdfast.CheckpointManager(tmp_path) as manager:
        manager.save(3, state_of(3), wait=wait)
        signal.raise_signal(signal.SIGTERM)
        saved = manager.maybe_save(3, state_of(3))
        assert manager.should_stop
        assert saved is None if wait else isinstance(saved, holdfast.SaveReport)
        assert steps_in(tmp_path) == [3]  # committed by now
    assert events_of_saves(events) == [(3, "asked for")]


def test_a_step_whose_save_failed_is_saved_again_before_a_stop(tmp_path, moody):
    moody.failing = {3}
    manager = holdfast.CheckpointManager(moody, background=holdfast.Background(on_failure="warn"))
    manager.save(3, state_of(3)).exception()
    moody.failing = set()
    signal.raise_signal(signal.SIGTERM)
    assert isinstance(manager.maybe_save(3, state_of(3)), holdfast.SaveReport)
    with pytest.warns(RuntimeWarning, match="step 3 was saved at the second attempt only"):
        manager.close()
    assert steps_in(tmp_path) == [3]


def test_before_a_stop_nobody_waits_for_room_longer_than_there_is_time(tmp_path, moody):
    moody.full = {1}
    with holdfast.CheckpointManager(
        moody,
        on_full_disk=holdfast.OnFullDisk(action="wait"),
        on_signal=holdfast.OnSignal(grace_seconds=0.5),
        save_at_end=False,
    ) as manager:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StorageFullError, match="before the program has to end"):
            manager.maybe_save(1, state_of(1))


@pytest.mark.parametrize(("took", "is_told"), [(20.0, True), (10.0, False)])
def test_too_little_time_for_a_save_is_reported(tmp_path, caplog, took, is_told):
    with holdfast.CheckpointManager(
        tmp_path, background=False, on_signal=holdfast.OnSignal(grace_seconds=30)
    ) as manager:
        report = manager.save(1, state_of(1))
        manager._saver._newest = replace(report, seconds=took)
        signal.raise_signal(signal.SIGTERM)
        manager.maybe_save(2, state_of(2))
    assert ("s are left to save in before the program is ended, and the last save took 20 s" in caplog.text) == is_told
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.parametrize("error", [SystemExit(0), ZeroDivisionError()])
def test_a_last_step_that_is_not_saved_because_of_an_exception_is_reported(tmp_path, caplog, error):
    for every in (2, 3):

        def program(every: int = every) -> None:
            with holdfast.CheckpointManager(tmp_path / str(every), every_steps=every) as manager:
                train(manager, range(1, 4))
                raise error

        with pytest.raises(type(error)):
            program()
    told = [record.getMessage() for record in caplog.records if "not saved" in record.getMessage()]
    assert told == [f"step 3 is not saved, because the block was left by {type(error).__name__}"]
    assert steps_in(tmp_path / "2") == [2]


def test_steps_of_numpy_are_steps_and_others_are_refused_at_once(tmp_path):
    with holdfast.CheckpointManager(tmp_path, every_steps=100) as manager:
        manager.maybe_save(np.int64(5), state_of(5))
        for wrong in (-1, 10**18):
            with pytest.raises(ValueError, match="whole number"):
                manager.maybe_save(wrong, state_of(0))
        for wrong in (1.0, "3", None, True):
            with pytest.raises(TypeError, match="whole number"):
                manager.save(wrong, state_of(0))
    assert steps_in(tmp_path) == [5]
    with holdfast.CheckpointManager(tmp_path, save_at_end=False) as manager:
        for wrong in ("5", 5.0, True):
            for method in (manager.pin, manager.unpin, manager.delete, lambda step: manager.restore({}, step=step)):
                with pytest.raises(TypeError, match="whole number"):
                    method(wrong)
        manager.restore(state_of(0), step=np.int64(5))
        manager.pin(np.int64(5))
        manager.unpin(np.int64(5))
        manager.delete(np.int64(5))
    assert steps_in(tmp_path) == []


def test_a_step_that_is_saved_again_is_replaced(tmp_path):
    a_run(tmp_path, 1, 2)
    with holdfast.CheckpointManager(tmp_path) as manager:
        before = manager.latest()
        manager.save(2, state_of(99), metrics={"loss": 7.0})
        manager.wait()
        after = manager.latest()
    assert (after.step, after.metrics) == (2, {"loss": 7.0})
    assert after.identity != before.identity
    assert is_state_of(restored_from(tmp_path)[1], 99)
    assert len(list((tmp_path / "step-00000002").iterdir())) == 2
