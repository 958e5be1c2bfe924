"""Planners that users write: every hook is called as with stock, and what a planner decides is what happens."""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import holdfast.dcp as dcp
from holdfast.dcp.default_planner import create_default_local_load_plan, create_default_local_save_plan
from holdfast.dcp.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast.dcp.planner import LoadItemType, TensorWriteData, WriteItemType
from tests.rank_pool import RankPool
from tests.sharding import sharded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")  # stock says so on every call

OURS, STOCK = "holdfast.dcp", "torch.distributed.checkpoint"

Log = list[tuple[str, int, tuple[str, ...]]]

SAVE_PLANNER = ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data"]
LOAD_PLANNER = [
    *("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"),
    *("load_bytes", "resolve_bytes", "resolve_tensor", "commit_tensor"),
]
WRITER = [
    *("reset", "storage_meta", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan"),
    *("write_data", "finish"),
]
READER = [
    *("reset", "read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data"),
]


def recording(base: type, methods: list[str], log: Log) -> type:
    """A subclass that notes every call: the method, how many arguments came by position, and which by name."""

    def noted(name: str) -> Callable[..., Any]:
        inherited = getattr(base, name)

        @functools.wraps(inherited)  # keeps the signature, which is looked at to decide how to call
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            log.append((f"{base.__name__}.{name}", len(args), tuple(sorted(kwargs))))
            return inherited(self, *args, **kwargs)

        return method

    return type(f"Recording{base.__name__}", (base,), {name: noted(name) for name in methods})


def calls_of_a_save_and_a_load(namespace: str, folder: Path) -> Log:
    checkpoint = importlib.import_module(namespace)
    log: Log = []
    save_planner = recording(checkpoint.DefaultSavePlanner, SAVE_PLANNER, log)()
    load_planner = recording(checkpoint.DefaultLoadPlanner, LOAD_PLANNER, log)()
    writer = recording(checkpoint.FileSystemWriter, WRITER, log)(folder)
    reader = recording(checkpoint.FileSystemReader, READER, log)(folder)
    rank = dist.get_rank() if dist.is_initialized() else 0
    state: dict[str, Any] = {f"a value of {rank}": rank, f"b tensor of {rank}": torch.full((2,), float(rank))}
    if dist.is_initialized():
        state["c shared"] = sharded(torch.arange(4.0))
    checkpoint.save(state, checkpoint_id=folder, storage_writer=writer, planner=save_planner)
    checkpoint.load(state, checkpoint_id=folder, storage_reader=reader, planner=load_planner)
    return log


def as_of_stock(log: Log) -> Log:
    """Our calls without what older stocks do not tell to storages."""
    if "use_collectives" in inspect.signature(stock.save).parameters:
        return log
    return [(name, count, () if "set_up_storage" in name else names) for name, count, names in log]


def test_planners_and_storages_are_called_in_the_order_and_form_of_stock(tmp_path: Path) -> None:
    theirs = calls_of_a_save_and_a_load(STOCK, tmp_path / "stock")
    ours = calls_of_a_save_and_a_load(OURS, tmp_path / "ours")

    assert as_of_stock(ours) == theirs
    assert ("DefaultSavePlanner.set_up_planner", 0, ("is_coordinator", "state_dict", "storage_meta")) in ours
    assert ("FileSystemWriter.set_up_storage_writer", 1, ("rank", "use_collectives")) in ours
    assert ("FileSystemWriter.finish", 0, ("metadata", "results")) in ours
    assert ("DefaultLoadPlanner.set_up_planner", 3, ()) in ours


def test_on_two_ranks_too_and_only_the_coordinator_plans_for_all(ranks: RankPool, tmp_path: Path) -> None:
    theirs = ranks(2).run(calls_of_a_save_and_a_load, STOCK, tmp_path / "stock")
    ours = ranks(2).run(calls_of_a_save_and_a_load, OURS, tmp_path / "ours")

    assert [as_of_stock(log) for log in ours] == theirs
    for rank, log in enumerate(ours):
        central = [name for name, *_ in log if "global" in name or name.endswith(".finish")]
        assert len(central) == (5 if rank == 0 else 0)


# Subclasses of the default planners


class RenamesWhatItSaves(dcp.DefaultSavePlanner):
    """`a.*` becomes `b.*` in the checkpoint: the renamed state is what the planner takes in."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        renamed = {("b" if key == "a" else key): value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class RenamesItemsOfThePlan(dcp.DefaultSavePlanner):
    """The same by rewriting the plan and looking the data up under the old name."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        items = [replace(item, index=self._renamed(item.index, "a.", "b.")) for item in plan.items]
        paths = {key.replace("a.", "b."): ("b", *path[1:]) for key, path in plan.planner_data.items()}
        self.plan = replace(plan, items=items, planner_data=paths)
        return self.plan

    def lookup_object(self, index: Any) -> Any:
        return super().lookup_object(self._renamed(index, "b.", "a."))

    @staticmethod
    def _renamed(index: Any, old: str, new: str) -> Any:
        return MetadataIndex(index.fqn.replace(old, new), index.offset, index.index)


class RenamesWhatItLoads(dcp.DefaultLoadPlanner):
    """Fills `a.*` of the state from `b.*` of the checkpoint."""

    def create_local_plan(self) -> Any:
        stored = {key.replace("a.", "b."): value for key, value in self.state_dict.items()}
        plan = create_default_local_load_plan(stored, self.metadata)
        for position, item in enumerate(plan.items):
            target = MetadataIndex(item.dest_index.fqn.replace("b.", "a."), item.dest_index.offset)
            plan.items[position] = replace(item, dest_index=target)
        return plan


@pytest.mark.parametrize("planner", [RenamesWhatItSaves, RenamesItemsOfThePlan])
def test_a_planner_renames_keys_and_another_finds_them_again(tmp_path: Path, planner: type) -> None:
    metadata = dcp.save({"a": {"w": torch.arange(3.0), "n": 5}}, checkpoint_id=tmp_path, planner=planner())
    assert set(metadata.state_dict_metadata) == {"b.w", "b.n"}
    target = {"a": {"w": torch.zeros(3), "n": 0}}

    dcp.load(target, checkpoint_id=tmp_path, planner=RenamesWhatItLoads())

    assert target["a"]["w"].tolist() == [0, 1, 2]
    assert target["a"]["n"] == 5
    theirs = {"b": {"w": torch.zeros(3), "n": 0}}
    stock.load(theirs, checkpoint_id=tmp_path)
    assert theirs["b"]["n"] == 5


def rename_on_ranks(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {"a": {"w": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]), "n": 5}}
    dcp.save(state, checkpoint_id=folder, planner=RenamesItemsOfThePlan())
    target = {"a": {"w": distribute_tensor(torch.zeros(4), mesh, [Shard(0)]), "n": 0}}
    dcp.load(target, checkpoint_id=folder, planner=RenamesWhatItLoads())
    assert target["a"]["w"].full_tensor().tolist() == [0, 1, 2, 3]
    assert target["a"]["n"] == 5


