"""Leftover files: what killed saves leave is swept, and nothing that anybody may need or be writing."""

from __future__ import annotations

import fcntl
import os
import signal

import pytest
import torch

import holdfast
import holdfast.dcp
from holdfast._stores.local_store import LocalStore
from holdfast._tools.converting.work_folders import ResultFolder
from holdfast._tools.repairing.repair import repair
from tests.native_files import spoil_table
from tests.tools.repairing.checkpoints import age_all, in_a_process_that_is_killed


def killed_at_its_commit(save):
    """Have a process begin a save, which is killed when it is about to put its record in place."""

    def die_at_the_commit():
        commit = LocalStore.commit

        def dying(store, name, content, **rest):
            if name == "holdfast.json":
                os.kill(os.getpid(), signal.SIGKILL)
            commit(store, name, content, **rest)

        LocalStore.commit = dying
        save()

    in_a_process_that_is_killed(die_at_the_commit)


def killed_overwrite(folder):
    killed_at_its_commit(lambda: holdfast.save({"w": torch.ones(1000)}, folder, overwrite=True))


def killed_job(run):
    def save():
        holdfast.CheckpointManager(run, every_steps=1).save(2, {"w": torch.ones(1000)}, wait=True)

    killed_at_its_commit(save)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def overwritten(tmp_path):
    """A checkpoint, and beside it what a killed overwrite has left."""
    folder = tmp_path / "c"
    holdfast.save({"w": torch.zeros(1000)}, folder)
    whole = set(names_in(folder))
    killed_overwrite(folder)
    left = set(names_in(folder)) - whole
    assert any(name.startswith("data-") for name in left)
    return folder, whole, left


def test_what_a_killed_overwrite_left_is_swept_and_the_checkpoint_stays(overwritten):
    folder, whole, left = overwritten
    age_all(folder)

    dry = repair(folder)
    assert dry.ok
    assert {name for leftover in dry.leftovers for name in leftover.names} == left
    assert dry.leftover_bytes == sum((folder / name).stat().st_size for name in left)
    assert set(names_in(folder)) == whole | left
    assert [leftover.fate for leftover in repair(folder, apply=True).leftovers] == ["can be removed"] * len(
        dry.leftovers
    )
    report = repair(folder, apply=True, sweep=True)

    assert {leftover.fate for leftover in report.leftovers} == {"removed"}
    assert set(names_in(folder)) == whole
    assert holdfast.open(folder).verify().ok
    assert repair(folder).leftovers == ()


def test_what_was_written_just_now_may_be_of_a_save_that_goes_on(overwritten):
    folder, whole, left = overwritten

    report = repair(folder, apply=True, sweep=True)

    assert {leftover.fate for leftover in report.leftovers} == {"kept"}
    assert "a save may be going on" in report.leftovers[0].reason
    assert report.leftover_bytes == 0
    assert set(names_in(folder)) == whole | left


def test_one_recent_file_of_a_save_protects_all_of_it(overwritten):
    folder, _, left = overwritten
    age_all(folder)
    os.utime(folder / next(name for name in left if name.startswith("data-")))

    report = repair(folder, apply=True, sweep=True)

    assert [leftover.fate for leftover in report.leftovers if any(n.startswith("data-") for n in leftover.names)] == [
        "kept"
    ]


def test_leftovers_of_a_killed_job_is_swept_from_its_run(tmp_path):
    run = tmp_path / "run"
    with holdfast.CheckpointManager(run, every_steps=1) as manager:
        manager.save(1, {"w": torch.zeros(1000)})
    killed_job(run)
    folder = run / "step-00000002"
    for name in names_in(folder):  # the save was so far that it could be made a checkpoint
        if name.startswith("data-"):
            spoil_table(folder / name)
    age_all(folder)

    report = repair(run, apply=True, sweep=True)

    assert report.ok
    assert [leftover.fate for leftover in report.leftovers] == ["removed"]
    assert names_in(folder) == []
    assert holdfast.open(run / "step-00000001").verify().ok


def test_a_save_that_only_lacked_its_record_is_reported_and_never_swept(tmp_path):
    run = tmp_path / "run"
    with holdfast.CheckpointManager(run, every_steps=1) as manager:
        manager.save(1, {"w": torch.zeros(1000)})
    killed_job(run)
    age_all(run / "step-00000002")
    before = names_in(run / "step-00000002")

    report = repair(run, apply=True, sweep=True)

    assert [finding.outcome for finding in report.findings] == ["cannot be repaired"]
    assert "repair this folder by itself" in report.findings[0].remedy
    assert names_in(run / "step-00000002") == before
    assert repair(run / "step-00000002", apply=True).ok
    assert holdfast.open(run / "step-00000002").read()["w"].tolist() == [1.0] * 1000


