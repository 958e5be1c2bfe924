"""Plan caching: less is sent when nothing changed, and any change is noticed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock

import holdfast.dcp as dcp
from holdfast.dcp.state_dict_loader import _load_state_dict_from_keys
from tests.rank_pool import RankPool
from tests.sharding import sharded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # stock says so on every call

MEMORIES = [name for name in vars(dcp.SavePlanner) if name.startswith("_cached_")]


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """Plans are remembered for the life of the process; each test begins without any."""
    forget()
    yield
    forget()


def forget() -> None:
    for name in MEMORIES:
        getattr(dcp.SavePlanner, name).clear()


class Watched(dcp.DefaultSavePlanner):
    """Notes what it sends to the coordinator, what the coordinator answers, and what is written in the end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(enable_plan_caching=True, **options)

    def create_local_plan(self) -> dcp.SavePlan:
        self.sent = super().create_local_plan()
        return self.sent

    def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
        self.answer = new_plan
        self.written = super().finish_plan(new_plan)
        return self.written


def save(state: dict[str, Any], folder: Path, **options: Any) -> tuple[Watched, dcp.Metadata]:
    planner = Watched(**options)
    return planner, dcp.save(state, checkpoint_id=folder, planner=planner)


def summary(planner: Watched) -> tuple[bool, bool, int]:
    """Whether a plan was sent, whether a plan came back, and how many items were written."""
    return planner.sent.usable, planner.answer.usable, len(planner.written.items)


def test_an_unchanged_layout_is_not_sent_again_and_the_new_content_is_saved(tmp_path: Path) -> None:
    first, _ = save({"w": torch.zeros(3), "step": 1}, tmp_path / "1")
    second, _ = save({"w": torch.ones(3), "step": 2}, tmp_path / "2")

    assert summary(first) == (True, True, 2)
    assert summary(second) == (False, False, 2)
    assert second.sent.items == []
    for namespace in (dcp, stock):
        target = {"w": torch.zeros(3), "step": 0}
        namespace.load(target, checkpoint_id=tmp_path / "2")
        assert target["w"].tolist() == [1, 1, 1]
        assert target["step"] == 2


def test_without_caching_nothing_is_remembered(tmp_path: Path) -> None:
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path)

    assert [name for name in MEMORIES if getattr(dcp.SavePlanner, name)] == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"w": torch.zeros(2)}, {"w": torch.zeros(3)}),
        ({"w": torch.zeros(2)}, {"w": torch.zeros(2), "v": 1}),
        ({"w": torch.zeros(2), "v": 1}, {"w": torch.zeros(2)}),
        ({"w": torch.zeros(2)}, {"w": "text"}),
        # Stock takes the next two for unchanged.
        ({"w": torch.zeros(2)}, {"w": torch.zeros(2, dtype=torch.float64)}),
        ({"a.b": torch.zeros(2)}, {"a": {"b": torch.zeros(2)}}),
    ],
    ids=["shape", "more", "less", "kind", "dtype", "path"],
)
def test_every_change_is_noticed(tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    save(before, tmp_path / "1")
    planner, metadata = save(after, tmp_path / "2")

    assert planner.sent.usable
    fresh = dcp.save(after, checkpoint_id=tmp_path / "3")
    assert metadata.state_dict_metadata == fresh.state_dict_metadata
    assert metadata.planner_data == fresh.planner_data
    assert repr(_load_state_dict_from_keys(checkpoint_id=tmp_path / "2")) == repr(after)


def test_going_back_to_an_earlier_layout_is_a_change_too(tmp_path: Path) -> None:
    states = [{"w": torch.zeros(2)}, {"v": torch.ones(3)}, {"w": torch.full((2,), 2.0)}]
    for number, state in enumerate(states):
        planner, _ = save(state, tmp_path / str(number))
        assert planner.sent.usable
    for number, state in enumerate(states):
        assert repr(_load_state_dict_from_keys(checkpoint_id=tmp_path / str(number))) == repr(state)


def test_the_index_of_an_earlier_save_is_not_changed_by_a_later_one(tmp_path: Path) -> None:
    _, first = save({"w": torch.zeros(2)}, tmp_path / "1")
    files, save_id = dict(first.storage_data), first.storage_meta.save_id
    _, second = save({"w": torch.ones(2)}, tmp_path / "2")

    assert second is not first
    assert (first.storage_data, first.storage_meta.save_id) == (files, save_id)
    assert second.storage_meta.save_id != save_id
    first.state_dict_metadata.clear()
    _, third = save({"w": torch.ones(2)}, tmp_path / "3")
    assert set(third.state_dict_metadata) == {"w"}


def test_overwriting_with_remembered_plans_uses_new_files(tmp_path: Path) -> None:
    save({"w": torch.zeros(2)}, tmp_path)
    before = {path.name for path in tmp_path.glob("*.distcp")}
    with pytest.warns(UserWarning, match="holds a checkpoint"):
        save({"w": torch.ones(2)}, tmp_path)

    after = {path.name for path in tmp_path.glob("*.distcp")}
    assert before.isdisjoint(after)
    assert _load_state_dict_from_keys(checkpoint_id=tmp_path)["w"].tolist() == [1, 1]


class OtherKind(Watched):
    pass


def test_planners_of_different_classes_do_not_share_what_they_remember(tmp_path: Path) -> None:
    save({"w": torch.zeros(2)}, tmp_path / "1")
    planner = OtherKind()
    dcp.save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "2", planner=planner)

    assert summary(planner) == (True, True, 1)


