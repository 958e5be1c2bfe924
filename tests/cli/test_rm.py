"""``holdfast rm``: deletes checkpoints, and refuses whatever might be a mistake."""

from __future__ import annotations

import errno
import os
import pty
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import holdfast
from holdfast._manager.run_file import RunFile
from holdfast._stores.places import store_at
from holdfast._stores.roots import root_at
from holdfast._tools import deleting
from tests.manager.io_faults import IoFaults
from tests.warm_python import warm_python


def error_of(ran):
    assert ran.status == 2
    return ran.json["error"]["type"]


@pytest.mark.parametrize("name", ["runs/a/step-00000100", "dcp", "model.safetensors", "model.pt", "damaged"])
def test_a_checkpoint_of_any_format_is_deleted_and_nothing_else(prepared, cli, name):
    others = {path for path in prepared.rglob("*") if not path.is_relative_to(prepared / name)}

    ran = cli("rm", name, "--yes", "--json")

    assert ran.status == 0
    assert ran.json["deleted"]
    assert not (prepared / name).exists()
    assert set(prepared.rglob("*")) == others


def test_files_that_are_no_part_of_a_checkpoint_stay(prepared, cli):
    (prepared / "runs/a/step-00000100/notes.txt").write_text("mine")

    ran = cli("rm", "runs/a/step-00000100", "hf-model", "--yes")

    assert ran.status == 0
    assert os.listdir("runs/a/step-00000100") == ["notes.txt"]
    assert os.listdir("hf-model") == ["config.json"]
    assert "left what is not part of it: notes.txt" in ran.out


STRANGE = [
    "notes.metadata",
    ".metadata.backup",
    "dataset.metadata.json",
    "model.safetensors.bak",
    "a.safetensors.txt",
    "x.before-repair",
    "x.distcp",
    "y.tmp",
]


@pytest.mark.parametrize("name", ["runs/a/step-00000100", "dcp", "hf-model"])
def test_files_with_names_like_those_of_checkpoints_stay(prepared, cli, name):
    for strange in STRANGE:
        (prepared / name / strange).write_text("mine")
    if name == "hf-model":
        shutil.copy("model.safetensors", "hf-model/lora.safetensors")  # which its index does not name
        kept = {*STRANGE, "config.json", "lora.safetensors"}
    else:
        kept = set(STRANGE)

    assert cli("rm", name, "--yes").status == 0

    assert set(os.listdir(name)) == kept


def test_what_saves_and_repairs_left_goes_with_the_checkpoint(prepared, cli):
    index = "model.safetensors.index.json"
    for name in (f"{index}.before-repair", "model-00001-of-00001.safetensors.00112233.tmp"):
        path = prepared / "hf-model" / name
        path.write_text("left")
        os.utime(path, (1_000_000, 1_000_000))
    for name in ("holdfast.json.before-repair2", ".holdfast.json.00112233.tmp"):
        (prepared / "runs/a/step-00000100" / name).write_text("left")
    (prepared / "dcp/.metadata.00112233.tmp").write_text("left")

    assert cli("rm", "hf-model", "runs/a/step-00000100", "dcp", "--yes").status == 0

    assert os.listdir("hf-model") == ["config.json"]
    assert not os.path.exists("runs/a/step-00000100")
    assert not os.path.exists("dcp")


def test_a_folder_of_several_models_is_refused(prepared, cli):
    os.mkdir("models")
    for name in ("model", "lora"):
        shutil.copy("model.safetensors", f"models/{name}.safetensors")

    ran = cli("rm", "models", "--yes", "--force", "--json")

    assert error_of(ran) == "NotACheckpointError"
    assert ran.json["error"]["message"].endswith(".safetensors.")
    assert sorted(os.listdir("models")) == ["lora.safetensors", "model.safetensors"]


