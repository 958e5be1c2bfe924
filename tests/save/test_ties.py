"""Two names of one tensor are stored as one where all ranks that hold it say so, and else as two complete tensors."""

from __future__ import annotations

import ast
import itertools
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast._load.tensor_handles import TensorHandle
from tests.models import Tied
from tests.properties import examples
from tests.rank_pool import RankPool
from tests.sharding import mesh_of_all_ranks

PATIENCE = 60.0
WAYS = ["now", "thread", "process"]


def save(way: str, state: Any, path: Any, **options: Any) -> None:
    if way == "now":
        holdfast.save(state, path, **options)
    else:
        holdfast.async_save(state, path, writer=way, **options).result(PATIENCE)  # type: ignore[arg-type]


def outcome_of(way: str, state: Any, path: Any, **options: Any) -> str:
    try:
        save(way, state, path, **options)
    except holdfast.errors.ReplicaMismatchError as error:
        return f"{type(error).__name__} {sorted(error.keys)}"
    return "saved"


def stored_in(path: Any) -> dict[str, str]:
    """Every key, and under which one its tensor is stored."""
    checkpoint = holdfast.open(path)
    return {name: checkpoint[name].key for name in checkpoint if isinstance(checkpoint[name], TensorHandle)}


def rows(count: int, width: int, first: float) -> torch.Tensor:
    return torch.arange(first, first + count * width).reshape(count, width)


def sharded(values: torch.Tensor) -> DTensor:
    """Rows over ranks as FSDP2 has them: the last ranks may have none."""
    mesh = mesh_of_all_ranks()
    parts = values.chunk(dist.get_world_size())
    rank = dist.get_rank()
    local = parts[rank].clone() if rank < len(parts) else values[:0].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=values.shape, stride=values.stride())


# --- ranks without elements ------------------------------------------------------------------------------------------


def save_tied_model(path: str, way: str) -> list[int]:
    torch.manual_seed(0)
    model = fully_shard(Tied(9, 4), mesh=mesh_of_all_ranks())
    expected = model.embed.weight.full_tensor().clone()
    save(way, {"model": model}, path)
    with torch.no_grad():
        model.embed.weight.zero_()
    holdfast.load({"model": model}, path)
    assert torch.equal(model.head.weight.full_tensor(), expected)
    assert model.head.weight.to_local().data_ptr() == model.embed.weight.to_local().data_ptr()
    return [model.embed.weight.to_local().numel()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [1, 4])
def test_tied_weights_of_which_a_rank_has_no_rows_are_stored_once(ranks: RankPool, tmp_path, way, world_size):
    sizes = ranks(world_size).run(save_tied_model, str(tmp_path / "x"), way)
    assert world_size == 1 or sizes[-1] == [0]
    assert stored_in(tmp_path / "x") == {
        "model.embed.weight": "model.embed.weight",
        "model.head.weight": "model.embed.weight",
    }


def load_one_name(path: str, strict: bool) -> tuple[list[str], list[str]]:
    model = fully_shard(Tied(9, 4), mesh=mesh_of_all_ranks())
    report = holdfast.load({"model": model}, path, strict=strict)
    assert torch.equal(model.head.weight.full_tensor(), rows(9, 4, 0.0))
    return list(report.read), list(report.missing)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_one_stored_name_is_enough_for_tied_weights_of_which_a_rank_has_no_rows(
    ranks: RankPool, tmp_path, strict, world_size
):
    holdfast.save({"model": {"embed.weight": rows(9, 4, 0.0)}}, tmp_path / "x")
    found = ranks(world_size).run(load_one_name, str(tmp_path / "x"), strict)
    assert found == [(["model.embed.weight", "model.head.weight"], [])] * world_size


def load_untied_without_rows(path: str) -> list[str]:
    weights = [sharded(rows(9, 4, 0.0)) for _ in range(2)]
    with pytest.raises(holdfast.errors.StateMismatchError) as raised:
        holdfast.load({"embed": weights[0], "head": weights[1]}, path)
    return list(raised.value.missing)


def test_a_name_that_is_missing_everywhere_is_missing_on_ranks_without_rows_too(ranks: RankPool, tmp_path):
    holdfast.save({"embed": rows(9, 4, 0.0)}, tmp_path / "x")
    assert ranks(4).run(load_untied_without_rows, str(tmp_path / "x")) == [["head"]] * 4


def save_with_manager(path: str) -> int:
    model = fully_shard(Tied(9, 4), mesh=mesh_of_all_ranks())
    with holdfast.CheckpointManager(path) as manager:
        manager.save(1, {"model": model})
        manager.wait()
        return len(manager.steps())