def test_a_save_that_failed_while_writing_does_not_spoil_the_next(tmp_path: Path) -> None:
    class Breaks(Watched):
        broken = False

        def resolve_data(self, write_item: Any) -> Any:
            return 1 / 0 if self.broken else super().resolve_data(write_item)

    def save_with(broken: bool, fill: float, folder: Path) -> None:
        planner = Breaks()
        planner.broken = broken
        dcp.save({"w": torch.full((2,), fill)}, checkpoint_id=folder, planner=planner)

    save_with(False, 1.0, tmp_path / "1")
    with pytest.raises(dcp.CheckpointException, match="division"):
        save_with(True, 2.0, tmp_path / "2")
    save_with(False, 3.0, tmp_path / "3")

    assert _load_state_dict_from_keys(checkpoint_id=tmp_path / "3")["w"].tolist() == [3, 3]


def test_a_plan_that_the_coordinator_refused_does_not_count_as_agreed(tmp_path: Path) -> None:
    class Picky(Watched):
        def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> Any:
            result = super().create_global_plan(all_plans)
            if "bad" in self.state_dict:
                raise ValueError("refused")
            return result

    def save_with(state: dict[str, Any], folder: Path) -> Picky:
        planner = Picky()
        dcp.save(state, checkpoint_id=folder, planner=planner)
        return planner

    save_with({"w": torch.zeros(2)}, tmp_path / "1")
    with pytest.raises(dcp.CheckpointException, match="refused"):
        save_with({"w": torch.zeros(2), "bad": torch.zeros(1)}, tmp_path / "2")
    planner = save_with({"w": torch.full((2,), 5.0)}, tmp_path / "3")

    assert len(planner.written.items) == 1
    assert _load_state_dict_from_keys(checkpoint_id=tmp_path / "3")["w"].tolist() == [5, 5]


# On ranks


