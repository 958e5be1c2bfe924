"""Deleting: only what this run saved, the record first, again if it failed, and never under a save that goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import holdfast
from holdfast import keep
from holdfast._formats.native.names import RECORD, SET_ASIDE
from holdfast._manager.retention import plan_deletions
from holdfast._manager.run_file import RUN_FILE, RunFile
from holdfast._manager.run_owner import Owner
from holdfast._manager.step_deletion import Deleter, Deletion
from holdfast._manager.steps import StepInfo, folder_of, rows_of, set_aside
from holdfast.errors import CheckpointNotFoundError, DamagedCheckpointError, NotACheckpointError, RunTakenError
from holdfast.stores import LocalRoot, LocalStore, MemoryRoot, Root
from tests.manager.folders import TOKEN, a_run, files_in, loads, save_step, state_of, steps_in
from tests.rank_pool import RankPool
from tests.safety.power_loss import PowerCuts, write_disk
from tests.safety.syscalls import require_tracing, watch
from tests.warm_python import warm_python

DATA = "data-00c0ffee00c0ffee-0-0.safetensors"


@pytest.fixture(params=["disk", "memory"])
def root(request, tmp_path) -> Root:
    return LocalRoot(tmp_path / "run") if request.param == "disk" else MemoryRoot(str(tmp_path))


@pytest.fixture
def disk(tmp_path) -> LocalRoot:
    return LocalRoot(tmp_path / "run")


def delete(root: Root, *steps: int, **options) -> list[Deletion]:
    found = steps_in(root)
    return Deleter(RunFile(root), TOKEN, **options).delete([found[step] for step in steps])


class Stubborn(LocalRoot):
    """A disk on which some files cannot be deleted for a while."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.kept = ""

    def child(self, name: str) -> LocalStore:
        root = self

        class Store(LocalStore):
            def delete(self, names):
                names = list(names)
                if any(root.kept and name.startswith(root.kept) for name in names):
                    raise PermissionError(13, "Permission denied", self.path_of(root.kept))
                super().delete(names)

        return Store(self.folder / name)


# --- what goes and what stays -------------------------------------------------------------------------------------


def test_a_deleted_step_is_gone_with_its_folder_and_the_others_are_whole(root):
    run_file = a_run(root, 1, 2, 3)
    (deletion,) = delete(root, 2)
    assert (deletion.step, deletion.outcome, deletion.is_gone) == (2, "deleted", True)
    assert deletion.nbytes > 0
    assert sorted(root.children()) == [folder_of(1), folder_of(3)]
    assert all(loads(root, step) for step in (1, 3))
    assert run_file.check(TOKEN).unfinished == {}


def test_what_was_remembered_of_a_deleted_step_is_forgotten(root):
    run_file = a_run(root, 1, 2)
    rows = rows_of(root, list(steps_in(root).values()), run_file.read())
    run_file.end(TOKEN, [], rows=rows)
    delete(root, 1)
    assert list(run_file.read().rows) == [folder_of(2)]


def test_what_a_policy_dooms_is_deleted(root):
    a_run(root, *range(1, 8))
    infos = list(steps_in(root).values())
    doomed = plan_deletions(infos, keep.last(2) | keep.every(3), infos[0].saved_at)
    Deleter(RunFile(root), TOKEN).delete(doomed)
    assert list(steps_in(root)) == [3, 6, 7]


def test_files_of_others_in_the_folder_of_a_step_stay_where_they_are(disk):
    a_run(disk, 1)
    folder = disk.folder / folder_of(1)
    (folder / "notes.txt").write_text("best run so far")
    (folder / DATA).write_bytes(b"of a save that is not this one")
    (folder / "samples").mkdir()
    (folder / "samples" / "0.png").write_bytes(b"png")
    (folder / "link").symlink_to(folder / "notes.txt")
    assert delete(disk, 1)[0].is_gone
    assert files_in(folder) == {"notes.txt", "samples/0.png", DATA, "link"}
    assert steps_in(disk) == {}


