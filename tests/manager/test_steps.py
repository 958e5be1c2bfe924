"""Steps are found as they are on the disk: what is committed, by whom, and what of it can be used."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
import torch

import holdfast
from holdfast._formats.native.names import RECORD, SET_ASIDE
from holdfast._manager.run_file import RunFile, RunState
from holdfast._manager.steps import (
    StepInfo,
    best,
    folder_of,
    latest,
    list_steps,
    look_at,
    put_back,
    rows_of,
    set_aside,
    step_of,
)
from holdfast._manager.summaries import Summary, noted_metadata
from holdfast.stores import LocalRoot, MemoryRoot, Root
from tests.manager.folders import a_run, files_in, save_step, state_of, steps_in


@pytest.fixture(params=["disk", "memory"])
def root(request, tmp_path) -> Root:
    return LocalRoot(tmp_path / "run") if request.param == "disk" else MemoryRoot(str(tmp_path))


def test_steps_are_listed_with_what_was_noted(root):
    a_run(root, 1000)
    before = datetime.now(timezone.utc) - timedelta(seconds=1)
    save_step(root, 500, {"loss": torch.tensor(0.25), "steps": 3})
    info = steps_in(root)[500]
    assert list(steps_in(root)) == [500, 1000]
    assert info.path == root.child("step-00000500").location
    assert info.metrics == {"loss": 0.25, "steps": 3.0}
    assert info.saved_at is not None
    assert before <= info.saved_at <= datetime.now(timezone.utc)
    assert info.nbytes == sum(listed.size for listed in root.child("step-00000500").list())
    assert (info.is_ours, info.pinned, info.set_aside, info.damage) == (True, False, None, None)
    assert look_at(root, 500, RunFile(root).read()) == info


def test_a_step_is_an_ordinary_checkpoint(tmp_path):
    a_run(LocalRoot(tmp_path), 500)
    state = {"weight": torch.zeros(4), "step": 0}
    holdfast.load(state, tmp_path / "step-00000500")
    assert state["step"] == 500
    assert torch.equal(state["weight"], state_of(500)["weight"])


def test_metadata_of_the_user_is_apart_from_the_managers(root):
    run = a_run(root).read().run
    noted = noted_metadata(run, 1, {"loss": 1}, "signal", {"git": "1a2b3c"})
    holdfast.save({"step": 1}, root.child(folder_of(1)), metadata=noted)
    assert steps_in(root)[1].metadata == {"git": "1a2b3c"}
    with pytest.raises(ValueError, match="'holdfast'"):
        noted_metadata(run, 1, metadata={"holdfast": "mine"})


def test_metrics_may_be_any_floats(root):
    a_run(root)
    save_step(root, 1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e300})
    found = steps_in(root)[1].metrics
    assert math.isnan(found["a"])
    assert (found["b"], found["c"], found["d"]) == (math.inf, -math.inf, 1e300)


@pytest.mark.parametrize(("name", "value"), [("loss", "low"), ("loss", torch.zeros(2)), ("loss", None), (7, 1.0)])
def test_what_is_no_metric_is_refused(name, value):
    with pytest.raises(TypeError, match="metric"):
        noted_metadata("run", 1, {name: value})


def test_a_folder_without_a_record_is_no_step(root):
    a_run(root, 1, 2)
    root.child(folder_of(2)).delete([RECORD])
    root.child(folder_of(3)).put("data-00c0ffee00c0ffee-0-0.safetensors", b"")
    assert list(steps_in(root)) == [1]
    assert look_at(root, 2, RunFile(root).read()) is None


def test_an_empty_place_has_no_steps(tmp_path):
    assert list_steps(LocalRoot(tmp_path / "nowhere"), RunState()) == []
    assert not (tmp_path / "nowhere").exists()


def test_checkpoints_of_others_are_listed_but_are_not_ours(root):
    a_run(root, 1)
    holdfast.save(state_of(2), root.child(folder_of(2)))
    holdfast.save(state_of(3), root.child("step-3"), metadata={"holdfast": "my own note"})
    holdfast.save(state_of(4), root.child(folder_of(4)), metadata=noted_metadata("another run", 4, {"loss": 1.0}))
    holdfast.save(state_of(5), root.child("best-model"))
    found = steps_in(root)
    assert {step: info.is_ours for step, info in found.items()} == {1: True, 2: False, 3: False, 4: False}
    assert found[3].metadata == {"holdfast": "my own note"}
    assert found[4].metrics == {"loss": 1.0}


def test_a_copy_of_our_checkpoint_is_not_ours(tmp_path):
    root = LocalRoot(tmp_path)
    a_run(root, 1)
    shutil.copytree(tmp_path / folder_of(1), tmp_path / folder_of(2))
    (tmp_path / folder_of(1)).rename(tmp_path / "step-1")
    assert [info.is_ours for info in steps_in(root).values()] == [False, False]


def test_without_a_run_nothing_is_ours(root):
    holdfast.save(state_of(1), root.child(folder_of(1)), metadata=noted_metadata("", 1))
    assert [info.is_ours for info in list_steps(root, RunState())] == [False]


def test_of_two_folders_for_one_step_the_managers_name_counts(root):
    a_run(root, 500)
    holdfast.save(state_of(1), root.child("step-500"))
    holdfast.save(state_of(1), root.child("step-0000000500"))
    assert [(info.name, info.is_ours) for info in steps_in(root).values()] == [("step-00000500", True)]


def test_large_steps_have_longer_names():
    assert folder_of(123456789012) == "step-123456789012"
    assert step_of(folder_of(123456789012)) == 123456789012
    assert [step_of(name) for name in ("step-", "step-1x", "step--1", "xstep-1", f"step-{'9' * 19}")] == [None] * 5


@pytest.mark.parametrize("step", [-1, 1.0, True, "500", 10**18])
def test_what_is_no_step_is_refused(step):
    with pytest.raises(ValueError, match="whole number"):
        folder_of(step)


# --- the cache ----------------------------------------------------------------------------------------------------


def remembered(root: Root) -> RunState:
    state = RunFile(root).read()
    return replace(state, rows=rows_of(root, list_steps(root, state), state))


def test_a_remembered_record_is_not_read_again(root, monkeypatch):
    a_run(root, 1)
    save_step(root, 2, {"loss": math.inf})
    expected, state = list_steps(root, RunFile(root).read()), remembered(root)
    monkeypatch.setattr("holdfast._manager.steps.decode_record", lambda *_: pytest.fail("it was read"))
    assert list_steps(root, state) == expected


def test_what_is_remembered_survives_the_run_file(root):
    run_file = a_run(root, 1)
    rows = remembered(root).rows
    run_file.end("this job", [], rows=rows)
    assert rows
    assert RunFile(root).read().rows == rows


def test_a_step_that_was_saved_again_is_read_again(root):
    a_run(root)
    save_step(root, 1, {"loss": 1.0})
    state = remembered(root)
    save_step(root, 1, {"loss": 2.0}, overwrite=True)
    (info,) = list_steps(root, state)
    assert info.metrics == {"loss": 2.0}


def test_a_remembered_record_that_was_cut_off_since_is_damage(tmp_path):
    root = LocalRoot(tmp_path)
    a_run(root, 1)
    state, record = remembered(root), tmp_path / folder_of(1) / RECORD
    record.write_bytes(record.read_bytes()[:-100])
    (info,) = list_steps(root, state)
    assert info.damage is not None


@pytest.mark.parametrize("digits", ["9" * 400, "-" + "9" * 400])
def test_a_metric_that_is_too_large_for_a_float_is_none(root, digits):
    a_run(root, 1)
    state = remembered(root)
    row = {**state.rows[folder_of(1)], "metrics": {"loss": int(digits), "gain": 2}}
    (info,) = list_steps(root, replace(state, rows={folder_of(1): row}))
    assert info.metrics == {"gain": 2.0}


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "soon", "2026-01-01"])
def test_a_time_that_nobody_can_have_saved_at_is_none(root, time):
    a_run(root, 1)
    state = remembered(root)
    (info,) = list_steps(root, replace(state, rows={folder_of(1): {**state.rows[folder_of(1)], "saved_at": time}}))
    assert info.saved_at is None


@pytest.mark.parametrize("spoil", [{}, {"identity": 7}, {"nbytes": "many"}, {"metrics": None}, {"more": 1}])
def test_a_spoilt_memory_is_not_used(root, spoil):
    a_run(root, 1)
    expected, state = list_steps(root, RunFile(root).read()), remembered(root)
    row = {**state.rows[folder_of(1)], **spoil} if spoil else {}
    assert Summary.from_json(row) is None
    assert list_steps(root, replace(state, rows={folder_of(1): row})) == expected


# --- what is passed over ------------------------------------------------------------------------------------------


def test_a_damaged_record_is_listed_as_that(tmp_path):
    root = LocalRoot(tmp_path)
    a_run(root, 1, 2)
    record = tmp_path / folder_of(2) / RECORD
    record.write_bytes(record.read_bytes().replace(b'"step"', b'"stop"'))
    info = steps_in(root)[2]
    assert info.damage is not None
    assert "digest" in info.damage
    assert not info.is_ours
    assert not info.is_usable
    assert latest(list(steps_in(root).values())).step == 1


@pytest.mark.parametrize("content", [b"", b"{}", b"\0" * 5000])
def test_a_record_that_is_none_is_damage(root, content):
    root.child(folder_of(1)).put(RECORD, content)
    assert steps_in(root)[1].damage is not None


def test_what_is_set_aside_is_passed_over_until_it_is_put_back(root):
    a_run(root, 1, 2)
    store = root.child(folder_of(2))
    set_aside(store, "data-… is damaged")
    set_aside(store, "it is damaged, really")
    info = steps_in(root)[2]
    assert (info.set_aside, info.is_ours, info.is_usable) == ("it is damaged, really", True, False)
    assert latest(list(steps_in(root).values())).step == 1
    put_back(store)
    assert latest(list(steps_in(root).values())).step == 2


def test_a_new_save_in_place_of_one_that_was_set_aside_is_good(root):
    a_run(root, 1)
    set_aside(root.child(folder_of(1)), "damaged")
    save_step(root, 1, overwrite=True)
    assert steps_in(root)[1].is_usable


def test_a_checkpoint_with_a_damaged_record_can_be_set_aside(root):
    root.child(folder_of(1)).put(RECORD, b"damaged")
    set_aside(root.child(folder_of(1)), "damaged")
    assert steps_in(root)[1].set_aside == "damaged"


def test_a_file_made_by_hand_sets_aside(tmp_path):
    root = LocalRoot(tmp_path)
    a_run(root, 1)
    (tmp_path / folder_of(1) / SET_ASIDE).write_text("diverged, do not use\n")
    assert steps_in(root)[1].set_aside == "diverged, do not use"


def test_listing_changes_nothing(tmp_path):
    root = LocalRoot(tmp_path)
    a_run(root, 1)
    before = files_in(tmp_path)
    steps_in(root)
    assert files_in(tmp_path) == before


def test_pinned_steps_say_so(root):
    a_run(root, 1, 2).pin(2)
    assert [info.pinned for info in steps_in(root).values()] == [False, True]


# --- the latest and the best --------------------------------------------------------------------------------------


def with_loss(step: int, loss: float | None, **changes) -> StepInfo:
    return StepInfo(step, f"step-{step}", metrics={} if loss is None else {"loss": loss}, **changes)


def test_the_best_is_the_newest_of_equals_among_those_that_can_be_used():
    steps = [
        with_loss(1, 0.5),
        with_loss(2, 0.5),
        with_loss(3, 0.1, set_aside="damaged"),
        with_loss(4, math.nan),
        with_loss(5, -math.inf),
        with_loss(6, None),
        with_loss(7, 0.9),
    ]
    assert best(steps, "loss").step == 2
    assert best(steps, "loss", "max").step == 7
    assert best(steps, "accuracy") is None
    assert latest(steps).step == 7
    assert latest([]) is None
    with pytest.raises(ValueError, match="'min'"):
        best(steps, "loss", "smallest")
