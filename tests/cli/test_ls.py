"""``holdfast ls``: what it says of checkpoints in every state."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
import torch

import holdfast as hf
from holdfast.cli.ls import age
from holdfast.listing.listing import list_place
from holdfast.manager.run_file import RunFile
from holdfast.stores.roots import root_at

LONG_AGO = 1_000_000


def entries(ran):
    (place,) = ran.json["places"]
    return {entry["name"]: entry for entry in place["entries"]}


def leave_debris(folder, *, is_old=True):
    folder.mkdir()
    file = folder / "data-00112233aabbccdd-0-0.safetensors"
    file.write_bytes(bytes(1000))
    if is_old:
        os.utime(file, (LONG_AGO, LONG_AGO))


def test_a_run_is_listed_with_steps_sizes_times_and_metrics(prepared, holdfast):
    ran = holdfast("ls", "runs/a", "--json")

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


def test_people_see_a_table(prepared, holdfast):
    ran = holdfast("ls", "runs/a")

    headline, header, *rows = ran.out.splitlines()
    assert headline.startswith(f"{prepared}/runs/a: 3 checkpoints, ")
    assert header.split() == ["NAME", "STATE", "SIZE", "AGE", "FORMAT", "loss"]
    assert [row.split()[0] for row in rows] == ["step-00000100", "step-00000200", "step-00000300"]
    assert "committed, pinned" in rows[2]
    assert rows[1].split()[-1] == "0.5"


def test_states_tell_what_became_of_saves(prepared, holdfast):
    run = prepared / "runs/a"
    (run / "step-00000100/set-aside.json").write_text('{"reason": "loss was [red] NaN"}')
    record = run / "step-00000200/holdfast.json"
    record.write_bytes(record.read_bytes()[:-40])
    leave_debris(run / "step-00000400")
    leave_debris(run / "step-00000500", is_old=False)

    found = entries(holdfast("ls", run, "--json"))

    states = {name: entry["state"] for name, entry in found.items()}
    assert states == {
        "step-00000100": "set aside",
        "step-00000200": "damaged",
        "step-00000300": "committed",
        "step-00000400": "debris",
        "step-00000500": "being written",
    }
    assert found["step-00000100"]["why"] == "loss was [red] NaN"
    assert "does not end as a record must" in found["step-00000200"]["why"]
    assert found["step-00000400"]["bytes"] == 1000
    assert "set aside: loss was [red] NaN" in holdfast("ls", run).out


def test_a_run_that_a_job_owns_says_so_and_its_begun_saves_are_not_debris(tmp_path, holdfast):
    with hf.CheckpointManager(tmp_path / "run", every_steps=1) as manager:
        manager.save(1, {"w": torch.ones(2)})
        manager.wait()
        leave_debris(tmp_path / "run/step-00000002")
        RunFile(root_at(tmp_path / "run")).change(lambda run: replace(run, unfinished={"step-00000002": ""}))
        ran = holdfast("ls", tmp_path / "run", "--json")
        (place,) = ran.json["places"]
        assert place["owner"].startswith(f"process {os.getpid()} on ")
        assert "in use by process" in holdfast("ls", tmp_path / "run").out
        assert [entry["state"] for entry in place["entries"]] == ["committed", "being written"]
    (place,) = holdfast("ls", tmp_path / "run", "--json").json["places"]
    assert place["owner"] == ""
    assert [entry["state"] for entry in place["entries"]] == ["committed", "debris"]


def test_formats_of_a_mixed_folder_are_told(prepared, holdfast):
    shutil.rmtree("damaged")

    found = entries(holdfast("ls", ".", "--json"))

    assert {name: entry["format"] for name, entry in found.items()} == {
        "dcp": "dcp",
        "hf-model": "safetensors",
        "model.pt": "torch",
        "model.safetensors": "safetensors",
    }
    assert found["model.pt"]["bytes"] == os.path.getsize("model.pt")
    assert all(entry["saved_at"] for entry in found.values())


def test_one_checkpoint_can_be_given_and_several_places(prepared, holdfast):
    ran = holdfast("ls", "runs/b/step-00000100", "dcp", "model.pt", "--json")

    kinds = [(place["kind"], place["entries"][0]["format"]) for place in ran.json["places"]]
    assert kinds == [("checkpoint", "native"), ("checkpoint", "dcp"), ("checkpoint", "torch")]


def test_without_a_path_it_lists_what_is_here(prepared, holdfast, monkeypatch):
    monkeypatch.chdir("runs/b")

    assert list(entries(holdfast("ls", "--json"))) == ["step-00000100"]


@pytest.mark.parametrize(
    ("order", "expected"),
    [("name", ["a", "b", "c"]), ("size", ["b", "c", "a"]), ("age", ["c", "a", "b"]), ("step", ["c", "a", "b"])],
)
def test_the_largest_or_newest_comes_last(tmp_path, holdfast, order, expected):
    for name, size, when in (("a", 300, 2000), ("b", 100, 3000), ("c", 200, 1000)):
        path = tmp_path / f"{name}.pt"
        torch.save(torch.zeros(size * 100), path)
        os.utime(path, (when, when))

    assert [name[0] for name in entries(holdfast("ls", tmp_path, "--sort", order, "--json"))] == expected


def test_two_folders_of_one_step_are_both_listed(prepared, holdfast):
    shutil.copytree("runs/a/step-00000100", "runs/a/step-100")

    assert list(entries(holdfast("ls", "runs/a", "--json")))[:2] == ["step-00000100", "step-100"]


def test_what_is_no_checkpoint_is_an_error(tmp_path, holdfast):
    (tmp_path / "notes.txt").write_text("hello")
    for place in (tmp_path, tmp_path / "notes.txt"):
        ran = holdfast("ls", place, "--json")
        assert (ran.status, ran.json["error"]["type"]) == (2, "NotACheckpointError")


def test_a_checkpoint_in_memory_is_listed():
    hf.save({"w": torch.ones(2)}, "memory://some-run/step-7")

    listing = list_place("memory://some-run")

    assert [(entry.name, entry.state, entry.step) for entry in listing.entries] == [("step-7", "committed", 7)]


def test_ages_have_units():
    now = datetime.now(timezone.utc)
    ages = [age(now - timedelta(seconds=seconds)) for seconds in (0, 119, 121, 3600 * 47, 3600 * 49)]

    assert ages == ["0 s", "119 s", "2 min", "47 h", "2 d"]
