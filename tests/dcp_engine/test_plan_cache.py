"""Plan caching: notes instead of plans while nothing changes, and the same outcome as without it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.futures import Future

from holdfast import dcp
from holdfast._dcp.planner import SavePlanner
from holdfast._dcp.save import save_state
from holdfast._dcp.save_planner import DefaultSavePlanner
from holdfast._dcp.storage import StorageWriter, WriteResult
from holdfast._formats.dcp.metadata import Metadata
from holdfast._formats.dcp.plan import SavePlan
from holdfast._ranks.shared_steps import Collectives
from holdfast.errors import CheckpointException, InvalidPlanError
from tests.properties import examples
from tests.rank_pool import RankPool
from tests.sharding import sharded


@pytest.fixture(autouse=True)
def _no_memories():
    DefaultSavePlanner().forget_cached_plans()


@dataclass
class Planned:
    """One round of planning, seen from one rank."""

    sent: SavePlan
    answer: SavePlan
    final: SavePlan
    metadata: Metadata

    @property
    def notes(self) -> tuple[bool, bool]:
        """Whether the rank sent a note and whether it got one."""
        return not self.sent.usable, not self.answer.usable


def plan(state: dict[str, Any], *, caching: bool = True, storage: Any = None) -> Planned:
    """Plan as a save without a process group does; each save makes a planner of its own."""
    planner = DefaultSavePlanner(enable_plan_caching=caching)
    planner.set_up_planner(state, None, is_coordinator=True)
    sent = planner.create_local_plan()
    (answer,), metadata = planner.create_global_plan([sent])
    return Planned(sent, answer, planner.finish_plan(replace(answer, storage_data=storage)), metadata)


def described(final: SavePlan, metadata: Metadata) -> Any:
    """All that a plan and its description say."""
    items = [(item, item.index.index) for item in final.items]
    return repr(items), repr(metadata.state_dict_metadata), repr(metadata.planner_data)


def weights(dtype=torch.float32) -> dict[str, Any]:
    return {"w": torch.zeros(2, 3, dtype=dtype), "nested": {"step": 1}}


# --- nothing changed ---------------------------------------------------------------------------------------------


def test_a_state_of_the_same_layout_is_planned_by_notes():
    first, second = plan(weights()), plan(weights())
    assert first.notes == (False, False)
    assert second.notes == (True, True)
    assert second.sent.items == second.answer.items == []
    assert second.final.items == first.final.items
    assert described(second.final, second.metadata) == described(first.final, first.metadata)


def test_values_may_change_without_a_new_plan():
    plan({"w": torch.zeros(2), "step": 1})
    assert plan({"w": torch.ones(2), "step": "a much longer value than before"}).notes == (True, True)


def test_without_caching_nothing_is_remembered():
    plan(weights(), caching=False)
    assert plan(weights()).notes == (False, False)
    assert plan(weights(), caching=False).notes == (False, False)


# --- something changed -------------------------------------------------------------------------------------------

BEFORE = {"w": torch.zeros(2, 3), "a": {"b": 1}, "list": [torch.zeros(1)]}
CHANGES = {
    "dtype": {**BEFORE, "w": torch.zeros(2, 3, dtype=torch.float64)},
    "shape": {**BEFORE, "w": torch.zeros(3, 2)},
    "requires grad": {**BEFORE, "w": torch.zeros(2, 3, requires_grad=True)},
    "path of a key": {"w": torch.zeros(2, 3), "a.b": 1, "list": [torch.zeros(1)]},
    "path of a list": {"w": torch.zeros(2, 3), "a": {"b": 1}, "list": {"0": torch.zeros(1)}},
    "new key": {**BEFORE, "new": 1},
    "key gone": {"w": torch.zeros(2, 3), "a": {"b": 1}},
    "order of keys": dict(reversed(BEFORE.items())),
    "tensor to value": {**BEFORE, "w": 1},
    "value to tensor": {**BEFORE, "a": {"b": torch.zeros(())}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_planned_anew_and_described_as_it_is(change):
    plan(BEFORE)
    changed = plan(CHANGES[change])
    assert changed.notes == (False, False)
    afresh = plan(CHANGES[change], caching=False)
    assert described(changed.final, changed.metadata) == described(afresh.final, afresh.metadata)
    assert plan(CHANGES[change]).notes == (True, True)


@settings(max_examples=examples(40))
@given(st.lists(st.sampled_from([BEFORE, *CHANGES.values()]), min_size=2, max_size=6))
def test_any_series_of_saves_is_planned_as_without_caching(series):
    DefaultSavePlanner().forget_cached_plans()
    for state in series:
        cached, afresh = plan(state), plan(state, caching=False)
        assert described(cached.final, cached.metadata) == described(afresh.final, afresh.metadata)


# --- what belongs to one save only -------------------------------------------------------------------------------


def spoil_storage(metadata: Metadata) -> None:
    metadata.storage_data, metadata.version = {"file": 1}, "x"


def spoil_paths(metadata: Metadata) -> None:
    metadata.planner_data["w"] = ("elsewhere",)


def spoil_keys(metadata: Metadata) -> None:
    metadata.state_dict_metadata["other"] = metadata.state_dict_metadata.pop("nested.step")


def spoil_dtype(metadata: Metadata) -> None:
    metadata.state_dict_metadata["w"].properties.dtype = torch.int8


def spoil_size(metadata: Metadata) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size([9])


def spoil_list_of_chunks(metadata: Metadata) -> None:
    metadata.state_dict_metadata["w"].chunks.clear()


def spoil_chunk(metadata: Metadata) -> None:
    metadata.state_dict_metadata["w"].chunks[0].offsets = torch.Size([7, 7])


@pytest.mark.parametrize(
    "spoil",
    [spoil_storage, spoil_paths, spoil_keys, spoil_dtype, spoil_size, spoil_list_of_chunks, spoil_chunk],
)
def test_whatever_a_caller_does_to_its_metadata_the_next_save_does_not_see_it(spoil):
    afresh = plan(weights(), caching=False)
    for expected in [(False, False), (True, True), (True, True)]:
        planned = plan(weights())
        assert planned.notes == expected
        assert described(planned.final, planned.metadata) == described(afresh.final, afresh.metadata)
        assert (planned.metadata.storage_data, planned.metadata.version) == (None, None)
        spoil(planned.metadata)


def test_the_storage_data_of_the_new_save_is_used():
    assert plan(weights(), storage="first").final.storage_data == "first"
    second = plan(weights(), storage="second")
    assert second.notes == (True, True)
    assert second.final.storage_data == "second"


def test_what_a_storage_puts_down_with_the_local_plan_comes_back_with_the_answer():
    for save in ("first", "second", "third"):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        planner.set_up_planner(weights(), None, is_coordinator=True)
        sent = replace(planner.create_local_plan(), storage_data=save)
        (answer,), _ = planner.create_global_plan([sent])
        assert answer.storage_data == save
        assert planner.finish_plan(answer).storage_data == save
    assert not sent.usable


# --- out of step -------------------------------------------------------------------------------------------------


def test_a_note_that_the_coordinator_cannot_complete_is_an_error():
    plan(weights())
    SavePlanner._cached_all_plans.clear()
    with pytest.raises(InvalidPlanError, match=r"rank 0 relies on a plan of an earlier save.*save again"):
        plan(weights())


def test_a_note_about_another_plan_than_the_coordinator_remembers_is_an_error():
    first = plan(weights())
    plan(weights(torch.float64))
    (key,) = SavePlanner._cached_save_plan
    SavePlanner._cached_save_plan[key] = replace(first.sent)  # as on a rank that missed the second save
    with pytest.raises(InvalidPlanError, match="rank 0 relies on"):
        plan(weights())


def test_a_note_to_a_rank_that_remembers_nothing_is_an_error():
    planner = DefaultSavePlanner(enable_plan_caching=True)
    with pytest.raises(InvalidPlanError, match="this rank relies on"):
        planner.finish_plan(SavePlan([], usable=False))


def test_a_plan_that_was_refused_is_not_remembered():
    plan(weights())
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner.set_up_planner({"new": 1}, None, is_coordinator=True)
    planner.create_local_plan()  # and then the coordinator refuses
    planned = plan({"new": 1})
    assert planned.notes == (False, False)
    assert [item.index.fqn for item in planned.final.items] == ["new"]


class MemoryWriter(StorageWriter):
    """Keeps nothing but the names of what it is given; may fail at a point of one's choice."""

    def __init__(self, fail_in: str = "") -> None:
        self.fail_in = fail_in
        self.plan: SavePlan | None = None

    def _step(self, name: str) -> None:
        if name == self.fail_in:
            raise OSError(f"no {name} today")

    def reset(self, checkpoint_id=None):
        pass

    def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
        pass

    def prepare_local_plan(self, plan):
        self._step("local plan")
        return plan

    def prepare_global_plan(self, plans):
        self._step("global plan")
        return plans

    def write_data(self, plan, planner):
        self._step("write")
        self.plan = plan
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata, results):
        self._step("finish")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True


