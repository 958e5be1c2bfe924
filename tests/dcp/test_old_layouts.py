"""Checkpoints of older torch versions: keys by the rules of 2.3 and before, and an index that says less."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.checkpoint import _version
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import holdfast.dcp as dcp
from holdfast._base.nested import flatten
from holdfast.dcp.state_dict_loader import _load_state_dict_from_keys
from tests.rank_pool import RankPool
from tests.sharding import sharded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # stock says so on every call


@contextmanager
def flattening_of_torch_2_3() -> Iterator[None]:
    """Stock flattens as it did before 2.4: mappings and lists without a tensor inside are stored whole."""
    _version._derived_version = "2_3"
    try:
        yield
    finally:
        _version._derived_version = None


def state(step: int, fill: float) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((2,), fill)},
        "optim": {
            "state": {0: {"step": torch.tensor(float(step)), "m": torch.full((2,), fill)}},
            "param_groups": [{"lr": step / 10, "params": [0]}],
        },
        "scheduler": {"last_epoch": step, "base_lrs": [0.1] * step, "nested": {"deep": {"x": step}}},
        "mixed": [{"t": torch.full((1,), fill), "n": {"a": step}}, {"only": step}],
        "step": step,
    }


OLD_KEYS = {
    *("model.w", "optim.state.0.step", "optim.state.0.m", "optim.param_groups"),
    *("scheduler", "mixed.0.t", "mixed.0.n", "mixed.1", "step"),
}


def save_old(folder: Path, **options: Any) -> None:
    with flattening_of_torch_2_3():
        metadata = stock.save(state(3, 1.0), checkpoint_id=folder, **options)
    assert set(metadata.state_dict_metadata) == OLD_KEYS


def assert_equal_states(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert repr(ours) == repr(expected)


def test_a_checkpoint_with_keys_of_torch_2_3_is_loaded(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    save_old(tmp_path)
    recwarn.clear()
    target = state(0, 0.0)
    tensor = target["optim"]["state"][0]["m"]

    dcp.load(target, checkpoint_id=tmp_path)

    assert_equal_states(target, state(3, 1.0))
    assert target["optim"]["state"][0]["m"] is tensor
    assert list(recwarn) == []


def test_a_part_of_such_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    save_old(tmp_path)
    target = {"scheduler": state(0, 0.0)["scheduler"], "step": 0}

    dcp.load(target, checkpoint_id=tmp_path)

    assert target == {"scheduler": state(3, 1.0)["scheduler"], "step": 3}


def test_a_part_without_values_needs_no_old_rules(tmp_path: Path) -> None:
    save_old(tmp_path)
    target = {"model": {"w": torch.zeros(2)}}

    dcp.load(target, checkpoint_id=tmp_path)

    assert target["model"]["w"].tolist() == [1, 1]


def test_objects_with_a_state_get_theirs_from_such_a_checkpoint(tmp_path: Path) -> None:
    def objects(steps: int) -> dict[str, Any]:
        torch.manual_seed(steps)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(steps):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            scheduler.step()
        return {"model": model, "optim": optimizer, "scheduler": scheduler}

    before, after = objects(3), objects(1)
    with flattening_of_torch_2_3():
        metadata = stock.save(before, checkpoint_id=tmp_path)
    assert "scheduler" in metadata.state_dict_metadata

    dcp.load(after, checkpoint_id=tmp_path)

    assert torch.equal(after["model"].weight, before["model"].weight)
    assert after["scheduler"].last_epoch == 3
    assert after["optim"].param_groups[0]["lr"] == before["optim"].param_groups[0]["lr"]


def test_keys_are_picked_from_such_a_checkpoint(tmp_path: Path) -> None:
    save_old(tmp_path)

    assert _load_state_dict_from_keys("scheduler", checkpoint_id=tmp_path) == {"scheduler": state(3, 1.0)["scheduler"]}


def test_what_is_missing_by_both_rules_is_reported_in_todays_keys_where_old_ones_do_not_help(tmp_path: Path) -> None:
    with flattening_of_torch_2_3():
        stock.save({"w": torch.ones(1), "other": {"x": 1}}, checkpoint_id=tmp_path)

    with pytest.raises(dcp.CheckpointException, match=r"Missing key in checkpoint state_dict: cfg\.x\."):
        dcp.load({"w": torch.zeros(1), "cfg": {"x": 0}}, checkpoint_id=tmp_path)


def test_a_new_checkpoint_with_more_keys_than_asked_for_is_not_taken_for_an_old_one(tmp_path: Path) -> None:
    dcp.save({"cfg": {"x": 1, "y": 2}, "more": {"z": 3}}, checkpoint_id=tmp_path)
    target = {"cfg": {"x": 0, "y": 0}}

    dcp.load(target, checkpoint_id=tmp_path)

    assert target == {"cfg": {"x": 1, "y": 2}}


class FlattensMeanwhile(dcp.DefaultLoadPlanner):
    """What a save in another thread would see while an old checkpoint is loaded."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        class Probe(dict[str, Any]):
            def items(self) -> Any:
                FlattensMeanwhile.seen.append(sorted(flatten({"cfg": {"x": 1}}).values))
                return super().items()

        FlattensMeanwhile.seen = []
        super().set_up_planner({**state_dict, "probe": Probe(t=torch.zeros(1))}, metadata, is_coordinator)

    seen: list[list[str]] = []  # noqa: RUF012


