"""A manager on several ranks: they decide, save, restore, fail and stop together, and nobody waits for ever."""

from __future__ import annotations

import functools
import os
import signal
import time
import warnings
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import holdfast
from holdfast._manager import manager as module
from holdfast._manager.cadence import Cadence
from holdfast._manager.pending import PendingSaves, _View
from holdfast._manager.run import Run
from holdfast._manager.steps import folder_of
from holdfast.errors import NoUsableCheckpointError, RankDisagreementError, RunInUseError, StorageFullError
from tests.manager.managed import MoodyRoot, damage_data, not_by_python, steps_in
from tests.sharding import sharded

SIZE = 64


def sharded_state(step: float) -> dict[str, Any]:
    weight = sharded(torch.arange(float(SIZE)) + step)
    return {"model": {"weight": weight}, "seen": int(step), "mine": holdfast.PerRank({"rank": dist.get_rank()})}


def is_sharded_of(state: dict[str, Any], step: int) -> bool:
    weight = state["model"]["weight"]
    assert isinstance(weight, DTensor)
    whole = weight.full_tensor()
    return state["seen"] == step and bool(torch.equal(whole, torch.arange(float(SIZE)) + step))


# --- bodies, which run on every rank --------------------------------------------------------------------------------


def train_and_restore(root, async_save) -> tuple:
    with holdfast.CheckpointManager(root, every_steps=2, keep_last=2, background=async_save) as manager:
        assert manager.restore(sharded_state(0)) is None
        for step in range(1, 8):
            manager.maybe_save(step, sharded_state(step), metrics={"loss": step + dist.get_rank()})
        run = manager.run_id
    dist.barrier()
    state = sharded_state(0)
    with holdfast.CheckpointManager(root) as manager:
        restored = manager.restore(state)
        assert is_sharded_of(state, 7)
        assert manager.run_id == run
        return restored.step, [(info.step, info.metrics["loss"]) for info in manager.steps()]


def save_with_clocks_of_their_own(root) -> list[int]:
    clock = [1000.0 * dist.get_rank()]
    module.Cadence = functools.partial(Cadence, clock=lambda: clock[0])
    try:
        with holdfast.CheckpointManager(root, every_minutes=1, save_at_end=False) as manager:
            saved = []
            for step in range(1, 30):
                clock[0] += 11 * (1 + 3 * dist.get_rank())  # rank 1's clock is faster, and counts for nothing
                if manager.maybe_save(step, sharded_state(step)) is not None:
                    saved.append(step)
        return saved
    finally:
        module.Cadence = Cadence


def stop_by_a_signal_to_one(root, who) -> tuple:
    with holdfast.CheckpointManager(root) as manager:
        for step in range(1, 10_000):
            if step == 20 and dist.get_rank() == who:
                os.kill(os.getpid(), signal.SIGTERM)
            saved = manager.maybe_save(step, sharded_state(step))
            if manager.should_stop:
                there = [info.step for info in manager.steps()]
                return step, there, isinstance(saved, holdfast.SaveReport)
    raise AssertionError("nobody stopped")


def restore_over_damage(root) -> tuple:
    with holdfast.CheckpointManager(root) as manager:
        state = sharded_state(0)
        restored = manager.restore(state)
        assert is_sharded_of(state, restored.step)
        return restored.step, restored.lost_steps, [info.step for info in restored.set_aside]


def save_steps(root, *steps) -> None:
    with holdfast.CheckpointManager(root, save_at_end=False) as manager:
        for step in steps:
            manager.save(step, sharded_state(step))


def watch_ranks(root, async_save) -> list[tuple]:
    events: list[holdfast.Event] = []
    with (
        holdfast.subscribe(events.append),
        holdfast.CheckpointManager(root, every_steps=1, keep_last=1, background=async_save) as manager,
    ):
        for step in (1, 2):
            manager.maybe_save(step, sharded_state(step))
    return sorted({(event.verb, event.rank, event.world_size) for event in events})


def fail_the_last_step(root, who) -> tuple:
    """As rank ``who`` sees it: ranks may have different views of what became of a save."""
    moody = MoodyRoot(root)
    with (
        warnings.catch_warnings(record=True),
        holdfast.CheckpointManager(moody, every_steps=2, background=holdfast.Background(on_failure="warn")) as manager,
    ):
        warnings.simplefilter("always")
        manager.maybe_save(1, sharded_state(1))
        pending = manager.maybe_save(2, sharded_state(2))
        pending.exception()
        if dist.get_rank() == who:
            manager._saver.pending._newest = manager._saver.pending._newest._replace(committed=None)
        events: list[holdfast.Event] = []
        with holdfast.subscribe(events.append):
            manager.close()
    return [event.detail.get("reason") for event in events if event.name == "save"], steps_in(root)


