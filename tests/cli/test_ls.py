"""``holdfast ls``: what it says of checkpoints in every state."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
import torch

import holdfast
from holdfast._cli.ls import age
from holdfast._manager.run_file import RunFile, RunState
from holdfast._manager.run_owner import Owner
from holdfast._stores.local_store import LocalStore
from holdfast._stores.places import store_at
from holdfast._stores.roots import root_at
from holdfast._tools.listing.listing import list_place
from holdfast._tools.repairing.leftovers import leftovers_at
from holdfast._tools.serving.run_facts import RunWatch

LONG_AGO = 1_000_000


def entries(ran):
    (place,) = ran.json["places"]
    return {entry["name"]: entry for entry in place["entries"]}


def leave_a_cut_off_save(folder, *, is_old=True):
    folder.mkdir()
    file = folder / "data-00112233aabbccdd-0-0.safetensors"
    file.write_bytes(bytes(1000))
    if is_old:
        os.utime(file, (LONG_AGO, LONG_AGO))


def test_a_run_is_listed_with_steps_sizes_times_and_metrics(prepared, cli):
    ran = cli("ls", "runs/a", "--json")

    found = entries(ran)
    assert list(found) == ["step-00000100", "step-00000200", "step-00000300"]
    step = found["step-00000200"]
    folder = prepared / "runs/a/step-00000200"
    assert step["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert (step["step"], step["state"], step["format"], step["pinned"]) == (200, "committed", "native", False)
    assert step["metrics"] == {"loss": 0.5}
    assert abs(datetime.now(timezone.utc) - datetime.fromisoformat(step["saved_at"])) < timedelta(hours=1)
    assert found["step-00000300"]["pinned"]
    (place,) = ran.json["places"]
    assert (place["kind"], place["owner"]) == ("run", "")


def test_people_see_a_table(prepared, cli):
    ran = cli("ls", "runs/a")

    headline, header, *rows = ran.out.splitlines()
    assert headline.startswith(f"{prepared}/runs/a: 3 checkpoints, ")
    assert header.split() == ["NAME", "STATE", "SIZE", "AGE", "FORMAT", "loss"]
    assert [row.split()[0] for row in rows] == ["step-00000100", "step-00000200", "step-00000300"]
    assert "committed, pinned" in rows[2]
    assert rows[1].split()[-1] == "0.5"


def test_states_tell_what_became_of_saves(prepared, cli):
    run = prepared / "runs/a"
    (run / "step-00000100/set-aside.json").write_text('{"reason": "loss was [red] NaN"}')
    record = run / "step-00000200/holdfast.json"
    record.write_bytes(record.read_bytes()[:-40])
    leave_a_cut_off_save(run / "step-00000400")
    leave_a_cut_off_save(run / "step-00000500", is_old=False)

    found = entries(cli("ls", run, "--json"))

    states = {name: entry["state"] for name, entry in found.items()}
    assert states == {
        "step-00000100": "set aside",
        "step-00000200": "damaged",
        "step-00000300": "committed",
        "step-00000400": "leftover",
        "step-00000500": "being written",
    }
    assert found["step-00000100"]["why"] == "loss was [red] NaN"
    assert "does not end as a record must" in found["step-00000200"]["why"]
    assert found["step-00000400"]["bytes"] == 1000
    assert "set aside: loss was [red] NaN" in cli("ls", run).out


def test_a_checkpoint_whose_files_are_gone_or_cut_off_is_damaged(prepared, cli):
    run = prepared / "runs/a"
    next((run / "step-00000100").glob("data-*")).unlink()
    os.truncate(next((run / "step-00000200").glob("data-*")), 100)
    shutil.copytree(run / "step-00000100", run / "best")

    found = entries(cli("ls", run, "--json"))

    states = {name: entry["state"] for name, entry in found.items()}
    assert states == {
        "step-00000100": "damaged",
        "step-00000200": "damaged",
        "step-00000300": "committed",
        "best": "damaged",
    }
    assert "fewer bytes than its record says" in found["step-00000100"]["why"]
    assert entries(cli("ls", run / "step-00000200", "--json"))["step-00000200"]["state"] == "damaged"


def test_sizes_are_those_of_the_checkpoint_and_of_all_that_lies_beside_it(prepared, cli):
    folder = prepared / "runs/a/step-00000200"
    before = entries(cli("ls", folder, "--json"))[folder.name]
    (folder / "data-00112233aabbccdd-0-0.safetensors").write_bytes(bytes(1000))

    after = entries(cli("ls", folder, "--json"))[folder.name]

    assert (before["bytes"], before["bytes"] + 1000) == (after["bytes"], after["bytes_on_disk"])
    assert after["state"] == "committed"


def test_at_a_url_nobody_knows_whether_a_save_without_a_record_still_goes_on():
    store_at("memory://some-unfinished/step-1").put("data-00112233aabbccdd-0-0.safetensors", bytes(10))

    (entry,) = list_place("memory://some-unfinished").entries

    assert (entry.state, entry.why) == ("unfinished", "it is unknown when it was written")


def test_of_a_job_on_another_machine_nobody_knows_either(tmp_path, cli):
    leave_a_cut_off_save(tmp_path / "step-00000002")
    elsewhere = replace(Owner.this_process("token"), place="another machine")
    RunFile(root_at(tmp_path)).change(lambda run: replace(run, owner=elsewhere))

    (entry,) = entries(cli("ls", tmp_path, "--json")).values()

    assert entry["state"] == "unfinished"
    assert "it is unknown here whether it has ended" in entry["why"]


def test_what_a_dead_job_had_begun_is_leftovers_at_once(tmp_path, cli):
    leave_a_cut_off_save(tmp_path / "step-00000002", is_old=False)
    dead = replace(Owner.this_process("token"), started="long ago")
    RunFile(root_at(tmp_path)).change(lambda run: replace(run, owner=dead, unfinished={"step-00000002": ""}))

    (entry,) = entries(cli("ls", tmp_path, "--json")).values()

    assert entry["state"] == "leftover"


@pytest.mark.parametrize("age", [1, 200, 599, 700])
@pytest.mark.parametrize("note", ["nothing", "a dead job", "a job elsewhere"])
def test_ls_serve_and_repair_agree_about_a_save_without_a_record(tmp_path, age, note):
    leave_a_cut_off_save(tmp_path / "step-00000002")
    file = tmp_path / "step-00000002/data-00112233aabbccdd-0-0.safetensors"
    os.utime(file, (time.time() - age, time.time() - age))
    here = Owner.this_process("token")
    owners = {"a dead job": replace(here, started="long ago"), "a job elsewhere": replace(here, place="elsewhere")}
    if note in owners:
        state = RunState("run", owners[note], unfinished={"step-00000002": ""})
        RunFile(root_at(tmp_path)).change(lambda _: state)

    (entry,) = list_place(str(tmp_path)).entries
    (save,) = RunWatch(tmp_path).look().saves
    (leftover,) = leftovers_at(str(tmp_path))

    is_left_over = note == "a dead job" or (note == "nothing" and age > 600)
    assert (entry.state == "leftover", save.activity == "leftover", leftover.obstacle is None) == (is_left_over,) * 3


def test_ls_and_serve_list_the_same(prepared):
    (prepared / "checkpoint-500").mkdir()
    shutil.copy("model.safetensors", "checkpoint-500")
    next((prepared / "runs/a/step-00000200").glob("data-*")).unlink()
    for place in (".", "runs/a", "dcp", "model.pt", "checkpoint-500"):
        told = [entry.to_json() for entry in list_place(place).entries]
        served = [facts.to_json() for facts in RunWatch(place).look().checkpoints]
        assert {entry["name"] for entry in told} == {facts["name"] for facts in served}
        for facts in served:
            (entry,) = [entry for entry in told if entry["name"] == facts["name"]]
            assert entry.items() <= facts.items()
    assert {entry.name: entry.step for entry in list_place(".").entries}["checkpoint-500"] == 500


def test_single_files_at_urls_are_listed_like_those_in_folders(prepared):
    store = store_at("memory://single-files/of a run")
    for name in ("model.pt", "model.safetensors", "model.py"):
        store.put(name, (prepared / name).read_bytes())
    store.put("lora.safetensors", (prepared / "model.safetensors").read_bytes())

    listing = list_place("memory://single-files/of a run")
    assert [(entry.name, entry.format) for entry in listing.entries] == [
        ("lora.safetensors", "safetensors"),
        ("model.pt", "torch"),
        ("model.safetensors", "safetensors"),
    ]
    for entry in listing.entries:
        alone = list_place(entry.path)
        assert (alone.kind, list(alone.entries)) == ("checkpoint", [entry])


def test_a_url_where_nothing_is_is_reported(cli):
    ran = cli("ls", "memory://nothing/is-here", "--json")

    assert (ran.status, ran.json["error"]["type"]) == (2, "CheckpointNotFoundError")


def test_names_cannot_do_anything_to_a_terminal(tmp_path, cli):
    torch.save(torch.ones(2), tmp_path / "a\x1b[31m\n\u202eb.pt")
    torch.save(torch.ones(2), tmp_path / "c.pt")

    for command in ("ls", "du"):
        out = cli(command, tmp_path).out
        assert "a\\x1b[31m\\n\\u202eb.pt" in out
        assert all(line.isprintable() for line in out.splitlines())


def test_a_pipe_is_not_opened(tmp_path, cli, monkeypatch):
    torch.save(torch.ones(2), tmp_path / "a.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    opened = []
    read = LocalStore.read

    def noting(store, name, *arguments):
        opened.append(name)
        return b"" if name == "pipe.pt" else read(store, name, *arguments)  # nobody would ever write to it

    monkeypatch.setattr(LocalStore, "read", noting)

    assert list(entries(cli("ls", tmp_path, "--json"))) == ["a.pt"]
    assert "a.pt" in opened
    assert "pipe.pt" not in opened


def test_a_folder_that_may_not_be_looked_at_hides_no_other(prepared, cli, monkeypatch):
    os.makedirs("runs/a/lost+found")
    scandir = os.scandir

    def refusing(path):
        if os.path.basename(path) in ("lost+found", "step-00000100"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)

    assert list(entries(cli("ls", "runs/a", "--json"))) == ["step-00000100", "step-00000200", "step-00000300"]
    assert cli("du", "runs/a").status == 0
    assert [facts.step for facts in RunWatch("runs/a").look().checkpoints] == [100, 200, 300]


def test_work_folders_of_conversions_are_no_checkpoints(prepared, cli):
    os.rename("hf-model", ".hf-model.holdfast-0011223344556677.partial")

    assert not any(name.startswith(".") for name in entries(cli("ls", ".", "--json")))


def test_a_run_that_a_job_owns_says_so_and_its_begun_saves_are_not_leftovers(tmp_path, cli):
    with holdfast.CheckpointManager(tmp_path / "run", every_steps=1) as manager:
        manager.save(1, {"w": torch.ones(2)})
        manager.wait()
        leave_a_cut_off_save(tmp_path / "run/step-00000002")
        RunFile(root_at(tmp_path / "run")).change(lambda run: replace(run, unfinished={"step-00000002": ""}))
        ran = cli("ls", tmp_path / "run", "--json")
        (place,) = ran.json["places"]
        assert place["owner"].startswith(f"process {os.getpid()} on ")
        assert "in use by process" in cli("ls", tmp_path / "run").out
        assert [entry["state"] for entry in place["entries"]] == ["committed", "being written"]
    (place,) = cli("ls", tmp_path / "run", "--json").json["places"]
    assert place["owner"] == ""
    assert [entry["state"] for entry in place["entries"]] == ["committed", "leftover"]


def test_formats_of_a_mixed_folder_are_reported(prepared, cli):
    shutil.rmtree("damaged")

    found = entries(cli("ls", ".", "--json"))

    assert {name: entry["format"] for name, entry in found.items()} == {
        "dcp": "dcp",
        "hf-model": "safetensors",
        "model.pt": "torch",
        "model.safetensors": "safetensors",
    }
    assert found["model.pt"]["bytes"] == os.path.getsize("model.pt")
    assert all(entry["saved_at"] for entry in found.values())


def test_one_checkpoint_can_be_given_and_several_places(prepared, cli):
    ran = cli("ls", "runs/b/step-00000100", "dcp", "model.pt", "--json")

    kinds = [(place["kind"], place["entries"][0]["format"]) for place in ran.json["places"]]
    assert kinds == [("checkpoint", "native"), ("checkpoint", "dcp"), ("checkpoint", "torch")]


def test_without_a_path_it_lists_what_is_here(prepared, cli, monkeypatch):
    monkeypatch.chdir("runs/b")

    assert list(entries(cli("ls", "--json"))) == ["step-00000100"]


@pytest.mark.parametrize(
    ("order", "expected"),
    [("name", ["a", "b", "c"]), ("size", ["b", "c", "a"]), ("age", ["c", "a", "b"]), ("step", ["c", "a", "b"])],
)
def test_the_largest_or_newest_comes_last(tmp_path, cli, order, expected):
    for name, size, when in (("a", 300, 2000), ("b", 100, 3000), ("c", 200, 1000)):
        path = tmp_path / f"{name}.pt"
        torch.save(torch.zeros(size * 100), path)
        os.utime(path, (when, when))

    assert [name[0] for name in entries(cli("ls", tmp_path, "--sort", order, "--json"))] == expected


def test_two_folders_of_one_step_are_both_listed(prepared, cli):
    shutil.copytree("runs/a/step-00000100", "runs/a/step-100")

    assert list(entries(cli("ls", "runs/a", "--json")))[:2] == ["step-00000100", "step-100"]


def test_what_is_no_checkpoint_is_an_error(tmp_path, cli):
    (tmp_path / "notes.txt").write_text("hello")
    for place in (tmp_path, tmp_path / "notes.txt"):
        ran = cli("ls", place, "--json")
        assert (ran.status, ran.json["error"]["type"]) == (2, "NotACheckpointError")


def test_a_checkpoint_in_memory_is_listed():
    holdfast.save({"w": torch.ones(2)}, "memory://some-run/step-7")

    listing = list_place("memory://some-run")

    assert [(entry.name, entry.state, entry.step) for entry in listing.entries] == [("step-7", "committed", 7)]


def test_ages_have_units():
    now = datetime.now(timezone.utc)
    ages = [age(now - timedelta(seconds=seconds)) for seconds in (0, 119, 121, 3600 * 47, 3600 * 49)]

    assert ages == ["0 s", "119 s", "2 min", "47 h", "2 d"]