def test_leftovers_of_our_commits_go_with_the_step(disk):
    a_run(disk, 1)
    folder = disk.folder / folder_of(1)
    (folder / f".{RECORD}.0a1b2c3d.tmp").write_bytes(b"{")
    (folder / f".{SET_ASIDE}.0a1b2c3d.tmp").write_bytes(b"{")
    set_aside(disk.child(folder_of(1)), "damaged")
    delete(disk, 1)
    assert not folder.exists()


def test_what_this_run_did_not_save_is_refused(root):
    a_run(root, 1)
    holdfast.save(state_of(2), root.child(folder_of(2)))
    with pytest.raises(ValueError, match="not saved by this run"):
        delete(root, 1, 2)
    assert loads(root, 1)
    assert loads(root, 2)


def test_a_step_that_was_pinned_meanwhile_stays(root):
    run_file = a_run(root, 1, 2)
    doomed = list(steps_in(root).values())
    run_file.pin(1)
    outcomes = Deleter(run_file, TOKEN).delete(doomed)
    assert [deletion.outcome for deletion in outcomes] == ["kept", "deleted"]
    assert "pinned" in outcomes[0].reason
    assert loads(root, 1)
    assert run_file.check(TOKEN).unfinished == {}


def test_a_checkpoint_that_replaced_the_doomed_one_stays(root):
    run_file = a_run(root, 1)
    doomed = list(steps_in(root).values())
    holdfast.save(state_of(1), root.child(folder_of(1)), overwrite=True)
    (deletion,) = Deleter(run_file, TOKEN).delete(doomed)
    assert deletion.outcome == "kept"
    assert loads(root, 1)


def test_a_job_that_lost_its_run_deletes_nothing(root):
    run_file = a_run(root, 1)
    doomed = list(steps_in(root).values())
    RunFile(root).claim("another job", take_over=True)
    deleter = Deleter(run_file, TOKEN)
    with pytest.raises(RunTakenError):
        deleter.delete(doomed)
    with pytest.raises(RunTakenError):
        deleter.submit(doomed).result()
    with pytest.raises(RunTakenError):
        deleter.sweep()
    deleter.close()
    assert loads(root, 1)


def test_a_dry_run_tells_and_changes_nothing(disk):
    a_run(disk, 1, 2)
    disk.child(folder_of(3)).put(DATA, b"leftover")
    RunFile(disk).begin(TOKEN, {folder_of(3): ""})
    before = {name: (disk.folder / name).read_bytes() for name in files_in(disk.folder)}
    told = []
    outcomes = delete(disk, 1, dry_run=True, on_deletion=told.append)
    assert Deleter(RunFile(disk), TOKEN, dry_run=True).sweep() == []
    assert [(deletion.step, deletion.outcome) for deletion in outcomes] == [(1, "would be deleted")]
    assert told == outcomes
    assert {name: (disk.folder / name).read_bytes() for name in files_in(disk.folder)} == before


def test_a_full_disk_does_not_keep_steps_from_being_deleted(disk, monkeypatch):
    a_run(disk, 1, 2)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStore, "commit", full)
    assert delete(disk, 1)[0].is_gone
    assert list(steps_in(disk)) == [2]


# --- kills and power cuts -----------------------------------------------------------------------------------------


def delete_first(folder: Path) -> None:
    delete(LocalRoot(folder), 1)


def prepare(folder: Path) -> Path:
    a_run(LocalRoot(folder), 1, 2)
    (folder / folder_of(1) / "notes.txt").write_text("not ours")
    return folder


def opens(folder: Path, step: int) -> bool:
    """Whether there is a checkpoint; if there is, it must be intact."""
    try:
        checkpoint = holdfast.open(folder / folder_of(step))
    except (CheckpointNotFoundError, NotACheckpointError):
        return False
    assert checkpoint.verify().ok
    return True