def save(state: dict[str, Any], fail_in: str = "", ranks: Collectives | None = None) -> tuple[SavePlan, Metadata]:
    writer = MemoryWriter(fail_in)
    planner = DefaultSavePlanner(enable_plan_caching=True)
    metadata = save_state(state, writer, planner, ranks or Collectives(None, False, 0))
    assert writer.plan is not None
    return writer.plan, metadata


@pytest.mark.parametrize("fail_in", ["local plan", "global plan", "write", "finish"])
@pytest.mark.parametrize("before", [weights(), CHANGES["dtype"]], ids=["same-before", "other-before"])
def test_a_save_after_one_that_failed_is_planned_as_if_it_had_not_been(fail_in, before):
    expected = plan(weights(), caching=False)
    save(before)
    with pytest.raises(CheckpointException, match=f"no {fail_in} today"):
        save(weights(), fail_in)
    final, metadata = save(weights())
    assert described(final, metadata) == described(expected.final, expected.metadata)


def test_a_failed_plan_makes_the_next_save_plan_afresh():
    save(weights())
    assert SavePlanner._cached_save_plan
    with pytest.raises(CheckpointException):
        save(weights(), "global plan")
    assert plan(weights()).notes == (False, False)


# --- on ranks ----------------------------------------------------------------------------------------------------


