from __future__ import annotations

import json
import math
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as stock_dcp
from safetensors.torch import save_file

import holdfast
from holdfast._manager.run_file import RUN_FILE, RunFile
from holdfast._manager.steps import set_aside
from holdfast._tools.serving.run_facts import RunFacts, RunWatch, Writing
from holdfast.errors import CheckpointNotFoundError
from holdfast.stores import LocalRoot, LocalStore
from tests.manager.managed import MoodyRoot, a_run, file_of, state_of


def states(facts: RunFacts) -> dict[str, str]:
    return {one.name: one.state for one in facts.checkpoints}


def looked_at(watch: RunWatch) -> RunFacts:
    watch.forget_look()
    return watch.look()


def test_a_run_is_listed_with_all_that_is_known_of_its_steps(tmp_path) -> None:
    with holdfast.CheckpointManager(
        tmp_path, background=False, save_at_end=False, save_options={"metadata": {"git": "1a2b"}}
    ) as manager:
        manager.save(500, state_of(500), metrics={"loss": 0.25, "wild": math.inf})
        manager.save(1000, state_of(1000))
        manager.pin(500)
        facts = RunWatch(tmp_path).look()
        owner = facts.to_json()["owner"]

    first, second = facts.checkpoints
    assert (first.step, first.state, first.format, first.pinned) == (500, "committed", "native", True)
    assert dict(first.metrics) == {"loss": 0.25, "wild": math.inf}
    assert dict(first.metadata) == {"git": "1a2b"}
    assert first.nbytes == sum(file.stat().st_size for file in (tmp_path / first.name).iterdir())
    assert first.saved_at is not None
    assert set(first.writing.phases) >= {"plan", "write"}
    assert first.writing.world_size == 1
    assert (second.step, second.pinned) == (1000, False)
    assert (owner["pid"], owner["life"]) == (os.getpid(), "alive")


def test_what_a_page_gets_is_plain_json(tmp_path) -> None:
    holdfast.save({"seen": 1}, tmp_path / "step-1", metadata={"nested": {"a": [1, None]}, "text": "ü"})
    with holdfast.CheckpointManager(tmp_path, background=False, save_at_end=False) as manager:
        manager.save(2, state_of(2), metrics={"loss": math.nan})

    answer = json.loads(RunWatch(tmp_path).encoded().content)

    first, second = answer["checkpoints"]
    assert first["metadata"] == {"nested": '{"a": [1, null]}', "text": "ü"}
    assert second["metrics"] == {"loss": "nan"}
    assert answer["title"] == tmp_path.name


def test_damage_that_can_be_seen_without_reading_the_data_is_reported(tmp_path) -> None:
    a_run(tmp_path, 1, 2, 3, 4, 5)
    set_aside(LocalStore(tmp_path / "step-00000001"), "its weights are noise")
    os.truncate(file_of(tmp_path, 2, "holdfast.json"), 200)
    file_of(tmp_path, 3, "data-*").unlink()
    os.truncate(file_of(tmp_path, 4, "data-*"), 100)

    facts = RunWatch(tmp_path).look()

    assert list(states(facts).values()) == ["set aside", "damaged", "damaged", "damaged", "committed"]
    assert facts.checkpoints[0].why == "its weights are noise"
    assert "holdfast.json" in facts.checkpoints[1].why
    assert "fewer bytes" in facts.checkpoints[2].why