class FailingOnRank1(MoodyRoot):
    """A disk that fails for step 2, if it is rank 1 that writes."""

    def child(self, name):
        if dist.get_rank() == 1:
            self.failing = {2}
        return super().child(name)


def go_on_after_a_failure(root, on_failure) -> list[str]:
    """Whatever fails is caught: the ranks must stay in step with each other."""
    told = []
    with holdfast.CheckpointManager(
        FailingOnRank1(root), background=holdfast.Background(on_failure=on_failure), save_at_end=False
    ) as manager:
        for step in range(1, 7):
            pending, view = manager._saver.pending, PendingSaves._view
            if step == 3 and dist.get_rank() == 0:  # ranks do not learn of the end of a save at the same moment
                pending._view = lambda: _View(frozenset(), {})
            elif step == 3:
                pending.wait()
            try:
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    manager.save(step, sharded_state(step))
            except OSError as error:
                told.append(f"step {step} raised {type(error).__name__}")
            pending._view = functools.partial(view, pending)
            told += [f"step {step} warned" for each in seen if "step 2 was not saved" in str(each.message)]
        manager.wait()
    return told


def save_where_rank_1_is_full(root) -> tuple:
    class Full(MoodyRoot):
        def child(self, name):
            if dist.get_rank() == 1:
                self.full = {2}
            return super().child(name)

    with holdfast.CheckpointManager(Full(root)) as manager:
        manager.save(1, sharded_state(1))
        manager.save(2, sharded_state(2))
        try:
            manager.wait()
        except StorageFullError as error:
            return error.rank, error.ranks
    raise AssertionError("there was room")


def raise_on_one_rank(root) -> None:
    with holdfast.CheckpointManager(root, every_steps=2) as manager:
        for step in range(1, 6):
            manager.maybe_save(step, sharded_state(step))
            if step == 3 and dist.get_rank() == 1:
                raise ZeroDivisionError


def refuse_state_on_one_rank(root, async_save) -> str:
    with holdfast.CheckpointManager(
        root, run_options=holdfast.RunOptions(parts=["model", "seen", "mine"]), background=async_save
    ) as manager:
        state = sharded_state(1)
        if dist.get_rank() == 1:
            del state["seen"]
        try:
            manager.save(1, state)
            manager.wait()
        except ValueError as error:
            told = str(error)
        manager.save(2, sharded_state(2))
        manager.save(3, sharded_state(3))
        manager.wait()
    return told


def open_what_is_in_use(root) -> str:
    with holdfast.CheckpointManager(root):
        try:
            holdfast.CheckpointManager(root).__enter__()
        except RunInUseError as error:
            return type(error).__name__
    return "nobody was told"


def open_different_roots(root) -> str:
    try:
        holdfast.CheckpointManager(f"{root}/{dist.get_rank()}").__enter__()
    except RankDisagreementError:
        return "told"
    return "not told"


def fail_to_open_on_one_rank(root) -> str:
    try:
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                warnings.simplefilter("error")
                not_by_python(patch, signal.SIGUSR1)
            with holdfast.CheckpointManager(f"{root}/run"):
                return "opened"
    except Exception as error:
        assert "SIGUSR1 will not be noticed" in str(error)  # noqa: PT017 - also what the other rank raised
    with holdfast.CheckpointManager(f"{root}/run"):
        return "told, and the run is free"


def train_in_two_groups(root) -> list[int]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[dist.get_rank() % 2]
    place = f"{root}/{dist.get_rank() % 2}"
    with holdfast.CheckpointManager(place, every_steps=2, process_group=mine) as manager:
        for step in range(1, 4 + dist.get_rank() % 2):  # one group goes on for longer
            manager.maybe_save(step, {"w": torch.full((5,), float(step)), "group": dist.get_rank() % 2})
    dist.barrier()
    state = {"w": torch.zeros(5), "group": None}
    with holdfast.CheckpointManager(place, process_group=mine) as manager:
        assert manager.restore(state).step == state["w"][0]
        assert state["group"] == dist.get_rank() % 2
        return [info.step for info in manager.steps()]


def restore_nothing_usable(root) -> str:
    try:
        with holdfast.CheckpointManager(root) as manager:
            manager.restore(sharded_state(0))
    except NoUsableCheckpointError as error:
        return str(error.steps)
    return "a fresh start"