def kill_everywhere(folder: Path) -> list[tuple[str, bool]]:
    """Before which change a deletion was killed, and whether the checkpoint was there. The next job tidies up."""
    original = prepare(folder / "original")
    moments = []
    for number in range(100):
        place = folder / str(number)
        shutil.copytree(original, place)
        watched = watch([partial(delete_first, place)], place, kill_at=number)
        moments.append((str(watched.killed_before), opens(place, 1)))
        assert opens(place, 2)
        if watched.killed_before is None:
            return moments
        root = LocalRoot(place)
        run_file = RunFile(root)
        run_file.claim("the next job", take_over=True)
        Deleter(run_file, "the next job").sweep()
        left = files_in(place / folder_of(1))
        assert left == {"notes.txt"} or opens(place, 1), f"killed before {watched.killed_before}: {left}"
        assert run_file.read().unfinished == {}
    raise AssertionError


def test_a_kill_at_any_moment_of_a_deletion_leaves_a_whole_checkpoint_or_none(ranks: RankPool, tmp_path):
    require_tracing()
    (moments,) = ranks(1).run(kill_everywhere, tmp_path, process_group=False)
    story = "\n".join(f"before {before}: {'there' if there else 'gone'}" for before, there in moments)
    there = [there for _, there in moments]
    assert there == sorted(there, reverse=True), story  # once it is gone, it is gone
    assert there.count(True) >= 2, story
    assert there.count(False) >= 3, story


def cut_the_power_everywhere(folder: Path) -> int:
    place = prepare(folder / "disk")
    cuts = PowerCuts(place)
    watched = watch([partial(delete_first, place)], place)
    assert watched.exit_codes == {0: 0}
    disks = set().union(*cuts.during(watched.changes))
    gone = 0
    for number, disk in enumerate(disks):
        write_disk(disk, folder / f"cut-{number}")
        gone += not opens(folder / f"cut-{number}", 1)
        assert opens(folder / f"cut-{number}", 2)
    return gone


def test_a_power_cut_at_any_moment_of_a_deletion_leaves_a_whole_checkpoint_or_none(ranks: RankPool, tmp_path):
    require_tracing()
    (gone,) = ranks(1).run(cut_the_power_everywhere, tmp_path, process_group=False)
    assert gone >= 3


# --- failures -----------------------------------------------------------------------------------------------------


def test_what_could_not_be_deleted_is_tried_again_with_the_next_ones(tmp_path, caplog):
    root = Stubborn(tmp_path)
    run_file = a_run(root, 1, 2, 3)
    steps, told = steps_in(root), []
    deleter = Deleter(run_file, TOKEN, on_deletion=told.append)
    root.kept = "data-"
    (failed,) = deleter.delete([steps[1]])
    assert failed.outcome == "failed"
    assert "Permission denied" in failed.reason
    assert "Permission denied" in caplog.text
    assert [info.step for info in deleter.failed] == [1]
    assert 1 not in steps_in(root)

    root.kept = ""
    again = deleter.delete([steps[2]])
    assert [(deletion.step, deletion.outcome) for deletion in again] == [(1, "deleted"), (2, "deleted")]
    assert deleter.failed == ()
    assert root.children() == [folder_of(3)]
    assert run_file.check(TOKEN).unfinished == {}
    assert told == [failed, *again]


def test_what_failed_while_it_was_whole_is_not_tried_again_by_itself(tmp_path):
    """It may be the best or the last one again by then."""
    root = Stubborn(tmp_path)
    run_file = a_run(root, 1, 2, 3)
    steps, deleter = steps_in(root), Deleter(run_file, TOKEN)
    root.kept = RECORD
    assert deleter.delete([steps[1]])[0].outcome == "failed"
    root.kept = ""
    outcomes = deleter.delete([steps[2]])
    assert [(each.step, each.outcome) for each in outcomes] == [(1, "kept"), (2, "deleted")]
    assert loads(root, 1)
    assert deleter.failed == ()
    assert run_file.read().unfinished == {}
    assert deleter.delete([steps[1]])[0].is_gone


def test_what_could_not_be_deleted_is_swept_by_the_next_job(tmp_path):
    root = Stubborn(tmp_path)
    run_file = a_run(root, 1, 2)
    root.kept = "data-"
    Deleter(run_file, TOKEN).delete([steps_in(root)[1]])
    assert Deleter(run_file, TOKEN).sweep() == []
    root.kept = ""
    run_file.release(TOKEN)
    run_file.claim("the next job")
    assert Deleter(run_file, "the next job").sweep() == [folder_of(1)]
    assert root.children() == [folder_of(2)]


