"""Checkpoints in an object store: real HTTP to a real server, from real ranks, some of which are killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader as StockReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter as StockWriter

import holdfast.dcp as dcp
from holdfast.dcp._fsspec_filesystem import FsspecReader, FsspecWriter
from tests import s3_server
from tests.dcp.states import LIBRARIES
from tests.s3_server import Bucket
from tests.sharding import sharded

pytestmark = [
    pytest.mark.skipif(bool(s3_server.MISSING), reason=s3_server.WHY_SKIPPED),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # stock says so on every call
    pytest.mark.filterwarnings("ignore:.*holds a checkpoint"),
]

STORAGES = {"ours": (FsspecWriter, FsspecReader), "stock": (StockWriter, StockReader)}
ROWS = 1 << 10
ROW = 1 << 10


@pytest.fixture
def bucket() -> Bucket:
    return s3_server.new_bucket()


def numbers(seed: int) -> torch.Tensor:
    return torch.arange(ROWS * ROW, dtype=torch.float32).reshape(ROWS, ROW) + seed


def save(bucket: Bucket, path: str, seed: int, library: str = "ours", **options: Any) -> None:
    state = {"sharded": sharded(numbers(seed)), "whole": numbers(seed)[0].clone(), "seed": seed}
    writer = STORAGES[library][0](bucket.url(path), **bucket.options)
    LIBRARIES[library].save(state, storage_writer=writer, **options)


def load(bucket: Bucket, path: str, library: str = "ours") -> tuple[torch.Tensor, torch.Tensor, int]:
    state = {"sharded": sharded(torch.zeros(ROWS, ROW)), "whole": torch.zeros(ROW), "seed": -1}
    LIBRARIES[library].load(state, storage_reader=STORAGES[library][1](bucket.url(path), **bucket.options))
    return state["sharded"].full_tensor(), state["whole"], state["seed"]


def assert_all_loaded(results: list[tuple[torch.Tensor, torch.Tensor, int]], seed: int) -> None:
    for whole_of_sharded, whole, found in results:
        assert torch.equal(whole_of_sharded, numbers(seed))
        assert torch.equal(whole, numbers(seed)[0])
        assert found == seed


@pytest.mark.parametrize(("savers", "loaders"), [(1, 2), (4, 2), (2, 3)])
def test_any_number_of_ranks_saves_replaces_and_loads(ranks, bucket, savers, loaders):
    for seed in (1, 2):
        ranks(savers).run(save, bucket, "run/step", seed)
        assert_all_loaded(ranks(loaders).run(load, bucket, "run/step"), seed)
    left = bucket.names("run/step")
    assert ".metadata" in left
    assert len(left) == 1 + savers
    assert bucket.unfinished_uploads() == []


def save_by_url(bucket: Bucket, path: str) -> int:
    os.environ.update(bucket.environment)
    try:
        dcp.save({"step": 7}, checkpoint_id=bucket.url(path))
        state = {"step": 0}
        dcp.load(state, checkpoint_id=bucket.url(path))
    finally:
        for name in bucket.environment:
            del os.environ[name]
    return state["step"]


def test_a_url_is_enough(ranks, bucket):
    assert ranks(2).run(save_by_url, bucket, "a/b") == [7, 7]


@pytest.mark.parametrize(("saver", "loader"), [("ours", "stock"), ("stock", "ours")])
def test_stock_and_ours_load_what_the_other_saved(ranks, bucket, saver, loader):
    ranks(2).run(save, bucket, "run", 3, saver)
    assert_all_loaded(ranks(3).run(load, bucket, "run", loader), 3)


def test_ranks_that_save_for_themselves_commit_together(ranks, bucket):
    for seed in (1, 2):
        ranks(2).run(save, bucket, "run", seed, use_collectives=False)
        assert_all_loaded(ranks(2).run(load, bucket, "run"), seed)
        assert_all_loaded(ranks(1).run(load, bucket, "run"), seed)
    assert not [name for name in bucket.names("run") if name.endswith(".tmp")]
    ranks(2).run(save, bucket, "run", 3)
    assert_all_loaded(ranks(2).run(load, bucket, "run"), 3)
    assert not [name for name in bucket.names("run") if name.endswith("0.metadata")]


class DiesInTheUpload(dcp.DefaultSavePlanner):
    """Killed when the first of two tensors is on its way, in parts."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "second" and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def save_and_die_in_the_upload(bucket: Bucket, path: str, parts: int) -> None:
    large = sharded(torch.ones(2, parts * (5 << 20) // 4))
    state = {"first": large, "second": sharded(torch.ones(2, 2))}
    writer = FsspecWriter(bucket.url(path), **bucket.options, default_block_size=5 << 20)
    dcp.save(state, storage_writer=writer, planner=DiesInTheUpload())


@pytest.mark.parametrize("parts", [1, 3])
def test_a_rank_that_is_killed_while_it_uploads_leaves_the_old_checkpoint(ranks, bucket, parts):
    ranks(2).run(save, bucket, "run", 1)
    before = bucket.names("run")
    outcomes = ranks(2).run_raw(save_and_die_in_the_upload, bucket, "run", parts, group_timeout=20)
    assert outcomes[1].error.type_name == "RankDied"
    assert outcomes[0].error is not None
    if parts > 1:
        assert len(bucket.unfinished_uploads()) == 1  # it was in the middle of it
    assert bucket.names("run") == before
    assert_all_loaded(ranks(2).run(load, bucket, "run"), 1)
    ranks(2).run(save, bucket, "run", 2)
    assert_all_loaded(ranks(2).run(load, bucket, "run"), 2)
    assert len(bucket.names("run")) == 3


class DiesAtTheCommit(FsspecWriter):
    """Killed right before or right after the one request that commits."""

    when = "before"

    def _put_index_in_place(self) -> None:
        if self.when == "after":
            super()._put_index_in_place()
        os.kill(os.getpid(), signal.SIGKILL)


def save_and_die_at_the_commit(bucket: Bucket, path: str, seed: int, when: str) -> None:
    writer = DiesAtTheCommit(bucket.url(path), **bucket.options)
    writer.when = when
    dcp.save({"sharded": sharded(numbers(seed)), "whole": numbers(seed)[0], "seed": seed}, storage_writer=writer)


@pytest.mark.parametrize(("when", "left"), [("before", 1), ("after", 2)])
def test_the_commit_is_one_request(ranks, bucket, when, left):
    ranks(1).run(save, bucket, "run", 1)
    (outcome,) = ranks(1).run_raw(save_and_die_at_the_commit, bucket, "run", 2, when)
    assert outcome.error.type_name == "RankDied"
    assert not [name for name in bucket.names("run") if name.endswith(".tmp")]
    assert_all_loaded(ranks(1).run(load, bucket, "run"), left)
    ranks(1).run(save, bucket, "run", 3)
    assert len(bucket.names("run")) == 2


def damage_and_load(bucket: Bucket, path: str) -> str:
    with pytest.raises(dcp.CheckpointException) as caught:
        load(bucket, path)
    return str(caught.value)


def test_damage_and_loss_are_noticed_on_all_ranks(ranks, bucket):
    ranks(2).run(save, bucket, "run", 1)
    client = bucket.client()
    name = min(bucket.names("run") - {".metadata"})
    content = bytearray(client.cat_file(f"{bucket.name}/run/{name}"))
    content[len(content) // 2] ^= 1
    client.pipe_file(f"{bucket.name}/run/{name}", bytes(content))
    for message in ranks(2).run(damage_and_load, bucket, "run"):
        assert f"{bucket.url('run')}/{name} is damaged" in message
    client.rm_file(f"{bucket.name}/run/{name}")
    for message in ranks(2).run(damage_and_load, bucket, "run"):
        assert f"{bucket.url('run')}/{name} is missing" in message