def sharded_state(fill: float, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    whole = torch.full((5,), fill)
    return {"d": sharded(whole), "same": torch.full((2,), fill), **(extra or {})}


def save_three_times(folder: Path) -> list[tuple[bool, bool, int]]:
    forget()
    rank = dist.get_rank()
    seen = []
    for number in range(3):
        # In the third save one rank has something new; the others say that nothing changed.
        extra = {"new": 1} if number == 2 and rank == 1 else {}
        planner, metadata = save(sharded_state(float(number), {f"of {rank}": number, **extra}), folder / str(number))
        seen.append(summary(planner))
        target = sharded_state(-1.0, {"of 0": None, "of 1": None})
        dcp.load(target, checkpoint_id=folder / str(number))
        assert target["d"].full_tensor().tolist() == [number] * 5
        assert target["same"].tolist() == [number] * 2
        assert (target["of 0"], target["of 1"]) == (number, number)
        assert ("new" in metadata.state_dict_metadata) == (number == 2)
    return seen


def test_ranks_send_notes_and_only_what_changed(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(2).run(save_three_times, tmp_path)

    assert [sent for sent, *_ in first] == [True, False, False]
    assert [sent for sent, *_ in second] == [True, False, True]
    assert [answer for _, answer, _ in first[:2]] == [answer for _, answer, _ in second[:2]] == [True, False]
    theirs: dict[str, Any] = {"d": torch.zeros(5), "of 1": None, "new": None}
    stock.load(theirs, checkpoint_id=tmp_path / "2")
    assert theirs["d"].tolist() == [2] * 5
    assert (theirs["of 1"], theirs["new"]) == (2, 1)


def save_copies_that_begin_to_differ(folder: Path) -> list[int]:
    forget()
    counts = []
    for number, value in enumerate([0, dist.get_rank(), 0]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            save({"same": torch.tensor([float(value)])}, folder / str(number))
        counts.append(len([w for w in caught if "Ranks hold different values" in str(w.message)]))
    return counts


def test_copies_that_begin_to_differ_are_noticed_although_the_layout_did_not_change(
    ranks: RankPool, tmp_path: Path
) -> None:
    assert ranks(2).run(save_copies_that_begin_to_differ, tmp_path) == [[0, 1, 0], [0, 0, 0]]
    assert _load_state_dict_from_keys(checkpoint_id=tmp_path / "1")["same"].item() == 0


def save_on_two_sets_of_ranks(folder: Path) -> list[tuple[bool, bool, int]]:
    forget()
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    seen = []
    for number in range(2):
        for name, members in (("all", None), ("pair", group)):
            if members is not None and rank == 2:
                continue
            planner = Watched()
            state = {f"of {rank}": number, "same": torch.full((2,), float(number))}
            dcp.save(state, checkpoint_id=folder / f"{name}-{number}", planner=planner, process_group=members)
            seen.append(summary(planner)[:2])
    return seen


def test_each_set_of_ranks_has_plans_of_its_own(ranks: RankPool, tmp_path: Path) -> None:
    planned, noted = (True, True), (False, False)

    assert ranks(3).run(save_on_two_sets_of_ranks, tmp_path) == [
        [planned, planned, noted, noted],
        [planned, planned, noted, noted],
        [planned, noted],
    ]
    for name, count in (("all", 3), ("pair", 2)):
        loaded = _load_state_dict_from_keys(checkpoint_id=tmp_path / f"{name}-1")
        assert loaded.pop("same").tolist() == [1, 1]
        assert loaded == {f"of {rank}": 1 for rank in range(count)}


def save_after_the_coordinator_forgot(folder: Path) -> str:
    forget()
    save(sharded_state(1.0), folder / "1")
    if dist.get_rank() == 0:
        forget()
    with pytest.raises(dcp.CheckpointException, match="no longer cached"):
        save(sharded_state(2.0), folder / "2")
    save(sharded_state(3.0), folder / "3")
    return "saved again"


def test_ranks_that_are_out_of_step_fail_together_and_the_next_save_works(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(save_after_the_coordinator_forgot, tmp_path) == ["saved again"] * 2
    assert not (tmp_path / "2" / ".metadata").exists()
    assert _load_state_dict_from_keys(checkpoint_id=tmp_path / "3")["d"].tolist() == [3] * 5


# What subclasses read and override


class Reading(dcp.DefaultSavePlanner):
    """Looks at what is remembered, as programs for stock do."""

    def remembered(self) -> dict[str, Any]:
        return {name: getattr(dcp.SavePlanner, name).get(self._cached_plans_key) for name in MEMORIES}


@pytest.mark.parametrize("namespace", [dcp, stock])
def test_plans_are_remembered_under_the_key_that_the_planner_names(namespace: Any, tmp_path: Path) -> None:
    if not hasattr(namespace.DefaultSavePlanner(), "_cached_plans_key"):
        pytest.skip("the installed torch has no plan caching")
    planner = namespace.DefaultSavePlanner()
    assert planner._cached_plans_key == "DefaultSavePlanner"
    planner._enable_plan_caching = True
    planner._cached_plans_key = f"mine {namespace.__name__}"
    planner.set_up_planner({"w": torch.zeros(3)}, is_coordinator=True)

    sent = planner.create_local_plan()
    (answer,), metadata = planner.create_global_plan([sent])
    final = planner.finish_plan(answer)

    key = f"mine {namespace.__name__}"
    caches = namespace.SavePlanner
    assert [item.index.fqn for item in caches._cached_save_plan[key].items] == ["w"]
    assert caches._cached_final_save_plan[key] == final
    assert len(caches._cached_all_plans[key]) == len(caches._cached_global_plan[key]) == 1
    assert caches._cached_metadata[key].state_dict_metadata.keys() == metadata.state_dict_metadata.keys()
    planner.set_up_planner({"w": torch.ones(3)}, is_coordinator=True)
    assert not planner.create_local_plan().usable


def save_twice(path: Path) -> list[Any]:
    found = []
    for number in range(2):
        planner = Reading(enable_plan_caching=True)
        assert planner.enable_plan_caching
        dcp.save({"w": torch.zeros(3)}, checkpoint_id=path / str(number), planner=planner)
        found.append({name: plan is not None for name, plan in planner.remembered().items()})
    assert dcp.DefaultSavePlanner._cached_save_plan is dcp.SavePlanner._cached_save_plan
    forget()
    return found


def test_a_subclass_finds_the_plans_of_its_ranks(ranks: RankPool, tmp_path: Path) -> None:
    coordinator, other = ranks(2).run(save_twice, tmp_path)

    assert coordinator == [dict.fromkeys(MEMORIES, True)] * 2
    of_all = {"_cached_all_plans", "_cached_global_plan", "_cached_metadata"}
    assert other == [{name: name not in of_all for name in MEMORIES}] * 2


class LastRankWrites(dcp.DefaultSavePlanner):
    def _dedup_save_plans(self, all_plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        return [*(dcp.SavePlan([], planner_data=plan.planner_data) for plan in all_plans[:-1]), all_plans[-1]]


def save_on_last_rank(path: Path) -> int:
    planner = LastRankWrites()
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=path, planner=planner)
    return len(planner.plan.items)


def test_a_subclass_decides_who_writes_copies(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(3).run(save_on_last_rank, tmp_path) == [0, 0, 1]
