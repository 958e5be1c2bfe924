from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest

import holdfast
from holdfast._manager.run_file import RunState
from holdfast._manager.run_owner import Owner
from holdfast._stores.places import store_at
from holdfast._tools.listing.listing import WatchedFolder
from holdfast._tools.serving.live import LiveSaves, SaveFacts
from holdfast._tools.serving.run_facts import RunWatch
from tests.manager.managed import a_run
from tests.tools.serving.slow_job import PART, STEP_BYTES, SlowJob

GENERATION = "00112233aabbccdd"
NOW = 1_800_000_000.0


class Folder:
    """A folder whose files are written by the test, at times that it chooses."""

    def __init__(self, path) -> None:
        self.path = path / "step-00000300"
        self.path.mkdir()
        self.live = LiveSaves()
        self.watched = WatchedFolder(path)

    def write(self, rank: int, nbytes: int, at: float, kind: str = "data") -> None:
        name = f"index-{GENERATION}" if kind == "index" else f"data-{GENERATION}-{rank}-0"
        file = self.path / f"{name}.safetensors"
        file.write_bytes(b"x" * nbytes)
        os.utime(file, (at, at))
        os.utime(self.path, (at, at))

    def look(self, at: float, run: RunState | None = None, committed=None, **options) -> list[SaveFacts]:
        return self.live.look(self.watched.look(), committed or {}, run or RunState(), now=at, **options)


@pytest.fixture
def folder(tmp_path) -> Folder:
    return Folder(tmp_path)


def owned_by(owner: Owner | None, noted: str = "") -> RunState:
    return RunState("a-run", owner, unfinished={"step-00000300": noted})


ALIVE = Owner.this_process("token")
DEAD = replace(ALIVE, started="long ago")
ELSEWHERE = replace(ALIVE, place="another machine")


def test_files_that_grow_are_a_save_with_a_rate_and_bytes_by_rank(folder) -> None:
    folder.write(0, 1000, NOW)
    folder.write(1, 500, NOW)
    folder.look(NOW + 1, expected=10_000)
    folder.write(1, 4500, NOW + 3)

    (save,) = folder.look(NOW + 3, expected=10_000)

    assert (save.step, save.activity, save.nbytes, save.expected) == (300, "writing", 5500, 10_000)
    assert [(rank.rank, rank.nbytes) for rank in save.ranks] == [(0, 1000), (1, 4500)]
    assert save.rate == 2000
    assert save.began_at.timestamp() == NOW


def test_a_first_look_takes_the_rate_from_when_the_save_began(folder) -> None:
    folder.write(0, 3000, NOW)

    assert folder.look(NOW + 3)[0].rate == 1000


def test_nothing_is_expected_if_there_is_nothing_to_guess_from(folder) -> None:
    folder.write(0, 3000, NOW)

    assert folder.look(NOW + 3)[0].expected is None


def test_a_save_whose_index_is_there_is_committing(folder) -> None:
    folder.write(0, 1000, NOW)
    folder.write(0, 10, NOW, kind="index")

    assert folder.look(NOW + 1)[0].activity == "committing"


@pytest.mark.parametrize(
    ("run", "quiet", "activity"),
    [
        (RunState(), 5, "writing"),
        (RunState(), 60, "stalled"),
        (RunState(), 599, "stalled"),
        (RunState(), 600, "leftover"),
        (owned_by(ALIVE), 5, "writing"),
        (owned_by(ALIVE), 600, "stalled"),
        (owned_by(DEAD), 1, "leftover"),
        (owned_by(None), 1, "writing"),
        (owned_by(None), 600, "leftover"),
        (owned_by(ELSEWHERE), 5, "writing"),
        (owned_by(ELSEWHERE), 60, "stalled"),
        (owned_by(ELSEWHERE), 600, "stalled"),
        (owned_by(ALIVE, GENERATION), 1, "being deleted"),
    ],
)
def test_what_does_not_grow_is_judged_by_its_job_and_by_time(folder, run, quiet, activity) -> None:
    folder.write(0, 1000, NOW)

    assert folder.look(NOW + quiet, run)[0].activity == activity


def test_at_a_url_nobody_knows_whether_a_save_was_cut_off() -> None:
    store_at("memory://live-at-a-url/step-7").put(f"data-{GENERATION}-0-0.safetensors", bytes(10))
    watched, live = WatchedFolder("memory://live-at-a-url"), LiveSaves()
    live.look(watched.look(), {}, RunState(), now=NOW)

    (save,) = live.look(watched.look(), {}, RunState(), now=NOW + 3600)

    assert save.activity == "stalled"
    assert "it is unknown when it was written" in save.why


def test_a_save_that_grows_again_is_no_longer_stalled(folder) -> None:
    folder.write(0, 1000, NOW)
    assert folder.look(NOW + 60)[0].activity == "stalled"
    folder.write(0, 2000, NOW)  # at the same time, as a disk with coarse clocks has it

    assert folder.look(NOW + 62)[0].activity == "writing"


def test_files_of_a_checkpoint_whose_record_has_gone_are_being_deleted(folder) -> None:
    folder.write(0, 1000, NOW)
    folder.look(NOW + 1, committed={"step-00000300": GENERATION})

    assert folder.look(NOW + 2)[0].activity == "being deleted"


@pytest.mark.parametrize(("identity", "outcome"), [(GENERATION, "committed"), (None, "failed"), ("f" * 16, "failed")])
def test_how_a_save_ended_is_reported_for_a_while(folder, identity, outcome) -> None:
    folder.write(0, 1000, NOW)
    folder.look(NOW + 1)
    for file in folder.path.iterdir():
        if identity != GENERATION:
            file.unlink()

    saves = folder.look(NOW + 4, committed={} if identity is None else {"step-00000300": identity})

    assert saves == []
    (ended,) = folder.live.ended(NOW + 5)
    assert (ended.step, ended.outcome, ended.nbytes, ended.seconds) == (300, outcome, 1000, 4.0)
    assert folder.live.ended(NOW + 3600) == []