def test_a_failure_does_not_keep_others_from_being_deleted(tmp_path):
    root = Stubborn(tmp_path)
    a_run(root, 1, 2)
    steps = steps_in(root)
    root.kept = next(name.name for name in root.child(folder_of(1)).list() if name.name.startswith("data-"))
    outcomes = Deleter(RunFile(root), TOKEN).delete(list(steps.values()))
    assert [deletion.outcome for deletion in outcomes] == ["failed", "deleted"]


def test_a_callback_that_fails_breaks_nothing(root, caplog):
    a_run(root, 1, 2)

    def callback(deletion):
        raise RuntimeError("in the callback")

    assert delete(root, 1, on_deletion=callback)[0].is_gone
    assert "in the callback" in caplog.text


# --- in the background --------------------------------------------------------------------------------------------


def test_deletions_happen_in_the_background_one_after_the_other(root):
    run_file = a_run(root, 1, 2, 3)
    steps, threads = steps_in(root), []
    deleter = Deleter(run_file, TOKEN, on_deletion=lambda _: threads.append(threading.current_thread().name))
    jobs = [deleter.submit([steps[step]]) for step in (1, 2)]
    deleter.close()
    assert [job.result()[0].step for job in jobs] == [1, 2]
    assert len(set(threads)) == 1
    assert threads[0] != threading.current_thread().name
    assert list(steps_in(root)) == [3]
    assert deleter.submit([steps[3]]).result()[0].is_gone  # it may be used again
    deleter.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-delete")]


def test_nothing_is_deleted_if_the_newer_one_is_damaged(disk, caplog):
    run_file = a_run(disk, 1, 2)
    steps = steps_in(disk)
    (data,) = [path for path in (disk.folder / folder_of(2)).iterdir() if path.name.startswith("data-")]
    content = bytearray(data.read_bytes())
    content[-3] ^= 1
    data.write_bytes(content)
    deleter = Deleter(run_file, TOKEN)
    with pytest.raises(DamagedCheckpointError):
        deleter.submit([steps[1]], verify_first=steps[2]).result()
    deleter.close()
    assert "no checkpoint was deleted" in caplog.text
    assert loads(disk, 1)


def test_the_older_ones_are_deleted_if_the_newer_one_is_intact(root):
    run_file = a_run(root, 1, 2)
    steps = steps_in(root)
    deleter = Deleter(run_file, TOKEN)
    assert deleter.submit([steps[1]], verify_first=steps[2]).result()[0].is_gone
    deleter.close()


def test_at_the_end_of_python_it_works_without_a_thread(root, monkeypatch):
    run_file = a_run(root, 1, 2)
    steps = steps_in(root)

    def no_more(*_, **__):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr("threading.Thread.start", no_more)
    deleter = Deleter(run_file, TOKEN)
    assert deleter.submit([steps[1]]).result()[0].is_gone
    RunFile(root).claim("another job", take_over=True)
    with pytest.raises(RunTakenError):
        deleter.submit([steps[2]]).result()
    deleter.close()


# --- folders that are being written -------------------------------------------------------------------------------


def test_a_folder_that_is_being_written_is_left_alone(root):
    run_file = a_run(root, 1)
    info = steps_in(root)[1]
    deleter = Deleter(run_file, TOKEN)
    deleter.protect(info.name)
    deleter.protect(info.name)
    deleter.unprotect(info.name)
    assert deleter.delete([info])[0].outcome == "kept"
    assert loads(root, 1)
    deleter.unprotect(info.name)
    assert deleter.delete([info])[0].is_gone


def test_a_deletion_that_is_refused_does_not_forget_the_save(root):
    run_file = a_run(root, 1)
    info, deleter = steps_in(root)[1], Deleter(run_file, TOKEN)
    deleter.protect(info.name)
    run_file.begin(TOKEN, {info.name: ""})
    assert deleter.delete([info])[0].outcome == "kept"
    assert run_file.read().unfinished == {info.name: ""}
    deleter.unprotect(info.name)
    run_file.pin(1)
    assert deleter.delete([info])[0].outcome == "kept"
    assert run_file.read().unfinished == {info.name: ""}