def open_with_options_of_its_own(root, options) -> str:
    manager = holdfast.CheckpointManager(root, **(options if dist.get_rank() else {}))
    with pytest.raises(RankDisagreementError, match="with different options") as raised:
        manager.__enter__()
    return str(raised.value.views)


def open_in_memory() -> str:
    manager = holdfast.CheckpointManager("memory://of-several-ranks")
    with pytest.raises(ValueError, match="in the memory of one process, and this run has 2 ranks"):
        manager.save(1, {"w": torch.ones(2)})
    return "told"


class Odd(holdfast.keep.Policy):
    def choose(self, steps, now):
        return {info.step: "odd" for info in steps if info.step % 2}


def open_with_a_policy_of_its_own(root) -> str:
    with holdfast.CheckpointManager(
        root, keep=Odd() | holdfast.keep.last(2), on_signal=holdfast.OnSignal(signals=iter(["SIGTERM"])), every_steps=2
    ):
        return "opened"


def save_what_is_damaged_at_once(root) -> str:
    note, told = Run._note, ""

    def damaged_meanwhile(self, step):
        if step == 2:
            damage_data(root, 2)
        note(self, step)

    Run._note = damaged_meanwhile
    try:
        with holdfast.CheckpointManager(
            root, keep_last=1, keep=holdfast.Retention(verify_before_delete=True)
        ) as manager:
            for step in (1, 2, 3, 4):
                try:
                    manager.save(step, {"model": {"weight": torch.ones(10)}}, wait=True)
                    manager._run.wait_for_deletions()
                except Exception as error:
                    told = f"{type(error).__name__} at step {step}: {error}"
        return told
    finally:
        Run._note = note


# --- tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_save", [True, False])
def test_ranks_train_and_go_on_together(ranks, tmp_path, async_save):
    assert ranks(3).run(train_and_restore, tmp_path, async_save) == [(7, [(6, 6.0), (7, 7.0)])] * 3


def test_a_run_goes_on_with_another_number_of_ranks(ranks, tmp_path):
    def weights_only(step):
        return {"model": {"weight": torch.arange(float(SIZE)) + step}, "seen": 0}

    ranks(3).run(save_steps, tmp_path, 1, 2)
    state = weights_only(0)
    with holdfast.CheckpointManager(tmp_path) as manager:
        assert manager.restore(state).step == 2
        assert torch.equal(state["model"]["weight"], weights_only(2)["model"]["weight"])


def test_the_minutes_are_those_of_the_first_rank(ranks, tmp_path):
    first, second = ranks(2).run(save_with_clocks_of_their_own, tmp_path)
    assert first == second
    assert len(first) >= 3  # of 319 seconds; exchanges are announced some steps ahead
    assert steps_in(tmp_path) == first


@pytest.mark.parametrize("who", [0, 2])
def test_a_signal_to_one_rank_stops_all_at_one_step_which_is_committed(ranks, tmp_path, who):
    stopped = ranks(3).run(stop_by_a_signal_to_one, tmp_path, who)
    assert len({step for step, _, _ in stopped}) == 1
    step = stopped[0][0]
    assert step >= 20
    assert stopped == [(step, [step], True)] * 3


def test_all_ranks_walk_back_over_damage(ranks, tmp_path):
    ranks(2).run(save_steps, tmp_path, 5, 6, 9)
    for each in (6, 9):
        for file in (tmp_path / folder_of(each)).glob("data-*-1-0*"):  # what only rank 1 has written
            file.unlink()
    assert ranks(2).run(restore_over_damage, tmp_path) == [(5, 4, [9, 6])] * 2


def test_no_rank_begins_anew_if_nothing_is_intact(ranks, tmp_path):
    ranks(2).run(save_steps, tmp_path, 5)
    for file in (tmp_path / folder_of(5)).glob("data-*"):
        file.unlink()
    assert ranks(2).run(restore_nothing_usable, tmp_path) == ["[5]"] * 2


def test_all_ranks_raise_a_failure_at_the_same_save(ranks, tmp_path):
    first, second = ranks(2).run(go_on_after_a_failure, tmp_path, "error")
    assert first == second == ["step 3 raised OSError"]
    assert steps_in(tmp_path) == [1, 4, 5, 6]


def test_all_ranks_warn_of_a_failure_and_go_on(ranks, tmp_path):
    first, second = ranks(2).run(go_on_after_a_failure, tmp_path, "warn")
    assert first == second == ["step 3 warned"]
    assert steps_in(tmp_path) == [1, 3, 4, 5, 6]


@pytest.mark.parametrize("async_save", [True, False])
def test_events_tell_the_rank(ranks, tmp_path, async_save):
    first, second = ranks(2).run(watch_ranks, tmp_path, async_save)
    assert first == [("delete", 0, 2), ("save", 0, 2)]
    assert second == [("save", 1, 2)]