def test_a_save_that_has_ended_is_reported_with_all_of_its_bytes(folder) -> None:
    folder.write(0, 1000, NOW)
    folder.look(NOW + 1)

    folder.look(NOW + 4, committed={"step-00000300": GENERATION}, sizes={"step-00000300": 5000})

    assert [ended.nbytes for ended in folder.live.ended(NOW + 5)] == [5000]


def test_leftovers_that_is_swept_is_not_reported_as_a_failure(folder) -> None:
    folder.write(0, 1000, NOW)
    folder.look(NOW + 1, owned_by(DEAD))
    for file in folder.path.iterdir():
        file.unlink()
    folder.look(NOW + 4)

    assert folder.live.ended(NOW + 5) == []


def test_a_save_of_dcp_is_seen_until_its_index_is_there(tmp_path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": __import__("torch").ones(1000)}, checkpoint_id=tmp_path / "step-7")
    (tmp_path / "step-7" / ".metadata").rename(tmp_path / "index")
    watch = RunWatch(tmp_path)
    (save,) = watch.look().saves
    assert (save.step, save.activity, [rank.rank for rank in save.ranks]) == (7, "writing", [0])
    (tmp_path / "index").rename(tmp_path / "step-7" / ".metadata")
    watch.forget_look()

    facts = watch.look()

    assert [one.format for one in facts.checkpoints] == ["dcp"]
    assert [one.outcome for one in facts.ended] == ["committed"]
    assert facts.saves == []


@pytest.mark.parametrize("generation", ["", "00112233_"])
def test_saves_of_dcp_are_reported_by_rank_whoever_writes_them(tmp_path, generation) -> None:
    (tmp_path / "step-7").mkdir()
    for rank in range(3):
        (tmp_path / "step-7" / f"__{rank}_{generation}0.distcp").write_bytes(b"x" * (rank + 1))

    (save,) = RunWatch(tmp_path).look().saves

    assert [(rank.rank, rank.nbytes) for rank in save.ranks] == [(0, 1), (1, 2), (2, 3)]


def test_files_that_grow_are_seen_though_their_folder_has_not_changed_for_long(tmp_path) -> None:
    a_run(tmp_path, 100)
    file = tmp_path / "step-00000300" / f"data-{GENERATION}-0-0.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"x" * 10)
    os.utime(file.parent, (NOW - 1e8, NOW - 1e8))
    watch = RunWatch(tmp_path)
    assert watch.look().saves[0].nbytes == 10
    with file.open("ab") as stream:
        stream.write(b"x" * 5)
    watch.forget_look()

    assert watch.look().saves[0].nbytes == 15


def until(watch: RunWatch, is_so):
    """Look until it is so: a part that was handed to the disk is there soon, and not at once."""
    for _ in range(6000):
        watch.forget_look()
        facts = watch.look()
        if is_so(facts):
            return facts
        time.sleep(0.01)
    raise AssertionError(f"it did not come to that: {facts}")


def test_saves_of_a_job_in_another_process_are_followed_to_their_ends(tmp_path) -> None:
    a_run(tmp_path, 100)
    watch = RunWatch(tmp_path)
    with SlowJob(tmp_path, 200, 300, 400) as job:
        job.wait()
        (save,) = until(watch, lambda facts: facts.saves and facts.saves[0].nbytes >= PART).saves
        assert (save.step, save.activity) == (200, "writing")
        assert PART <= save.nbytes < STEP_BYTES  # though the file has its full size already
        assert save.expected >= STEP_BYTES
        job.say("go")
        job.wait()
        grown = until(watch, lambda facts: facts.saves[0].nbytes >= 2 * PART).saves[0]
        assert grown.nbytes < STEP_BYTES
        job.say("go")
        job.wait()
        job.say("go")
        facts = until(watch, lambda facts: facts.checkpoint("step-00000200") is not None)
        assert [(one.step, one.outcome) for one in facts.ended] == [(200, "committed")]

        job.wait()
        until(watch, lambda facts: [save.step for save in facts.saves] == [300])
        job.say("fail")
        facts = until(watch, lambda facts: len(facts.ended) == 2)
        assert (facts.ended[0].step, facts.ended[0].outcome) == (300, "failed")

        job.wait()
        facts = until(watch, lambda facts: facts.saves and facts.saves[0].nbytes >= PART)
        assert facts.run.owner is not None
        assert facts.run.owner.life() == "alive"
        job.kill()
        (left,) = until(watch, lambda facts: facts.saves[0].activity == "leftover").saves
    assert left.step == 400
    assert str(job.process.pid) in left.why
    assert [facts.step for facts in watch.look().checkpoints] == [100, 200]


def test_replacing_a_checkpoint_shows_it_and_the_save(tmp_path) -> None:
    a_run(tmp_path, 100)
    folder = tmp_path / "step-00000100"
    (folder / f"data-{GENERATION}-0-0.safetensors").write_bytes(b"x" * 50)

    facts = RunWatch(tmp_path).look()

    assert [(one.name, one.state) for one in facts.checkpoints] == [("step-00000100", "committed")]
    assert [(save.name, save.activity, save.nbytes) for save in facts.saves] == [("step-00000100", "writing", 50)]


def test_nothing_is_under_way_in_a_run_that_has_ended(tmp_path) -> None:
    a_run(tmp_path, 100, 200)
    holdfast.save({"seen": 1}, tmp_path / "final")

    assert RunWatch(tmp_path).look().saves == []
