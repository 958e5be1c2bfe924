"""Saves whose plan every rank computes: what travels, what is noticed, and that what is stored is what was held."""

from __future__ import annotations

import math
import uuid
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import holdfast
from holdfast._base.divisions import Cut, Division
from holdfast._layout.mesh_divisions import division_of_mesh
from holdfast._save import planning
from holdfast._save.common_ground import sum_of_copies
from holdfast._save.options import CheckedOptions
from holdfast._save.planning import WritePlan, plan_save
from holdfast._save.save import SaveRun
from holdfast._save.shared_plan import share_out
from holdfast._stores.memory_store import MemoryStore
from holdfast._watching.calls import Call
from holdfast.errors import CheckpointException, ReplicaMismatchError
from tests.properties import examples
from tests.rank_pool import RankPool
from tests.save.thread_ranks import ThreadRanks, captured_on, on_ranks
from tests.sharding import dtensor_of, mesh_of_all_ranks

EVERYTHING = CheckedOptions.of()


def save_on(world_size, store, tensors, values=None, *, own=None, options=EVERYTHING):
    """Save tensors that are divided by rules, on ranks that are threads."""

    def body(ranks: ThreadRanks):
        mine = None if own is None else own(ranks.rank)
        captured = captured_on(ranks.rank, world_size, tensors, values, own=mine)
        with Call("save", "memory", rank=ranks.rank, world_size=world_size) as call:
            return SaveRun(store, ranks, options, call).save(captured)

    return on_ranks(world_size, body)


# --- N to M ----------------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def random_division(draw: st.DrawFn, world_size: int, ndim: int) -> Division | None:
    """A mesh of some of the ranks in any order, and placements for a tensor of so many dimensions."""
    random = draw(st.randoms(use_true_random=False))
    mesh_shape = [random.randint(1, 4) for _ in range(random.randint(1, 3))]
    if math.prod(mesh_shape) > world_size:
        return None
    kinds = [Replicate(), *map(Shard, range(ndim)), _StridedShard(0, split_factor=mesh_shape[-1])]
    ranks = random.sample(range(world_size), math.prod(mesh_shape))
    return division_of_mesh(ndim, mesh_shape, [random.choice(kinds) for _ in mesh_shape], ranks)


@st.composite
def saves(draw: st.DrawFn) -> tuple[int, dict[str, tuple[torch.Tensor, Division | None]], dict[str, Division]]:
    """How many ranks save what, divided how; and how others want it divided."""
    savers, loaders = draw(st.integers(1, 16)), draw(st.integers(1, 16))
    tensors, wanted = {}, {}
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        full = torch.arange(number, number + math.prod(shape)).view(shape).to(dtype)
        tensors[f"t{number}"] = full, random_division(draw, savers, len(shape))
        wanted[f"t{number}"] = random_division(draw, loaders, len(shape)) or Division()
    return savers, tensors, wanted


@settings(max_examples=examples(45), deadline=None)
@given(saves(), st.sampled_from([1, 32, 1 << 30]))
def test_what_any_ranks_have_saved_any_other_ranks_find(case, smallest_share):
    savers, tensors, wanted = case
    store = MemoryStore(f"n to m {uuid.uuid4()}")

    def shared(*args, **options):
        return share_out(*args, **options, smallest_share=smallest_share)

    planning.known_plan.cache_clear()
    with mock.patch.object(planning, "share_out", shared):
        save_on(savers, store, tensors, {"step": 3})
    with holdfast.open(store) as checkpoint:
        assert checkpoint["step"] == 3
        for key, (full, _) in tensors.items():
            assert torch.equal(checkpoint[key][...], full)
            for at, lengths in zip(*(rows.tolist() for rows in wanted[key].boxes(full.shape)), strict=True):
                box = tuple(slice(a, a + n) for a, n in zip(at, lengths, strict=True))
                assert torch.equal(checkpoint[key][box], full[box])


def test_what_each_rank_has_of_its_own_comes_with_the_commit():
    store = MemoryStore("own")
    save_on(3, store, {"w": (torch.ones(6), None)}, own=lambda rank: {"p": rank * 10})
    state = holdfast.read(store)
    assert state["p"] == [0, 10, 20]
    assert state["w"].tolist() == [1] * 6


# --- what travels ----------------------------------------------------------------------------------------------------


def fsdp_state(world_size: int, count: int):
    division = Division((Cut(0, world_size),), (1,))
    return {f"model.layers.{n}.weight": (torch.full((world_size * 2, 3), n), division) for n in range(count)}