def test_renaming_works_on_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(rename_on_ranks, tmp_path)


class CastsToHalf(dcp.DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        data = super().transform_object(write_item, object)
        return data.half() if isinstance(data, torch.Tensor) and data.is_floating_point() else data


def test_a_planner_casts_to_half_and_the_index_tells_so(tmp_path: Path) -> None:
    state = {"w": torch.tensor([0.5, 1.25]), "count": torch.tensor([3])}
    metadata = dcp.save(state, checkpoint_id=tmp_path, planner=CastsToHalf())

    dtypes = {key: entry.properties.dtype for key, entry in metadata.state_dict_metadata.items()}
    assert dtypes == {"w": torch.float16, "count": torch.int64}
    for namespace in (dcp, stock):
        target = {"w": torch.zeros(2, dtype=torch.float16), "count": torch.tensor([0])}
        namespace.load(target, checkpoint_id=tmp_path)
        assert target["w"].tolist() == [0.5, 1.25]
        built = importlib.import_module(f"{namespace.__name__}.state_dict_loader")._load_state_dict_from_keys(
            {"w"}, checkpoint_id=tmp_path
        )
        assert built["w"].dtype is torch.float16


class CastsToHalfInThePlanToo(CastsToHalf):
    """As careful planners do: the plan already says float16."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        items = [
            replace(item, tensor_data=replace(item.tensor_data, properties=TensorProperties(torch.float16)))
            if item.tensor_data and item.tensor_data.properties.dtype.is_floating_point
            else item
            for item in plan.items
        ]
        return replace(plan, items=items)


def test_a_planner_that_casts_in_the_plan_too_gives_the_same_checkpoint(tmp_path: Path) -> None:
    state = {"w": torch.tensor([0.5, 1.25])}
    metadata = dcp.save(state, checkpoint_id=tmp_path, planner=CastsToHalfInThePlanToo())

    assert metadata.state_dict_metadata["w"].properties.dtype is torch.float16
    target = {"w": torch.zeros(2, dtype=torch.float16)}
    dcp.load(target, checkpoint_id=tmp_path)
    assert target["w"].tolist() == [0.5, 1.25]


class AddsData(dcp.DefaultSavePlanner):
    """Stores an extra value and an extra tensor that are not in the state."""

    EXTRA: dict[str, Any] = {"extra.note": "made by a planner", "extra.table": torch.arange(2)}  # noqa: RUF012

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        added = create_default_local_save_plan(self.EXTRA, self.is_coordinator)
        paths = {key: tuple(key.split(".")) for key in self.EXTRA}
        return replace(plan, items=[*plan.items, *added.items], planner_data={**plan.planner_data, **paths})

    def lookup_object(self, index: Any) -> Any:
        return self.EXTRA[index.fqn] if index.fqn in self.EXTRA else super().lookup_object(index)


@pytest.mark.parametrize("namespace", [OURS, STOCK])
def test_a_planner_adds_data_that_is_not_in_the_state(tmp_path: Path, namespace: str) -> None:
    dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path, planner=AddsData())
    target = {"w": torch.zeros(1), "extra": {"note": "", "table": torch.zeros(2, dtype=torch.int64)}}

    importlib.import_module(namespace).load(target, checkpoint_id=tmp_path)

    assert target["extra"]["note"] == "made by a planner"
    assert target["extra"]["table"].tolist() == [0, 1]


def save_added_data(folder: Path) -> set[str]:
    metadata = dcp.save({f"of {dist.get_rank()}": 1}, checkpoint_id=folder, planner=AddsData())
    return set(metadata.state_dict_metadata)


def test_added_data_of_several_ranks_is_stored_once(ranks: RankPool, tmp_path: Path) -> None:
    expected = {"of 0", "of 1", "extra.note", "extra.table"}
    assert ranks(2).run(save_added_data, tmp_path) == [expected, expected]


class SkipsHead(dcp.DefaultLoadPlanner):
    """Leaves `model.head.*` as it is, stored or not."""

    def create_local_plan(self) -> Any:
        body = {key: value for key, value in self.state_dict.items() if not key.startswith("model.head")}
        return create_default_local_load_plan(body, self.metadata)


def test_a_load_planner_skips_keys(tmp_path: Path) -> None:
    dcp.save({"model": {"body": torch.ones(2), "head": torch.ones(2)}}, checkpoint_id=tmp_path)
    target = {"model": {"body": torch.zeros(2), "head": torch.zeros(7)}}

    dcp.load(target, checkpoint_id=tmp_path, planner=SkipsHead())

    assert target["model"]["body"].tolist() == [1, 1]
    assert target["model"]["head"].tolist() == [0] * 7


class HalvesWhatItLoads(dcp.DefaultLoadPlanner):
    """Reads into memory of its own and applies the result in `commit_tensor`."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor / 2)


def test_a_load_planner_reads_into_its_own_memory_and_commits(tmp_path: Path) -> None:
    dcp.save({"w": torch.tensor([2.0, 4.0])}, checkpoint_id=tmp_path)
    target = {"w": torch.zeros(2)}

    dcp.load(target, checkpoint_id=tmp_path, planner=HalvesWhatItLoads())

    assert target["w"].tolist() == [1, 2]


class ReturnsWrongShape(dcp.DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        data = super().transform_object(write_item, object)
        return data.repeat(2) if isinstance(data, torch.Tensor) else data


class ReturnsNoData(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        return b"neither a tensor nor a stream"


@pytest.mark.parametrize("planner", [ReturnsWrongShape, ReturnsNoData])
def test_data_that_does_not_fit_the_plan_fails_the_save_with_the_key(tmp_path: Path, planner: type) -> None:
    with pytest.raises(dcp.CheckpointException, match="'w': the planner resolved the item to"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, planner=planner())

    assert list(tmp_path.iterdir()) == []


# Planners written before planners were told about the storage


class Legacy(dcp.DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, is_coordinator: bool) -> None:  # type: ignore[override]
        self.told = is_coordinator
        super().set_up_planner(state_dict, is_coordinator=is_coordinator)


def test_a_planner_that_takes_no_storage_meta_is_called_the_old_way_with_a_warning(tmp_path: Path) -> None:
    planner = Legacy()
    with pytest.warns(UserWarning, match=r"Legacy\.set_up_planner takes no storage_meta") as caught:
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, planner=planner)

    assert planner.told is True
    assert caught[0].filename == __file__
    target = {"w": torch.zeros(2)}
    dcp.load(target, checkpoint_id=tmp_path)
    assert target["w"].tolist() == [1, 1]


class LooksAtTheStorage(dcp.DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.storage_meta = storage_meta
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def test_a_planner_is_given_the_path_of_the_checkpoint(tmp_path: Path) -> None:
    planner, writer = LooksAtTheStorage(), dcp.FileSystemWriter(tmp_path)

    dcp.save({"w": 1}, storage_writer=writer, planner=planner)

    assert (planner.storage_meta.checkpoint_id, planner.storage_meta.save_id) == (tmp_path, writer.save_id)


# Planners from scratch


class BareSavePlanner(dcp.SavePlanner):
    """Flat states of tensors and texts, nothing taken from the default planner."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state = state_dict

    def create_local_plan(self) -> dcp.SavePlan:
        return dcp.SavePlan([self._item(key, value) for key, value in self.state.items()])

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], dcp.Metadata]:
        entries: dict[str, Any] = {}
        plans = []
        for plan in all_plans:
            kept = [item for item in plan.items if item.index.fqn not in entries]
            for item in kept:
                entries[item.index.fqn] = self._entry(item)
            plans.append(dcp.SavePlan(kept))
        return plans, dcp.Metadata(entries, planner_data={"made by": "hand"})

    def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
        return new_plan

    def resolve_data(self, write_item: dcp.WriteItem) -> Any:
        value = self.state[write_item.index.fqn]
        return value if isinstance(value, torch.Tensor) else io.BytesIO(value.encode())

    def _item(self, key: str, value: Any) -> dcp.WriteItem:
        if not isinstance(value, torch.Tensor):
            return dcp.WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
        chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())
        data = TensorWriteData(chunk, TensorProperties(dtype=value.dtype), value.size())
        return dcp.WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.TENSOR, tensor_data=data)

    def _entry(self, item: dcp.WriteItem) -> Any:
        data = item.tensor_data
        if data is None:
            return BytesStorageMetadata()
        return TensorStorageMetadata(data.properties, data.size, [data.chunk])


class BareLoadPlanner(dcp.LoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state, self.metadata = state_dict, metadata

    def create_local_plan(self) -> dcp.LoadPlan:
        items = []
        for key, entry in self.metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                index, size = MetadataIndex(key, entry.chunks[0].offsets), entry.size
                origin = torch.Size([0] * len(size))
                items.append(dcp.ReadItem(LoadItemType.TENSOR, index, origin, index, origin, size))
            else:
                index, nothing = MetadataIndex(key), torch.Size([0])
                items.append(dcp.ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
        return dcp.LoadPlan(items)

    def create_global_plan(self, global_plan: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: dcp.LoadPlan) -> dcp.LoadPlan:
        return central_plan

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
        self.state[read_item.dest_index.fqn] = value.getvalue().decode()

    def resolve_tensor(self, read_item: dcp.ReadItem) -> torch.Tensor:
        return self.state.setdefault(read_item.dest_index.fqn, torch.zeros(read_item.lengths))

    def commit_tensor(self, read_item: dcp.ReadItem, tensor: torch.Tensor) -> None:
        self.committed = [*getattr(self, "committed", []), read_item.dest_index.fqn]


def save_and_load_with_bare_planners(folder: Path) -> Any:
    dcp.save({"w": torch.tensor([1.0, 2.0]), "note": "text"}, checkpoint_id=folder, planner=BareSavePlanner())
    target: dict[str, Any] = {"w": torch.zeros(2), "note": ""}
    planner = BareLoadPlanner()
    dcp.load(target, checkpoint_id=folder, planner=planner)
    assert planner.metadata.planner_data == {"made by": "hand"}
    assert planner.committed == ["w"]
    return target["w"].tolist(), target["note"]


def test_planners_made_from_the_bare_contracts_save_and_load(tmp_path: Path) -> None:
    assert save_and_load_with_bare_planners(tmp_path) == ([1, 2], "text")


def test_planners_made_from_the_bare_contracts_work_on_ranks(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(save_and_load_with_bare_planners, tmp_path) == [([1, 2], "text")] * 2


def test_a_planner_that_lacks_a_method_cannot_be_made_for_saving_and_tells_when_loading(tmp_path: Path) -> None:
    class Incomplete(dcp.SavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None: ...

    with pytest.raises(TypeError, match="resolve_data"):
        Incomplete()
    dcp.save({"w": 1}, checkpoint_id=tmp_path)
    with pytest.raises(dcp.CheckpointException, match="NotImplementedError"):
        dcp.load({"w": 1}, checkpoint_id=tmp_path, planner=dcp.LoadPlanner())


# Errors in planners


class FailsOnRank1(dcp.DefaultSavePlanner):
    where = "create_local_plan"

    def create_local_plan(self) -> Any:
        if self.where == "create_local_plan" and dist.get_rank() == 1:
            raise KeyError("in the local plan")
        return super().create_local_plan()

    def finish_plan(self, new_plan: Any) -> Any:
        if self.where == "finish_plan" and dist.get_rank() == 1:
            raise KeyError("in the end")
        return super().finish_plan(new_plan)


def save_with_a_failing_planner(folder: Path, where: str) -> tuple[str, list[int], str]:
    planner = FailsOnRank1()
    planner.where = where
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.save({f"of {dist.get_rank()}": 1}, checkpoint_id=folder, planner=planner)
    failures = raised.value.failures
    return raised.value.args[0], list(failures), type(failures[1][0]).__name__


@pytest.mark.parametrize(("where", "step"), [("create_local_plan", "plan"), ("finish_plan", "write")])
def test_an_error_of_one_ranks_planner_reaches_every_rank(
    ranks: RankPool, tmp_path: Path, where: str, step: str
) -> None:
    assert ranks(2).run(save_with_a_failing_planner, tmp_path, where) == [(step, [1], "KeyError")] * 2
    assert not (tmp_path / ".metadata").exists()


def test_turning_off_deduplication_is_answered_with_a_note_that_it_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dcp.DefaultSavePlanner(dedup_replicated_tensors=False)

    assert "dedup_replicated_tensors" in caplog.text