def test_what_a_failed_save_left_in_the_folder_goes_with_the_step(tmp_path):
    root = Stubborn(tmp_path)
    run_file = a_run(root, 1)
    leave_a_cut_off_save(root, 1)
    info, deleter = steps_in(root)[1], Deleter(run_file, TOKEN)
    root.kept = "data-"
    assert deleter.delete([info])[0].outcome == "failed"
    root.kept = ""
    assert deleter.delete([])[0].is_gone
    assert root.children() == []
    assert run_file.read().unfinished == {}


def test_a_step_can_be_pinned_until_it_is_its_turn(tmp_path):
    pinned = []

    class Slow(LocalRoot):
        def remove(self, name: str) -> bool:
            if not pinned:
                pinned.append(RunFile(root).pin(2))
            return super().remove(name)

    root = Slow(tmp_path)
    run_file = a_run(root, 1, 2, 3)
    steps = steps_in(root)
    outcomes = Deleter(run_file, TOKEN).delete([steps[1], steps[2]])
    assert list(pinned[0].unfinished) == [folder_of(1)]
    assert [each.outcome for each in outcomes] == ["deleted", "kept"]
    assert loads(root, 2)


# --- links ----------------------------------------------------------------------------------------------------------


def move_and_link(root: LocalRoot, step: int, place: Path) -> Path:
    """What people do with an old checkpoint when the disk is full."""
    moved = shutil.move(root.folder / folder_of(step), place)
    (root.folder / folder_of(step)).symlink_to(moved)
    return Path(moved)


def test_what_is_behind_a_link_is_listed_and_never_deleted(disk, tmp_path):
    run_file = a_run(disk, 1, 2)
    known = steps_in(disk)[1]
    moved = move_and_link(disk, 1, tmp_path / "cold")
    before = files_in(moved)
    assert [(info.step, info.is_ours) for info in steps_in(disk).values()] == [(1, False), (2, True)]
    with pytest.raises(ValueError, match="or is a link"):
        delete(disk, 1)
    (late,) = Deleter(run_file, TOKEN).delete([known])
    assert (late.outcome, late.reason) == ("kept", "a link is in its place")
    assert files_in(moved) == before
    assert loads(disk, 1)


def test_nothing_is_swept_behind_a_link(disk, tmp_path):
    run_file = a_run(disk, 1)
    leave_a_cut_off_save(disk, 2)
    moved = move_and_link(disk, 2, tmp_path / "cold")
    before = files_in(moved)
    assert Deleter(run_file, TOKEN).sweep() == []
    assert files_in(moved) == before
    assert run_file.read().unfinished == {}


# --- the end of the program -----------------------------------------------------------------------------------------


class Stuck(LocalRoot):
    """A disk that does not come back from deleting data, until it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.is_stuck, self.go_on = threading.Event(), threading.Event()

    def child(self, name: str) -> LocalStore:
        root = self

        class Store(LocalStore):
            def delete(self, names):
                names = list(names)
                if any(name.startswith("data-") for name in names):
                    root.is_stuck.set()
                    assert root.go_on.wait(60)
                super().delete(names)

        return Store(self.folder / name)


def test_closing_does_not_wait_for_ever_and_no_other_deletion_begins(tmp_path):
    root = Stuck(tmp_path)
    run_file = a_run(root, 1, 2, 3)
    steps, deleter = steps_in(root), Deleter(run_file, TOKEN)
    job = deleter.submit([steps[1], steps[2]])
    assert root.is_stuck.wait(60)
    assert not deleter.close(0.01)
    run_file.release(TOKEN)
    later = LocalRoot(tmp_path)
    RunFile(later).claim("the next job")
    assert Deleter(RunFile(later), "the next job").sweep() == [folder_of(1)]
    root.go_on.set()
    assert [each.step for each in job.result(60)] == [1]
    assert sorted(later.children()) == [folder_of(2), folder_of(3)]
    assert loads(later, 2)


def test_the_end_of_the_program_does_not_wait_for_ever(tmp_path):
    a_run(LocalRoot(tmp_path), 1, 2).release(TOKEN)
    program = f"""