def planned_again(world_size: int, tensors, times: int = 2) -> list[list[tuple[WritePlan, int, int, int]]]:
    """Plans of several saves, with the messages and bytes that each rank sent and got for each."""
    store = MemoryStore("planned")

    def body(ranks: ThreadRanks):
        found = []
        for step in range(times):
            captured = captured_on(ranks.rank, world_size, tensors, {"step": step})
            before = ranks.messages, ranks.sent, ranks.received
            plan = plan_save(store, ranks, EVERYTHING, captured)
            found.append((plan, ranks.messages - before[0], ranks.sent - before[1], ranks.received - before[2]))
        return found

    return on_ranks(world_size, body)


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_a_plan_takes_two_messages_of_less_than_a_kilobyte_whatever_there_is_to_save(layout):
    tensors = fsdp_state(16, 300)
    if layout == "replicated":
        tensors = {key: (full, None) for key, (full, _) in tensors.items()}
    for rank, saves in enumerate(planned_again(16, tensors)):
        for plan, messages, sent, received in saves:
            assert messages == 2
            assert sent <= (1024 if rank else 2048)  # the coordinator's answer goes to all
            assert received <= (1024 if rank else 16 * 1024)
            assert (plan.decision is None) == (rank > 0)
    assert sum(len(saves[0][0].chunks) for saves in planned_again(16, tensors, 1)) == (
        16 * 300 if layout == "sharded" else 300
    )


def test_a_plan_is_computed_once_for_a_state_that_is_saved_again():
    planning.known_plan.cache_clear()
    with mock.patch.object(planning, "share_out", side_effect=share_out) as computed:
        saves = planned_again(2, fsdp_state(2, 5), times=3)
    assert computed.call_count == 2  # by each rank
    assert all(found[0][0].chunks == found[2][0].chunks for found in saves)
    assert all(found[0][0].generation != found[2][0].generation for found in saves)


def test_ranks_that_do_not_have_the_same_gather_what_they_have():
    store = MemoryStore("parts")

    def body(ranks: ThreadRanks):
        captured = captured_on(ranks.rank, 2, {f"stage{ranks.rank}": (torch.ones(3), None)})
        with Call("save", "memory") as call:
            return SaveRun(store, ranks, EVERYTHING, call).save(captured).tensor_count

    assert on_ranks(2, body) == [2, 2]
    assert set(holdfast.read(store)) == {"stage0", "stage1"}


# --- copies ----------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(2, 16), st.data())
def test_copies_add_up_to_nothing_exactly_if_they_are_equal(world_size, data):
    divisions = [random_division(data.draw, world_size, 2) for _ in range(3)]
    tensors = {f"t{n}": (torch.arange(35).view(5, 7) + n, division) for n, division in enumerate(divisions)}
    ranks = [captured_on(rank, world_size, tensors).descriptions for rank in range(world_size)]

    def total() -> int:
        return sum(sum_of_copies(held, rank, world_size) for rank, held in enumerate(ranks)) % ((1 << 127) - 1)

    assert total() == 0
    copies = [(rank, number) for rank, held in enumerate(ranks) for number, one in enumerate(held) if one.digests]
    if copies:
        rank, number = data.draw(st.sampled_from(copies))
        ranks[rank][number] = ranks[rank][number]._replace(digests=(b"another",))
        assert total() != 0


def test_two_wrong_copies_do_not_make_up_for_each_other():
    # Each of two tensors differs on one rank, by the very same digest.
    tensors = {"a": (torch.zeros(3), None), "b": (torch.zeros(3), None)}
    ranks = [captured_on(rank, 2, tensors).descriptions for rank in range(2)]
    ranks[0][0] = ranks[0][0]._replace(digests=(b"other",))
    ranks[1][1] = ranks[1][1]._replace(digests=(b"other",))
    assert sum(sum_of_copies(held, rank, 2) for rank, held in enumerate(ranks)) % ((1 << 127) - 1) != 0


def save_differing(ranks: ThreadRanks, store, options) -> Any:
    tensors = {"same": (torch.ones(4), None), "w": (torch.full((4,), min(ranks.rank, 1)), None)}
    with Call("save", "memory") as call:
        return SaveRun(store, ranks, options, call).save(captured_on(ranks.rank, 3, tensors))


def test_ranks_whose_copies_differ_are_named():
    with pytest.raises(CheckpointException) as caught:
        on_ranks(3, lambda ranks: save_differing(ranks, MemoryStore("differing"), EVERYTHING))
    error = caught.value.__cause__
    assert isinstance(error, ReplicaMismatchError)
    assert error.fields["keys"] == {"w": "ranks 0 != ranks 1,2"}


def test_of_copies_that_differ_the_lowest_ranks_is_stored_with_a_warning():
    store = MemoryStore("warned")
    with pytest.warns(UserWarning, match="ranks 0 != ranks 1,2"):
        on_ranks(3, lambda ranks: save_differing(ranks, store, CheckedOptions.of({"replica_mismatch": "warn"})))
    assert holdfast.read(store)["w"].tolist() == [0] * 4


