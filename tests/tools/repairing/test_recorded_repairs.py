"""A checkpoint says what was rebuilt of it, and ``verify`` what it can vouch for since."""

from __future__ import annotations

import json

import pytest
import torch

import holdfast
from holdfast._formats.native.names import RECORD
from holdfast._formats.native.record import Repair, decode_record, repairs_in
from holdfast._tools.inspecting.summary import summarize
from holdfast._tools.repairing.repair import repair
from tests.formats.native.specified_reader import SpecifiedReader
from tests.native_files import flip_last_data_bit, spoil_table
from tests.tools.repairing.checkpoints import age_all


@pytest.fixture
def checkpoint(tmp_path):
    holdfast.save({"model": {"w": torch.arange(5000.0), "b": torch.ones(7)}, "step": 5}, tmp_path / "c")
    return tmp_path / "c"


def file_of(checkpoint, prefix):
    """The last one, which is that of the last repair, if there was one."""
    return max(file for file in checkpoint.iterdir() if file.name.startswith(prefix))


def lose_record(checkpoint):
    (checkpoint / RECORD).unlink()
    age_all(checkpoint)  # or a save might be going on


def test_digests_that_were_rebuilt_over_a_flipped_bit_are_not_called_whole(checkpoint):
    assert "intact" in str(holdfast.verify(checkpoint)).splitlines()[0]
    flip_last_data_bit(file_of(checkpoint, "data-"))
    assert not holdfast.verify(checkpoint).ok
    spoil_table(file_of(checkpoint, "data-"))
    assert repair(checkpoint, apply=True).ok

    report = holdfast.verify(checkpoint)

    assert report.ok  # it is as it was when it was repaired, and that is all that can be known
    assert "intact" not in str(report).splitlines()[0]
    assert report.checked == "some"
    assert "when it was saved" not in str(report)
    assert "nobody can vouch" in str(report)
    [found] = report.repairs
    assert (found.what, found.digests) == ("columns", "computed")
    assert found.time[:2] == "20"
    assert report.to_json()["repairs"] == [found.to_json()]
    assert json.dumps(report.to_json())
    assert "a repair has computed" in holdfast.verify(checkpoint, include="model.b").why

    flip_last_data_bit(file_of(checkpoint, "data-"))
    assert not holdfast.verify(checkpoint).ok


def test_a_record_that_was_made_again_tells_that_the_data_agreed_with_the_digests_of_the_save(checkpoint):
    lose_record(checkpoint)
    assert repair(checkpoint, apply=True).ok

    report = holdfast.verify(checkpoint)

    assert (report.ok, report.checked) == (True, "all")
    [found] = report.repairs
    assert (found.what, found.digests, found.source) == ("record", "kept", "the data files and their tables")
    assert "Values, ties" in report.doubts[0]


def test_rebuilt_digests_are_known_as_such_though_the_record_that_said_so_was_lost(checkpoint):
    flip_last_data_bit(file_of(checkpoint, "data-"))
    spoil_table(file_of(checkpoint, "data-"))
    repair(checkpoint, apply=True)
    lose_record(checkpoint)
    [finding] = repair(checkpoint, apply=True).findings

    assert "computed in a repair" in finding.loses
    report = holdfast.verify(checkpoint)
    assert (report.ok, report.checked) == (True, "some")
    assert [(found.what, found.digests) for found in report.repairs] == [("record", "computed")]


def test_every_repair_is_remembered(checkpoint):
    lose_record(checkpoint)
    repair(checkpoint, apply=True)
    spoil_table(file_of(checkpoint, "data-"))
    repair(checkpoint, apply=True)

    assert [found.what for found in holdfast.verify(checkpoint).repairs] == ["record", "columns"]


def test_a_record_without_proof_says_that_its_digests_vouch_for_nothing_before(checkpoint):
    generation = decode_record((checkpoint / RECORD).read_bytes(), "").generation
    spoil_table(file_of(checkpoint, "data-"))
    lose_record(checkpoint)
    assert repair(checkpoint, apply=True, generation=generation).ok

    [found] = holdfast.verify(checkpoint).repairs
    assert (found.what, found.digests, found.source) == ("record", "computed", "the data files")


def test_readers_that_know_nothing_of_repairs_read_a_repaired_checkpoint(checkpoint):
    before = SpecifiedReader(checkpoint)
    spoil_table(file_of(checkpoint, "data-"))
    repair(checkpoint, apply=True)

    after = SpecifiedReader(checkpoint)
    assert after.state["step"] == before.state["step"] == 5
    for key, tensor in before.tensors.items():
        assert after.tensors[key].raw.tobytes() == tensor.raw.tobytes()


def test_a_load_and_a_summary_tell_of_repairs(checkpoint):
    spoil_table(file_of(checkpoint, "data-"))
    repair(checkpoint, apply=True)
    state = {"model": {"w": torch.zeros(5000), "b": torch.zeros(7)}, "step": 0}

    report = holdfast.load(state, checkpoint)

    assert "rebuilt by a repair" in report.notes[0]
    assert "rebuilt by a repair" in str(report)
    assert state["step"] == 5
    assert "rebuilt by a repair" in str(summarize(holdfast.open(checkpoint)))


@pytest.mark.parametrize("noted", [{"what": "columns", "time": "2026-01-01"}, ["?"], [{"what": 3}], "yes", 7])
def test_repairs_that_are_noted_in_another_way_are_repairs_too(noted):
    [found] = repairs_in({"repaired": noted})
    assert found.has_new_digests
    assert str(found)


def test_what_was_never_repaired_tells_of_nothing(checkpoint):
    report = holdfast.verify(checkpoint)
    assert (report.repairs, report.doubts, report.checked) == ((), (), "all")
    assert repairs_in({}) == repairs_in(None) == ()
    assert repairs_in({"repaired": []}) == ()
    assert Repair("columns", "t", "s", "kept").to_json() == {
        "what": "columns",
        "time": "t",
        "from": "s",
        "digests": "kept",
    }
