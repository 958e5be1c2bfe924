"""A save through stock torch that fails does so on every rank, says why, and leaves the folder as it was."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import pickle
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

import holdfast
from holdfast._stores.local_store import LocalStore
from holdfast.errors import (
    CheckpointExistsError,
    IncompleteSaveError,
    InvalidPlanError,
    UnsupportedTensorError,
    UnsupportedValueError,
)
from holdfast.integrations.torch_dcp import HoldfastWriter
from tests.integrations.torch_dcp_programs import load, quiet, same, save
from tests.rank_pool import RankPool
from tests.sharding import sharded


class Unknown:
    """Something that no format has a place for."""


class FullDisk(LocalStore):
    """Takes the first bytes of every file, and then no more."""

    def create(self, name, size=None, memory=None):
        sink = super().create(name, size, memory)

        class Full:
            def __enter__(self):
                self.inner = sink.__enter__()
                return self

            def __exit__(self, *error):
                return sink.__exit__(*error)

            def write(self, data):
                self.inner.write(bytes(data)[:10])
                raise OSError(errno.ENOSPC, "No space left on device", name)

        return Full()


class NoCommit(LocalStore):
    def commit(self, name, content, *, replaces):
        raise OSError(errno.EIO, "Input/output error", name)


class CommitsAndFails(LocalStore):
    """As a network that loses the answer."""

    def commit(self, name, content, *, replaces):
        super().commit(name, content, replaces=replaces)
        raise OSError(errno.EIO, "Input/output error", name)


def sharded_tensor(value=1.0):
    return sharded(torch.full((4, 3), value))


STEPS = []
"""The steps of torch at which saves of this process have failed."""


def cause_of(save_it):
    """What a rank is told about a save that fails: the cause, and by which rank."""
    with pytest.raises(CheckpointException) as caught:
        save_it()
    STEPS.append(caught.value.args[0])
    (cause, _) = next(iter(caught.value.failures.values()))
    if isinstance(cause, holdfast.CheckpointException):
        rank, (cause, _) = next(iter(cause.failures.items()))
        return rank, cause
    return None, cause


def refused_overwrite(path):
    _, cause = cause_of(lambda: save({"t": sharded_tensor(2.0)}, path))
    return cause, STEPS.pop()


def save_first(path):
    save({"t": sharded_tensor(), "step": 1}, path)


def save_over(path):
    save({"t": sharded_tensor(2.0), "step": 2}, path, overwrite=True)


def test_a_checkpoint_that_is_there_is_not_replaced_unless_that_is_asked_for(ranks: RankPool, tmp_path):
    path = tmp_path / "c"
    ranks(2).run(save_first, path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}

    for cause, step in ranks(2).run(refused_overwrite, path):
        assert step == "plan"  # before anything was written
        assert isinstance(cause, CheckpointExistsError)
        assert str(path) in str(cause)
        assert "overwrite=True" in str(cause)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before

    ranks(2).run(save_over, path)
    assert same(holdfast.open(path).read(), {"t": torch.full((4, 3), 2.0), "step": 2})
    assert not {file.name for file in path.iterdir()} & (before.keys() - {"holdfast.json"})


def save_with_bad_value(path):
    state = {"t": sharded_tensor(), "fine": 1}
    if dist.get_rank() == 1:
        state |= {"config": {"bad": Unknown(), "worse": (1, Unknown())}}
    return cause_of(lambda: save(state, path))


def test_values_that_would_need_pickle_are_refused_with_their_names_on_all_ranks(ranks: RankPool, tmp_path):
    for rank, cause in ranks(2).run(save_with_bad_value, tmp_path / "c"):
        assert rank == 1
        assert isinstance(cause, UnsupportedValueError)
        assert cause.keys == ["config.bad", "config.worse"]
        assert "Unknown" in str(cause)
        assert "allow_pickle" in str(cause)
    assert list((tmp_path / "c").glob("*")) == []


def save_on_full_disk(path):
    store = FullDisk(path) if dist.get_rank() == 1 else LocalStore(path)
    return cause_of(lambda: save({"t": sharded_tensor()}, store))


def save_without_commit(path):
    return cause_of(lambda: save({"t": sharded_tensor()}, NoCommit(path), overwrite=True))


def test_a_rank_that_cannot_write_fails_all_and_nothing_is_left(ranks: RankPool, tmp_path):
    for rank, cause in ranks(2).run(save_on_full_disk, tmp_path / "c"):
        assert (rank, cause.errno) == (1, errno.ENOSPC)
    assert os.listdir(tmp_path / "c") == []


def test_a_commit_that_fails_leaves_the_old_checkpoint_alone(ranks: RankPool, tmp_path):
    ranks(2).run(save_first, tmp_path / "c")
    before = sorted(os.listdir(tmp_path / "c"))

    for _, cause in ranks(2).run(save_without_commit, tmp_path / "c"):
        assert cause.errno == errno.EIO

    assert sorted(os.listdir(tmp_path / "c")) == before
    assert holdfast.open(tmp_path / "c")["step"] == 1


def save_committed_without_an_answer(path):
    return cause_of(lambda: save({"t": sharded_tensor(), "step": 1}, CommitsAndFails(path)))


def test_a_commit_that_has_happened_keeps_its_files_whatever_it_raises(ranks: RankPool, tmp_path):
    for _, cause in ranks(2).run(save_committed_without_an_answer, tmp_path / "c"):
        assert cause.errno == errno.EIO

    assert same(holdfast.open(tmp_path / "c").read(), {"t": torch.ones(4, 3), "step": 1})


def save_one_part_only(path):
    return cause_of(lambda: save({"t": sharded_tensor()}, path / str(dist.get_rank()), no_dist=True))


def test_a_part_of_a_tensor_is_not_saved_as_the_whole(ranks: RankPool, tmp_path):
    """Stock torch saves it, and loads it with the rest left as it was; only older ones refuse it themselves."""
    for rank, (_, cause) in enumerate(ranks(2).run(save_one_part_only, tmp_path)):
        if str(cause) != "Failed to validate global plan":
            assert isinstance(cause, InvalidPlanError)
            assert "'t'" in str(cause)
        assert list((tmp_path / str(rank)).glob("*")) == []


def save_without_collectives(path):
    with quiet(), pytest.raises(ValueError, match="use_collectives"):
        stock.save({"t": sharded_tensor()}, storage_writer=HoldfastWriter(path), use_collectives=False)


def test_ranks_that_do_not_meet_cannot_save_one_checkpoint(ranks: RankPool, tmp_path):
    ranks(2).run(save_without_collectives, tmp_path / "c")

    assert not (tmp_path / "c").exists()


class Forgetting(DefaultSavePlanner):
    """Drops the last item of what is to be written."""

    def finish_plan(self, new_plan):
        return super().finish_plan(dataclasses.replace(new_plan, items=new_plan.items[:-1]))


def test_what_was_planned_and_not_written_is_named(tmp_path):
    _, cause = cause_of(lambda: save({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "c", planner=Forgetting()))

    assert isinstance(cause, IncompleteSaveError)
    assert cause.missing == ["b"]
    assert os.listdir(tmp_path / "c") == []


class Halves(DefaultSavePlanner):
    """Stores the halves of a tensor of four elements as chunks, the second one as float64."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        (item,) = plan.items
        halves = [
            dataclasses.replace(
                item,
                index=MetadataIndex("t", torch.Size([at])),
                type=WriteItemType.SHARD,
                tensor_data=dataclasses.replace(
                    item.tensor_data, chunk=ChunkStorageMetadata(torch.Size([at]), torch.Size([2]))
                ),
            )
            for at in (0, 2)
        ]
        return dataclasses.replace(plan, items=halves)

    def resolve_data(self, write_item):
        at = write_item.index.offset[0]
        return torch.arange(4.0)[at : at + 2].to(torch.float64 if at else torch.float32)