# --- changes, in real processes --------------------------------------------------------------------------------------


def state_before() -> dict[str, Any]:
    mesh = mesh_of_all_ranks()
    return {
        "sharded": dtensor_of(torch.arange(14.0).view(7, 2), mesh, [Shard(0)]),
        "plain": torch.arange(5.0),
        "step": 1,
        "own": holdfast.PerRank({"at": dist.get_rank(), "seen": torch.full((2,), dist.get_rank())}),
    }


def another_dtype(state):
    state["plain"] = state["plain"].double()


def another_key(state):
    state["renamed"] = state.pop("plain")


def another_shape(state):
    state["sharded"] = dtensor_of(torch.arange(16.0).view(8, 2), state["sharded"].device_mesh, [Shard(0)])


def another_placement(state):
    state["sharded"] = dtensor_of(torch.arange(14.0).view(7, 2), state["sharded"].device_mesh, [Shard(1)])


def replicated_now(state):
    state["sharded"] = dtensor_of(torch.arange(14.0).view(7, 2), mesh_of_all_ranks(), [Replicate()])


def another_mesh(state):
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()))
    state["sharded"] = dtensor_of(torch.arange(14.0).view(7, 2), mesh, [Replicate(), Shard(0)])


def another_type_of_value(state):
    state["step"] = 1.0


def more_of_its_own(state):
    state["own"] = holdfast.PerRank({"a": torch.ones(1), "b": torch.ones(dist.get_rank() + 1)})


def tied_now(state):
    state["tied"] = state["plain"]


CHANGES = [
    another_dtype,
    another_key,
    another_shape,
    another_placement,
    replicated_now,
    another_mesh,
    another_type_of_value,
    more_of_its_own,
    tied_now,
]


def in_words(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: in_words(each) for name, each in value.items()}
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        return str(whole.dtype), whole.tolist()
    return repr(value)


def save_changed(change, path: str) -> tuple[list[int], Any]:
    """Save, change the state of all ranks, save again. Returns how often plans were gathered, and the state."""
    state = state_before()
    with mock.patch.object(planning._Planning, "_gathered", autospec=True) as gathered:
        holdfast.save(state, f"{path}-before")
        change(state)
        holdfast.save(state, path)
    del state["own"]
    return gathered.call_count, in_words(state)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_on_all_ranks_is_planned_anew(ranks: RankPool, tmp_path, change):
    path = str(tmp_path / "changed")
    found = ranks(3).run(save_changed, change, path)
    stored = holdfast.read(path)
    own = stored.pop("own")
    assert found == [(0, in_words(stored))] * 3
    if change is more_of_its_own:
        assert [each["b"].tolist() for each in own] == [[1], [1, 1], [1, 1, 1]]
    else:
        assert [each["seen"].tolist() for each in own] == [[0, 0], [1, 1], [2, 2]]
    assert holdfast.verify(path).ok


def save_changed_on_one(change, path: str) -> str:
    state = state_before()
    holdfast.save(state, f"{path}-before")
    if dist.get_rank() == 1:
        change(state)
    with mock.patch.object(planning, "known_plan", side_effect=AssertionError("planned as if all had the same")):
        try:
            holdfast.save(state, path)
        except holdfast.errors.HoldfastError as error:
            return type(error).__name__
    return "saved"


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (another_dtype, "ReplicaMismatchError"),
        (another_key, "saved"),  # each rank has a copy of another one
        (another_shape, "ReplicaMismatchError"),
        (another_placement, "InvalidPlanError"),
        (another_type_of_value, "ReplicaMismatchError"),
        (more_of_its_own, "saved"),
        (tied_now, "saved"),
    ],
    ids=lambda case: getattr(case, "__name__", case),
)
def test_a_change_on_one_rank_is_noticed_by_all(ranks: RankPool, tmp_path, change, outcome):
    path = str(tmp_path / "changed")
    assert ranks(3).run(save_changed_on_one, change, path) == [outcome] * 3
    if outcome == "saved":
        assert holdfast.verify(path).ok


def save_with_other_options(path: str) -> str:
    holdfast.save(state_before(), path)
    options = {"max_file_size": 16} if dist.get_rank() == 1 else {}
    with mock.patch.object(planning, "known_plan", side_effect=AssertionError("planned as if all had the same")):
        holdfast.save(state_before(), path, overwrite=True, **options)
    return "saved"


def test_options_of_one_rank_are_noticed(ranks: RankPool, tmp_path):
    assert ranks(2).run(save_with_other_options, str(tmp_path / "x")) == ["saved"] * 2
    assert holdfast.read(str(tmp_path / "x"))["plain"].tolist() == [0, 1, 2, 3, 4]
