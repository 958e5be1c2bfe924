"""A disk that fails for a moment, or may not be read: no older step is taken in silence, nothing is deleted for it."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import uuid
from dataclasses import replace

import fsspec
import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast._manager.run_file import RunFile
from holdfast._manager.run_owner import Owner
from holdfast._manager.steps import folder_of
from holdfast._stores.fsspec_store import FsspecRoot
from holdfast._tools.listing.listing import list_place
from holdfast.errors import NotDeletedError, UnreadableCheckpointError
from holdfast.stores import LocalRoot
from tests.manager.io_faults import IoFaults
from tests.manager.managed import a_run, damage_data, is_state_of, state_of, steps_in

ERRORS = [errno.EIO, errno.ESTALE, errno.EACCES, errno.ENFILE]


def try_to_restore(root, **options):
    """What was restored and what was raised: one of the two is None."""
    state = state_of(0)
    try:
        with holdfast.CheckpointManager(root, **options) as manager:
            restored = manager.restore(state)
    except OSError as error:
        return None, error
    assert restored is not None, "a failing disk is no fresh start"
    assert is_state_of(state, restored.step)
    return restored, None


def unreadable(place, *steps, number=errno.EACCES, always=True):
    """Faults that keep this process from reading what is inside of the folders of these steps."""
    folders = tuple(f"{folder_of(step)}/" for step in steps)
    return IoFaults(place, number_of_error=number, names=lambda call, name: name.startswith(folders), always=always)


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_after_any_single_error_the_newest_is_restored_or_the_error_is_raised(tmp_path, number, caplog):
    a_run(tmp_path / "run", 1, 2)
    shutil.copytree(tmp_path / "run", tmp_path / "counted")
    counting = IoFaults(tmp_path / "counted")
    with counting.on_disk():
        assert try_to_restore(tmp_path / "counted")[0].step == 2
    assert len(counting.calls) > 40
    assert any("set-aside.json" in call for call in counting.calls)

    outcomes = set()
    for at in range(len(counting.calls)):
        root = shutil.copytree(tmp_path / "run", tmp_path / f"fails-at-{at}")
        faults = IoFaults(root, at, number)
        with faults.on_disk():
            restored, error = try_to_restore(root)
        assert faults.failed is not None
        assert error is not None or restored.step == 2, faults.failed
        assert not list(root.glob("*/set-aside.json")), faults.failed
        assert steps_in(root) == [1, 2]
        outcomes.add("raised" if restored is None else "restored")
        shutil.rmtree(root)
    assert outcomes == {"raised", "restored"}


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_the_same_at_a_url(number):
    name, files = f"/faults-{uuid.uuid4().hex}", fsspec.filesystem("memory")
    a_run(FsspecRoot(f"memory:/{name}/run"), 1, 2)
    try:
        counting = IoFaults(f"{name}/run")
        with counting.in_fsspec_memory():
            assert try_to_restore(FsspecRoot(f"memory:/{name}/run"))[0].step == 2
        assert any("set-aside.json" in call for call in counting.calls)
        for at in range(len(counting.calls)):
            files.copy(f"{name}/run", f"{name}/{at}", recursive=True)
            faults = IoFaults(f"{name}/{at}", at, number)
            with faults.in_fsspec_memory():
                restored, error = try_to_restore(FsspecRoot(f"memory:/{name}/{at}"))
            assert faults.failed is not None
            assert error is not None or restored.step == 2, faults.failed
            assert not files.glob(f"{name}/{at}/*/set-aside.json")
    finally:
        files.rm(name, recursive=True)


@pytest.mark.parametrize(
    "options", [{}, {"run_options": holdfast.RunOptions(read_only=True)}], ids=["training", "read-only"]
)
def test_a_step_that_another_user_may_not_read_is_not_passed_over(tmp_path, options):
    a_run(tmp_path, 1, 2)
    with unreadable(tmp_path, 2).on_disk():
        restored, error = try_to_restore(tmp_path, **options)
        assert restored is None
        assert isinstance(error, UnreadableCheckpointError)
        assert (error.step, error.path) == (2, str(tmp_path / folder_of(2)))
        assert "Permission denied" in error.reason
        assert "restore(state, step=" in str(error)
        with holdfast.CheckpointManager(tmp_path, run_options=holdfast.RunOptions(read_only=True)) as manager:
            assert [info.unreadable is None for info in manager.steps()] == [True, False]
            assert [info.is_usable for info in manager.steps()] == [True, False]
            with pytest.raises(UnreadableCheckpointError):
                manager.latest()
    assert not list(tmp_path.glob("*/set-aside.json"))
    assert try_to_restore(tmp_path)[0].step == 2


def test_an_older_step_that_cannot_be_read_does_not_matter(tmp_path, caplog):
    a_run(tmp_path, 1, 2, 3)
    with unreadable(tmp_path, 1).on_disk():
        assert try_to_restore(tmp_path)[0].step == 3
        with holdfast.CheckpointManager(tmp_path, run_options=holdfast.RunOptions(read_only=True)) as manager:
            assert manager.latest().step == 3
            assert manager.best("loss", "max").step == 2
    assert "step 1 at" in caplog.text
    assert "does not count for the best" in caplog.text


def test_one_can_go_back_on_purpose_and_the_log_names_what_is_left_behind(tmp_path, caplog):
    a_run(tmp_path, 1, 2)
    state = state_of(0)
    with unreadable(tmp_path, 2).on_disk(), holdfast.CheckpointManager(tmp_path) as manager:
        assert manager.restore(state, step=1).step == 1
    assert is_state_of(state, 1)
    assert "newer ones" in caplog.text


def test_what_was_set_aside_before_is_named_at_every_restart(tmp_path, caplog):
    a_run(tmp_path, 10, 25, 40)
    damage_data(tmp_path, 40)
    first, _ = try_to_restore(tmp_path)
    assert [(info.step, bool(info.set_aside)) for info in first.passed_over] == [(40, True)]
    assert first.set_aside == first.passed_over
    (tmp_path / folder_of(25) / "set-aside.json").write_text("diverged\n")
    caplog.clear()
    again, _ = try_to_restore(tmp_path)
    assert (again.step, again.lost_steps, list(again.set_aside)) == (10, 30, [])
    assert [info.step for info in again.passed_over] == [40, 25]
    assert again.passed_over[1].set_aside == "diverged"
    assert "step 25 of" in caplog.text
    assert "diverged" in caplog.text
    a_run(tmp_path, 50)
    newest, _ = try_to_restore(tmp_path)
    assert (newest.step, newest.lost_steps, list(newest.passed_over)) == (50, 0, [])


def test_those_who_watch_hear_what_was_passed_over(tmp_path):
    a_run(tmp_path, 1, 2)
    (tmp_path / folder_of(2) / "set-aside.json").write_text("diverged\n")
    events = []
    with holdfast.subscribe(events.append):
        try_to_restore(tmp_path)
    (ended,) = [event for event in events if event.verb == "restore"]
    assert ended.detail["passed_over"] == [2]


# --- deleting ------------------------------------------------------------------------------------------------------


def losses(step):
    return {"loss": {1: 0.1, 2: 0.5, 3: 0.2, 4: 0.3, 5: 0.4}[step]}


@pytest.mark.parametrize("hidden", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"keep_last": 2},
        {"keep": holdfast.keep.best(2, "loss")},
        {"keep": holdfast.keep.every(2)},
        {"keep": holdfast.keep.last(9).within(max_bytes="12 KB")},
    ],
    ids=lambda options: str(next(iter(options.values()))),
)
def test_what_cannot_be_read_is_not_deleted_and_has_no_other_deleted(tmp_path, hidden, options):
    with holdfast.CheckpointManager(tmp_path / "run", background=False) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state_of(step), metrics=losses(step))
    left = {}
    for name, steps in (("readable", ()), ("hidden", (hidden,))):
        root = shutil.copytree(tmp_path / "run", tmp_path / name)
        faults, run = (
            unreadable(root, *steps, always=bool(steps)),
            holdfast.CheckpointManager(root, background=False, **options),
        )
        with faults.on_disk(), run as manager:
            manager.save(5, state_of(5), metrics=losses(5))
        left[name] = set(steps_in(root))
    assert left["readable"] < {1, 2, 3, 4, 5}
    assert left["hidden"] >= left["readable"] | {hidden, 5}


def test_a_full_disk_is_not_made_room_on_by_what_cannot_be_read(tmp_path):
    a_run(tmp_path, 1, 2, 3)
    with holdfast.CheckpointManager(tmp_path) as manager, unreadable(tmp_path, 1).on_disk():
        assert manager._run.prune() == folder_of(2)
        assert manager._run.prune() is None
    assert steps_in(tmp_path) == [1, 3]


def test_what_cannot_be_read_is_not_deleted_by_its_number_either(tmp_path):
    a_run(tmp_path, 1, 2)
    refused = pytest.raises(NotDeletedError, match="Permission denied")
    with holdfast.CheckpointManager(tmp_path) as manager, unreadable(tmp_path, 1).on_disk(), refused:
        manager.delete(1)
    assert steps_in(tmp_path) == [1, 2]


def test_what_cannot_be_read_is_not_replaced_if_it_may_be_somebody_elses(tmp_path):
    a_run(tmp_path, 1)
    holdfast.save(state_of(7), tmp_path / folder_of(2))
    refused = pytest.raises(UnreadableCheckpointError, match=r"step 2 is not saved.*Permission denied")
    with holdfast.CheckpointManager(tmp_path, background=False) as manager, unreadable(tmp_path, 2).on_disk(), refused:
        manager.save(2, state_of(2))
    assert holdfast.open(tmp_path / folder_of(2)).read()["seen"] == 7


def test_a_listing_shows_it_with_the_reason(tmp_path):
    a_run(tmp_path, 1, 2)
    for path in (tmp_path, tmp_path / folder_of(2)):
        faults = IoFaults(
            tmp_path, number_of_error=errno.EIO, names=lambda call, name: name.endswith("set-aside.json"), always=True
        )
        with faults.on_disk():
            entry = list_place(str(path)).entries[-1]
        assert (entry.step, entry.state) == (2, "damaged")
        assert "Input/output error" in entry.why


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_a_listing_has_files_that_cannot_be_read(tmp_path, number):
    torch.save(state_of(1), tmp_path / "model.pt")
    holdfast.save(state_of(1), tmp_path / "native")
    holdfast.convert(tmp_path / "native", tmp_path / "model.safetensors", to="safetensors", include="model.weight")
    faults = IoFaults(
        tmp_path, number_of_error=number, names=lambda call, name: call == "open" and "model." in name, always=True
    )
    with faults.on_disk():
        found = {entry.name: entry for entry in list_place(str(tmp_path)).entries}
    assert {name: entry.state for name, entry in found.items()} == {
        "model.pt": "damaged",
        "model.safetensors": "damaged",
        "native": "committed",
    }
    assert os.strerror(number) in found["model.pt"].why


# --- the run file --------------------------------------------------------------------------------------------------


def test_a_claim_that_failed_leaves_the_run_to_whom_it_belonged(tmp_path):
    a_run(tmp_path, 1)
    elsewhere = replace(Owner.this_process("theirs"), host="node-7", place="another machine")
    run_file = RunFile(LocalRoot(tmp_path))
    for owner in (None, elsewhere):
        run_file.change(lambda state, owner=owner: replace(state, owner=owner))
        counting = IoFaults(tmp_path)
        with counting.on_disk():
            RunFile(LocalRoot(tmp_path)).claim("mine")
        run_file.change(lambda state, owner=owner: replace(state, owner=owner))
        for at in range(len(counting.calls)):
            with IoFaults(tmp_path, at, errno.EIO).on_disk():
                try:
                    RunFile(LocalRoot(tmp_path)).claim("mine")
                    was_claimed = True
                except OSError:
                    was_claimed = False
            assert run_file.read().owner == owner or was_claimed, counting.calls[at]
            run_file.change(lambda state, owner=owner: replace(state, owner=owner))


def test_a_process_that_cannot_be_looked_at_is_not_called_dead():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        stat = f"/proc/{process.pid}/stat"
        if not os.path.exists(stat):
            pytest.skip("this system has no /proc")
        with open(stat) as file:
            started = file.read().rpartition(")")[2].split()[19]
        owner = replace(Owner.this_process("theirs"), pid=process.pid, started=started)
        assert owner.life() == "alive"
        for number in (errno.ENFILE, errno.EACCES, errno.EIO):
            with IoFaults(f"/proc/{process.pid}", number_of_error=number, always=True).on_disk():
                assert owner.life() == "unknown"
        process.communicate(b"\n")
    assert owner.life() == "dead"


# --- several ranks -------------------------------------------------------------------------------------------------


def restore_with_a_fault(root, rank, at, number):
    """Restore on all ranks, of which one meets an error. With ``at=None`` its calls are only counted."""
    logging.disable(logging.ERROR)
    try:
        faults = IoFaults(root, at, number)
        if dist.get_rank() != rank:
            faults = IoFaults(root, None)
        state = state_of(0)
        with faults.on_disk():
            try:
                with holdfast.CheckpointManager(root) as manager:
                    restored = manager.restore(state)
            except Exception as error:
                return type(error).__name__, len(faults.calls)
        return restored.step if is_state_of(state, restored.step) else "another state", len(faults.calls)
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2), (1, 3)])
def test_an_error_on_one_rank_is_one_of_all_ranks(ranks, tmp_path, rank, world_size):
    a_run(tmp_path / "run", 1, 2)
    pool = ranks(world_size)
    shutil.copytree(tmp_path / "run", tmp_path / "counted")
    _, count = pool.run(restore_with_a_fault, str(tmp_path / "counted"), rank, None, 0)[rank]
    assert count > 5
    for at in range(0, count, 3):
        number = ERRORS[at % len(ERRORS)]
        root = shutil.copytree(tmp_path / "run", tmp_path / f"fails-at-{at}")
        outcomes = [outcome for outcome, _ in pool.run(restore_with_a_fault, str(root), rank, at, number)]
        assert 1 not in outcomes
        assert len({outcome == 2 for outcome in outcomes}) == 1 or outcomes[0] == 2, (at, outcomes)
        assert not list(root.glob("*/set-aside.json"))
