"""Loading without a state to load into: `_load_state_dict_from_keys` and the planner behind it."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys as stock_from_keys
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import holdfast.dcp as dcp
from holdfast.dcp.default_planner import _EmptyStateDictLoadPlanner
from holdfast.dcp.metadata import Metadata
from holdfast.dcp.state_dict_loader import _load_state_dict, _load_state_dict_from_keys
from holdfast.errors import StateMismatchError
from tests.rank_pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")  # stock says so on every call

STATE: dict[str, Any] = {
    "model": {"l": [torch.arange(3.0), {"deep": torch.ones(1, dtype=torch.int8)}], "0.weight": torch.ones(2)},
    "optim": OrderedDict(state={0: {"step": torch.tensor(4.0)}}, groups=[{"lr": 0.1}]),
    "step": 7,
    "note.with.dots": "text",
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("from-keys")
    dcp.save(STATE, checkpoint_id=folder)
    return folder


FILTERS: list[Any] = [
    None,
    set(),
    "model",
    "model.l",
    "model.l.0",
    "model.0.weight",
    "optim",
    {"step", "model.l"},
    {"note.with.dots"},
    ["optim.state.0", "step"],
]


def _id(value: object) -> str:
    """Sets have no order of their own."""
    return str(sorted(value)) if isinstance(value, set) else str(value)


@pytest.mark.parametrize("keys", FILTERS, ids=_id)
def test_keys_select_what_they_select_in_stock(path: Path, keys: Any) -> None:
    ours, theirs = (load(keys, checkpoint_id=path) for load in (_load_state_dict_from_keys, stock_from_keys))

    if keys is None and theirs == {}:
        pytest.skip(f"torch {torch.__version__}: stock loads nothing without keys")
    assert repr(ours) == repr(theirs)


def test_an_element_of_a_list_keeps_its_position(path: Path) -> None:
    # Stock takes the place in front of it for something to be loaded, and fails.
    loaded = _load_state_dict_from_keys("model.l.1.deep", checkpoint_id=path)

    assert loaded == {"model": {"l": [None, {"deep": torch.ones(1, dtype=torch.int8)}]}}


def test_tensors_come_whole_in_memory_of_their_own_with_their_dtype(path: Path) -> None:
    loaded = _load_state_dict_from_keys({"model.l"}, checkpoint_id=path)

    assert list(loaded) == ["model"]
    assert loaded["model"]["l"][0].tolist() == [0, 1, 2]
    assert loaded["model"]["l"][1]["deep"].dtype is torch.int8
    assert loaded["model"]["l"][0].data_ptr() != STATE["model"]["l"][0].data_ptr()


def test_selecting_a_part_warns_of_nothing(path: Path, recwarn: pytest.WarningsRecorder) -> None:
    _load_state_dict_from_keys("model.l.0", checkpoint_id=path)

    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize(
    ("keys", "unknown", "suggestion"),
    [
        ("modle", ["modle"], "did you mean 'model'?"),
        ({"step", "model.l.0.x"}, ["model.l.0.x"], "did you mean 'model.l.0'?"),
        ("mod", ["mod"], None),
        ({"a", "b", "step"}, ["a", "b"], None),
    ],
    ids=_id,
)
def test_a_key_that_selects_nothing_is_an_error_that_names_it(
    path: Path, keys: Any, unknown: list[str], suggestion: str | None
) -> None:
    with pytest.raises(dcp.CheckpointException) as raised:
        _load_state_dict_from_keys(keys, checkpoint_id=path)

    (cause, _) = raised.value.failures[0]
    assert isinstance(cause, StateMismatchError)
    assert cause.missing == unknown
    for key in unknown:
        assert f"Missing key in checkpoint state_dict: {key}." in str(cause)
    if suggestion:
        assert suggestion in str(cause)
    selected = {keys} if isinstance(keys, str) else keys
    assert "step" in selected or stock_from_keys(keys, checkpoint_id=path) == {}  # what stock makes of it


def test_with_partial_load_allowed_unknown_keys_are_passed_over(path: Path) -> None:
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner({"step", "absent"}, allow_partial_load=True)

    _load_state_dict(state, dcp.FileSystemReader(path), no_dist=True, planner=planner)

    assert state == {"step": 7}


def test_a_checkpoint_without_paths_is_loaded_under_its_flat_keys(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(2), "a.c": {"nested": "value"}, "d": 1}
    dcp.save(state, checkpoint_id=tmp_path, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))

    assert repr(_load_state_dict_from_keys(checkpoint_id=tmp_path)) == repr(state)
    assert _load_state_dict_from_keys({"a.c"}, checkpoint_id=tmp_path) == {"a.c": {"nested": "value"}}
    with pytest.raises(stock.CheckpointException, match="NoneType"):
        stock_from_keys({"a.c"}, checkpoint_id=tmp_path)  # stock cannot filter such a checkpoint


def test_checkpoints_of_stock_are_loaded_from_keys_too(tmp_path: Path) -> None:
    stock.save(STATE, checkpoint_id=tmp_path)

    keys = set(STATE)
    assert repr(_load_state_dict_from_keys(checkpoint_id=tmp_path)) == repr(
        stock_from_keys(keys, checkpoint_id=tmp_path)
    )


def test_the_storage_can_be_given_instead_of_the_path(path: Path, tmp_path: Path) -> None:
    assert _load_state_dict_from_keys("step", storage_reader=dcp.FileSystemReader(path)) == {"step": 7}
    moved = dcp.FileSystemReader(tmp_path)
    assert _load_state_dict_from_keys("step", storage_reader=moved, checkpoint_id=path) == {"step": 7}
    with pytest.raises(RuntimeError, match="`checkpoint_id` must be specified"):
        _load_state_dict_from_keys("step")


# The planner on its own, which programs pass to `_load_state_dict`


def test_the_planner_fills_an_empty_dict(path: Path) -> None:
    state: dict[str, Any] = {}

    _load_state_dict(state, dcp.FileSystemReader(path), no_dist=True, planner=_EmptyStateDictLoadPlanner())

    assert state["optim"]["groups"][0]["lr"] == 0.1
    assert state["step"] == 7


def test_the_planner_refuses_a_dict_that_is_not_empty(path: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match="empty dict"):
        _load_state_dict({"step": 0}, dcp.FileSystemReader(path), no_dist=True, planner=_EmptyStateDictLoadPlanner())


def test_a_planner_can_be_used_again_for_another_checkpoint(path: Path, tmp_path: Path) -> None:
    dcp.save({"other": 1}, checkpoint_id=tmp_path)
    planner = _EmptyStateDictLoadPlanner()
    first: dict[str, Any] = {}
    second: dict[str, Any] = {}

    _load_state_dict(first, dcp.FileSystemReader(path), no_dist=True, planner=planner)
    _load_state_dict(second, dcp.FileSystemReader(tmp_path), no_dist=True, planner=planner)

    assert first["step"] == 7
    assert second == {"other": 1}


class OnlyScalars(_EmptyStateDictLoadPlanner):
    """What to build can be decided key by key, as with stock's planner."""

    def _should_include_key(self, key: str, metadata: Metadata) -> bool:
        return key.endswith(("lr", "step"))