def test_loading_an_old_checkpoint_does_not_change_how_others_flatten(tmp_path: Path) -> None:
    with flattening_of_torch_2_3():
        stock.save({"cfg": {"x": 1}, "probe": {"t": torch.ones(1)}}, checkpoint_id=tmp_path)

    dcp.load({"cfg": {"x": 0}}, checkpoint_id=tmp_path, planner=FlattensMeanwhile())

    assert len(FlattensMeanwhile.seen) >= 2  # by today's rules and by the old ones
    assert all(keys == ["cfg.x"] for keys in FlattensMeanwhile.seen)


def save_old_on_ranks(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    with flattening_of_torch_2_3():
        stock.save({"d": tensor, "cfg": {"rank": "any"}, f"of {dist.get_rank()}": {"x": 1}}, checkpoint_id=folder)


def load_old_on_ranks(folder: Path) -> list[float]:
    target: dict[str, Any] = {
        "d": sharded(torch.zeros(5)),
        "cfg": {"rank": ""},
        "of 1": {"x": 0},
    }
    dcp.load(target, checkpoint_id=folder)
    assert target["cfg"] == {"rank": "any"}
    assert target["of 1"] == {"x": 1}
    return target["d"].full_tensor().tolist()


def test_such_a_checkpoint_of_two_ranks_is_loaded_on_other_numbers_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save_old_on_ranks, tmp_path)

    for count in (1, 2, 3):
        assert ranks(count).run(load_old_on_ranks, tmp_path) == [[0, 1, 2, 3, 4]] * count


# An index that says less


def rewrite_index(folder: Path, change: Callable[[Any], None]) -> None:
    """Change stock's own objects and pickle them again, as an older version would have written them."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def without(*fields: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for field in fields:
            metadata.__dict__.pop(field, None)  # older torches lack some themselves

    return change


def hint_free(metadata: Any) -> None:
    """Indexes without the position of the chunk, which only later versions add."""
    metadata.storage_data = {
        type(index)(index.fqn, index.offset): info for index, info in metadata.storage_data.items()
    }


@pytest.mark.parametrize(
    "change",
    [
        without("version"),
        without("storage_meta"),
        without("version", "storage_meta"),
        hint_free,
        lambda metadata: setattr(metadata, "version", "1.7.2"),
        lambda metadata: setattr(metadata.storage_meta, "checkpoint_id", "a text"),
        lambda metadata: setattr(metadata.storage_meta, "modules", ["a", "b"]),
    ],
    ids=["no version", "no storage_meta", "neither", "no hints", "other version", "text id", "modules"],
)
@pytest.mark.parametrize("flattening", ["2.3", "today"])
def test_an_older_index_is_read(tmp_path: Path, change: Callable[[Any], None], flattening: str) -> None:
    if flattening == "2.3":
        save_old(tmp_path)
    else:
        stock.save(state(3, 1.0), checkpoint_id=tmp_path)
    rewrite_index(tmp_path, change)
    target = state(0, 0.0)

    dcp.load(target, checkpoint_id=tmp_path)

    assert_equal_states(target, state(3, 1.0))


def test_an_index_without_storage_meta_has_one_with_the_id_of_this_load(tmp_path: Path) -> None:
    stock.save({"w": torch.ones(1)}, checkpoint_id=tmp_path)
    rewrite_index(tmp_path, without("storage_meta", "version"))
    reader = dcp.FileSystemReader(tmp_path)

    metadata = reader.read_metadata()

    assert metadata.version is None
    assert metadata.storage_meta.save_id is None
    assert metadata.storage_meta.load_id == reader.load_id


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_index_pickled_with_any_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    stock.save(state(3, 1.0), checkpoint_id=tmp_path)
    file = tmp_path / ".metadata"
    file.write_bytes(pickle.dumps(pickle.loads(file.read_bytes()), protocol=protocol))
    target = state(0, 0.0)

    dcp.load(target, checkpoint_id=tmp_path)

    assert_equal_states(target, state(3, 1.0))


def load_old_index_on_ranks(folder: Path) -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    target = {"d": distribute_tensor(torch.zeros(5), mesh, [Shard(0)])}
    dcp.load(target, checkpoint_id=folder)
    return target["d"].full_tensor().tolist()


def test_ranks_agree_on_an_index_that_does_not_tell_which_save_it_is_of(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save_old_on_ranks, tmp_path)
    rewrite_index(tmp_path, without("storage_meta", "version"))

    assert ranks(2).run(load_old_index_on_ranks, tmp_path) == [[0, 1, 2, 3, 4]] * 2