def test_a_manager_saves_tied_weights_of_which_a_rank_has_no_rows(ranks: RankPool, tmp_path):
    assert ranks(4).run(save_with_manager, str(tmp_path / "run")) == [1] * 4


# --- ranks that say different things ---------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.full((5,), 7.0))


def save_buffer_twice(path: str, way: str) -> str:
    model = DistributedDataParallel(Counting())
    return outcome_of(way, {"model": model, "alias": model.module.seen}, path)


@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_of_ddp_may_have_another_name_in_the_state(ranks: RankPool, tmp_path, way):
    assert ranks(2).run(save_buffer_twice, str(tmp_path / "x"), way) == ["saved"] * 2
    found = holdfast.open(tmp_path / "x").read()
    assert torch.equal(found["alias"], torch.full((5,), 7.0))
    assert torch.equal(found["model"]["seen"], torch.full((5,), 7.0))


def save_tied_on_one_rank(path: str, way: str, tied_rank: int, other_value: float, check: Any) -> str:
    one = torch.ones(6)
    other = one if dist.get_rank() == tied_rank else torch.full((6,), other_value)
    return outcome_of(way, {"a": one, "b": other}, path, replica_mismatch=check)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tied_rank", [0, 1])
def test_a_tie_of_one_rank_hides_no_value_of_another(ranks: RankPool, tmp_path, way, tied_rank):
    found = ranks(2).run(save_tied_on_one_rank, str(tmp_path / "x"), way, tied_rank, 2.0, "error")
    assert found == ["ReplicaMismatchError ['b']"] * 2
    assert ranks(2).run(save_tied_on_one_rank, str(tmp_path / "y"), way, tied_rank, 1.0, "error") == ["saved"] * 2
    assert stored_in(tmp_path / "y") == {"a": "a", "b": "b"}
    assert ranks(2).run(save_tied_on_one_rank, str(tmp_path / "z"), way, tied_rank, 2.0, "ignore") == ["saved"] * 2
    assert holdfast.open(tmp_path / "z")["b"][:].tolist() in ([1.0] * 6, [2.0] * 6)


def save_where_the_first_name_is_no_tensor(path: str, way: str, check: Any) -> str:
    weights = torch.arange(4.0)
    state = {"embed": None} if dist.get_rank() == 0 else {"embed": weights, "head": weights}
    return outcome_of(way, state, path, replica_mismatch=check)


@pytest.mark.parametrize("way", WAYS)
def test_the_first_name_of_a_tensor_may_be_something_else_on_another_rank(ranks: RankPool, tmp_path, way):
    found = ranks(2).run(save_where_the_first_name_is_no_tensor, str(tmp_path / "x"), way, "error")
    assert found == ["ReplicaMismatchError ['embed']"] * 2
    assert ranks(2).run(save_where_the_first_name_is_no_tensor, str(tmp_path / "y"), way, "ignore") == ["saved"] * 2
    loaded = holdfast.open(tmp_path / "y").read()
    assert loaded["embed"] is None
    assert loaded["head"].tolist() == [0.0, 1.0, 2.0, 3.0]


# --- any ties, on any ranks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Of all names in one group; names of different groups are never tied."""

    rows: int
    is_sharded: bool

    def tensor(self, value: float) -> Any:
        values = rows(self.rows, 2, value)
        return sharded(values) if self.is_sharded else values

    def elements(self, rank: int, world_size: int) -> int:
        if not self.is_sharded:
            return self.rows
        parts = torch.empty(self.rows).chunk(world_size)
        return parts[rank].numel() if rank < len(parts) else 0


@dataclass(frozen=True)
class Case:
    layouts: dict[str, Layout]
    held: list[dict[str, int | None]]
    """For each rank in which memory it has the values of each name; None for no tensor."""
    values: list[list[float]]
    """For each rank what begins in each memory."""

    def state(self, rank: int) -> dict[str, Any]:
        made: dict[Any, Any] = {}
        state: dict[str, Any] = {}
        for name, memory in self.held[rank].items():
            place = (self.layouts[name], memory)
            if memory is not None and place not in made:
                made[place] = self.layouts[name].tensor(self.values[rank][memory])
            state[name] = None if memory is None else made[place]
        return state

    def holders(self, name: str) -> list[int]:
        return [rank for rank, held in enumerate(self.held) if held.get(name) is not None]

    def differing(self) -> list[str]:
        """Names that do not stand for the same on all ranks that have them."""
        found = []
        for name, layout in self.layouts.items():
            having = [rank for rank, held in enumerate(self.held) if name in held]
            kinds = {self.held[rank][name] is None for rank in having}
            copies = {self.values[rank][self.held[rank][name] or 0] for rank in self.holders(name)}
            differ = not layout.is_sharded and layout.rows > 0 and len(copies) > 1
            if len(kinds) > 1 or differ:
                found.append(name)
        return sorted(found)

    def are_tied(self, one: str, other: str) -> bool:
        layout, holders = self.layouts[one], self.holders(one)
        if layout != self.layouts[other] or holders != self.holders(other):
            return False
        telling = [rank for rank in holders if layout.elements(rank, len(self.held))]
        return bool(telling) and all(self.held[rank][one] == self.held[rank][other] for rank in telling)


