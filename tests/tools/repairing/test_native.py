"""Repairs of our own format: columns from records, records from data files, and honesty about the rest."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import contextmanager
from itertools import count

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import assume, given

import holdfast
from holdfast._formats.folder_files import KEPT
from holdfast._formats.native.names import RECORD, index_file
from holdfast._formats.native.source import NativeSource
from holdfast._formats.source import WholeReads
from holdfast._stores.local_store import LocalStore
from holdfast._stores.memory_store import MemoryStore
from holdfast._tools.repairing import native, rewriting
from holdfast._tools.repairing.repair import repair
from holdfast._tools.repairing.unrecorded import Digesting
from tests.formats.native.specified_reader import SpecifiedReader
from tests.golden import test_golden as golden
from tests.native_files import flip_last_data_bit, spoil_table, table_begin
from tests.stores.counting import CountingMemoryStore
from tests.tools.repairing.checkpoints import GENERATION, age_all, grid, spoil_tables, write

NUMBERS = count()
KEYS = ["w", "w[0:2]", "w[0:2]#2", "w#2", "model.layers.0.weight", "x[0:1,0:2]", '["a.b"]', '["a"]["b"]', '["a"][null]']
KEYS += ["ü", "__metadata__", "n[", "n[1:0]"]
STORED_AS_THEY_ARE = ["float32", "bfloat16", "int64", "bool", "uint8", "float8_e4m3fn"]
OTHERS = ["complex64", "float8_e8m0fnu", "raw3"]


@st.composite
def layouts(draw, dtypes=(*STORED_AS_THEY_ARE, *OTHERS)):
    """Tensors, and how they are cut over ranks."""
    tensors, cuts = {}, {}
    for key in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True)):
        shape = draw(st.lists(st.integers(1, 6), max_size=3))
        edges = [draw(st.lists(st.integers(1, size), max_size=2)) for size in shape]
        tensors[key] = draw(st.sampled_from(dtypes)), tuple(shape)
        cuts[key] = grid(shape, edges, draw(st.integers(1, 3)))
    return tensors, cuts, draw(st.none() | st.integers(8, 100))


def contents(store):
    """All tensors of a checkpoint, every digest compared."""
    with NativeSource(store) as source:
        source.verify()
        buffers = {key: np.empty(ref.shape, ref.dtype.carrier) for key, ref in source.tensors.items()}
        source.read_many([], WholeReads.into(buffers))
        return source, {key: array.tobytes() for key, array in buffers.items()}


def repaired(store, *, generation=None):
    """Carries out all that can be done. Returns what is wrong."""
    plans = list(
        native.problems_of(store, generation=generation, may_rebuild=lambda: None, digesting=Digesting()),
    )
    return [plan.carried_out(apply=True) for plan in plans]


@given(layouts())
def test_tables_are_rebuilt_from_the_record_and_the_data_files(layout):
    tensors, cuts, most = layout
    store = MemoryStore(f"columns-{next(NUMBERS)}")
    refs, arrays = write(store, tensors, cuts, max_file_size=most)
    record = store.read(RECORD)
    spoil_tables(store)

    findings = repaired(store)

    if [finding.outcome for finding in findings] == ["cannot be repaired"]:
        # Only where names mean several things, and then nothing is guessed.
        assert "may be of another tensor" in findings[0].remedy
        assert any(key in ("w[0:2]", "w[0:2]#2", "w#2", "x[0:1,0:2]") for key in tensors)
        assert store.read(RECORD) == record
        return
    assert [finding.outcome for finding in findings] == ["repaired"]
    source, found = contents(store)
    assert found == {ref.key: arrays[ref.key].tobytes() for ref in refs}
    assert [source.tensors[ref.key].dtype for ref in refs] == [ref.dtype for ref in refs]
    assert source.metadata == {"note": 1}
    assert source.identity == GENERATION
    assert store.read(f"{RECORD}{KEPT}") == record


@given(layouts(STORED_AS_THEY_ARE))
def test_a_record_is_made_of_data_files_alone(layout):
    tensors, cuts, most = layout
    plain = {key: tensors[key] for key in tensors if key in ("w", "model.layers.0.weight", '["a"][null]', "ü")}
    assume(plain)
    store = MemoryStore(f"record-{next(NUMBERS)}")
    refs, arrays = write(store, plain, cuts, max_file_size=most)
    store.delete([RECORD])

    assert [finding.outcome for finding in repaired(store)] == ["repaired"]

    source, found = contents(store)
    assert found == {ref.key: arrays[ref.key].tobytes() for ref in refs}
    assert {key: (ref.dtype.name, ref.shape) for key, ref in source.tensors.items()} == plain
    assert sorted(holdfast.Checkpoint(source)) == sorted(plain)


@given(layouts(STORED_AS_THEY_ARE), st.data())
def test_no_record_is_made_if_a_data_file_is_missing_or_changed(layout, data):
    tensors, cuts, most = layout
    store = MemoryStore(f"missing-{next(NUMBERS)}")
    write(store, tensors, cuts, max_file_size=most)
    store.delete([RECORD])
    files = sorted(listed.name for listed in store.list() if listed.name.startswith("data-"))
    victim = data.draw(st.sampled_from(files))
    content = bytearray(store.read(victim))
    store.delete([victim])
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        store.put(victim, bytes(content))

    findings = repaired(store)

    assert findings[0].outcome in ("cannot be repaired", "failed")
    assert store.size(RECORD) is None


class MeetingReader:
    """Does not read before another thread wants to read too."""

    def __init__(self, reader, barrier):
        self._reader, self._barrier, self.size = reader, barrier, reader.size

    def read_into(self, begin, buffer):
        self._barrier.wait(60)
        self._reader.read_into(begin, buffer)


def test_digests_are_computed_by_several_threads():
    store = MemoryStore(f"threads-{next(NUMBERS)}")
    tensors = {f"w{number}": ("float32", (100,)) for number in range(4)}
    write(store, tensors, {key: [(number, (0,), (100,))] for number, key in enumerate(tensors)})
    source, _ = contents(store)
    barrier = threading.Barrier(2)

    class MeetingStore(MemoryStore):
        @contextmanager
        def reader(self, name):
            with super().reader(name) as reader:
                yield MeetingReader(reader, barrier)

    meeting = MeetingStore(store.location.removeprefix("memory://"))
    found = Digesting().digests_of(meeting, source.record.files, source.record.block_bytes)

    assert found.tolist() == source.columns.digests.tolist()


@pytest.mark.parametrize("lost", ["record", "tables"])
def test_digests_are_computed_within_the_memory_budget(lost):
    store = CountingMemoryStore(f"budget-{next(NUMBERS)}")
    _, arrays = write(
        store, {"w": ("float32", (300_000,))}, {"w": [(0, (0,), (200_000,)), (1, (200_000,), (100_000,))]}
    )
    if lost == "record":
        store.delete([RECORD])
    else:
        spoil_tables(store)
    store.reads.clear()
    seen = []

    problems = native.problems_of(
        store,
        generation=None,
        may_rebuild=lambda: None,
        digesting=Digesting(256 << 10, lambda done, total: seen.append((done, total))),
    )
    assert [planned.carried_out(apply=True).outcome for planned in problems] == ["repaired"]

    assert max(read.nbytes for read in store.data_reads()) <= 128 << 10
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] >= 1_200_000
    assert contents(store)[1] == {"w": arrays["w"].tobytes()}


def test_a_budget_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="memory_budget must be"):
        repair(tmp_path, memory_budget=1000)


@pytest.fixture
def checkpoint(tmp_path):
    """A real one."""
    state = {"model": torch.nn.Linear(300, 200), "optim": [torch.ones(7), {"x": torch.zeros(3)}], "step": 5}
    holdfast.save(state, tmp_path / "checkpoint", max_file_size=200_000)
    return tmp_path / "checkpoint"


def file_of(folder, start):
    return next(folder / name for name in sorted(os.listdir(folder)) if name.startswith(start))


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def tensors_in(folder):
    source = holdfast.open(folder)
    return {key: source[key][...] for key in source if hasattr(source[key], "shape")}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def test_nothing_is_wrong_with_a_whole_checkpoint_and_nothing_is_touched(checkpoint):
    before = {file: file.stat().st_mtime_ns for file in checkpoint.iterdir()}

    report = repair(checkpoint, apply=True, sweep=True)

    assert (report.ok, report.findings, report.leftovers) == (True, (), ())
    assert {file: file.stat().st_mtime_ns for file in checkpoint.iterdir()} == before


@pytest.mark.parametrize("how", ["flipped", "cut off", "gone", "all of them"])
def test_damaged_tables_are_rebuilt_and_the_old_files_are_kept(checkpoint, how):
    before = tensors_in(checkpoint)
    data = file_of(checkpoint, "data-")
    content = data.read_bytes()
    if how == "cut off":
        data.write_bytes(content[:-1])
    elif how == "gone":
        data.write_bytes(content[: table_begin(content)])
    else:
        for file in [data] if how == "flipped" else checkpoint.glob("data-*"):
            spoil_table(file)
    damaged = {file: file.read_bytes() for file in checkpoint.iterdir()}

    dry = repair(checkpoint)
    assert [finding.outcome for finding in dry.findings] == ["can be repaired"]
    assert "can no longer be noticed" in dry.findings[0].loses
    assert {file: file.read_bytes() for file in checkpoint.iterdir()} == damaged
    report = repair(checkpoint, apply=True)

    assert report.ok
    assert repair(checkpoint).findings == ()
    assert_equal(tensors_in(checkpoint), before)
    assert holdfast.open(checkpoint)["step"] == 5
    assert holdfast.open(checkpoint).provenance["repaired"][0]["what"] == "columns"
    kept = {file: file.read_bytes() for file in damaged if file.name != RECORD}
    assert kept == {file: damaged[file] for file in kept}
    assert (checkpoint / f"{RECORD}.before-repair").read_bytes() == damaged[checkpoint / RECORD]
    target = {"model": torch.nn.Linear(300, 200), "optim": [torch.ones(7), {"x": torch.ones(3)}], "step": 0}
    holdfast.load(target, checkpoint)
    assert target["step"] == 5
    assert torch.equal(target["model"].weight, before["model.weight"])


def test_an_index_is_rebuilt_from_tables():
    store = MemoryStore(f"index-{next(NUMBERS)}")
    cuts = [(0, (0, 0), (1, 10)), (2, (1, 0), (3, 10)), (1, (4, 0), (2, 10))]
    _, arrays = write(store, {"w": ("float32", (6, 10)), "b": ("int64", (3,))}, {"w": cuts, "b": [(1, (0,), (3,))]})
    store.delete([index_file(GENERATION)])

    assert [finding.outcome for finding in repaired(store)] == ["repaired"]

    source, found = contents(store)
    assert found == {key: array.tobytes() for key, array in arrays.items()}
    assert [repair["digests"] for repair in source.provenance["repaired"]] == ["kept"]


def test_tables_are_not_rebuilt_while_a_data_file_is_missing(checkpoint):
    data, other = sorted(checkpoint.glob("data-*"))[:2]
    spoil_table(other)
    data.rename(checkpoint.parent / "away")

    report = repair(checkpoint, apply=True)

    assert not report.ok
    assert [finding.outcome for finding in report.findings] == ["cannot be repaired"] * 2
    (checkpoint.parent / "away").rename(data)
    assert repair(checkpoint, apply=True).ok


def test_lost_data_files_are_named_with_all_keys_in_them(checkpoint):
    with NativeSource(LocalStore(checkpoint)) as source:
        chunks = [(key, chunk) for key in source.tensors for chunk in source.chunk_places(key)]
    data = checkpoint / next(chunk.file for key, chunk in chunks if key == "optim.0")
    held = {key: chunk.begin for key, chunk in chunks if chunk.file == data.name}
    assert len(held) > 1
    data.write_bytes(data.read_bytes()[: table_begin(data.read_bytes()) - 1])

    (finding,) = repair(checkpoint, apply=True).findings
    assert (finding.path, finding.outcome) == (str(data), "cannot be repaired")
    assert finding.keys == [max(held, key=held.get)]
    data.unlink()
    (finding,) = repair(checkpoint, apply=True).findings

    assert sorted(finding.keys) == sorted(held)


@pytest.mark.parametrize("how", ["flipped", "cut off", "empty", "other"])
def test_a_damaged_record_is_made_again_and_values_are_said_to_be_lost(checkpoint, how):
    before = tensors_in(checkpoint)
    record = checkpoint / RECORD
    if how == "flipped":
        flip(record, record.stat().st_size // 2)
    else:
        record.write_bytes({"cut off": record.read_bytes()[:-50], "empty": b"", "other": b'{"hello": 1}'}[how])
    damaged = record.read_bytes()

    report = repair(checkpoint, apply=True)

    assert report.ok
    assert "values that are not tensors" in report.findings[0].loses
    assert_equal(tensors_in(checkpoint), before)
    assert "step" not in holdfast.open(checkpoint)
    assert (checkpoint / f"{RECORD}.before-repair").read_bytes() == damaged
    assert holdfast.open(checkpoint).verify().ok
    model = torch.nn.Linear(300, 200)
    holdfast.load({"model": model}, checkpoint)
    assert torch.equal(model.weight, before["model.weight"])


def test_a_missing_record_is_not_made_while_a_save_may_go_on(checkpoint):
    (checkpoint / RECORD).unlink()

    report = repair(checkpoint, apply=True)

    assert not report.ok
    assert "a save may be going on" in report.findings[0].remedy
    assert not (checkpoint / RECORD).exists()
    age_all(checkpoint)
    assert repair(checkpoint, apply=True).ok
    assert repair(checkpoint).findings == ()


def test_data_that_is_not_as_it_was_saved_gets_no_record(checkpoint):
    record = (checkpoint / RECORD).read_bytes()
    (checkpoint / RECORD).write_bytes(record[:-10])
    data = file_of(checkpoint, "data-")
    flip_last_data_bit(data)

    (finding,) = repair(checkpoint, apply=True).findings

    assert finding.outcome == "failed"
    assert f"{data} is damaged" in finding.remedy
    assert (checkpoint / RECORD).read_bytes() == record[:-10]


def test_without_tables_only_a_user_can_say_that_all_files_are_there(checkpoint):
    before = tensors_in(checkpoint)
    generation = file_of(checkpoint, "data-").name.split("-")[1]
    (checkpoint / RECORD).unlink()
    for file in checkpoint.glob("data-*"):
        spoil_table(file)
    age_all(checkpoint)

    report = repair(checkpoint, apply=True, sweep=True)
    assert [finding.outcome for finding in report.findings] == ["cannot be repaired"]
    assert "nothing proves" in report.findings[0].remedy
    assert report.leftovers == ()  # what a user may still want is not swept away
    report = repair(checkpoint, apply=True, generation=generation)

    assert report.ok
    assert "Nothing proves that all files are there" in report.findings[0].loses
    assert_equal(tensors_in(checkpoint), before)


def test_of_several_complete_saves_one_has_to_be_chosen(tmp_path):
    for value in (1, 2):
        holdfast.save({"w": torch.full((3,), value)}, tmp_path / str(value))
    both = tmp_path / "both"
    both.mkdir()
    generations = []
    for value in ("1", "2"):
        generations.append(file_of(tmp_path / value, "data-").name.split("-")[1])
        for name in os.listdir(tmp_path / value):
            if name != RECORD:
                shutil.copy(tmp_path / value / name, both)
    age_all(both)

    report = repair(both, apply=True)
    assert not report.ok
    assert "--generation" in report.findings[0].remedy
    assert all(generation in report.findings[0].remedy for generation in generations)
    assert not repair(both, apply=True, generation="f" * 16).ok
    assert repair(both, apply=True, generation=generations[1]).ok

    assert holdfast.open(both).read()["w"].tolist() == [2, 2, 2]


def test_the_answer_says_that_content_was_not_compared(checkpoint):
    flip_last_data_bit(next(checkpoint.glob("data-*")))

    report = repair(checkpoint)

    assert report.ok
    assert "no file is missing or too short. Content is not compared here; holdfast verify does that" in str(report)
    assert not holdfast.verify(checkpoint).ok


def test_what_is_left_of_a_checkpoint_can_be_converted_as_the_answer_says(checkpoint, tmp_path):
    (lost,) = [file for file in checkpoint.glob("data-*") if file.stat().st_size == largest_of(checkpoint)]
    lost.unlink()

    (finding,) = repair(checkpoint).findings

    assert "holdfast convert --exclude" in finding.remedy
    holdfast.convert(checkpoint, tmp_path / "left", to="native", exclude=finding.keys)
    assert holdfast.open(tmp_path / "left").read()["step"] == 5


def largest_of(folder):
    return max(file.stat().st_size for file in folder.iterdir())


def test_a_repair_that_another_save_overtakes_changes_nothing(checkpoint, monkeypatch):
    (checkpoint / RECORD).write_bytes(b"damaged")

    def overtaken(store, name):
        holdfast.save({"new": torch.ones(1)}, checkpoint, overwrite=True)
        return b"damaged"

    monkeypatch.setattr(rewriting, "keep_copy", overtaken)
    report = repair(checkpoint, apply=True)

    assert [finding.outcome for finding in report.findings] == ["failed"]
    assert list(holdfast.open(checkpoint)) == ["new"]
    assert holdfast.open(checkpoint).verify().ok


def test_a_checkpoint_that_ranks_cut_is_repaired(tmp_path, ranks):
    ranks(3).run(save_cut, tmp_path / "cut")
    before = tensors_in(tmp_path / "cut")
    record = tmp_path / "cut" / RECORD
    record.write_bytes(record.read_bytes()[:-1])

    assert repair(tmp_path / "cut", apply=True).ok

    assert_equal(tensors_in(tmp_path / "cut"), before)


def save_cut(path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,))
    rows = distribute_tensor(torch.arange(70.0).reshape(7, 10), mesh, [Shard(0)])
    columns = distribute_tensor(torch.arange(50).reshape(5, 10), mesh, [Shard(1)])
    holdfast.save({"rows": rows, "columns": columns, "same": torch.ones(3), "step": 1}, path)


def test_repaired_runs_can_be_resumed_and_cleaned_up(tmp_path):
    with holdfast.CheckpointManager(tmp_path / "run", every_steps=1) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((4,), float(step))})
    spoil_table(file_of(tmp_path / "run/step-00000002", "data-"))

    assert repair(tmp_path / "run", apply=True).ok

    state = {"w": torch.zeros(4)}
    with holdfast.CheckpointManager(tmp_path / "run", every_steps=1) as manager:
        assert manager.restore(state).step == 2
        assert state["w"].tolist() == [2, 2, 2, 2]
        manager.delete(2)
        manager.wait()
        assert [info.step for info in manager.steps()] == [1]


# Checkpoints of version 1 stay of version 1: their columns are rebuilt, and their records.


@pytest.fixture(params=["version-1-one-rank", "version-1-four-ranks", "version-1-many-files"])
def old_checkpoint(request, tmp_path):
    return shutil.copytree(golden.HERE / request.param, tmp_path / "old")


def test_columns_of_version_1_are_rebuilt(old_checkpoint):
    before = contents(LocalStore(old_checkpoint))[1]
    file_of(old_checkpoint, "index-").unlink()

    assert repair(old_checkpoint, apply=True).ok

    source, found = contents(LocalStore(old_checkpoint))
    assert source.record.version == (1, 0)
    assert found == before
    assert SpecifiedReader(old_checkpoint).record["version"] == [1, 0]


def test_records_of_version_1_are_made_again(old_checkpoint):
    before = contents(LocalStore(old_checkpoint))[1]
    (old_checkpoint / RECORD).unlink()
    age_all(old_checkpoint)

    report = repair(old_checkpoint, apply=True)

    assert report.ok, report
    source, found = contents(LocalStore(old_checkpoint))
    assert source.record.version == (1, 0)
    assert {key: found[key] for key in found if key in before} == {key: before[key] for key in found if key in before}
    assert sum(map(len, found.values())) == sum(map(len, before.values()))