def test_a_checkpoint_that_loses_its_files_later_becomes_damaged(tmp_path) -> None:
    a_run(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    long_ago = folder.stat().st_mtime - 1000
    os.utime(folder, (long_ago, long_ago))
    watch = RunWatch(tmp_path)
    assert states(watch.look()) == {"step-00000001": "committed"}
    file_of(tmp_path, 1, "data-*").unlink()

    assert states(looked_at(watch)) == {"step-00000001": "damaged"}


def test_a_change_within_one_tick_of_the_clock_of_a_disk_is_seen(tmp_path) -> None:
    a_run(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    soon = folder.stat().st_mtime + 60
    os.utime(folder, (soon, soon))
    watch = RunWatch(tmp_path)
    assert states(watch.look()) == {"step-00000001": "committed"}
    file_of(tmp_path, 1, "data-*").unlink()
    os.utime(folder, (soon, soon))

    assert states(looked_at(watch)) == {"step-00000001": "damaged"}


def test_a_folder_that_has_not_changed_is_not_read_again(tmp_path, monkeypatch) -> None:
    a_run(tmp_path, 1, 2)
    for folder in tmp_path.glob("step-*"):
        os.utime(folder, (1, 1))
    watch = RunWatch(tmp_path)
    watch.look()
    read = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: read.append(os.path.basename(path)) or scandir(path))
    (tmp_path / "step-00000002" / "note").touch()
    looked_at(watch)

    assert [name for name in read if name.startswith("step-")] == ["step-00000002"]


def test_checkpoints_of_all_formats_are_found_and_other_things_are_not(tmp_path) -> None:
    tensors = {"w": torch.ones(10)}
    holdfast.save(tensors, tmp_path / "ours")
    with pytest.warns(UserWarning, match="single process"):
        stock_dcp.save(tensors, checkpoint_id=tmp_path / "dcp-7")
    (tmp_path / "checkpoint-500").mkdir()
    save_file(tensors, tmp_path / "checkpoint-500" / "model.safetensors")
    save_file(tensors, tmp_path / "epoch=3-step=70.safetensors")
    torch.save(tensors, tmp_path / "model.pt")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "log.txt").write_text("no checkpoint")
    (tmp_path / "notes.bin").write_text("nor is this")

    facts = RunWatch(tmp_path).look()

    found = {one.name: (one.format, one.step) for one in facts.checkpoints}
    assert found == {
        "dcp-7": ("dcp", 7),
        "epoch=3-step=70.safetensors": ("safetensors", 70),
        "checkpoint-500": ("safetensors", 500),
        "model.pt": ("torch", None),
        "ours": ("native", None),
    }
    assert facts.checkpoint("model.pt").nbytes == (tmp_path / "model.pt").stat().st_size
    assert facts.problem == ""


@pytest.mark.parametrize("name", ["step-00000002", "step-00000002/holdfast.json", "final", "dcp", "m.safetensors"])
def test_a_single_checkpoint_is_shown_without_its_neighbours(tmp_path, name) -> None:
    a_run(tmp_path, 1, 2)
    holdfast.save({"w": torch.ones(2)}, tmp_path / "final")
    with pytest.warns(UserWarning, match="single process"):
        stock_dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp")
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")

    facts = RunWatch(tmp_path / name).look()

    assert facts.is_single
    assert [one.name for one in facts.checkpoints] == [name.split("/")[0]]
    assert facts.location == str(tmp_path / name.split("/")[0])


def test_a_hugging_face_folder_is_one_checkpoint_and_loose_files_are_several(tmp_path) -> None:
    for name in ("model-00001-of-00002", "model-00002-of-00002"):
        (tmp_path / "hf").mkdir(exist_ok=True)
        save_file({"w": torch.ones(2)}, tmp_path / "hf" / f"{name}.safetensors")
    for name in ("model-1", "model-2"):
        (tmp_path / "loose").mkdir(exist_ok=True)
        save_file({"w": torch.ones(2)}, tmp_path / "loose" / f"{name}.safetensors")

    assert [one.name for one in RunWatch(tmp_path / "hf").look().checkpoints] == ["hf"]
    assert [one.step for one in RunWatch(tmp_path / "loose").look().checkpoints] == [1, 2]


def test_a_run_that_has_no_checkpoint_yet_is_a_run_whatever_lies_in_it(tmp_path) -> None:
    a_run(tmp_path)
    save_file({"w": torch.ones(2)}, tmp_path / "pretrained.safetensors")

    facts = RunWatch(tmp_path).look()

    assert not facts.is_single
    assert facts.run.run


