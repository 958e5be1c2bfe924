"""Objects with a state: when they are asked for it, when they get it back, and what happens if they refuse."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful as StockStateful

import holdfast.dcp as dcp
from holdfast.dcp.state_dict_saver import _stateful_to_state_dict
from holdfast.dcp.stateful import Stateful
from tests.ranks import RankPool
from tests.torches import says

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # stock says so on every call


class Counter:
    """Notes in a shared log when it is asked and when it is told."""

    def __init__(self, name: str, log: list[str], state: Any) -> None:
        self.name, self.log, self.state = name, log, state

    def state_dict(self) -> Any:
        self.log.append(f"ask {self.name}")
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.log.append(f"tell {self.name}")
        self.state = state_dict


def calls(namespace: str, folder: Path) -> list[str]:
    checkpoint = importlib.import_module(namespace)
    log: list[str] = []
    state: dict[str, Any] = {name: Counter(name, log, {"x": torch.ones(1), "n": 1}) for name in ("zebra", "apple", "M")}
    state["plain"] = torch.ones(2)
    log.append("save")
    checkpoint.save(state, checkpoint_id=folder)
    log.append("load")
    checkpoint.load(state, checkpoint_id=folder)
    return log


def test_objects_are_asked_and_told_in_the_order_of_stock(tmp_path: Path) -> None:
    ours = calls("holdfast.dcp", tmp_path / "ours")

    if says("torch.distributed.checkpoint.state_dict_loader", "keys = sorted(state_dict.keys())"):  # since 2.7
        assert ours == calls("torch.distributed.checkpoint", tmp_path / "stock")
    assert ours == [
        *("save", "ask zebra", "ask apple", "ask M"),
        *("load", "ask M", "ask apple", "ask zebra", "tell M", "tell apple", "tell zebra"),
    ]


def test_on_two_ranks_too(ranks: RankPool, tmp_path: Path) -> None:
    ours = ranks(2).run(calls, "holdfast.dcp", tmp_path / "ours")

    assert ours == ranks(2).run(calls, "torch.distributed.checkpoint", tmp_path / "stock")


def test_a_model_an_optimizer_and_a_scheduler_come_back_as_they_were(tmp_path: Path) -> None:
    def trained(steps: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            scheduler.step()
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    before, after = trained(3), trained(1)
    dcp.save(before, checkpoint_id=tmp_path)
    dcp.load(after, checkpoint_id=tmp_path)

    assert torch.equal(after["model"].weight, before["model"].weight)
    assert isinstance(after["model"].weight, nn.Parameter)
    moments = [state["optimizer"].state_dict()["state"][0]["exp_avg"] for state in (before, after)]
    assert torch.equal(*moments)
    assert after["optimizer"].param_groups[0]["lr"] == before["optimizer"].param_groups[0]["lr"]
    assert after["scheduler"].last_epoch == 3


@pytest.mark.parametrize("value", [[1, "two"], "text", 7, None, (1, 2), {}], ids=repr)
def test_a_state_of_any_kind_is_handed_back(tmp_path: Path, value: Any) -> None:
    dcp.save({"odd": Counter("odd", [], value), "w": 1}, checkpoint_id=tmp_path)
    fresh = Counter("odd", [], value)
    fresh.state = {} if value == {} else "something else"

    dcp.load({"odd": fresh, "w": 0}, checkpoint_id=tmp_path)

    assert fresh.state == value


def test_a_state_that_is_a_tensor_is_filled_in_place_and_handed_back(tmp_path: Path) -> None:
    dcp.save({"t": Counter("t", [], torch.ones(2))}, checkpoint_id=tmp_path)
    mine = torch.zeros(2)
    fresh = Counter("t", [], mine)

    dcp.load({"t": fresh}, checkpoint_id=tmp_path)

    assert fresh.state is mine
    assert mine.tolist() == [1, 1]


def test_only_objects_at_the_top_are_asked_as_in_stock(tmp_path: Path) -> None:
    inner = Counter("inner", [], {"x": 1})

    states = _stateful_to_state_dict({"top": Counter("top", [], {"y": 2}), "deep": {"inner": inner}})

    assert states["top"] == {"y": 2}
    assert states["deep"]["inner"] is inner
    assert inner.log == []


def test_the_dict_that_is_saved_is_not_changed(tmp_path: Path) -> None:
    counter = Counter("c", [], {"x": 1})
    state = {"c": counter, "n": 1}

    dcp.save(state, checkpoint_id=tmp_path)

    assert state == {"c": counter, "n": 1}


def test_a_class_is_not_an_object_with_a_state(tmp_path: Path) -> None:
    states = _stateful_to_state_dict({"kind": Counter, "module": nn.Linear})

    assert states == {"kind": Counter, "module": nn.Linear}
    assert isinstance(nn.Linear, StockStateful)  # which is why stock calls the method on the class, and fails


def test_what_counts_as_stateful_is_what_counts_in_stock() -> None:
    class Half:
        def state_dict(self) -> dict[str, Any]:
            return {}

    for value in (nn.Linear(1, 1), Counter("c", [], {}), Half(), {}, torch.ones(1), 3):
        assert isinstance(value, Stateful) == isinstance(value, StockStateful)


def test_states_cross_between_the_libraries(tmp_path: Path) -> None:
    for saving, loading in ((dcp, stock), (stock, dcp)):
        folder = tmp_path / saving.__name__
        torch.manual_seed(1)
        before, after = nn.Linear(2, 2), nn.Linear(2, 2)
        saving.save({"model": before}, checkpoint_id=folder)
        loading.load({"model": after}, checkpoint_id=folder)
        assert torch.equal(after.weight, before.weight)


# Errors of the objects themselves


class Refuses(Counter):
    def load_state_dict(self, state_dict: Any) -> None:
        raise LookupError(f"{self.name} will not have it")


class CannotTell(Counter):
    def state_dict(self) -> Any:
        raise LookupError(f"{self.name} has no state yet")


def test_alone_the_error_of_an_object_is_raised_as_it_is(tmp_path: Path) -> None:
    log: list[str] = []
    dcp.save({key: Counter(key, [], {"x": 1}) for key in "abc"}, checkpoint_id=tmp_path)
    target = {"a": Counter("a", log, {"x": 0}), "b": Refuses("b", log, {"x": 0}), "c": Counter("c", log, {"x": 0})}

    with pytest.raises(LookupError, match="b will not have it"):
        dcp.load(target, checkpoint_id=tmp_path)

    assert log == ["ask a", "ask b", "ask c", "tell a"]
    with pytest.raises(LookupError, match="d has no state yet"):
        dcp.save({"d": CannotTell("d", [], {})}, checkpoint_id=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def load_where_rank_1_refuses(folder: Path) -> None:
    dcp.save({"c": Counter("c", [], {"x": 1})}, checkpoint_id=folder)
    kind = Refuses if dist.get_rank() == 1 else Counter
    dcp.load({"c": kind("c", [], {"x": 0})}, checkpoint_id=folder)


def load_where_rank_1_cannot_tell(folder: Path) -> None:
    dcp.save({"c": Counter("c", [], {"x": 1})}, checkpoint_id=folder)
    kind = CannotTell if dist.get_rank() == 1 else Counter
    dcp.load({"c": kind("c", [], {"x": 0})}, checkpoint_id=folder)


def save_where_rank_1_cannot_tell(folder: Path) -> None:
    kind = CannotTell if dist.get_rank() == 1 else Counter
    dcp.save({"c": kind("c", [], {"x": 1})}, checkpoint_id=folder)


@pytest.mark.parametrize(
    ("body", "step"),
    [
        (load_where_rank_1_refuses, "load_state_dict"),
        (load_where_rank_1_cannot_tell, "plan"),
        (save_where_rank_1_cannot_tell, "plan"),
    ],
)
def test_an_object_that_fails_on_one_rank_fails_the_call_on_all(
    ranks: RankPool, tmp_path: Path, body: Any, step: str
) -> None:
    outcomes = ranks(3).run_raw(body, tmp_path, group_timeout=20)

    assert [outcome.error.type_name for outcome in outcomes] == [
        *("CheckpointException", "LookupError", "CheckpointException"),
    ]
    for outcome in (outcomes[0], outcomes[2]):
        raised = outcome.error.exception
        assert raised.args[0] == step
        assert list(raised.failures) == [1]
        assert isinstance(raised.failures[1][0], LookupError)
        assert "(RANK 1)" in str(raised)


class Interrupted(Counter):
    def load_state_dict(self, state_dict: Any) -> None:
        raise KeyboardInterrupt


def load_where_rank_0_is_interrupted(folder: Path) -> str:
    dcp.save({"c": Counter("c", [], {"x": 1})}, checkpoint_id=folder)
    kind = Interrupted if dist.get_rank() == 0 else Counter
    try:
        dcp.load({"c": kind("c", [], {"x": 0})}, checkpoint_id=folder)
    except KeyboardInterrupt:
        return "interrupted"
    except dcp.CheckpointException as error:
        return type(error.failures[0][0]).__name__
    return "went on"


def test_an_interruption_stays_one_where_it_happens_and_stops_the_others(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(load_where_rank_0_is_interrupted, tmp_path) == ["interrupted", "KeyboardInterrupt"]


def load_with_different_objects(folder: Path) -> int:
    """Ranks need not have the same objects."""
    rank = dist.get_rank()
    dcp.save({f"of {rank}": Counter("c", [], {"x": rank})}, checkpoint_id=folder)
    target: dict[str, Any] = {"of 1": Counter("c", [], {"x": -1})} if rank == 0 else {"of 0": {"x": -1}}
    dcp.load(target, checkpoint_id=folder)
    return target["of 1"].state["x"] if rank == 0 else target["of 0"]["x"]


def test_ranks_may_load_into_different_objects(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(load_with_different_objects, tmp_path) == [1, 0]