class OfAnotherTypeOnRank1(DefaultSavePlanner):
    def transform_object(self, write_item, object):
        made = super().transform_object(write_item, object)
        return made.double() if dist.get_rank() == 1 else made


def save_as_different_types(path):
    return cause_of(lambda: save({"t": sharded_tensor()}, path, planner=OfAnotherTypeOnRank1()))


def test_a_tensor_is_stored_in_one_dtype(ranks: RankPool, tmp_path):
    causes = [cause_of(lambda: save({"t": torch.arange(4.0)}, tmp_path / "c", planner=Halves()))]
    causes += ranks(2).run(save_as_different_types, tmp_path / "c")

    for _, cause in causes:
        assert isinstance(cause, InvalidPlanError)
        assert all(word in str(cause) for word in ["'t'", "float32", "float64"])
    assert list((tmp_path / "c").glob("*")) == []


@pytest.mark.parametrize("kind", [tuple, frozenset])
def test_a_state_that_could_not_be_read_again_is_not_committed(tmp_path, kind):
    value = kind()
    for _ in range(90):
        value = kind([value])
    state = {"a": value}
    for _ in range(60):
        state = {"a": state}

    _, cause = cause_of(lambda: save(state, tmp_path / "c"))

    assert isinstance(cause, UnsupportedValueError)
    assert "more than 128 containers" in str(cause)
    assert not (tmp_path / "c").exists() or os.listdir(tmp_path / "c") == []


class OwnBytes(DefaultSavePlanner):
    def resolve_data(self, write_item):
        return io.BytesIO(b"not what torch.save writes")


