"""The run file: one job owns a run, others get an error, and nothing that several processes note is lost."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast._manager.run_file import RUN_FILE, RunFile, RunState
from holdfast._manager.run_owner import Owner
from holdfast.errors import (
    CommitConflictError,
    DamagedCheckpointError,
    NotAFolderError,
    RunInUseError,
    RunTakenError,
    UnsupportedVersionError,
)
from holdfast.stores import LocalRoot, LocalStore, MemoryRoot, Root


@pytest.fixture(params=["disk", "memory"])
def root(request, tmp_path) -> Root:
    return LocalRoot(tmp_path / "run") if request.param == "disk" else MemoryRoot(str(tmp_path))


def owned_by(root: Root, owner: Owner | None) -> RunFile:
    """A run file that names this owner, as if it had been written elsewhere."""
    RunFile(root).change(lambda state: replace(state, run="a", owner=owner))
    return RunFile(root)


class AnotherJob:
    """A process that owns the run of a folder until it is killed."""

    PROGRAM = """
import sys
from holdfast._manager.run_file import RunFile
from holdfast.stores import LocalRoot
RunFile(LocalRoot(sys.argv[1])).claim("the other job")
print("claimed", flush=True)
sys.stdin.read()
"""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"claimed\n"

    def __enter__(self) -> AnotherJob:
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.communicate()

    def kill(self) -> None:
        """End it, but leave its exit code where its parent finds it: it is a zombie then."""
        self._process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def bury(self) -> None:
        self._process.wait()


# --- owners -------------------------------------------------------------------------------------------------------


def test_a_job_that_is_alive_keeps_others_away(tmp_path):
    with AnotherJob(tmp_path) as other:
        with pytest.raises(RunInUseError, match="take_over=True") as caught:
            RunFile(LocalRoot(tmp_path)).claim("mine")
        assert caught.value.pid == other.pid
        assert caught.value.path == str(tmp_path)
        assert str(other.pid) in str(caught.value)
        assert caught.value.host in str(caught.value)
        assert caught.value.since in str(caught.value)
        owner = RunFile(LocalRoot(tmp_path)).read().owner
        assert owner is not None
        assert owner.token == "the other job"


@pytest.mark.parametrize("is_buried", [True, False], ids=["gone", "zombie"])
def test_a_job_that_was_killed_does_not(tmp_path, caplog, is_buried):
    with AnotherJob(tmp_path) as other:
        run = RunFile(LocalRoot(tmp_path)).read().run
        other.kill()
        if is_buried:
            other.bury()
        state = RunFile(LocalRoot(tmp_path)).claim("mine")
    assert state.run == run
    assert state.owner is not None
    assert state.owner.pid == os.getpid()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_process_that_got_the_number_of_a_dead_one_is_not_taken_for_it(root):
    same_number = replace(Owner.this_process("dead"), started="12345")
    assert owned_by(root, same_number).claim("mine").owner.token == "mine"


def test_any_process_of_this_machine_can_be_seen_to_be_alive(root):
    init = Owner.this_process("not mine")
    started = Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]
    with pytest.raises(RunInUseError):
        owned_by(root, replace(init, pid=1, started=started)).claim("mine")


def test_without_a_time_of_start_the_number_alone_counts(root):
    here = replace(Owner.this_process("here"), started="")
    with pytest.raises(RunInUseError):
        owned_by(root, here).claim("mine")
    finished = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    gone = replace(here, pid=int(finished.stdout))
    assert owned_by(root, gone).claim("mine").owner.token == "mine"


def test_a_job_of_another_machine_is_taken_over_with_a_warning(root, caplog):
    elsewhere = replace(Owner.this_process("far away"), host="node-7", place="another boot", since="2026-01-01")
    state = owned_by(root, elsewhere).claim("mine")
    assert state.owner is not None
    assert state.owner.token == "mine"
    (told,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "node-7" in told
    assert "cannot be seen from here" in told


def test_a_copy_of_a_run_is_not_in_use_by_the_owner_of_the_original(tmp_path, caplog):
    with AnotherJob(tmp_path / "run"):
        RunFile(LocalRoot(tmp_path / "run")).pin(7)
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        copy = RunFile(LocalRoot(tmp_path / "copy"))
        assert copy.claim("mine").pinned == {7}
        assert not copy.has_rival
        with pytest.raises(RunInUseError):
            RunFile(LocalRoot(tmp_path / "run")).claim("mine")
    assert caplog.text == ""


def test_a_run_is_in_use_whatever_path_leads_to_it(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with AnotherJob(tmp_path / "run"):
        with pytest.raises(RunInUseError):
            RunFile(LocalRoot(tmp_path / "link")).claim("mine")
        (tmp_path / "run").rename(tmp_path / "moved")  # as if it were mounted in two places
        with pytest.raises(RunInUseError):
            RunFile(LocalRoot(tmp_path / "moved")).claim("mine")


def test_an_owner_that_does_not_tell_its_folder_keeps_others_away(root):
    with pytest.raises(RunInUseError):
        owned_by(root, Owner.this_process("not mine")).claim("mine")
    stored = Owner.this_process("x", ("a", "b")).to_json()
    assert Owner.from_json(stored).root == ("a", "b")
    assert Owner.from_json({**stored, "root": "a"}) is None
    del stored["root"]
    assert Owner.from_json(stored).root == ()


def test_two_managers_in_one_process_are_two_jobs(root):
    RunFile(root).claim("first")
    with pytest.raises(RunInUseError, match="this process already"):
        RunFile(root).claim("second")


def test_an_owner_may_claim_again(root):
    first = RunFile(root).claim("mine")
    assert RunFile(root).claim("mine").run == first.run


def test_a_run_that_was_released_is_free_and_goes_on(root, caplog):
    run_file = RunFile(root)
    run = run_file.claim("first").run
    run_file.release("first")
    assert run_file.read().owner is None
    assert RunFile(root).claim("second").run == run
    assert caplog.records == []


def test_take_over_ends_the_other_job(root, caplog):
    old, new = RunFile(root), RunFile(root)
    old.claim("old")
    new.claim("new", take_over=True)
    assert "which is alive" in caplog.text
    for act in (
        lambda: old.check("old"),
        lambda: old.begin("old", {"step-00000001": ""}),
        lambda: old.end("old", ["step-00000001"]),
    ):
        with pytest.raises(RunTakenError, match="another job") as caught:
            act()
        assert caught.value.pid == os.getpid()
        assert caught.value.path == root.location
    old.release("old")
    assert new.check("new").unfinished == {}


def test_a_run_that_was_taken_and_released_is_still_lost_for_the_first_job(root):
    old, new = RunFile(root), RunFile(root)
    old.claim("old")
    new.claim("new", take_over=True)
    new.release("new")
    with pytest.raises(RunTakenError, match="has ended since") as caught:
        old.check("old")
    assert caught.value.pid is None


def test_of_jobs_that_start_at_once_one_gets_the_run(root):
    begin = threading.Barrier(6)

    def start(number: int) -> str:
        begin.wait()
        try:
            RunFile(root).claim(f"job {number}")
        except RunInUseError:
            return "refused"
        return f"job {number}"

    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(start, range(6)))
    owner = RunFile(root).read().owner
    assert owner is not None
    assert sorted(outcomes) == [owner.token, *["refused"] * 5]


def test_a_run_id_can_be_asked_for(root):
    assert RunFile(root).claim("mine", run="fine-tune").run == "fine-tune"
    assert RunFile(root).claim("mine", run="fine-tune").run == "fine-tune"
    with pytest.raises(ValueError, match="'fine-tune' and not 'other'"):
        RunFile(root).claim("mine", run="other")


# --- notes --------------------------------------------------------------------------------------------------------


def test_what_is_noted_is_there_for_the_next_process(root):
    run_file = RunFile(root)
    run_file.claim("mine")
    run_file.pin(500, 700)
    run_file.unpin(700)
    run_file.begin("mine", {"step-00000500": "", "step-00000600": "00c0ffee00c0ffee"})
    run_file.end("mine", ["step-00000500"], rows={"step-00000500": {"x": 1}, "step-00000400": {"x": 2}})
    run_file.end("mine", [], gone=["step-00000400"])
    state = RunFile(root).check("mine")
    assert state.pinned == {500}
    assert state.unfinished == {"step-00000600": "00c0ffee00c0ffee"}
    assert state.rows == {"step-00000500": {"x": 1}}


def test_pins_of_several_processes_at_once_are_all_kept(root):
    RunFile(root).claim("mine")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda step: RunFile(root).pin(step), range(20)))
    assert RunFile(root).check("mine").pinned == set(range(20))


def test_nothing_is_written_if_nothing_changes(root, monkeypatch):
    run_file = RunFile(root)
    run_file.claim("mine")
    before = root.store.read(RUN_FILE)
    monkeypatch.setattr(type(root.store), "commit", lambda *_, **__: pytest.fail("it was written"))
    run_file.end("mine", ["step-00000001"])
    run_file.unpin(7)
    assert root.store.read(RUN_FILE) == before


def test_a_store_where_every_change_is_overtaken_is_an_error_and_no_endless_loop(root, monkeypatch):
    def overtaken(*_, **__):
        raise CommitConflictError("overtaken", path="here")

    monkeypatch.setattr(type(root.store), "commit", overtaken)
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(CommitConflictError):
        RunFile(root).claim("mine")


def test_on_a_full_disk_the_owner_can_still_act_and_others_still_cannot(tmp_path, monkeypatch, caplog):
    run_file = RunFile(LocalRoot(tmp_path))
    run_file.claim("mine")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStore, "commit", full)
    assert run_file.begin("mine", {"step-00000001": "x"}).unfinished == {"step-00000001": "x"}
    assert run_file.end("mine", ["step-00000001"]).unfinished == {}
    assert "No space left" in caplog.text
    with pytest.raises(RunTakenError):
        run_file.begin("theirs", {"step-00000001": "x"})
    run_file.release("mine")
    with pytest.raises(OSError, match="No space left"):
        run_file.pin(1)


def test_a_file_that_was_deleted_comes_back_as_it_was(root):
    run_file = RunFile(root)
    run_file.claim("mine")
    RunFile(root).pin(500)  # by another process
    before = run_file.check("mine")
    root.store.delete([RUN_FILE])
    assert run_file.check("mine") == before
    assert RunFile(root).read() == before
    root.store.delete([RUN_FILE])
    run_file.begin("mine", {"step-00000001": ""})
    assert RunFile(root).read() == replace(before, unfinished={"step-00000001": ""})


def test_reading_where_there_is_no_run_changes_nothing(root):
    assert RunFile(root).read() == RunState()
    assert root.store.list() == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"version": 1', '"version": 0'),
        lambda text: text.replace('"holdfast-run"', '"something"'),
        lambda text: text.replace('"pinned": [500]', '"pinned": ["500"]'),
        lambda text: text.replace('"pinned": [500]', '"pinned": [1e999]'),
        lambda text: text.replace('"pinned": [500]', '"pinned": [NaN]'),
        lambda text: text.replace('"pinned": [500]', '"pinned": [5e2]'),
        lambda text: text.replace('"pinned": [500]', '"pinned": [true]'),
        lambda text: text.replace('"pinned": [500]', f'"pinned": [{"9" * 5000}]'),
        lambda text: text.replace('"version": 1', '"version": 1e999'),
        lambda text: text.replace('"version": 1', '"version": 1.0'),
        lambda text: text.replace('"version": 1', '"version": true'),
        lambda text: text.replace('"steps": {}', '"steps": {"step-00000001": {"metrics": {"loss": 1e999}}}'),
        lambda text: text.replace('"steps": {}', '"steps": {"step-00000001": {"metrics": {"loss": -1e999}}}'),
        lambda text: text.replace('"steps": {}', '"steps": {"step-00000001": {"metadata": [Infinity]}}'),
        lambda text: json.dumps({**json.loads(text), "owner": {**json.loads(text)["owner"], "pid": 10**30}}),
        lambda text: text.replace('"pid": ', '"pid": 1e999, "was": '),
        lambda text: text.replace('"pinned"', '"nailed"'),
        lambda text: json.dumps({**json.loads(text), "owner": {"pid": 1}}),
        lambda text: json.dumps({**json.loads(text), "owner": {**json.loads(text)["owner"], "pid": "1"}}),
        lambda text: json.dumps({**json.loads(text), "run": None}),
        lambda text: json.dumps({**json.loads(text), "steps": [1]}),
        lambda text: json.dumps({**json.loads(text), "steps": {"a": 1}}),
        lambda text: json.dumps({**json.loads(text), "unfinished": {"a": 1}}),
    ],
)
def test_a_spoilt_file_is_reported_and_not_guessed_at(root, spoil):
    run_file = RunFile(root)
    run_file.claim("mine")
    run_file.pin(500)
    before = root.store.read(RUN_FILE)
    spoilt = spoil(before.decode()).encode()
    assert spoilt != before
    root.store.commit(RUN_FILE, spoilt, replaces=before)
    with pytest.raises(DamagedCheckpointError, match=rf"{RUN_FILE} is not a run file .* move it away"):
        run_file.claim("mine")
    assert root.store.read(RUN_FILE) == spoilt


def test_a_file_of_a_newer_version_is_not_taken_for_damage(root):
    run_file = RunFile(root)
    run_file.claim("mine")
    before = root.store.read(RUN_FILE)
    newer = before.replace(b'"version": 1', b'"version": 2')
    root.store.commit(RUN_FILE, newer, replaces=before)
    with pytest.raises(UnsupportedVersionError, match="newer version of Holdfast"):
        run_file.claim("mine")
    assert root.store.read(RUN_FILE) == newer


def test_a_file_where_the_folder_should_be_is_named(tmp_path):
    (tmp_path / "file").write_text("notes")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(NotAFolderError, match="a file, or below one"):
            RunFile(LocalRoot(place)).claim("mine")


def test_people_can_read_it(root):
    run_file = RunFile(root)
    run_file.claim("mine", run="a")
    run_file.pin(7, 500)
    rows = {f"step-{step}": {"metrics": {"loss": 0.5}} for step in (1, 2)}
    run_file.end("mine", [], rows=rows)
    lines = root.store.read(RUN_FILE).decode("ascii").splitlines()
    assert ' "run": "a",' in lines
    assert ' "pinned": [7, 500],' in lines
    assert '  "step-1": {"metrics": {"loss": 0.5}},' in lines
    assert RunFile(root).read().rows == rows