@pytest.mark.parametrize(
    "pattern",
    [
        "runs/a/step-00000100/data-*",
        "runs/a/step-00000100/holdfast.json",
        "dcp/*.distcp",
        "dcp/.metadata",
        "hf-model/model-00001-*",
        "hf-model/*.index.json",
    ],
)
def test_a_file_that_is_only_a_part_of_a_checkpoint_is_refused(prepared, cli, pattern):
    (path,) = prepared.glob(pattern)
    before = sorted(prepared.rglob("*"))

    assert cli("rm", path, "--yes", "--force").status == 2

    assert sorted(prepared.rglob("*")) == before


def test_what_is_given_twice_is_deleted_once(prepared, cli):
    ran = cli("rm", "dcp", "./dcp/", "runs/../dcp", "model.pt", "--yes", "--json")

    assert ran.status == 0
    assert [entry["name"] for entry in ran.json["checkpoints"]] == ["dcp", "model.pt"]
    assert not os.path.exists("model.pt")


def test_a_zip_archive_is_no_checkpoint(prepared, cli):
    shutil.copy("model.pt", "photos.zip")

    assert error_of(cli("rm", "photos.zip", "--yes", "--json")) == "NotACheckpointError"

    assert os.path.exists("photos.zip")


def test_a_folder_that_ends_in_the_number_of_a_pinned_step_is_another_one(prepared, cli):
    shutil.copytree("runs/a/step-00000300", "runs/a/best-300")

    assert cli("rm", "runs/a/best-300", "--yes").status == 0

    assert not os.path.exists("runs/a/best-300")
    assert RunFile(root_at("runs/a")).read().pinned == frozenset([300])


def test_what_may_be_being_written_at_a_url_goes_only_with_force(cli):
    store = store_at("memory://rm-unfinished/step-1")
    store.put("data-00112233aabbccdd-0-0.safetensors", bytes(10))

    ran = cli("rm", "memory://rm-unfinished/step-1", "--yes", "--json")
    assert error_of(ran) == "NotDeletedError"
    assert "it is unknown when it was written" in ran.json["error"]["message"]
    assert store.list()

    assert cli("rm", "memory://rm-unfinished/step-1", "--yes", "--force").status == 0
    assert not store.list()


def test_a_single_file_at_a_url_is_deleted(prepared, cli):
    store = store_at("memory://rm-files")
    for name in ("model.pt", "model.safetensors"):
        store.put(name, (prepared / name).read_bytes())

    ran = cli("rm", "memory://rm-files/model.pt", "--yes", "--json")

    assert ran.status == 0
    assert ran.json["bytes"] == os.path.getsize("model.pt")
    assert [listed.name for listed in store.list()] == ["model.safetensors"]


def test_a_dry_run_changes_nothing(prepared, cli):
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}

    ran = cli("rm", "runs/a/step-00000100", "dcp", "--dry-run")

    assert ran.status == 0
    assert ran.out.count("would delete") == 2
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*")} == before


def test_the_run_forgets_it_and_others_can_go_on(prepared, cli):
    assert cli("rm", "runs/a/step-00000100", "--yes").status == 0

    state = RunFile(root_at("runs/a")).read()
    assert (state.owner, dict(state.unfinished), state.pinned) == (None, {}, frozenset([300]))
    assert state.rows.keys() == {"step-00000200", "step-00000300"}
    with holdfast.CheckpointManager("runs/a", every_steps=100) as manager:
        assert [info.step for info in manager.steps()] == [200, 300]


def test_what_is_pinned_goes_only_with_force(prepared, cli):
    ran = cli("rm", "runs/a/step-00000300", "--yes", "--json")
    assert error_of(ran) == "NotDeletedError"
    assert os.path.exists("runs/a/step-00000300/holdfast.json")

    assert cli("rm", "runs/a/step-00000300", "--yes", "--force").status == 0
    assert not os.path.exists("runs/a/step-00000300")
    assert RunFile(root_at("runs/a")).read().pinned == frozenset()