class Reshaping(DefaultSavePlanner):
    def transform_object(self, write_item, object):
        return object.flatten() if isinstance(object, torch.Tensor) else super().transform_object(write_item, object)


@pytest.mark.parametrize(
    ("state", "planner", "kind", "words"),
    [
        ({"t": torch.zeros(2, 3)}, Reshaping(), InvalidPlanError, ["'t'", "(6,)", "(2, 3)"]),
        ({"v": 1}, OwnBytes(), UnsupportedValueError, ["'v'", "torch.save did not write"]),
        ({"t": torch.zeros(3, device="meta")}, None, UnsupportedTensorError, ["'t'"]),
        ({"v": (torch.zeros(2).to_sparse(),)}, None, (UnsupportedTensorError, UnsupportedValueError), ["v"]),
    ],
    ids=["another shape", "other bytes", "no memory", "a sparse tensor in a value"],
)
def test_what_cannot_be_stored_is_named(tmp_path, state, planner, kind, words):
    rank, cause = cause_of(lambda: save(state, tmp_path / "c", planner=planner))

    assert rank == 0
    assert isinstance(cause, kind)
    assert all(word in str(cause) for word in words)
    assert not (tmp_path / "c").exists() or os.listdir(tmp_path / "c") == []


def test_a_path_is_needed_and_may_come_with_the_call(tmp_path):
    _, cause = cause_of(lambda: save({"n": 1}, None))
    assert "path" in str(cause)

    save({"n": 1}, None, checkpoint_id=tmp_path / "c")
    assert load({"n": 0}, None, checkpoint_id=tmp_path / "c") == {"n": 1}


def test_one_writer_and_one_reader_serve_many_places(tmp_path):
    writer = HoldfastWriter(metadata={"run": 1})
    with quiet():
        for step in (1, 2):
            stock.save({"n": step}, storage_writer=writer, checkpoint_id=tmp_path / str(step))

    assert [holdfast.open(tmp_path / str(step))["n"] for step in (1, 2)] == [1, 2]


def test_metadata_that_json_cannot_hold_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="metadata"):
        HoldfastWriter(tmp_path, metadata={"tensor": torch.ones(1)})
    with pytest.raises(ValueError, match="the key 1 is not a str"):
        HoldfastWriter(tmp_path, metadata={"steps": {1: 0.5}})


def test_a_file_size_that_is_no_number_of_bytes_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="max_file_size: '2 parsecs' is not a size"):
        HoldfastWriter(tmp_path, max_file_size="2 parsecs")


def test_a_relative_path_is_that_of_the_moment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = pickle.loads(pickle.dumps(HoldfastWriter("here")))
    monkeypatch.chdir("/")

    with quiet():
        stock.save({"n": 1}, storage_writer=writer)

    assert holdfast.open(tmp_path / "here")["n"] == 1


def test_values_are_stored_as_pickles_if_that_is_allowed_and_loaded_only_if_that_is_too(tmp_path):
    save({"odd": time.gmtime(0), "fine": 1}, tmp_path / "c", allow_pickle=True)

    with quiet(), pytest.raises(CheckpointException, match="allow_pickle=True"):
        load({"odd": None}, tmp_path / "c")
    assert load({"fine": 0}, tmp_path / "c") == {"fine": 1}
    assert load({"odd": None}, tmp_path / "c", allow_pickle=True) == {"odd": time.gmtime(0)}


def async_saves(path):
    weight = sharded_tensor(1.0)
    state = {"t": weight, "step": 1}
    with quiet():
        future = stock.async_save(state, storage_writer=HoldfastWriter(path))
        weight.mul_(0)  # what is saved is what it was when the call was made
        state["step"] = 0
        future.result()
        refused = stock.async_save(state, storage_writer=HoldfastWriter(path)).exception()
    return refused.failures


def test_a_save_in_the_background_holds_the_state_of_the_call(ranks: RankPool, tmp_path):
    for failures in ranks(2).run(async_saves, tmp_path / "c"):
        ((error, _),) = failures.values()
        assert isinstance(error, CheckpointExistsError)

    assert same(holdfast.open(tmp_path / "c").read(), {"t": torch.ones(4, 3), "step": 1})


def async_save_by_process(path):
    with quiet():
        kind = stock.state_dict_saver.AsyncCheckpointerType.PROCESS
        state = {"t": sharded_tensor(1.0), "step": 1}
        stock.async_save(state, storage_writer=HoldfastWriter(path), async_checkpointer_type=kind).result()


def test_a_process_of_torch_can_write_it(ranks: RankPool, tmp_path):
    ranks(1).run(async_save_by_process, tmp_path / "c")
    ranks.kill()  # the process would outlive the group that it belongs to

    assert same(holdfast.open(tmp_path / "c").read(), {"t": torch.ones(4, 3), "step": 1})
