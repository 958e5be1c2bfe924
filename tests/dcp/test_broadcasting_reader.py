"""Loading one torch.save file on many ranks, of which one reads it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import holdfast.dcp as dcp
from holdfast._dcp import deliveries
from holdfast._formats.dcp.plan import LoadPlan, ReadItem
from holdfast.dcp.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from holdfast.dcp.metadata import Metadata
from holdfast.dcp.state_dict_loader import _load_state_dict_from_keys, load_state_dict
from holdfast.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    RankDisagreementError,
    RefusedPickleError,
    StateMismatchError,
    UnsupportedValueError,
)
from tests.dcp.memory import growth_while
from tests.dcp.states import LAYOUTS, Layouts, blank, numbered, same_bits, same_parts
from tests.rank_pool import RankPool
from tests.sharding import mesh_of_all_ranks

FULL = numbered(8, 12)
STATE: dict[str, Any] = {
    "model": {"w": FULL, "b": torch.arange(5, dtype=torch.bfloat16), "scalar": torch.tensor(3.5)},
    "layers": [torch.ones(2, dtype=torch.int8), {"deep": torch.zeros(0, 3)}],
    "step": 7,
    "note": ("text", None, [1.5]),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torch-file") / "all.pt"
    torch.save(STATE, path)
    return path


def empty_state() -> dict[str, Any]:
    return {
        "model": {name: blank(tensor) for name, tensor in STATE["model"].items()},
        "layers": [blank(STATE["layers"][0]), {"deep": torch.zeros(0, 3)}],
        "step": 0,
        "note": None,
    }


def load(state: dict[str, Any], path: Any, planner: Any = None, coordinator_rank: int = 0, **options: Any) -> None:
    dcp.load(
        state,
        storage_reader=BroadcastingTorchSaveReader(coordinator_rank=coordinator_rank),
        planner=planner or DynamicMetaLoadPlanner(),
        checkpoint_id=path,
        **options,
    )


def cause(raised: pytest.ExceptionInfo[dcp.CheckpointException], rank: int = 0) -> BaseException:
    return raised.value.failures[rank][0]


# Everything arrives


def load_all(path: Path) -> str:
    state = empty_state()
    load(state, path)
    return repr(state)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_tensors_and_values_arrive_on_every_rank(ranks: RankPool, file: Path, world_size: int) -> None:
    assert ranks(world_size).run(load_all, file) == [repr(STATE)] * world_size


def test_it_works_without_a_process_group(file: Path) -> None:
    assert load_all(file) == repr(STATE)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_old_files_work_too(ranks: RankPool, tmp_path: Path, zipped: bool) -> None:
    torch.save(STATE, tmp_path / "f.pt", _use_new_zipfile_serialization=zipped)

    assert ranks(2).run(load_all, tmp_path / "f.pt") == [repr(STATE)] * 2


def load_laid_out(path: Path, block_bytes: int) -> list[str]:
    usual, deliveries.DELIVERY_BYTES = deliveries.DELIVERY_BYTES, block_bytes
    try:
        layouts = Layouts()
        wrong = []
        for layout in LAYOUTS:
            target, expected = layouts.lay_out(layout, blank(FULL)), layouts.lay_out(layout, FULL)
            load({"model": {"w": target}}, path)
            if not same_parts(target, expected):
                wrong.append(layout)
    finally:
        deliveries.DELIVERY_BYTES = usual
    return wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("world_size", "block_bytes"), [(2, 1 << 20), (3, 20), (4, 64)])
def test_every_rank_gets_its_slice_whatever_the_layout(
    ranks: RankPool, file: Path, world_size: int, block_bytes: int
) -> None:
    # Stock aborts or hangs for anything but plain tensors, and would send the first slice to every rank.
    assert ranks(world_size).run(load_laid_out, file, block_bytes) == [[]] * world_size


def count_received(path: Path) -> int:
    received = []
    plain = dist.recv

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        received.append(tensor.numel() * tensor.dtype.itemsize)
        return plain(tensor, *args, **kwargs)

    layouts = Layouts()
    target = layouts.lay_out("rows", blank(FULL))
    dist.recv = counted
    try:
        load({"model": {"w": target}}, path)
    finally:
        dist.recv = plain
    return sum(received)


def test_a_rank_receives_its_own_slice_and_nothing_else(ranks: RankPool, file: Path) -> None:
    slice_bytes = FULL.numel() * FULL.itemsize // 4
    notes = 2 * 3 * 8

    assert ranks(4).run(count_received, file) == [0] + [slice_bytes + notes] * 3


def load_other_dtype(path: Path) -> list[Any]:
    state = {"model": {"w": torch.zeros(8, 12, dtype=torch.float64)}}
    with pytest.warns(UserWarning, match="another dtype"):
        load(state, path)
    return state["model"]["w"].flatten().tolist()


def test_tensors_are_converted_as_in_any_load(ranks: RankPool, file: Path) -> None:
    assert ranks(2).run(load_other_dtype, file) == [FULL.flatten().tolist()] * 2


def load_with_other_planners(path: Path) -> bool:
    state = empty_state()
    load(state, path, planner=dcp.DefaultLoadPlanner())
    partial: dict[str, Any] = {"step": 0, "unknown": 5}
    load(partial, path, planner=DynamicMetaLoadPlanner(allow_partial_load=True))
    everything = _load_state_dict_from_keys(storage_reader=BroadcastingTorchSaveReader(path))
    return repr(state) == repr(everything) == repr(STATE) and partial == {"step": 7, "unknown": 5}


def test_other_planners_work_too(ranks: RankPool, file: Path) -> None:
    assert ranks(2).run(load_with_other_planners, file) == [True, True]


def test_stock_loads_nothing_else_from_the_same_file(ranks: RankPool, tmp_path: Path) -> None:
    torch.save({"a": FULL, "b": {"c": torch.arange(4)}}, tmp_path / "f.pt")

    assert ranks(2).run(load_with_both, tmp_path / "f.pt") == [True, True]


def load_with_both(path: Path) -> bool:
    import torch.distributed.checkpoint as stock
    from torch.distributed.checkpoint import format_utils

    ours, theirs = ({"a": blank(FULL), "b": {"c": torch.zeros(4, dtype=torch.int64)}} for _ in range(2))
    load(ours, path)
    stock.load(
        theirs,
        storage_reader=format_utils.BroadcastingTorchSaveReader(),
        planner=format_utils.DynamicMetaLoadPlanner(),
        checkpoint_id=path,
    )
    return repr(ours) == repr(theirs)


MEGABYTES = 160


def load_large_slice(path: Path) -> tuple[int, int, bool]:
    target = torch.zeros(MEGABYTES << 16, 4 // dist.get_world_size())  # columns, which do not lie together in the file
    target.fill_(-1)  # so that the memory is really there
    tensor = DTensor.from_local(target, mesh_of_all_ranks(), [Shard(1)])
    usual, deliveries.DELIVERY_BYTES = deliveries.DELIVERY_BYTES, 1 << 20
    try:
        growth = growth_while(load, {"large": tensor}, path)
    finally:
        deliveries.DELIVERY_BYTES = usual
    return *growth, bool((target == dist.get_rank()).all())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_that_it_takes_is_that_of_some_blocks(ranks: RankPool, tmp_path: Path) -> None:
    torch.save({"large": torch.arange(2.0).repeat_interleave(2).repeat(MEGABYTES << 16, 1)}, tmp_path / "f.pt")

    for anonymous, _, is_right in ranks(2).run(load_large_slice, tmp_path / "f.pt"):
        assert is_right
        assert anonymous < MEGABYTES / 4  # half of what a rank receives


# Who reads


def load_as_coordinator(path: Path, reading_rank: int, coordinator_rank: int) -> list[str]:
    """Only the rank that should read sees the file, and it is recorded who opens it."""
    own = path if dist.get_rank() == reading_rank else path.with_name("not here")
    state = empty_state()
    reader = BroadcastingTorchSaveReader(own, coordinator_rank=reading_rank)
    with pytest.warns(FutureWarning):
        load_state_dict(state, reader, coordinator_rank=coordinator_rank, planner=DynamicMetaLoadPlanner())
    by_load = empty_state()
    load(by_load, own, coordinator_rank=reading_rank)
    return [repr(state), repr(by_load)]


@pytest.mark.parametrize(("reading_rank", "coordinator_rank"), [(1, 1), (2, 2), (2, 0), (1, 2)])
def test_any_rank_can_read_and_nobody_else_needs_the_file(
    ranks: RankPool, file: Path, reading_rank: int, coordinator_rank: int
) -> None:
    found = ranks(3).run(load_as_coordinator, file, reading_rank, coordinator_rank)

    assert found == [[repr(STATE)] * 2] * 3


def load_where_the_coordinator_sees_it(path: Path) -> str:
    own = path if dist.get_rank() == 2 else path.with_name("not here")
    state = empty_state()
    with pytest.warns(FutureWarning):
        load_state_dict(state, BroadcastingTorchSaveReader(own), coordinator_rank=2, planner=DynamicMetaLoadPlanner())
    return repr(state)


def test_by_default_the_coordinator_of_the_load_reads(ranks: RankPool, file: Path) -> None:
    assert ranks(3).run(load_where_the_coordinator_sees_it, file) == [repr(STATE)] * 3


def load_in_subgroups(path: Path) -> tuple[str, bool]:
    """Two groups load at the same time, one of them without rank 0, each a part of a distributed tensor."""
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    group = groups[dist.get_rank() % 2]
    state = empty_state()
    load(state, path, process_group=group)
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    target = DTensor.from_local(torch.zeros(8, 6), mesh, [Shard(1)])
    load({"model": {"w": target}}, path, process_group=group, coordinator_rank=3 if dist.get_rank() % 2 else 2)
    expected = FULL[:, 6 * mesh.get_local_rank() :][:, :6]
    return repr(state), same_bits(target.to_local().contiguous(), expected.contiguous())


def test_any_process_group_can_load(ranks: RankPool, file: Path) -> None:
    assert ranks(4).run(load_in_subgroups, file) == [(repr(STATE), True)] * 4


def load_with_a_reader_outside(path: Path) -> str:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return ""
    with pytest.raises(dcp.CheckpointException, match=r"coordinator_rank=3 is not among the ranks \[1, 2\]") as raised:
        load(empty_state(), path, process_group=group, coordinator_rank=3)
    return str(sorted(raised.value.failures))


def test_a_reading_rank_that_does_not_load_is_an_error_everywhere(ranks: RankPool, file: Path) -> None:
    assert ranks(3).run(load_with_a_reader_outside, file) == ["", "[0, 1]", "[0, 1]"]


def load_with_different_readers(path: Path) -> dict[int, str]:
    errors, unchanged = try_to_load(path, empty_state(), dist.get_rank() % 2)
    error = errors[0]
    assert isinstance(error, RankDisagreementError)
    assert unchanged
    return dict(error.views)


def test_ranks_that_disagree_on_who_reads_are_reported(ranks: RankPool, file: Path) -> None:
    views = ranks(3).run(load_with_different_readers, file)

    assert views == [{rank: f"rank {rank % 2} of the group reads" for rank in range(3)}] * 3


# What does not fit: all ranks raise, nobody hangs, nothing is changed


def try_to_load(path: Any, state: dict[str, Any], reading_rank: int = 0) -> tuple[dict[int, BaseException], bool]:
    """The errors, and whether the state stayed as it was."""
    before = repr(state)
    with pytest.raises(dcp.CheckpointException) as raised:
        load(state, path, coordinator_rank=reading_rank)
    return {rank: error for rank, (error, _) in raised.value.failures.items()}, repr(state) == before


@pytest.mark.parametrize("world_size", [1, 3])
def test_missing_keys_wrong_shapes_and_wrong_kinds_are_named_on_all_ranks(
    ranks: RankPool, file: Path, world_size: int
) -> None:
    state = {
        "model": {"w": torch.zeros(8, 11), "b": torch.zeros(9, dtype=torch.bfloat16), "gone": torch.zeros(1)},
        "layers": [torch.zeros(2, dtype=torch.int8)],
        "step": torch.zeros(3),
        "away": 5,
    }
    for errors, unchanged in ranks(world_size).run(try_to_load, file, state):
        assert unchanged
        assert sorted(errors) == list(range(world_size))
        for error in errors.values():
            assert isinstance(error, StateMismatchError)
            assert error.missing == ["away", "model.gone"]
            assert set(error.shapes) == {"model.w", "model.b"}
            assert set(error.kinds) == {"step"}


def load_with_a_key_of_one_rank(path: Path) -> tuple[list[int], bool]:
    state = empty_state()
    if dist.get_rank() == 1:
        state["only on rank 1"] = torch.zeros(2)
    errors, unchanged = try_to_load(path, state)
    return sorted(errors), unchanged


def test_a_problem_of_one_rank_stops_all(ranks: RankPool, file: Path) -> None:
    assert ranks(3).run(load_with_a_key_of_one_rank, file) == [([1], True)] * 3


class Custom:
    pass


def bad_files(folder: Path) -> list[tuple[Path, type[BaseException], str]]:
    torch.save([torch.ones(2)], folder / "list.pt")
    torch.save({"step": Custom()}, folder / "code.pt")
    (folder / "text.pt").write_text("not a checkpoint")
    torch.save({"step": torch.zeros(1000)}, folder / "cut.pt")
    os.truncate(folder / "cut.pt", 3000)
    return [
        (folder / "nothing.pt", CheckpointNotFoundError, "does not exist"),
        (folder, CheckpointNotFoundError, "is a folder"),
        (folder / "list.pt", UnsupportedValueError, "a checkpoint is a dict"),
        (folder / "code.pt", RefusedPickleError, "Custom"),
        (folder / "text.pt", DamagedCheckpointError, "not a file that torch.save wrote"),
        (folder / "cut.pt", DamagedCheckpointError, "cut.pt"),
    ]


@pytest.mark.parametrize("reading_rank", [0, 1])
def test_a_file_that_cannot_be_read_is_reported_on_all_ranks(
    ranks: RankPool, tmp_path: Path, reading_rank: int
) -> None:
    for path, kind, text in bad_files(tmp_path):
        for errors, unchanged in ranks(2).run(try_to_load, path, {"step": 0}, reading_rank):
            assert unchanged
            assert list(errors) == [reading_rank]
            assert isinstance(errors[reading_rank], kind)
            assert text in str(errors[reading_rank])


def test_no_file_at_all_is_an_error() -> None:
    with pytest.raises(dcp.CheckpointException, match=r"no torch\.save file was named"):
        dcp.load({"a": 1}, storage_reader=BroadcastingTorchSaveReader())


def test_an_empty_file_has_no_keys(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "f.pt")

    with pytest.raises(dcp.CheckpointException) as raised:
        load({"w": torch.ones(2)}, tmp_path / "f.pt")

    error = cause(raised)
    assert isinstance(error, StateMismatchError)
    assert error.missing == ["w"]
    assert raised.value.args[0] == "plan"


# Errors on the way


class Faulty(DynamicMetaLoadPlanner):
    """Fails on one rank, in one of its methods."""

    def __init__(self, rank: int, method: str) -> None:
        super().__init__()
        self.faulty = method if dist.get_rank() == rank else None

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.fail_in("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.fail_in("resolve_tensor")
        tensor = super().resolve_tensor(read_item)
        return tensor[:0] if self.faulty == "wrong shape" else tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.fail_in("commit_tensor")

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.fail_in("load_bytes")
        super().load_bytes(read_item, value)

    def fail_in(self, method: str) -> None:
        if self.faulty == method:
            raise OSError(f"{method} does not want to")


def load_with_a_fault(path: Path, rank: int, method: str) -> tuple[list[int], str, bool]:
    state = {"big": torch.zeros(1 << 20), "small": torch.zeros(3), "step": 0}
    with pytest.raises(dcp.CheckpointException) as raised:
        load(state, path, planner=Faulty(rank, method))
    if dist.get_rank() == rank and method == "load_bytes":
        assert not state["big"].any()  # values come first: one that is refused leaves the tensors alone
    after: dict[str, Any] = {"big": torch.zeros(1 << 20), "small": torch.zeros(3), "step": 0}
    load(after, path)  # the ranks are still in step
    works = after["step"] == 7 and after["small"].tolist() == [2, 2, 2]
    return sorted(raised.value.failures), str(cause(raised, rank)), works


@pytest.mark.parametrize("method", ["finish_plan", "resolve_tensor", "wrong shape", "commit_tensor", "load_bytes"])
@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_of_one_rank_reaches_all_and_nobody_hangs(
    ranks: RankPool, tmp_path: Path, rank: int, method: str
) -> None:
    torch.save({"big": torch.ones(1 << 20), "small": torch.full((3,), 2.0), "step": 7}, tmp_path / "f.pt")

    for failed, text, works in ranks(3).run(load_with_a_fault, tmp_path / "f.pt", rank, method, deadline=60.0):
        assert failed == [rank]
        assert "resolved the item to" in text if method == "wrong shape" else text == f"{method} does not want to"
        assert works


def load_while_sending_fails(path: Path) -> tuple[list[int], str, bool]:
    plain = deliveries._flat_bytes
    calls = []

    def failing(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        if len(calls) == 4:
            raise MemoryError("no room for a block")
        return plain(tensor)

    deliveries._flat_bytes = failing
    try:
        with pytest.raises(dcp.CheckpointException) as raised:
            load(empty_state(), path)
    finally:
        deliveries._flat_bytes = plain
    return sorted(raised.value.failures), str(cause(raised)), load_all(path) == repr(STATE)


def test_an_error_of_the_reading_rank_in_the_middle_reaches_all(ranks: RankPool, file: Path) -> None:
    found = ranks(3).run(load_while_sending_fails, file, deadline=60.0)

    assert found == [([0], "no room for a block", True)] * 3


class Dying(DynamicMetaLoadPlanner):
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_tensor(read_item)


def load_until_death(path: Path, dying_rank: int, reading_rank: int) -> None:
    planner = Dying() if dist.get_rank() == dying_rank else DynamicMetaLoadPlanner()
    load(empty_state(), path, planner=planner, coordinator_rank=reading_rank)


@pytest.mark.parametrize(("dying_rank", "reading_rank"), [(1, 0), (0, 0), (2, 1)])
def test_the_death_of_a_rank_ends_the_load_of_the_others(
    ranks: RankPool, file: Path, dying_rank: int, reading_rank: int
) -> None:
    outcomes = ranks(3).run_raw(load_until_death, file, dying_rank, reading_rank, deadline=40.0)

    assert outcomes[dying_rank].error.type_name == "RankDied"
    for outcome in outcomes:
        assert outcome.error is not None
        assert outcome.error.type_name != "DeadlineExceeded"


class AsksForTooMuch(DynamicMetaLoadPlanner):
    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change

    def _warn_of_unloaded(self, metadata: Metadata) -> None:
        pass

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return LoadPlan([self.changed(item) for item in new_plan.items])

    def changed(self, item: ReadItem) -> ReadItem:
        fields = dict(vars(item))
        if self.change == "key":
            fields["storage_index"] = type(item.storage_index)("nowhere", item.storage_index.offset)
        else:
            fields["storage_offsets"] = torch.Size([1, 0])
        return ReadItem(**fields)


@pytest.mark.parametrize(
    ("change", "text"), [("key", r"does not hold \['nowhere'\]"), ("region", r"of size \[8, 12\]")]
)
def test_a_plan_that_the_file_cannot_serve_is_refused_before_anything_changes(
    file: Path, change: str, text: str
) -> None:
    state = {"model": {"w": torch.zeros(8, 12)}}

    with pytest.raises(dcp.CheckpointException, match=text):
        load(state, file, planner=AsksForTooMuch(change))

    assert not state["model"]["w"].any()


# The parts, as stock names them


def test_a_path_of_a_file_is_valid(file: Path) -> None:
    assert BroadcastingTorchSaveReader.validate_checkpoint_id(file)
    assert not BroadcastingTorchSaveReader.validate_checkpoint_id(file.parent)


def drive(state: dict[str, Any], path: Path) -> None:
    """Step by step, as a flow that knows nothing of ranks would do it."""
    reader, planner = BroadcastingTorchSaveReader(), DynamicMetaLoadPlanner()
    reader.reset(path)
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
    reader.read_data(planner.finish_plan(plan), planner).wait()


def test_without_having_met_ranks_the_state_says_what_is_expected(file: Path) -> None:
    state = {"model": {"w": blank(FULL), "scalar": torch.tensor(0.0)}}

    drive(state, file)

    assert same_bits(state["model"]["w"], FULL)
    assert state["model"]["scalar"] == 3.5
    with pytest.raises(dcp.CheckpointException, match="gone"):
        drive({"gone": torch.zeros(1)}, file)


def test_only_tensors_can_be_expected_without_an_index() -> None:
    with pytest.raises(RuntimeError, match="Non-tensor value identified at step"):
        DynamicMetaLoadPlanner().set_up_planner({"step": 7}, Metadata({}), True)


def expect_whole(_: Any = None) -> list[Sequence[int]]:
    target = Layouts().lay_out("rows", FULL)
    planner = DynamicMetaLoadPlanner()
    planner.set_up_planner({"w": target}, Metadata({}), True)
    (item,) = planner.create_local_plan().items
    return [list(item.storage_offsets), list(item.lengths)]


def test_expected_slices_lie_where_they_belong_in_the_whole_tensor(ranks: RankPool) -> None:
    # Stock counts from the start of each rank's own part, so that all of them would get the first slice.
    assert ranks(2).run(expect_whole) == [[[0, 0], [4, 12]], [[4, 0], [4, 12]]]


def test_a_reader_can_be_used_again(file: Path, tmp_path: Path) -> None:
    torch.save({"step": 8}, tmp_path / "other.pt")
    reader, state = BroadcastingTorchSaveReader(file), {"step": 0}

    for path, expected in ((None, 7), (tmp_path / "other.pt", 8), (None, 8), (file, 7)):
        dcp.load(state, storage_reader=reader, checkpoint_id=path)
        assert state == {"step": expected}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_reader_does_not_hold_on_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    torch.save({"w": torch.ones(3), "step": 7}, path)
    reader = BroadcastingTorchSaveReader(path)

    dcp.load({"step": 0}, storage_reader=reader)

    assert str(path) not in Path("/proc/self/maps").read_text()