def rounds(states, caching: bool = True):
    """Plan one state after the other on all ranks: per save the notes, the keys to write, and the description."""
    ranks = Collectives(None, True, 1)
    planner = DefaultSavePlanner()
    planner.peers = ranks.global_ranks()
    planner.forget_cached_plans()
    seen = []
    for make_state in states:
        planner = DefaultSavePlanner(enable_plan_caching=caching)
        planner.peers = ranks.global_ranks()
        planner.set_up_planner(make_state(ranks.rank), None, ranks.is_coordinator)
        sent = planner.create_local_plan()
        descriptions = []

        def globally(plans, planner=planner, descriptions=descriptions):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                answers, metadata = planner.create_global_plan(plans)
            descriptions.append((described(SavePlan([]), metadata), len(caught)))
            return answers

        answer = ranks.reduce_scatter("plan", lambda sent=sent: sent, globally)
        final = planner.finish_plan(answer)
        seen.append(
            {
                "notes": (not sent.usable, not answer.usable),
                "final": repr(final.items),
                "keys": [item.index.fqn for item in final.items],
                "described": descriptions,
            }
        )
    return seen


def sharded_state(rank):
    return {"sharded": sharded(torch.zeros(6)), "both": torch.zeros(3), "step": 1}


def one_rank_has_more(rank):
    return {**sharded_state(rank), **({"extra": 1} if rank == 2 else {})}


def all_have_more(rank):
    return {**sharded_state(rank), f"own{rank}": 1}


def ranks_differ(rank):
    return {**sharded_state(rank), "step": rank}


def other_dtype(rank):
    return {**sharded_state(rank), "both": torch.zeros(3, dtype=torch.float64)}


SERIES = [
    sharded_state,
    sharded_state,
    one_rank_has_more,
    one_rank_has_more,
    all_have_more,
    sharded_state,
    other_dtype,
    other_dtype,
    ranks_differ,
    ranks_differ,
]