@st.composite
def cases(draw: Any) -> Case:
    world_size = draw(st.integers(1, 4))
    groups = draw(
        st.lists(
            st.builds(Layout, st.sampled_from([0, 1, 2, 3, 9]), st.booleans()), min_size=1, max_size=2, unique=True
        )
    )
    names = [f"t{number}" for number in range(draw(st.integers(2, 4)))]
    layouts = {name: draw(st.sampled_from(groups)) for name in names}
    alike = draw(st.lists(st.integers(0, 2), min_size=len(names), max_size=len(names)))
    common = [10.0, 20.0, 30.0]
    held: list[dict[str, int | None]] = []
    values = []
    for _ in range(world_size):
        own = (
            draw(st.lists(st.integers(0, 2), min_size=len(names), max_size=len(names)))
            if draw(st.booleans())
            else alike
        )
        part: dict[str, int | None] = dict(zip(names, own, strict=True))
        for name in names:
            fate = draw(st.sampled_from(["tensor"] * 6 + ["absent", "none"]))
            if not layouts[name].is_sharded and fate != "tensor":
                part[name] = None
                if fate == "absent":
                    del part[name]
        held.append(dict(reversed(part.items())) if draw(st.booleans()) else part)
        values.append([draw(st.sampled_from([value] * 5 + [value + 5.0, 10.0])) for value in common])
    return Case(layouts, held, values)


def local_of(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def assert_loads(path: str, state: dict[str, Any], target: dict[str, Any]) -> None:
    for value in target.values():
        if value is not None:
            local_of(value).zero_()
    holdfast.load(target, path, allow_unexpected="*")
    for name, value in state.items():
        assert value is target[name] is None or torch.equal(local_of(value), local_of(target[name])), name


def save_and_load(path: str, case: Case, way: str) -> str:
    state = case.state(dist.get_rank())
    found = outcome_of(way, state, path)
    if found == "saved":
        untied = {name: None if value is None else value.clone() for name, value in state.items()}
        assert_loads(path, state, untied)
        assert_loads(path, state, case.state(dist.get_rank()))
    return found


@pytest.mark.hypothesis
@pytest.mark.parametrize(("way", "count"), [("now", 60), ("thread", 60), ("process", 15)])
def test_each_rank_gets_back_what_it_held_and_agreed_ties_are_stored_once(ranks: RankPool, tmp_path, way, count):
    places = itertools.count()

    layouts = dict.fromkeys(("a", "b", "c"), Layout(1, False))
    tied_but_differing = Case(
        layouts, [{"a": 0, "b": 0, "c": 0}, {"a": 0, "b": 1, "c": 1}], [[10.0, 20.0, 30.0], [10.0, 20.0, 30.0]]
    )

    @settings(max_examples=examples(count), database=None, suppress_health_check=list(HealthCheck))
    @given(case=cases())
    @example(case=tied_but_differing)
    def check(case: Case) -> None:
        path = str(tmp_path / str(next(places)))
        found = ranks(len(case.held)).run(save_and_load, path, case, way)
        assert len(set(found)) == 1
        if differing := case.differing():
            kind, _, named = found[0].partition(" ")
            assert kind == "ReplicaMismatchError"
            # One name is enough for names of one tensor.
            assert set(ast.literal_eval(named)) <= set(differing)
            for name in differing:
                assert any(name == one or case.are_tied(name, one) for one in ast.literal_eval(named)), name
            assert not os.path.exists(path) or os.listdir(path) == []
            return
        assert found[0] == "saved"
        stored = stored_in(path)
        for one, other in itertools.combinations([name for name in case.layouts if case.holders(name)], 2):
            assert (stored[one] == stored[other]) == case.are_tied(one, other), (one, other)

    check()