def test_a_run_in_use_is_left_to_its_manager(tmp_path):
    with holdfast.CheckpointManager(tmp_path / "run", every_steps=1) as manager:
        manager.save(1, {"w": torch.zeros(10)})
        manager.wait()
        folder = tmp_path / "run/step-00000002"
        folder.mkdir()
        (folder / "data-00112233aabbccdd-0-0.safetensors").write_bytes(bytes(10))
        age_all(folder)
        (leftover,) = repair(tmp_path / "run", apply=True, sweep=True).leftovers
        assert leftover.fate == "kept"
        assert f"process {os.getpid()}" in leftover.reason
        (leftover,) = repair(folder, apply=True, sweep=True).leftovers
        assert leftover.fate == "kept"
    assert repair(tmp_path / "run", apply=True, sweep=True).leftovers[0].fate == "removed"


def test_files_of_others_are_never_leftovers(overwritten):
    folder, _, _ = overwritten
    strange = ["notes.txt", "data-1.safetensors", "data-00112233AABBCCDD-0-0.safetensors", "x.tmp", ".hidden"]
    for name in strange:
        (folder / name).write_text("mine")
    age_all(folder)

    repair(folder, apply=True, sweep=True)

    assert set(strange) <= set(names_in(folder))


def test_nothing_is_swept_beside_a_damaged_record(overwritten):
    folder, whole, left = overwritten
    (folder / "holdfast.json").write_bytes(b"damaged")
    age_all(folder)

    report = repair(folder, sweep=True, apply=True)

    assert report.leftovers == ()
    assert whole | left <= set(names_in(folder))


def killed_conversion(destination, *, at):
    """Have a process convert to a destination, and be killed when it is about to call this function."""

    def convert():
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(at, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
        holdfast.convert(destination.parent / "source", destination, to="native", overwrite=True)

    in_a_process_that_is_killed(convert)


def test_unfinished_conversions_are_swept_unless_a_process_holds_them(tmp_path):
    holdfast.save({"w": torch.ones(100)}, tmp_path / "source")
    killed_conversion(tmp_path / "new", at="holdfast._tools.converting.convert.prove")
    (left,) = [name for name in names_in(tmp_path) if name.endswith(".partial")]
    (tmp_path / ".mine.partial").write_bytes(bytes(10))
    held = os.open(tmp_path / left, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)

    (leftover,) = repair(tmp_path, apply=True, sweep=True).leftovers
    assert (leftover.fate, leftover.reason) == ("kept", "a conversion may be writing it")
    os.close(held)
    (leftover,) = repair(tmp_path).leftovers
    assert (leftover.names, leftover.fate) == ([left], "can be removed")
    assert leftover.nbytes > 400
    (leftover,) = repair(tmp_path, apply=True, sweep=True).leftovers

    assert leftover.fate == "removed"
    assert names_in(tmp_path) == [".mine.partial", "source"]


def test_what_a_conversion_was_to_replace_is_put_back_before_its_folder_is_swept(tmp_path):
    holdfast.save({"w": torch.ones(100)}, tmp_path / "source")
    work = ResultFolder(tmp_path / ".model.holdfast-00112233aabbccdd.partial", tmp_path / "model")
    work.folder.mkdir()  # as a kill leaves it where names cannot be exchanged
    work.prepare()
    work.new.mkdir()
    holdfast.save({"w": torch.zeros(5)}, work.old)

    assert repair(tmp_path, apply=True, sweep=True).leftovers[0].fate == "removed"

    assert names_in(tmp_path) == ["model", "source"]
    assert holdfast.open(tmp_path / "model").read()["w"].tolist() == [0] * 5


def test_dcp_files_that_the_index_does_not_name_are_swept_if_they_are_ours(tmp_path):
    folder = tmp_path / "c"
    holdfast.dcp.save({"w": torch.ones(3)}, checkpoint_id=folder)
    whole = set(names_in(folder))
    ours, of_stock = folder / "__0_00c0ffee_0.distcp", folder / "__7_0.distcp"
    for file in (ours, of_stock, folder / ".metadata.0a1b2c3d.tmp"):
        file.write_bytes(bytes(100))
    age_all(folder)

    report = repair(folder, apply=True, sweep=True)

    assert report.leftover_bytes == 200
    assert set(names_in(folder)) == whole | {of_stock.name}
    state = {"w": torch.zeros(3)}
    holdfast.dcp.load(state, checkpoint_id=folder)
    assert state["w"].tolist() == [1, 1, 1]


def test_temporary_files_of_a_hugging_face_save_are_swept(tmp_path):
    import safetensors.torch

    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "model-00001-of-00002.safetensors.0a1b2c3d.tmp").write_bytes(bytes(40))
    age_all(tmp_path)

    assert repair(tmp_path, apply=True, sweep=True).leftover_bytes == 40
    assert names_in(tmp_path) == ["model.safetensors"]