def test_ranks_plan_a_series_of_saves_as_without_caching(ranks: RankPool):
    cached = ranks(3).run(rounds, SERIES)
    afresh = ranks(3).run(rounds, SERIES, caching=False)
    for with_notes, without in zip(cached, afresh, strict=True):
        for number, (one, other) in enumerate(zip(with_notes, without, strict=True)):
            assert one["final"] == other["final"], number
            assert one["described"] == other["described"], number


def test_only_ranks_with_something_new_send_and_get_plans(ranks: RankPool):
    first, second, third = ranks(3).run(rounds, [sharded_state, sharded_state, one_rank_has_more, one_rank_has_more])
    assert [r["notes"] for r in first] == [(False, False), (True, True), (True, True), (True, True)]
    assert [r["notes"] for r in second] == [(False, False), (True, True), (True, True), (True, True)]
    assert [r["notes"] for r in third] == [(False, False), (True, True), (False, False), (True, True)]
    assert "extra" in third[2]["keys"]


def test_copies_that_differ_are_noticed_although_the_layout_is_unchanged(ranks: RankPool):
    for seen in ranks(3).run(rounds, [sharded_state, ranks_differ, ranks_differ, sharded_state]):
        assert [r["notes"][0] for r in seen] == [False, True, True, True]
        warned = [count for r in seen for _, count in r["described"]]
        assert warned in ([], [0, 1, 1, 0])
    lowest = ranks(3).run(rounds, [sharded_state, ranks_differ])[0]
    assert "step" in lowest[1]["keys"]


def plans_of_two_groups():
    """The ranks of a group and all ranks save in turn, each with a state of its own."""
    part = dist.new_group([0, 1])
    everybody = Collectives(None, True, 0)
    keys = []
    for _ in range(2):
        keys.append(planned_keys({"all": torch.zeros(1), "more": 1}, everybody))
        if dist.get_rank() < 2:
            keys.append(planned_keys({"part": torch.zeros(1)}, Collectives(part, True, 0)))
    return keys


def planned_keys(state, ranks):
    return sorted({key for keys in ranks.all_gather("keys", lambda: _keys(state, ranks)) for key in keys})


def _keys(state, ranks):
    plan, _ = save(state, ranks=ranks)
    return [item.index.fqn for item in plan.items]


def test_groups_do_not_mix_up_their_plans(ranks: RankPool):
    results = ranks(3).run(plans_of_two_groups)
    assert results[0] == results[1] == [["all", "more"], ["part"]] * 2
    assert results[2] == [["all", "more"]] * 2


def fail_once_then_save():
    ranks = Collectives(None, True, 0)
    outcomes = []
    for fail_in, failing in [("", 0), ("local plan", 1), ("", 0), ("global plan", 0), ("", 0), ("", 0)]:
        try:
            plan, metadata = save(weights(), fail_in if ranks.rank == failing else "", ranks)
            outcomes.append((described(SavePlan([]), metadata), [item.index.fqn for item in plan.items]))
        except CheckpointException:
            outcomes.append("failed")
    return outcomes


def test_on_ranks_a_save_after_one_that_failed_is_planned_as_if_it_had_not_been(ranks: RankPool):
    per_rank = ranks(2).run(fail_once_then_save)
    for outcomes in per_rank:
        assert [outcome == "failed" for outcome in outcomes] == [False, True, False, True, False, False]
        good = [outcome for outcome in outcomes if outcome != "failed"]
        assert all(outcome == good[0] for outcome in good)
    assert sorted(key for outcomes in per_rank for key in outcomes[-1][1]) == ["nested.step", "w"]


def save_each_for_itself(path):
    """Save twice, rank by rank; the names of the files that hold this rank's items."""
    names = []
    for _ in range(3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of overwriting
            metadata = dcp.save(weights(), checkpoint_id=path, planner=planner, use_collectives=False)
        names.append({info.relative_path for info in metadata.storage_data.values()})
        dist.barrier()
    return names


def test_ranks_that_save_for_themselves_write_under_their_own_and_new_names_each_time(ranks: RankPool, tmp_path):
    for rank, names in enumerate(ranks(2).run(save_each_for_itself, str(tmp_path))):
        assert len(set.union(*names)) == sum(map(len, names))
        assert all(name.startswith(f"__{rank}_") for name in set.union(*names))