def test_if_one_is_refused_none_is_deleted(prepared, cli):
    assert cli("rm", "runs/a/step-00000100", "runs/a/step-00000300", "--yes").status == 2

    assert os.path.exists("runs/a/step-00000100/holdfast.json")


def test_a_run_that_is_in_use_is_left_alone_even_with_force(prepared, cli):
    with holdfast.CheckpointManager("runs/a", every_steps=100):
        ran = cli("rm", "runs/a/step-00000100", "--yes", "--force", "--json")
    assert error_of(ran) == "RunInUseError"
    assert ran.json["error"]["pid"] == os.getpid()
    assert os.path.exists("runs/a/step-00000100/holdfast.json")


@pytest.mark.parametrize("place", ["runs/a", "runs", ".", "model.py", "runs/a/holdfast-run.json", "nowhere"])
def test_what_is_no_checkpoint_is_refused(prepared, cli, place):
    before = sorted(prepared.rglob("*"))

    assert cli("rm", place, "--yes", "--force").status == 2

    assert sorted(prepared.rglob("*")) == before


def test_a_link_to_a_checkpoint_is_refused(prepared, cli):
    os.symlink(prepared / "dcp", "link")

    assert error_of(cli("rm", "link", "--yes", "--force", "--json")) == "NotDeletedError"

    assert os.path.exists("dcp/.metadata")


def test_what_is_being_written_goes_only_with_force(prepared, cli):
    os.mkdir("new")
    shutil.copy(next((prepared / "runs/b/step-00000100").glob("data-*")), "new")
    assert error_of(cli("rm", "new", "--yes", "--json")) == "NotDeletedError"
    assert cli("rm", "new", "--yes", "--force").status == 0
    assert not os.path.exists("new")


def test_a_save_that_goes_on_beside_a_checkpoint_is_not_deleted_with_it(prepared, cli):
    folder = prepared / "runs/b/step-00000100"
    (folder / "data-00112233aabbccdd-0-0.safetensors").write_bytes(bytes(100))

    assert error_of(cli("rm", folder, "--yes", "--json")) == "NotDeletedError"

    os.utime(folder / "data-00112233aabbccdd-0-0.safetensors", (1_000_000, 1_000_000))
    assert cli("rm", folder, "--yes").status == 0
    assert not folder.exists()


def test_nothing_is_deleted_if_nobody_can_be_asked(prepared, cli):
    assert error_of(cli("rm", "dcp", "--json")) == "UsageError"

    assert os.path.exists("dcp/.metadata")


@pytest.mark.parametrize(("answer", "is_gone", "status"), [("y", True, 0), ("n", False, 2)])
def test_somebody_at_a_terminal_is_asked(prepared, answer, is_gone, status):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "rm", "model.pt"], stdin=slave, stdout=subprocess.PIPE, stderr=slave
    )
    with process:
        os.close(slave)
        seen = b""
        while b"[y/N]" not in seen:
            seen += os.read(master, 1000)
        os.write(master, f"{answer}\n".encode())
        out = process.stdout.read()
    os.close(master)

    assert process.returncode == status
    assert os.path.exists("model.pt") != is_gone
    assert (b"deleted" in out) == is_gone
    assert b"Delete 1 checkpoint(s)" in seen


KILLED_AT_THE_DATA = """
import os, signal
from holdfast._cli.main import run
from holdfast._stores.local_store import LocalStore

delete = LocalStore.delete

def dying(store, names):
    names = list(names)
    if any(name.startswith("data-") for name in names):
        os.kill(os.getpid(), signal.SIGKILL)
    delete(store, names)

LocalStore.delete = dying
run(["rm", "runs/a/step-00000100", "--yes"])
"""


