"""Going on with a run: the newest checkpoint that is intact, and nothing hidden about those that are not."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
import xxhash

import holdfast
from holdfast._manager.steps import folder_of
from holdfast.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    NoUsableCheckpointError,
    StateMismatchError,
    UnsupportedVersionError,
)
from tests.manager.managed import (
    MoodyRoot,
    a_run,
    damage_data,
    file_of,
    flip_a_byte,
    is_state_of,
    restored_from,
    state_of,
    steps_in,
)

DAMAGES = {
    "a byte of the data": damage_data,
    "the data are cut": lambda root, step: os.truncate(file_of(root, step, "data-*"), 2000),
    "the data are empty": lambda root, step: os.truncate(file_of(root, step, "data-*"), 0),
    "the data are missing": lambda root, step: file_of(root, step, "data-*").unlink(),
    "a byte of the record": lambda root, step: flip_a_byte(file_of(root, step, "holdfast.json"), -100),
    "the first byte of the record": lambda root, step: flip_a_byte(file_of(root, step, "holdfast.json"), 0),
    "the record is cut": lambda root, step: os.truncate(file_of(root, step, "holdfast.json"), 200),
    "the record is empty": lambda root, step: os.truncate(file_of(root, step, "holdfast.json"), 0),
    "a byte of the table": lambda root, step: flip_a_byte(file_of(root, step, "data-*"), -3),
}


def test_a_fresh_start_is_none_and_leaves_the_state_alone(tmp_path):
    restored, state = restored_from(tmp_path / "new")
    assert restored is None
    assert is_state_of(state, 0)


def test_the_newest_is_restored(tmp_path):
    a_run(tmp_path, 3, 20, 100, save_options={"metadata": {"git": "1a2b3c"}})
    restored, state = restored_from(tmp_path)
    assert is_state_of(state, 100)
    assert (restored.step, restored.path) == (100, str(tmp_path / "step-00000100"))
    assert (restored.metrics, restored.metadata) == ({"loss": 0.01}, {"git": "1a2b3c"})
    assert (restored.lost_steps, list(restored.set_aside)) == (0, [])
    assert restored.report.read == ["model.weight", "seen"]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_walked_back_over_and_set_aside(tmp_path, damage):
    a_run(tmp_path, 10, 25, 40)
    damage(tmp_path, 40)
    damage(tmp_path, 25)
    restored, state = restored_from(tmp_path)
    assert is_state_of(state, 10)
    assert (restored.step, restored.lost_steps) == (10, 30)
    assert [info.step for info in restored.set_aside] == [40, 25]
    found = {info.step: info for info in holdfast.CheckpointManager(tmp_path).steps()}
    assert found[10].set_aside is None
    for step in (25, 40):
        assert folder_of(step) in found[step].set_aside
        note = json.loads((tmp_path / folder_of(step) / "set-aside.json").read_text())
        assert note["reason"] == found[step].set_aside
    assert holdfast.CheckpointManager(tmp_path).latest().step == 10
    again, _ = restored_from(tmp_path)
    assert (again.step, list(again.set_aside)) == (10, [])


def test_how_many_steps_are_lost_is_reported(tmp_path, caplog):
    a_run(tmp_path, 10, 25)
    damage_data(tmp_path, 25)
    restored, _ = restored_from(tmp_path)
    assert str(restored) == f"restored step 10 from {tmp_path / 'step-00000010'}; 15 steps are lost"
    assert "15 steps are lost" in caplog.text


def test_if_all_are_damaged_it_is_no_fresh_start_not_even_the_second_time(tmp_path):
    a_run(tmp_path, 1, 2)
    damage_data(tmp_path, 1)
    damage_data(tmp_path, 2)
    for _ in range(2):
        with pytest.raises(NoUsableCheckpointError, match="move these away") as raised:
            restored_from(tmp_path)
        assert (raised.value.path, list(raised.value.steps)) == (str(tmp_path), [1, 2])
    shutil.rmtree(tmp_path / folder_of(1))
    shutil.rmtree(tmp_path / folder_of(2))
    assert restored_from(tmp_path)[0] is None


def test_a_step_by_its_number(tmp_path, caplog):
    a_run(tmp_path, 1, 2, 3)
    restored, state = restored_from(tmp_path, step=2)
    assert (restored.step, restored.metrics) == (2, {"loss": 0.5})
    assert is_state_of(state, 2)
    assert "newer ones" in caplog.text
    with pytest.raises(CheckpointNotFoundError, match=r"step 7 in .* There are: 1, 2, 3"):
        restored_from(tmp_path, step=7)


def test_damage_of_the_step_that_was_asked_for_is_an_error(tmp_path):
    a_run(tmp_path, 1, 2)
    damage_data(tmp_path, 2)
    with pytest.raises(DamagedCheckpointError):
        restored_from(tmp_path, step=2)
    assert [info.set_aside for info in holdfast.CheckpointManager(tmp_path).steps()] == [None, None]


def test_a_step_that_was_set_aside_can_be_asked_for_when_its_files_are_back(tmp_path):
    a_run(tmp_path, 1, 2)
    damage_data(tmp_path, 2)
    restored_from(tmp_path)
    damage_data(tmp_path, 2)  # flips the same byte back
    restored, state = restored_from(tmp_path, step=2)
    assert restored.step == 2
    assert is_state_of(state, 2)


def test_a_step_that_was_set_aside_counts_again_when_it_is_saved_again(tmp_path):
    a_run(tmp_path, 1, 2)
    damage_data(tmp_path, 2)
    with holdfast.CheckpointManager(tmp_path) as manager:
        assert manager.restore(state_of(0)).step == 1
        manager.maybe_save(2, state_of(2))
    assert manager.latest().step == 2
    assert restored_from(tmp_path)[0].step == 2
    assert not (tmp_path / folder_of(2) / "set-aside.json").exists()


def test_what_another_checkpoint_would_not_help_against_is_raised(tmp_path):
    a_run(tmp_path, 1, 2)
    with holdfast.CheckpointManager(tmp_path) as manager:
        for wrong in ({"model": {"weight": torch.zeros(3)}, "seen": 0}, {"model": {}, "seen": 0, "more": 1}):
            with pytest.raises(StateMismatchError):
                manager.restore(wrong)
    assert [info.set_aside for info in manager.steps()] == [None, None]


def test_a_checkpoint_of_a_newer_version_is_not_taken_for_damage(tmp_path):
    a_run(tmp_path, 1, 2)
    record = file_of(tmp_path, 2, "holdfast.json")
    body = record.read_bytes().replace(b'"version":[2,', b'"version":[9,').rpartition(b',"check":')[0]
    record.write_bytes(body + b',"check":"%s"}\n' % xxhash.xxh3_128_hexdigest(body).encode())
    with pytest.raises(UnsupportedVersionError):
        restored_from(tmp_path)
    assert not (tmp_path / folder_of(2) / "set-aside.json").exists()


def test_a_part_reads_only_its_bytes(tmp_path):
    state = {"model": {"w": torch.ones(10_000)}, "optim": {"m": torch.ones(500_000)}, "data": {"position": 7}}
    with holdfast.CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
    root = MoodyRoot(tmp_path)
    template = {"model": {"w": torch.zeros(10_000)}, "optim": {"m": torch.zeros(500_000)}, "data": {"position": 0}}
    with holdfast.CheckpointManager(root) as manager:
        restored = manager.restore(template, parts=["model", "data"])
    assert restored.report.read == ["model.w", "data.position"]
    assert template["data"] == {"position": 7}
    assert template["model"]["w"].sum() == 10_000
    assert template["optim"]["m"].sum() == 0
    assert 40_000 <= root.bytes_read["data"] < 40_000 + 2 * 65_536
    root.bytes_read.clear()
    with holdfast.CheckpointManager(root) as manager:
        manager.restore(template)
    assert root.bytes_read["data"] >= 2_040_000


def test_parts_that_are_no_list_or_not_there_are_refused(tmp_path):
    a_run(tmp_path, 1)
    with pytest.raises(TypeError, match="list of names"):
        restored_from(tmp_path, parts="model")
    with pytest.raises(ValueError, match=r"no part 'modle'\. Its parts are: 'model', 'seen'\."):
        restored_from(tmp_path, parts=["seen", "modle"])
    with holdfast.CheckpointManager(tmp_path) as manager, pytest.raises(TypeError, match="the state is a Linear"):
        manager.restore(torch.nn.Linear(1, 1), parts=["weight"])


def test_options_of_load_are_passed_on(tmp_path):
    a_run(tmp_path, 1)
    state = {"model": {"weight": torch.zeros(1000, dtype=torch.float64)}, "seen": 0}
    with holdfast.CheckpointManager(tmp_path) as manager:
        manager.restore(state, cast=True)
    assert state["model"]["weight"].sum() == 1000


def test_what_an_older_step_does_not_have_is_not_left_over_from_a_damaged_newer_one(tmp_path):
    size = 300_000
    with holdfast.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"late": torch.full((size,), 1.0)})
        manager.save(2, {"early": torch.full((size,), 2.0), "late": torch.full((size,), 2.0)})
    damage_data(tmp_path, 2)  # at the end, when the rest has been read
    state = {"early": torch.full((size,), 5.0), "late": torch.zeros(size)}
    with holdfast.CheckpointManager(tmp_path) as manager:
        restored = manager.restore(state, allow_missing="early")
    assert (restored.step, restored.report.missing) == (1, ["early"])
    assert (state["early"].unique().tolist(), state["late"].unique().tolist()) == ([5.0], [1.0])


def test_without_digests_to_compare_an_incomplete_step_is_restored_as_it_is(tmp_path):
    with holdfast.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"late": torch.ones(3)})
    state = {"early": torch.zeros(3), "late": torch.zeros(3)}
    with holdfast.CheckpointManager(tmp_path) as manager:
        restored = manager.restore(state, allow_missing="early", verify=False)
    assert (restored.step, state["late"].tolist()) == (1, [1.0, 1.0, 1.0])


def test_checkpoints_that_others_put_there_are_restored_too(tmp_path):
    for step in (1, 2):
        holdfast.save(state_of(step), tmp_path / f"step-{step}")
    restored, state = restored_from(tmp_path)
    assert (restored.step, restored.path) == (2, str(tmp_path / "step-2"))
    assert is_state_of(state, 2)


def test_a_killed_save_is_no_step_and_leaves_nothing(tmp_path):
    a_run(tmp_path, 1)
    with holdfast.CheckpointManager(tmp_path) as manager:
        manager._run.begin(2)  # as far as a save gets that is killed while it writes
        shutil.copytree(tmp_path / folder_of(1), tmp_path / folder_of(2))
        (tmp_path / folder_of(2) / "holdfast.json").unlink()
    restored, _ = restored_from(tmp_path)
    assert restored.step == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["holdfast-run.json", "step-00000001"]


class Vanishing(MoodyRoot):
    """When the data of step 1 are to be read here, the job that trains has saved another step and deletes this one."""

    def child(self, name):
        store = super().child(name)
        open_object = store.reader

        def reader(name_of_object):
            if name_of_object.startswith("data-") and name == folder_of(1):
                holdfast.save(state_of(2), self.folder / folder_of(2))
                shutil.rmtree(self.folder / name)
            return open_object(name_of_object)

        store.reader = reader
        return store


def test_a_step_that_is_deleted_while_it_is_read_is_neither_damaged_nor_the_end(tmp_path):
    a_run(tmp_path, 1)
    root, state = Vanishing(tmp_path), state_of(0)
    with holdfast.CheckpointManager(root, run_options=holdfast.RunOptions(read_only=True)) as manager:
        restored = manager.restore(state)
    assert (restored.step, restored.lost_steps, list(restored.set_aside)) == (2, 0, [])
    assert is_state_of(state, 2)
    assert steps_in(tmp_path) == [2]
    assert not (tmp_path / folder_of(1)).exists()


def test_what_is_excluded_stays_as_the_program_has_it(tmp_path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optim": optimizer}
    with holdfast.CheckpointManager(tmp_path) as manager:
        manager.save(1, state, wait=True)
        optimizer.param_groups[0].update(lr=0.5, eps=0.25)
        manager.restore(state, exclude="optim.param_groups.*.lr")
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["eps"] == 1e-8
