"""Of a key that several ranks hold one copy is stored. If the copies differ, that is said, with key and ranks."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import holdfast.dcp as dcp
from holdfast.dcp import CheckpointException, DefaultSavePlanner
from holdfast.errors import ReplicaMismatchError
from tests.rank_pool import RankPool


def differing() -> dict[str, Any]:
    rank = dist.get_rank()
    norm = torch.nn.BatchNorm1d(3)
    norm.running_mean.fill_(float(rank))
    return {
        "norm": norm.state_dict(),
        "data": {"position": 100 + min(rank, 1), "epoch": 7},
        "generator": torch.Generator().manual_seed(rank).get_state(),
        f"rng_of_rank_{rank}": rank,
    }


def save_differing(folder: Path, planner_options: dict[str, Any], environment: dict[str, str]) -> tuple[str, list[str]]:
    planner = DefaultSavePlanner(**planner_options)
    with warnings.catch_warnings(record=True) as caught, mock.patch.dict(os.environ, environment):
        warnings.simplefilter("always")
        try:
            dcp.save(differing(), checkpoint_id=folder, planner=planner)
            outcome = "saved"
        except CheckpointException as error:
            ((cause, _),) = error.failures.values()
            assert isinstance(cause, ReplicaMismatchError)
            outcome = str(cause)
    return outcome, [str(warning.message) for warning in caught if "Ranks hold different" in str(warning.message)]


def test_copies_that_differ_are_named_with_their_ranks_and_the_lowest_ranks_copy_is_kept(ranks: RankPool, tmp_path):
    outcomes = ranks(3).run(save_differing, tmp_path, {}, {})
    assert [outcome for outcome, _ in outcomes] == ["saved"] * 3
    (text,) = [text for _, texts in outcomes for text in texts]  # said once, by the coordinator
    assert "'norm.running_mean': ranks 0 != ranks 1 != ranks 2" in text
    assert "'data.position': ranks 0 != ranks 1,2" in text
    assert "'generator': ranks 0 != ranks 1 != ranks 2" in text
    assert "under 3 key(s)" in text
    assert "put the rank into the key" in text
    loaded = dcp.state_dict_loader._load_state_dict_from_keys(checkpoint_id=tmp_path)
    assert loaded["norm"]["running_mean"].tolist() == [0.0] * 3
    assert loaded["data"] == {"position": 100, "epoch": 7}
    assert torch.equal(loaded["generator"], torch.Generator().manual_seed(0).get_state())
    assert [loaded[f"rng_of_rank_{rank}"] for rank in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "environment"),
    [({"replica_mismatch": "error"}, {}), ({}, {"HOLDFAST_REPLICA_MISMATCH": "error"})],
    ids=["planner", "environment"],
)
def test_copies_that_differ_can_be_an_error_on_every_rank(ranks: RankPool, tmp_path, options, environment):
    outcomes = ranks(3).run(save_differing, tmp_path, options, environment)
    for outcome, texts in outcomes:
        assert "'data.position': ranks 0 != ranks 1,2" in outcome
        assert "Nothing was saved." in outcome
        assert texts == []
    assert list(tmp_path.iterdir()) == []


def test_the_comparison_can_be_switched_off(ranks: RankPool, tmp_path):
    assert ranks(2).run(save_differing, tmp_path, {"replica_mismatch": "ignore"}, {}) == [("saved", [])] * 2


def of_different_kinds(what: str) -> dict[str, Any]:
    odd = dist.get_rank() == 1
    values = {
        "shape": torch.zeros(4 if odd else 3),
        "dtype": torch.zeros(3, dtype=torch.float64 if odd else torch.float32),
        "kind": 5 if odd else torch.tensor(5),
    }
    return {"same": torch.ones(2), what: values[what]}


def save_different_kinds(folder: Path, what: str) -> str:
    try:
        dcp.save(of_different_kinds(what), checkpoint_id=folder, planner=DefaultSavePlanner(replica_mismatch="ignore"))
    except CheckpointException as error:
        ((cause, _),) = error.failures.values()
        assert isinstance(cause, ReplicaMismatchError)
        assert list(cause.keys) == [what]
        return str(cause)
    return "saved"


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ("shape", "a tensor of shape [3] and torch.float32 on ranks 0,2; a tensor of shape [4]"),
        ("dtype", "torch.float32 on ranks 0,2; a tensor of shape [3] and torch.float64 on ranks 1"),
        ("kind", "torch.int64 on ranks 0,2; a value on ranks 1"),
    ],
)
def test_one_key_for_different_kinds_of_things_is_always_an_error(ranks: RankPool, tmp_path, what, shown):
    for text in ranks(3).run(save_different_kinds, tmp_path, what):
        assert f"'{what}': " in text
        assert shown in text
    assert list(tmp_path.iterdir()) == []