def test_a_subclass_decides_key_by_key(path: Path) -> None:
    state: dict[str, Any] = {}

    _load_state_dict(state, dcp.FileSystemReader(path), no_dist=True, planner=OnlyScalars())

    assert state == {"optim": {"state": {"0": {"step": torch.tensor(4.0)}}, "groups": [{"lr": 0.1}]}, "step": 7}


# On ranks


def load_keys_on_ranks(folder: Path, use_collectives: bool) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    state = {"d": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]), f"of {dist.get_rank()}": dist.get_rank()}
    dcp.save(state, checkpoint_id=folder, use_collectives=use_collectives)
    everything = _load_state_dict_from_keys(checkpoint_id=folder)
    with pytest.raises(dcp.CheckpointException, match="of 9"):
        _load_state_dict_from_keys("of 9", checkpoint_id=folder)
    other = f"of {1 - dist.get_rank()}"
    assert _load_state_dict_from_keys(other, checkpoint_id=folder) == {other: 1 - dist.get_rank()}
    return everything["d"].tolist()


@pytest.mark.parametrize("use_collectives", [True, False])
def test_every_rank_gets_whole_tensors(ranks: RankPool, tmp_path: Path, use_collectives: bool) -> None:
    assert ranks(2).run(load_keys_on_ranks, tmp_path, use_collectives) == [[0, 1, 2, 3, 4]] * 2


def save_rank_by_rank(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    dcp.save({"d": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])}, checkpoint_id=folder, use_collectives=False)


def test_a_lost_part_of_a_checkpoint_is_reported_and_not_filled_up(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save_rank_by_rank, tmp_path)
    (tmp_path / "__1.metadata").unlink()

    with pytest.raises(dcp.CheckpointException) as raised:
        _load_state_dict_from_keys(checkpoint_id=tmp_path)

    (cause, _) = raised.value.failures[0]
    assert isinstance(cause, StateMismatchError)
    assert "offsets [3] of sizes [2]" in cause.uncovered["d"]