def test_a_kill_leaves_nothing_that_looks_like_a_checkpoint_and_the_next_job_goes_on(prepared, cli):
    killed = subprocess.run([*warm_python(), "-c", KILLED_AT_THE_DATA], check=False)

    assert killed.returncode == -signal.SIGKILL
    names = os.listdir("runs/a/step-00000100")
    assert "holdfast.json" not in names
    assert any(name.startswith("data-") for name in names)
    with holdfast.CheckpointManager("runs/a", every_steps=100) as manager:
        assert [info.step for info in manager.steps()] == [200, 300]
    assert not os.path.exists("runs/a/step-00000100")


def removing_entries(path):
    from holdfast._tools.listing.listing import list_place

    return list_place(path).entries


def test_a_checkpoint_that_was_replaced_meanwhile_stays(tmp_path):
    holdfast.save({"w": torch.ones(2)}, tmp_path / "c")
    (entry,) = removing_entries(str(tmp_path / "c"))
    holdfast.save({"w": torch.zeros(2)}, tmp_path / "c", overwrite=True)

    with pytest.raises(holdfast.errors.NotDeletedError, match="replaced"):
        deleting.remove(entry)

    assert holdfast.open(tmp_path / "c").read()["w"].tolist() == [0, 0]


# --- a run of a job on another machine ------------------------------------------------------------------------------

ANOTHER_MACHINE = """
import sys
import torch
import holdfast
from holdfast._manager import run_owner
from holdfast._stores.local_store import LocalStore

run_owner._this_place = lambda: "another machine"
run_owner.socket.gethostname = lambda: "node-7"
commit = LocalStore.commit

def waiting(store, name, content, *, replaces):
    if name == "holdfast.json":
        print("writing", store.folder.name, flush=True)
        sys.stdin.readline()
    commit(store, name, content, replaces=replaces)

with holdfast.CheckpointManager("runs/c", background=False, keep_last=3, on_signal=None) as manager:
    for step in (1, 2):
        manager.save(step, {"w": torch.full((4,), float(step))})
    manager.pin(1)
    LocalStore.commit = waiting
    for step in (3, 2, 4, 5):
        print("next", flush=True)
        if sys.stdin.readline() != "go\\n":
            break
        manager.save(step, {"w": torch.full((4,), step + 0.5)})
        print("saved", step, flush=True)
"""