def test_a_path_that_does_not_exist_is_reported_at_once(tmp_path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nothing at"):
        RunWatch(tmp_path / "rnu")


def test_a_run_in_memory_is_listed_too() -> None:
    a_run("memory://a-served-run", 3)
    holdfast.save({"seen": 1}, "memory://a-served-run/final")

    facts = RunWatch("memory://a-served-run").look()

    assert [(one.name, one.state) for one in facts.checkpoints] == [
        ("step-00000003", "committed"),
        ("final", "committed"),
    ]
    assert [one.name for one in RunWatch("memory://a-served-run/final").look().checkpoints] == ["final"]


def test_a_damaged_run_file_is_a_problem_but_hides_no_checkpoint(tmp_path) -> None:
    a_run(tmp_path, 1)
    (tmp_path / RUN_FILE).write_text("{")

    facts = RunWatch(tmp_path).look()

    assert RUN_FILE in facts.problem
    assert states(facts) == {"step-00000001": "committed"}


def test_a_folder_that_vanishes_is_empty_until_it_is_back(tmp_path) -> None:
    a_run(tmp_path / "run", 1)
    watch = RunWatch(tmp_path / "run")
    assert len(watch.look().checkpoints) == 1
    shutil.move(tmp_path / "run", tmp_path / "moved")
    gone = looked_at(watch)
    assert (gone.checkpoints, "nothing at" in gone.problem) == ([], True)
    shutil.move(tmp_path / "moved", tmp_path / "run")

    back = looked_at(watch)
    assert (len(back.checkpoints), back.problem) == (1, "")


def test_a_url_where_nothing_is_is_reported_at_once() -> None:
    with pytest.raises(CheckpointNotFoundError, match="nothing at"):
        RunWatch("memory://a-served-rnu")


def test_a_checkpoint_that_replaces_another_under_its_name_is_seen(tmp_path) -> None:
    holdfast.save({"w": torch.ones(4)}, tmp_path / "best", metadata={"at": 1})
    watch = RunWatch(tmp_path)
    before = watch.look().checkpoints[0]
    holdfast.save({"w": torch.ones(4)}, tmp_path / "best", metadata={"at": 2}, overwrite=True)

    after = looked_at(watch).checkpoints[0]

    assert before.identity != after.identity
    assert (dict(before.metadata), dict(after.metadata)) == ({"at": 1}, {"at": 2})


def test_a_copy_of_a_run_has_no_job_though_its_run_file_names_one(tmp_path) -> None:
    with holdfast.CheckpointManager(tmp_path / "run", background=False, save_at_end=False) as manager:
        manager.save(1, state_of(1))
        shutil.copytree(tmp_path / "run", tmp_path / "copy")

        assert RunWatch(tmp_path / "run").look().to_json()["owner"] is not None
        assert RunWatch(tmp_path / "copy").look().to_json()["owner"] is None


def test_pins_of_another_process_are_seen(tmp_path) -> None:
    a_run(tmp_path, 1)
    watch = RunWatch(tmp_path)
    assert not watch.look().checkpoints[0].pinned
    RunFile(LocalRoot(tmp_path)).pin(1)

    assert looked_at(watch).checkpoints[0].pinned


def test_many_who_ask_at_once_cost_one_look(tmp_path) -> None:
    a_run(tmp_path, 1, 2, 3)
    watch = RunWatch(tmp_path)
    first = watch.look()
    a_run(tmp_path, 4)

    assert watch.look() is first
    assert watch.encoded() is watch.encoded()


def test_a_record_is_read_once_and_then_only_its_beginning(tmp_path) -> None:
    holdfast.save({f"key {number}": number for number in range(50_000)}, tmp_path / "step-1")
    (record,) = tmp_path.glob("*/holdfast.json")
    root = MoodyRoot(tmp_path)
    watch = RunWatch(root)
    watch.look()
    root.bytes_read.clear()
    looked_at(watch)

    assert record.stat().st_size > 500_000
    assert root.bytes_read.get("holdfast.json", 0) < 1000


def test_how_long_the_phases_took_is_that_of_the_slowest_rank() -> None:
    noted = {"world_size": 2, "phases": {"write": [1.0, 2.5], "plan": [0.1, 0.1]}}

    assert Writing.of(noted) == Writing(2, {"write": 2.5, "plan": 0.1})


@pytest.mark.parametrize(
    "noted", [None, [], {"phases": 3}, {"phases": {"write": "long"}}, {"phases": {"write": []}}, {"world_size": "many"}]
)
def test_nonsense_about_how_a_checkpoint_was_written_is_passed_over(noted) -> None:
    assert Writing.of(noted) == Writing()