@pytest.mark.parametrize("who", [0, 1, None])
def test_all_ranks_save_the_last_step_again_if_any_knows_that_it_failed(ranks, tmp_path, who):
    expected = ([] if who is None else ["end"], [2])
    assert ranks(2).run(fail_the_last_step, tmp_path, who) == [expected, expected]


def test_a_full_disk_of_one_rank_is_reported_to_all(ranks, tmp_path):
    assert ranks(2).run(save_where_rank_1_is_full, tmp_path) == [(1, [1])] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["holdfast-run.json", folder_of(1)]


def test_a_rank_that_raises_does_not_leave_the_others_waiting(ranks, tmp_path):
    began = time.monotonic()
    first, second = ranks(2).run_raw(raise_on_one_rank, tmp_path, group_timeout=20)
    assert second.error.type_name == "ZeroDivisionError"
    assert first.error is not None
    assert not first.error.is_fatal
    assert time.monotonic() - began < 60
    assert steps_in(tmp_path) == [2]


@pytest.mark.parametrize("async_save", [True, False])
def test_a_state_that_one_rank_refuses_is_refused_by_all(ranks, tmp_path, async_save):
    told = ranks(2).run(refuse_state_on_one_rank, tmp_path, async_save)
    assert all("['seen'] are missing" in text for text in told)
    assert steps_in(tmp_path) == [2, 3]


def test_ranks_open_together_or_not_at_all(ranks, tmp_path):
    assert ranks(2).run(open_what_is_in_use, tmp_path / "a") == ["RunInUseError"] * 2
    assert ranks(2).run(open_different_roots, tmp_path / "b") == ["told"] * 2
    (tmp_path / "c").mkdir()
    assert ranks(2).run(fail_to_open_on_one_rank, tmp_path / "c") == ["told, and the run is free"] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"every_steps": 3},
        {"every_minutes": 3},
        {"on_signal": None},
        {"keep_last": 2},
        {"keep": holdfast.keep.best(1, "loss")},
        {"background": False},
        {"background": holdfast.Background(writer="process")},
        {"background": holdfast.Background(when_busy="copy")},
        {"background": holdfast.Background(check_tearing=True)},
        {"background": holdfast.Background(overlap=True)},
        {"background": holdfast.Background(on_failure="warn")},
        {"on_full_disk": holdfast.OnFullDisk(action="prune")},
        {"on_full_disk": holdfast.OnFullDisk(wait_seconds=60)},
        {"save_at_end": False},
        {"keep": holdfast.Retention(verify_before_delete=True)},
        {"keep": holdfast.Retention(dry_run=True)},
        {"run_options": holdfast.RunOptions(run_id="other")},
        {"run_options": holdfast.RunOptions(take_over=True)},
        {"run_options": holdfast.RunOptions(parts=["model"])},
        {"run_options": holdfast.RunOptions(read_only=True)},
    ],
    ids=lambda options: str(next(iter(options.values())))[:60],
)
def test_ranks_with_different_options_get_an_error_when_they_open(ranks, tmp_path, options):
    first, second = ranks(2).run(open_with_options_of_its_own, tmp_path, options)
    assert first == second
    ((name, given),) = options.items()
    named = {"keep_last": "Retention.policy", "on_signal": "signals", "keep": "Retention."}.get(name, name)
    assert (f"{type(given).__name__}." if is_dataclass(given) and name != "keep" else named) in first
    assert first.count("=") == 2  # what is the same is not told
    assert not any(tmp_path.iterdir())


def test_ranks_cannot_share_the_memory_of_one_process(ranks):
    assert ranks(2).run(open_in_memory) == ["told"] * 2


def test_ranks_with_the_same_options_open(ranks, tmp_path):
    assert ranks(2).run(open_with_a_policy_of_its_own, tmp_path) == ["opened"] * 2


def test_all_ranks_get_the_error_of_damage_that_is_found_before_a_deletion(ranks, tmp_path):
    first, second = ranks(2).run(save_what_is_damaged_at_once, tmp_path)
    assert first.startswith("DamagedCheckpointError at step 3")
    assert second.startswith("RemoteError at step 3: the save of step 2 failed on another rank: DamagedCheckpointError")
    assert steps_in(tmp_path) == [2, 4]


def test_groups_of_ranks_have_runs_of_their_own(ranks, tmp_path):
    assert ranks(4).run(train_in_two_groups, tmp_path) == [[2, 3], [2, 4], [2, 3], [2, 4]]