class JobOnAnotherMachine:
    """A real process that saves to a run, and of which nobody here can see whether it is alive."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [*warm_python(), "-c", ANOTHER_MACHINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.expect("next")

    def expect(self, text: str) -> None:
        line = self.process.stdout.readline()
        assert line == f"{text}\n", line

    def tell(self, text: str) -> None:
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def save(self, step: int) -> None:
        self.tell("go")
        self.expect(f"writing step-{step:08d}")
        self.tell("go on")
        self.expect(f"saved {step}")
        self.expect("next")


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = JobOnAnotherMachine()
    with job.process:
        yield job
        if job.process.poll() is None:
            job.tell("stop")


def test_force_deletes_from_a_living_run_and_the_job_goes_on_saving(job, cli):
    before = RunFile(root_at("runs/c")).read()
    assert before.owner.host == "node-7"
    ran = cli("rm", "runs/c/step-00000002", "--yes", "--json")
    assert error_of(ran) == "NotDeletedError"
    assert "node-7" in ran.json["error"]["message"]

    assert cli("rm", "runs/c/step-00000001", "runs/c/step-00000002", "--yes", "--force").status == 0

    state = RunFile(root_at("runs/c")).read()
    assert (state.owner, state.run) == (before.owner, before.run)
    assert (dict(state.unfinished), dict(state.rows), state.pinned) == ({}, {}, frozenset())
    assert not os.path.exists("runs/c/step-00000001")
    for step in (3, 2, 4):
        job.save(step)
    job.tell("stop")
    assert job.process.wait() == 0
    with holdfast.CheckpointManager("runs/c", run_options=holdfast.RunOptions(read_only=True)) as manager:
        assert [info.step for info in manager.steps() if info.is_ours] == [2, 3, 4]
    assert RunFile(root_at("runs/c")).read().owner is None
    assert holdfast.open("runs/c/step-00000004").read()["w"].tolist() == [4.5] * 4


def test_what_a_job_on_another_machine_is_writing_is_refused_even_with_force(job, cli):
    job.save(3)
    job.tell("go")
    job.expect("writing step-00000002")  # over the one that is there
    before = sorted(os.listdir("runs/c/step-00000002"))

    ran = cli("rm", "runs/c/step-00000002", "--yes", "--force", "--json")

    assert error_of(ran) == "NotDeletedError"
    assert "being written by process" in ran.json["error"]["message"]
    assert sorted(os.listdir("runs/c/step-00000002")) == before
    job.tell("go on")
    job.expect("saved 2")
    job.expect("next")
    assert holdfast.open("runs/c/step-00000002").read()["w"].tolist() == [2.5] * 4
    assert cli("rm", "runs/c/step-00000002", "--yes", "--force").status == 0


def test_what_a_job_that_cannot_be_seen_has_left_long_ago_goes_with_force(job, cli):
    job.tell("go")
    job.expect("writing step-00000003")
    job.process.kill()
    job.process.wait()
    folder = "runs/c/step-00000003"
    assert cli("rm", folder, "--yes", "--force").status == 2

    for name in os.listdir(folder):
        os.utime(f"{folder}/{name}", (1_000_000, 1_000_000))
    assert cli("rm", folder, "--yes").status == 2
    assert cli("rm", folder, "--yes", "--force").status == 0

    assert not os.path.exists(folder)
    assert RunFile(root_at("runs/c")).read().unfinished == {}


def test_files_of_a_save_that_begins_meanwhile_are_left_to_the_job(job, cli):
    theirs = "data-00112233aabbccdd-0-0.safetensors"
    with open(f"runs/c/step-00000002/{theirs}", "wb") as file:
        file.write(bytes(10))

    ran = cli("rm", "runs/c/step-00000002", "--yes", "--force", "--json")

    assert ran.status == 0
    assert ran.json["checkpoints"][0]["files_left"] == [theirs]


def test_nothing_is_deleted_beside_a_run_file_that_cannot_be_read(prepared, cli):
    with open("runs/a/holdfast-run.json", "w") as file:
        file.write("{")

    ran = cli("rm", "runs/a/step-00000100", "--yes", "--force", "--json")

    assert error_of(ran) == "NotDeletedError"
    assert os.path.exists("runs/a/step-00000100/holdfast.json")


def test_force_beside_a_living_job_works_at_a_url_too(cli, monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("holdfast._manager.run_owner._this_place", lambda: "another machine")
        manager = holdfast.CheckpointManager("memory://rm-beside", background=False, save_at_end=False)
        manager.save(1, {"w": torch.ones(2)})
    manager.save(2, {"w": torch.ones(2)})
    assert error_of(cli("rm", "memory://rm-beside/step-00000001", "--yes", "--json")) == "NotDeletedError"

    assert cli("rm", "memory://rm-beside/step-00000001", "--yes", "--force").status == 0

    manager.save(3, {"w": torch.ones(2)})
    assert [info.step for info in manager.steps()] == [2, 3]
    manager.close()
    for step in (2, 3):
        assert cli("rm", f"memory://rm-beside/step-{step:08d}", "--yes").status == 0


def test_a_run_file_that_cannot_be_written_does_not_hinder_a_deletion(prepared, cli):
    faults = IoFaults(
        prepared / "runs/a",
        number_of_error=errno.ENOSPC,
        names=lambda call, name: call == "open" and name.startswith(".holdfast-run.json"),
        always=True,
    )
    with faults.on_disk():
        assert cli("rm", "runs/a/step-00000100", "--yes").status == 0
    assert faults.failed
    assert not os.path.exists("runs/a/step-00000100")
    with holdfast.CheckpointManager("runs/a", every_steps=100) as manager:
        assert [info.step for info in manager.steps()] == [200, 300]