from pathlib import Path
from holdfast._manager.step_deletion import Deleter
from tests.manager.folders import TOKEN, a_run, steps_in
from tests.manager.test_step_deletion import Stuck
root = Stuck(Path({str(tmp_path)!r}))
Deleter(a_run(root), TOKEN).submit([steps_in(root)[1]])
assert root.is_stuck.wait(60)
"""
    environment = {**os.environ, "HOLDFAST_DRAIN_SECONDS": "0.2"}
    subprocess.run([*warm_python(), "-c", program], check=True, env=environment, timeout=50)
    with holdfast.CheckpointManager(tmp_path) as manager:
        assert [info.step for info in manager.steps()] == [2]
    assert LocalRoot(tmp_path).children() == [folder_of(2)]


def test_the_end_of_the_program_waits_for_what_ends_in_time(tmp_path):
    a_run(LocalRoot(tmp_path), 1, 2).release(TOKEN)
    program = f"""
import threading
from pathlib import Path
from holdfast._manager.background_jobs import BackgroundJobs
from holdfast._manager.step_deletion import Deleter
from tests.manager.folders import TOKEN, a_run, steps_in
from tests.manager.test_step_deletion import Stuck
root = Stuck(Path({str(tmp_path)!r}))
Deleter(a_run(root), TOKEN).submit([steps_in(root)[1]])
assert root.is_stuck.wait(60)
wait = BackgroundJobs.wait
BackgroundJobs.wait = lambda self, seconds: (root.go_on.set(), wait(self, seconds))[1]
"""
    subprocess.run([*warm_python(), "-c", program], check=True, timeout=50)
    assert LocalRoot(tmp_path).children() == [folder_of(2)]


def test_a_manager_that_closes_leaves_a_deletion_that_does_not_end_to_the_next_one(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HOLDFAST_DRAIN_SECONDS", "0.1")
    root = Stuck(tmp_path)
    with holdfast.CheckpointManager(root, keep_last=1) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step), wait=True)
        assert root.is_stuck.wait(60)
    assert "still being deleted after 0.1 s" in caplog.text
    assert (tmp_path / folder_of(1)).exists()
    with holdfast.CheckpointManager(tmp_path) as manager:
        assert [info.step for info in manager.steps()] == [2]
        assert not (tmp_path / folder_of(1)).exists()
    root.go_on.set()


def test_jobs_may_be_submitted_while_another_thread_closes(root):
    run_file = a_run(root, *range(1, 30))
    steps, deleter = steps_in(root), Deleter(run_file, TOKEN)
    is_over = threading.Event()

    def close() -> None:
        while not is_over.is_set():
            deleter.close()

    closer = threading.Thread(target=close)
    closer.start()
    try:
        jobs = [deleter.submit([info]) for info in steps.values()]
        assert all(job.result(60)[0].is_gone for job in jobs)
    finally:
        is_over.set()
        closer.join()


def test_whoever_wants_to_write_waits_until_the_folder_is_deleted(tmp_path):
    is_deleting, go_on = threading.Event(), threading.Event()

    class Slow(LocalRoot):
        def remove(self, name: str) -> bool:
            is_deleting.set()
            assert go_on.wait(60)
            return super().remove(name)

    root = Slow(tmp_path)
    run_file = a_run(root, 1)
    deleter = Deleter(run_file, TOKEN)
    job = deleter.submit([steps_in(root)[1]])
    assert is_deleting.wait(60)
    seen: list[bool] = []

    def write() -> None:
        deleter.protect(folder_of(1))
        seen.append((tmp_path / folder_of(1)).exists())

    writer = threading.Thread(target=write)
    writer.start()
    deleter.protect(folder_of(2))  # another folder need not wait
    writer.join(0.2)
    assert writer.is_alive()
    go_on.set()
    writer.join(60)
    assert seen == [False]
    assert job.result()[0].is_gone
    deleter.close()


# --- what killed saves left ------------------------------------------------------------------------------------------


def leave_a_cut_off_save(root: Root, step: int) -> None:
    """What a save leaves when it is killed before its commit."""
    RunFile(root).begin(TOKEN, {folder_of(step): ""})
    for name in (DATA, "index-00c0ffee00c0ffee.safetensors", f".{RECORD}.0a1b2c3d.tmp"):
        root.child(folder_of(step)).put(name, b"cut off")


def test_what_a_killed_save_left_is_swept(root):
    run_file = a_run(root, 1)
    leave_a_cut_off_save(root, 2)
    assert Deleter(run_file, TOKEN).sweep() == [folder_of(2)]
    assert root.children() == [folder_of(1)]
    assert run_file.check(TOKEN).unfinished == {}
    assert Deleter(run_file, TOKEN).sweep() == []


def taken_from(root: Root, before: Owner) -> None:
    """A run whose owner this was, with what it has begun to write."""
    a_run(root, 1)
    leave_a_cut_off_save(root, 2)
    RunFile(root).change(lambda state: replace(state, owner=before))


@pytest.mark.parametrize("is_seen", [True, False])
def test_what_a_job_that_may_be_alive_has_begun_is_left_to_it(root, is_seen):
    rival = Owner.this_process("a rival", root.marks())
    taken_from(root, rival if is_seen else replace(rival, place="another machine"))
    with holdfast.CheckpointManager(root, run_options=holdfast.RunOptions(take_over=is_seen), save_at_end=False):
        assert root.child(folder_of(2)).size(DATA) is not None
        assert list(RunFile(root).read().unfinished) == [folder_of(2)]
    with holdfast.CheckpointManager(root, save_at_end=False):
        assert root.child(folder_of(2)).size(DATA) is None
        assert RunFile(root).read().unfinished == {}


def test_when_its_step_is_saved_what_such_a_job_has_begun_is_removed(root):
    taken_from(root, replace(Owner.this_process("a rival", root.marks()), place="another machine"))
    with holdfast.CheckpointManager(root) as manager:
        manager.save(2, state_of(2), wait=True)
    assert root.child(folder_of(2)).size(DATA) is None
    assert loads(root, 2)
    assert RunFile(root).read().unfinished == {}


def test_what_is_committed_at_the_last_moment_is_not_swept(tmp_path):
    class Late(LocalRoot):
        def child(self, name: str) -> LocalStore:
            class Store(LocalStore):
                def list(self):
                    listed = list(super().list())
                    if name == folder_of(2):
                        shutil.copy(tmp_path / folder_of(1) / RECORD, tmp_path / name / RECORD)
                    return listed

            return Store(self.folder / name)

    a_run(LocalRoot(tmp_path), 1)
    leave_a_cut_off_save(LocalRoot(tmp_path), 2)
    deleter = Deleter(RunFile(Late(tmp_path)), TOKEN)
    before = files_in(tmp_path / folder_of(2))
    assert deleter.sweep() == []
    assert files_in(tmp_path / folder_of(2)) == before | {RECORD}


def test_what_replaces_a_checkpoint_at_the_last_moment_is_not_swept(tmp_path):
    class Late(LocalRoot):
        def child(self, name: str) -> LocalStore:
            class Store(LocalStore):
                def list(self):
                    shutil.copy(tmp_path / "new" / RECORD, tmp_path / "run" / name / RECORD)
                    return list(super().list())

            return Store(self.folder / name)

    (tmp_path / "run").mkdir()
    run_file = a_run(LocalRoot(tmp_path / "run"), 1)
    run_file.begin(TOKEN, {folder_of(1): ""})
    holdfast.save(state_of(7), tmp_path / "new")
    for file in (tmp_path / "new").iterdir():
        if file.name != RECORD:
            shutil.copy(file, tmp_path / "run" / folder_of(1))
    Deleter(RunFile(Late(tmp_path / "run")), TOKEN).sweep()
    assert holdfast.verify(tmp_path / "run" / folder_of(1)).ok
    assert files_in(tmp_path / "run" / folder_of(1)) == files_in(tmp_path / "new")


def test_leftovers_of_others_is_not_swept(root):
    run_file = a_run(root, 1)
    root.child(folder_of(2)).put(DATA, b"another program writes here just now")
    assert Deleter(run_file, TOKEN).sweep() == []
    assert root.child(folder_of(2)).size(DATA) is not None


def test_files_of_others_are_not_swept(root):
    run_file = a_run(root, 1)
    leave_a_cut_off_save(root, 2)
    root.child(folder_of(2)).put("model.safetensors", b"a model of somebody")
    root.child(folder_of(2)).put("notes.txt", b"notes")
    Deleter(run_file, TOKEN).sweep()
    assert {listed.name for listed in root.child(folder_of(2)).list()} == {"model.safetensors", "notes.txt"}


def test_a_save_that_was_committed_after_all_stays_and_loses_only_the_leftovers(root):
    run_file = a_run(root, 1)
    leave_a_cut_off_save(root, 1)
    root.child(folder_of(1)).put("notes.txt", b"notes")
    before = {listed.name for listed in root.child(folder_of(1)).list()}
    Deleter(run_file, TOKEN).sweep()
    assert loads(root, 1)
    gone = before - {listed.name for listed in root.child(folder_of(1)).list()}
    assert {DATA, "index-00c0ffee00c0ffee.safetensors"} == {name for name in gone if not name.startswith(".")}
    assert run_file.check(TOKEN).unfinished == {}


def test_a_deletion_that_had_not_begun_is_forgotten(root):
    run_file = a_run(root, 1)
    run_file.begin(TOKEN, {folder_of(1): steps_in(root)[1].identity})
    Deleter(run_file, TOKEN).sweep()
    assert loads(root, 1)
    assert run_file.check(TOKEN).unfinished == {}


def test_a_folder_that_is_being_written_is_not_swept(root):
    run_file = a_run(root, 1)
    leave_a_cut_off_save(root, 2)
    deleter = Deleter(run_file, TOKEN)
    deleter.protect(folder_of(2))
    assert deleter.sweep() == []
    assert root.child(folder_of(2)).size(DATA) is not None
    deleter.unprotect(folder_of(2))
    assert deleter.sweep() == [folder_of(2)]


def test_a_damaged_checkpoint_keeps_all_its_files(root):
    run_file = a_run(root)
    leave_a_cut_off_save(root, 1)
    root.child(folder_of(1)).put(RECORD, b"damaged")
    assert Deleter(run_file, TOKEN).sweep() == []
    assert root.child(folder_of(1)).size(DATA) is not None


def test_a_name_in_the_run_file_that_is_no_step_is_not_touched(disk):
    run_file = a_run(disk, 1)
    (disk.folder / "precious").mkdir()
    (disk.folder / "precious" / DATA).write_bytes(b"not ours")
    run_file.begin(TOKEN, {"precious": "", "../precious": "", "": ""})
    assert Deleter(run_file, TOKEN).sweep() == []
    assert (disk.folder / "precious" / DATA).exists()
    assert run_file.check(TOKEN).unfinished == {}


def test_a_failed_save_of_this_process_is_swept_when_it_has_ended(disk):
    run_file = a_run(disk, 1)
    with pytest.raises(holdfast.errors.UnsupportedValueError):
        save_unsavable(disk)
    assert Deleter(run_file, TOKEN).sweep() == [folder_of(2)]
    assert os.listdir(disk.folder / folder_of(1))
    assert sorted(os.listdir(disk.folder)) == [RUN_FILE, folder_of(1)]


def save_unsavable(root: Root) -> None:
    RunFile(root).begin(TOKEN, {folder_of(2): ""})
    (LocalRoot(root.location).folder / folder_of(2)).mkdir()
    holdfast.save({"value": object()}, root.child(folder_of(2)))


def test_deletions_of_set_aside_steps_are_possible_when_asked_for(root):
    a_run(root, 1)
    save_step(root, 2)
    set_aside(root.child(folder_of(2)), "damaged")
    info: StepInfo = steps_in(root)[2]
    assert Deleter(RunFile(root), TOKEN).delete([info])[0].is_gone
    assert root.children() == [folder_of(1)]
