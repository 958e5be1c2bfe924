"""Saves, loads and runs at URLs of a real S3 server, by real ranks, some of which are killed."""

from __future__ import annotations

import os
import signal
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast._manager.steps import folder_of
from holdfast._stores.fsspec_store import FsspecStore
from holdfast._stores.s3_upload import S3Upload
from holdfast.errors import CommitConflictError
from tests import s3_server
from tests.s3_server import Bucket
from tests.sharding import sharded

pytestmark = pytest.mark.skipif(bool(s3_server.MISSING), reason=s3_server.WHY_SKIPPED)

ROWS, ROW = 64, 1 << 10
PARTS = 3


@pytest.fixture(scope="module")
def bucket() -> Bucket:
    return s3_server.new_bucket()


@pytest.fixture
def url(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    return bucket.url(uuid4().hex)


def names(bucket: Bucket, url: str) -> set[str]:
    return bucket.names(url.removeprefix(f"s3://{bucket.name}/"))


def numbers(seed: int, rows: int = ROWS) -> torch.Tensor:
    return torch.arange(rows * ROW, dtype=torch.float32).reshape(rows, ROW) + seed


def state_of(seed: int, rows: int = ROWS) -> dict[str, Any]:
    return {"sharded": sharded(numbers(seed, rows)), "whole": numbers(seed)[0].clone(), "seed": seed}


def save(bucket: Bucket, url: str, seed: int) -> None:
    with bucket.in_environment():
        holdfast.save(state_of(seed), url, overwrite=True)


def load(bucket: Bucket, url: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    state = state_of(-1)
    with bucket.in_environment():
        holdfast.load(state, url)
    return state["sharded"].full_tensor(), state["whole"], state["seed"]


def assert_all_loaded(results: list[tuple[torch.Tensor, torch.Tensor, int]], seed: int) -> None:
    for whole_of_sharded, whole, found in results:
        assert torch.equal(whole_of_sharded, numbers(seed))
        assert torch.equal(whole, numbers(seed)[0])
        assert found == seed


def test_ranks_save_replace_and_load_by_url_alone(ranks, bucket, url):
    for seed, savers in ((1, 2), (2, 3)):
        ranks(savers).run(save, bucket, url, seed)
        assert_all_loaded(ranks(2).run(load, bucket, url), seed)
    assert_all_loaded(ranks(1).run(load, bucket, url), 2)
    left = names(bucket, url)
    assert "holdfast.json" in left
    assert len(left) == 1 + 3  # the record, and a file of every rank: nothing is left of the first save
    assert bucket.unfinished_uploads() == []


def save_and_die_in_the_upload(bucket: Bucket, url: str) -> None:
    """Rank 1 is killed when the server has its first part, and others are on their way."""
    real = S3Upload._next_buffer

    def next_buffer(upload: S3Upload) -> bytearray:
        if dist.get_rank() == 1 and upload._parts == 2:
            upload._finish_one()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(upload)

    S3Upload._next_buffer = next_buffer  # type: ignore[method-assign]
    try:
        with bucket.in_environment():
            holdfast.save(state_of(2, rows=2 * PARTS * (8 << 20) // (4 * ROW)), url, overwrite=True)
    finally:
        S3Upload._next_buffer = real  # type: ignore[method-assign]


def test_a_rank_that_is_killed_while_it_uploads_leaves_the_old_checkpoint(ranks, bucket, url):
    ranks(2).run(save, bucket, url, 1)
    before = names(bucket, url)
    outcomes = ranks(2).run_raw(save_and_die_in_the_upload, bucket, url, group_timeout=20)
    assert outcomes[1].error.type_name == "RankDied"
    assert outcomes[0].error is not None
    assert len(bucket.unfinished_uploads()) == 1  # it was in the middle of it
    assert names(bucket, url) >= before
    assert_all_loaded(ranks(2).run(load, bucket, url), 1)
    assert holdfast.open(url)["seed"] == 1
    ranks(2).run(save, bucket, url, 3)
    assert_all_loaded(ranks(2).run(load, bucket, url), 3)


def test_of_two_saves_that_commit_at_once_one_wins(bucket, url, monkeypatch):
    """The second one begins when the first has written everything but its record."""
    holdfast.save({"seed": 0}, url)
    real, commits = FsspecStore.commit, []

    def commit(store: FsspecStore, name: str, content: bytes, *, replaces: bytes | None) -> None:
        commits.append(name)
        if len(commits) == 1:
            holdfast.save({"seed": 2}, url, overwrite=True)
        real(store, name, content, replaces=replaces)

    monkeypatch.setattr(FsspecStore, "commit", commit)
    with pytest.raises(CommitConflictError):
        holdfast.save({"seed": 1}, url, overwrite=True)
    assert holdfast.open(url)["seed"] == 2


@pytest.mark.parametrize("writer", ["thread", pytest.param("process", marks=pytest.mark.long)])
def test_saves_go_on_in_the_background(bucket, url, writer):
    state = {"w": torch.zeros(1000), "step": 0}
    holdfast.async_save(state, url, writer=writer).result()
    assert holdfast.open(url)["step"] == 0
    assert holdfast.verify(url).ok


# --- runs --------------------------------------------------------------------------------------------------------


def train(bucket: Bucket, url: str, steps: range, **options: Any) -> None:
    with bucket.in_environment(), holdfast.CheckpointManager(url, keep_last=2, every_steps=1, **options) as manager:
        for step in steps:
            manager.maybe_save(step, state_of(step), metrics={"loss": 1 / step})


def steps_in(url: str) -> list[int]:
    return [info.step for info in holdfast.CheckpointManager(url).steps()]


def restore(bucket: Bucket, url: str) -> tuple[int | None, torch.Tensor, int]:
    state = state_of(-1)
    with bucket.in_environment(), holdfast.CheckpointManager(url) as manager:
        restored = manager.restore(state)
        return None if restored is None else restored.step, state["sharded"].full_tensor(), state["seed"]


@pytest.mark.parametrize("async_save", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_run_keeps_its_last_checkpoints_and_goes_on(ranks, bucket, url, async_save):
    ranks(2).run(train, bucket, url, range(1, 5), background=async_save)
    assert steps_in(url) == [3, 4]
    folders = {path.split("/")[-2] for path in bucket.client().find(url) if "step-" in path}
    assert folders == {folder_of(step) for step in (3, 4)}
    for step, whole, seed in ranks(2).run(restore, bucket, url):
        assert (step, seed) == (4, 4)
        assert torch.equal(whole, numbers(4))
    ranks(2).run(train, bucket, url, range(5, 7), background=async_save)
    assert steps_in(url) == [5, 6]


def test_a_damaged_checkpoint_of_a_run_is_passed_over(bucket, url):
    with holdfast.CheckpointManager(url, background=False, save_at_end=False) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((1000,), float(step))})
    client = bucket.client()
    (data,) = [path for path in client.find(f"{url}/{folder_of(2)}") if "data-" in path]
    content = bytearray(client.cat_file(data))
    content[-1] ^= 1
    client.pipe_file(data, bytes(content))
    state = {"w": torch.zeros(1000)}
    with holdfast.CheckpointManager(url) as manager:
        restored = manager.restore(state)
    assert restored is not None
    assert restored.step == 1
    assert state["w"][0] == 1


def test_a_run_is_checked_before_it_begins(url):
    with holdfast.CheckpointManager(url, save_at_end=False) as manager:
        report = manager.preflight({"w": torch.ones(10_000)})
    assert report.problems == ()
    assert report.write_rate is not None
    assert report.write_rate > 0
