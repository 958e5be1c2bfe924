"""The helpers that programs import from the small modules: stock's answers, or the ones that stock should give."""

from __future__ import annotations

import io
import os
import random
from enum import Enum
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint._dedup_tensors as stock_dedup_tensors
import torch.distributed.checkpoint._nested_dict as stock_nested
import torch.distributed.checkpoint._traverse as stock_traverse
import torch.distributed.checkpoint.default_planner as stock_default_planner
import torch.distributed.checkpoint.metadata as stock_metadata
import torch.distributed.checkpoint.planner as stock_planner
import torch.distributed.checkpoint.planner_helpers as stock_helpers
import torch.distributed.checkpoint.resharding as stock_resharding
import torch.distributed.checkpoint.utils as stock_utils
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.distributed.tensor import Shard as ShardPlacement

import holdfast.dcp as dcp
from holdfast.dcp import (
    _dedup_save_plans,
    _dedup_tensors,
    _nested_dict,
    _sharded_tensor_utils,
    _traverse,
    default_planner,
    planner_helpers,
    resharding,
    utils,
)
from holdfast.dcp.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from holdfast.dcp.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from tests.rank_pool import RankPool

# Windows of a file


def window(data: bytes = b"0123456789", offset: int = 2, length: int = 5) -> Any:
    return utils._create_file_view(io.BytesIO(data), offset, length)


def test_a_window_is_read_like_a_file_of_its_own() -> None:
    view = window()

    assert view.read() == b"23456"
    assert view.read() == b""
    assert (view.seek(1), view.read(2), view.tell()) == (1, b"34", 3)
    assert (view.seek(1, os.SEEK_CUR), view.read(10)) == (4, b"6")
    assert view.readable()
    assert view.seekable()
    assert (view.seek(0), view.read(None)) == (0, b"23456")


def test_seeking_from_the_end_goes_backwards_where_stock_goes_past_it() -> None:
    view, file = window(), io.BytesIO(b"23456")

    for offset in (0, -1, -3, -5, 2):
        assert view.seek(offset, os.SEEK_END) == file.seek(offset, os.SEEK_END)
        assert view.read() == file.read()

    theirs = stock_utils._create_file_view(io.BytesIO(b"0123456789"), 2, 5)
    theirs.seek(-3, os.SEEK_END)
    assert theirs.read() != b"456"  # the defect that ours has not


def test_nothing_outside_of_the_window_can_be_read() -> None:
    view = window()
    view.seek(100)

    assert view.read() == b""
    assert view.readinto(bytearray(4)) == 0
    with pytest.raises(ValueError, match="before the start"):
        view.seek(-1)
    with pytest.raises(ValueError, match="whence"):
        view.seek(0, 7)


def test_a_window_fills_buffers_of_any_kind_up_to_its_end() -> None:
    view, buffer = window(), bytearray(8)

    assert view.readinto(buffer) == 5
    assert buffer == b"23456\0\0\0"
    assert (view.seek(3), view.readinto(memoryview(bytearray(1)))) == (3, 1)


def test_two_windows_of_one_file_do_not_disturb_each_other() -> None:
    file = io.BytesIO(b"aaabbb")
    first, second = utils._create_file_view(file, 0, 3), utils._create_file_view(file, 3, 3)

    assert [first.read(1), second.read(1), first.read(), second.read()] == [b"a", b"b", b"aa", b"bb"]


def test_torch_load_reads_from_a_window() -> None:
    archive = io.BytesIO()
    torch.save(torch.arange(3), archive)
    file = b"before" + archive.getvalue() + b"after"

    loaded = torch.load(utils._create_file_view(io.BytesIO(file), 6, len(archive.getvalue())))

    assert loaded.tolist() == [0, 1, 2]


# Keys of ranks


def gather_keys() -> Any:
    own = {"all": 1, f"of {dist.get_rank()}": 2}
    same = utils._assert_same_keys({"all": 1})
    with pytest.raises(AssertionError, match=rf"of {1 - dist.get_rank()}"):
        utils._assert_same_keys(own)
    return utils._all_gather_keys(own), same, stock_utils._all_gather_keys(own)


def test_the_keys_of_all_ranks_are_a_set_and_ranks_that_lack_some_see_which(ranks: RankPool) -> None:
    for gathered, same, theirs in ranks(2).run(gather_keys):
        assert gathered == set(theirs) == {"all", "of 0", "of 1"}  # older torches give a list
        assert same is None


def assert_same_keys_alone() -> None:
    utils._assert_same_keys({"anything": 1})


def test_a_single_rank_has_the_same_keys_as_itself(ranks: RankPool) -> None:
    ranks(1).run(assert_same_keys_alone)


# Finding things in a state


def test_objects_and_shards_are_found_by_index() -> None:
    plain = torch.arange(6).view(2, 3)
    state = {"t": plain, "v": "text"}

    assert utils.find_state_dict_object(state, MetadataIndex("t")) is plain
    assert utils.find_state_dict_object(state, MetadataIndex("t", [0, 0])) is plain
    assert utils.find_state_dict_object(state, MetadataIndex("v")) == "text"
    assert utils.find_tensor_shard(plain, MetadataIndex("t", [0, 0], 3)) is plain


@pytest.mark.parametrize(
    "index",
    [MetadataIndex("absent"), MetadataIndex("v", [0]), MetadataIndex("t", [1, 0])],
    ids=["unknown", "a value with an offset", "not at the origin"],
)
def test_what_cannot_be_found_is_a_value_error_as_in_stock(index: MetadataIndex) -> None:
    state = {"t": torch.zeros(2, 3), "v": "text"}
    theirs = stock_metadata.MetadataIndex(index.fqn, index.offset)

    with pytest.raises(ValueError, match=r"FQN|origin|not a tensor") as ours:
        utils.find_state_dict_object(state, index)
    with pytest.raises(ValueError, match=r".") as stocks:
        stock_utils.find_state_dict_object(state, theirs)
    if index.fqn == "absent":
        assert str(ours.value) == str(stocks.value) == "Could not find FQN: 'absent'"


def shards_of_a_sharded_tensor() -> None:
    rank = dist.get_rank()
    shards = [Shard.from_tensor_and_offsets(torch.full((1, 2), rank), [rank * 2 + row, 0], rank) for row in range(2)]
    tensor = init_from_local_shards(shards, 4, 2)
    items = planner_helpers._create_write_items("s", tensor)
    for shard, item in zip(tensor.local_shards(), items, strict=True):
        index = MetadataIndex("s", shard.metadata.shard_offsets)
        assert utils._find_shard(tensor, index) is shard
        assert utils.find_tensor_shard(tensor, index) is shard.tensor
        assert planner_helpers._create_write_item_for_shard("s", tensor, shard.metadata) == item
        assert planner_helpers._sharded_tensor_metadata(tensor, shard.metadata) == item.tensor_data
        assert planner_helpers._chunk_for_shard(shard.metadata) == item.tensor_data.chunk
    for elsewhere in (MetadataIndex("s"), MetadataIndex("s", [2 - rank * 2, 0])):
        for find in (utils._find_shard, utils.find_tensor_shard):
            with pytest.raises(ValueError, match="'s'"):
                find(tensor, elsewhere)
    state = {"s": tensor, "other": [1, {"x": shards[0].tensor}]}
    flat = _sharded_tensor_utils._flatten_sharded_tensors(state)
    assert flat["s"] is tensor
    assert flat["other"][1]["x"] is shards[0].tensor


def test_shards_of_a_sharded_tensor_are_found_and_described_by_offset(ranks: RankPool) -> None:
    ranks(2).run(shards_of_a_sharded_tensor)


# Small arithmetic


def test_element_wise_arithmetic_and_device_names_are_those_of_stock() -> None:
    for a, b in (([5, 7], [2, 3]), ((), ()), (torch.Size([4]), [1])):
        assert utils._element_wise_add(a, b) == stock_utils._element_wise_add(a, b)
        assert utils._element_wise_sub(a, b) == stock_utils._element_wise_sub(a, b)
    for device in (("cpu", 3), ("cuda", 1), ("xpu", 0)):
        assert utils._normalize_device_info(*device) == stock_utils._normalize_device_info(*device)


def test_profiling_works_without_a_process_group_and_is_off_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with utils._profile():
        sorted([3, 1])
    assert capsys.readouterr().out == ""

    monkeypatch.setattr(utils, "ENABLE_PROFILE", True)
    with utils._profile():
        sorted([3, 1])
    assert "function calls" in capsys.readouterr().out


def test_failures_are_picked_out_of_results_by_rank() -> None:
    wrapped = dcp.api._wrap_exception(ValueError("x"))

    assert utils._get_failure_dict(["fine", wrapped, None]) == {1: wrapped}
    assert dcp.api._is_wrapped_exception(wrapped)
    for other in (None, (), (ValueError(),), (ValueError(), "stack"), [*wrapped]):
        assert not dcp.api._is_wrapped_exception(other)


# Nested state


NESTED: dict[Any, Any] = {
    "n": {"tl": [torch.zeros(1), 5], "empty": {}, "el": []},
    "l": [1, 2, 3],
    "ld": [{"a": 1}],
    "ll": [[1, [2]], [3]],
    "llt": [[1], [[torch.ones(1)]]],
    "m": {(1, 2): torch.ones(2), 3: "three"},
    "dotted": {"0.weight": torch.ones(1)},
    "t": (torch.ones(1), 2),
    "s": {1, 2},
    "none": None,
    7: {"x": 1},
}


def test_flattening_gives_the_keys_and_paths_of_stock() -> None:
    ours, our_paths = _nested_dict.flatten_state_dict(NESTED)
    theirs, their_paths = stock_nested.flatten_state_dict(NESTED)

    assert list(ours) == list(theirs)
    assert all(ours[key] is theirs[key] for key in theirs)
    assert our_paths == their_paths


def test_unflattening_gives_what_stock_gives() -> None:
    flat, paths = stock_nested.flatten_state_dict(NESTED)

    assert repr(_nested_dict.unflatten_state_dict(flat, paths)) == repr(stock_nested.unflatten_state_dict(flat, paths))


def test_two_leaves_of_one_name_are_refused_with_the_message_of_stock() -> None:
    for module in (_nested_dict, stock_nested):
        with pytest.raises(ValueError, match=r"^duplicated flatten key a\.b$"):
            module.flatten_state_dict({"a.b": 1, "a": {"b": 2}})


@pytest.mark.parametrize("name", ["traverse_state_dict", "traverse_state_dict_v_2_3"])
def test_traversing_visits_the_leaves_that_stock_visits_in_its_order(name: str) -> None:
    def leaves(module: Any, **options: Any) -> list[tuple[Any, str]]:
        found: list[tuple[Any, str]] = []
        getattr(module, name)(NESTED, lambda path, value: found.append((path, repr(value))), **options)
        return found

    assert leaves(_traverse) == leaves(stock_traverse)
    by_int = {"keep_traversing": lambda value: isinstance(value, int)}
    assert leaves(_traverse, **by_int) == leaves(stock_traverse, **by_int)


def test_elements_are_put_and_found_by_path() -> None:
    root: dict[str, Any] = {}
    _traverse.set_element(root, ("a", 2, "b"), "late")
    _traverse.set_element(root, ("a", 0), "early")

    assert root == {"a": ["early", None, {"b": "late"}]}
    assert _traverse.get_element(root, ("a", 2, "b")) == "late"
    assert _traverse.get_element(root, ("a", 3)) is None  # stock raises IndexError at exactly this index
    assert _traverse.get_element(root, ("a", 9), "default") == "default"
    assert _traverse.get_element(root, ("a", 0, "b"), "default") == "default"
    assert _traverse.get_element(root, ("x",), "default") == "default"


def test_leaves_can_be_printed_while_traversing(capsys: pytest.CaptureFixture[str]) -> None:
    _traverse.traverse_state_dict({"w": torch.ones(2, 3), "l": [1, 2], "s": "text"}, _traverse.print_tensor)

    assert capsys.readouterr().out.splitlines() == [
        "['w']: Tensor (2, 3) torch.float32",
        "['l']: list of 2",
        "['s']: str",
    ]


# Chunks


def chunk(offsets: list[int], sizes: list[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def random_chunks(count: int) -> list[ChunkStorageMetadata]:
    dice = random.Random(0)
    return [chunk([dice.randrange(5) for _ in "xy"], [dice.randrange(1, 4) for _ in "xy"]) for _ in range(count)]


def test_overlaps_of_two_chunks_are_those_of_stock() -> None:
    meeting = 0
    for one, other in zip(random_chunks(200), reversed(random_chunks(200)), strict=True):
        meets = stock_resharding._check_shard_metadata_pair_overlap(one, other)
        assert resharding._check_shard_metadata_pair_overlap(one, other) == meets
        assert default_planner._check_box_overlap(one, other) == meets
        if meets:
            meeting += 1
            region = stock_resharding._shards_get_overlap_region_wrt_saved_tensor(one, other)
            assert resharding._shards_get_overlap_region_wrt_saved_tensor(one, other) == region
    assert 20 < meeting < 180


def test_chunks_that_do_not_meet_share_a_region_of_no_elements() -> None:
    region = resharding._shards_get_overlap_region_wrt_saved_tensor(chunk([0, 0], [2, 2]), chunk([5, 5], [1, 1]))

    assert [length for *_, length in region] == [0, 0]


def test_bounds_are_checked_as_in_stock() -> None:
    for box in random_chunks(100):
        expected = stock_default_planner._check_box_bounds(torch.Size([5, 5]), box)
        assert default_planner._check_box_bounds(torch.Size([5, 5]), box) == expected


# Plans


def tensor_item(name: str, offset: int = 0, size: int = 2) -> WriteItem:
    data = TensorWriteData(chunk([offset], [size]), TensorProperties(), torch.Size([8]))
    return WriteItem(MetadataIndex(name, [offset]), WriteItemType.SHARD, tensor_data=data)


def names(plans: list[SavePlan]) -> list[list[str]]:
    return [[item.index.fqn for item in plan.items] for plan in plans]


def test_copies_go_to_the_lowest_rank_if_asked_for() -> None:
    plans = [SavePlan([tensor_item("a")]), SavePlan([tensor_item("a"), tensor_item("b")])]

    assert names(_dedup_save_plans.dedup_save_plans(plans, save_to_lowest_rank=True)) == [["a"], ["b"]]
    assert names(_dedup_tensors.dedup_tensors(plans)) == [["a"], ["b"]]
    assert names(_dedup_tensors.dedup_tensors(plans)) == names(stock_dedup_tensors.dedup_tensors(plans))
    assert names(plans) == [["a"], ["a", "b"]]  # what was given is not changed


def test_copies_are_shared_out_by_the_bytes_that_are_really_written() -> None:
    # Rank 0 has much to write on its own, so the copies go to rank 1.
    plans = [
        SavePlan([tensor_item("own", size=8), tensor_item("a"), tensor_item("b")]),
        SavePlan([tensor_item("a"), tensor_item("b")]),
    ]

    assert names(_dedup_save_plans.dedup_save_plans(plans)) == [["own"], ["a", "b"]]


def test_plans_of_the_same_layout_are_equal_and_any_difference_shows() -> None:
    def plan(size: int = 2, dtype: torch.dtype = torch.float32, path: str = "a", usable: bool = True) -> SavePlan:
        data = TensorWriteData(chunk([0], [size]), TensorProperties(dtype=dtype), torch.Size([8]))
        items = [WriteItem(MetadataIndex("a", [0]), WriteItemType.SHARD, tensor_data=data)]
        return SavePlan(items, planner_data={"a": (path,)}, usable=usable)

    same = planner_helpers._compare_save_plans
    assert same(plan(), plan())
    assert not same(plan(), plan(size=3))
    assert not same(plan(), plan(usable=False))
    assert not same(plan(), SavePlan([]))
    # Stock calls these two equal, and its cached index then tells the old dtype or path.
    assert not same(plan(), plan(dtype=torch.float64))
    assert not same(plan(), plan(path="b"))


def test_notes_that_nothing_changed_stand_for_the_remembered_plans() -> None:
    old = [SavePlan([tensor_item("a")]), SavePlan([tensor_item("b")])]
    sent = [SavePlan([], usable=False), SavePlan([tensor_item("c")])]

    assert planner_helpers._contains_usable_plan(sent)
    assert not planner_helpers._contains_usable_plan([sent[0]])
    assert names(planner_helpers._merge_delta_local_plans(old, sent)) == [["a"], ["c"]]


# Items


NOT_COMPARED = {
    *("replica_digests", "strides"),
    *({"bytes_io_data"} - stock_planner.WriteItem.__dataclass_fields__.keys()),
    *({"usable"} - stock_planner.SavePlan.__dataclass_fields__.keys()),
    *({"version"} - stock_metadata.Metadata.__dataclass_fields__.keys()),
}
"""What ours adds to stock's plans, what stock of 2.15 adds to ours, and what older ones lack."""


def facts(value: Any) -> Any:
    """A plan object or its parts as plain data, to compare the classes of the two namespaces."""
    if hasattr(value, "__dataclass_fields__"):
        # MetadataIndex without an offset has no own attribute of that name.
        return {
            name: facts(getattr(value, name, None)) for name in value.__dataclass_fields__ if name not in NOT_COMPARED
        }
    if isinstance(value, dict):
        return {key: facts(member) for key, member in value.items()}
    if isinstance(value, list):
        return [facts(member) for member in value]
    return value.name if isinstance(value, Enum) else value


def test_items_are_created_as_in_stock() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.float16)
    state = {"t": tensor, "scalar": torch.tensor(1), "v": [1, 2]}
    index, theirs = MetadataIndex("t", [0, 0]), stock_metadata.MetadataIndex("t", [0, 0])

    for name, arguments in {
        "_create_write_item_for_tensor": ("t", tensor),
        "_create_write_item_for_bytesio": ("v", [1, 2]),
        "_create_write_items": ("t", tensor),
        "_create_chunk_from_tensor": (tensor,),
        "_create_chunk_list": (tensor,),
        "_create_default_metadata_only_plan": (state,),
    }.items():
        ours = facts(getattr(planner_helpers, name)(*arguments))
        assert ours == facts(getattr(stock_helpers, name)(*arguments)), name
    for name, arguments in {
        "_create_read_item_for_tensor": ([0, 1], [5, 6], [2, 2]),
        "_create_read_item_for_byteio": (1, 2, 3),
    }.items():
        first, second, third = arguments
        ours = getattr(planner_helpers, name)(index, first, index, second, third)
        assert facts(ours) == facts(getattr(stock_helpers, name)(theirs, first, theirs, second, third)), name
    assert facts(default_planner._create_default_local_metadata(state)) == facts(
        stock_default_planner._create_default_local_metadata(state)
    )


def test_a_value_cannot_take_a_stored_tensor() -> None:
    stored = default_planner._create_default_local_metadata({"t": torch.zeros(2)}).state_dict_metadata["t"]

    (item,) = planner_helpers._create_read_items("t", stored, torch.zeros(2))
    assert item.lengths == torch.Size([2])
    with pytest.raises(ValueError, match="'t'"):
        planner_helpers._create_read_items("t", stored, "text")


def items_of_dtensors() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for placement in (ShardPlacement(0), Replicate()):
        tensor = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [placement])
        ours = planner_helpers._create_write_items_for_dtensor("d", tensor)
        assert facts(ours) == facts(stock_helpers._create_write_items_for_dtensor("d", tensor))
        part = planner_helpers._create_chunk_from_dtensor(tensor)
        assert facts(part) == facts(stock_helpers._create_chunk_from_dtensor(tensor))
        assert [part] == planner_helpers._create_chunk_list(tensor)


def test_items_of_dtensors_are_those_of_stock(ranks: RankPool) -> None:
    ranks(2).run(items_of_dtensors)


def test_memory_is_given_to_meta_tensors_and_nothing_else_is_touched() -> None:
    left_alone = {"set": {1}, "array": object(), "list": [1, 2], "size": torch.Size([1])}
    state = {"deep": [{"meta": torch.empty(2, 3, device="meta")}], **left_alone}
    the_list = state["deep"]

    planner_helpers._init_state_dict(state)

    assert state["deep"] is the_list
    assert the_list[0]["meta"].device.type == "cpu"
    assert the_list[0]["meta"].shape == (2, 3)
    assert all(state[key] is value for key, value in left_alone.items())


# Errors in the words that programs look for


def test_what_is_not_found_is_said_in_the_words_of_stock() -> None:
    state = {"a": torch.rand(10), "b": [1, 2, 3]}

    for namespace, index in ((utils, MetadataIndex), (stock_utils, stock_metadata.MetadataIndex)):
        for key, offset, words in (
            ("c", None, r"Could not find FQN: 'c'"),
            ("b", [1], r"'b' is not a ShardedTensor, can't find by offset: 'torch.Size\(\[1\]\)'"),
            ("a", [1], r"'a' is not a ShardedTensor, can't find by offset"),
        ):
            with pytest.raises(ValueError, match=words):
                namespace.find_state_dict_object(state, index(key, offset))
        assert namespace.find_state_dict_object(state, index("a", index=99)) is state["a"]
    with pytest.raises(ValueError, match=r"Unsupported Type, expecting one of \[Tensor, DTensor, ShardedTensor\]"):
        planner_helpers._create_chunk_list("text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Invalid checkpoint metadata for t, expected BytesStorageMetadata but found"):
        planner_helpers._create_read_items("t", stored_tensor("t"), "text")


def stored_tensor(key: str) -> Any:
    return default_planner._create_default_local_metadata({key: torch.zeros(2)}).state_dict_metadata[key]


def sharded() -> Any:
    rank, count = dist.get_rank(), dist.get_world_size()
    local = Shard.from_tensor_and_offsets(torch.full((2, 3), float(rank)), [2 * rank, 0], rank)
    return init_from_local_shards([local], 2 * count, 3)


def shards_that_are_not_there() -> None:
    state = {"s": sharded()}
    elsewhere = [2 * (1 - dist.get_rank()), 0]
    for namespace, index in ((utils, MetadataIndex), (stock_utils, stock_metadata.MetadataIndex)):
        for find in (
            lambda wanted, where=namespace: where.find_state_dict_object(state, wanted),
            lambda wanted, where=namespace: where._find_shard(state["s"], wanted),
        ):
            with pytest.raises(ValueError, match="a ShardedTensor and no offset was provided"):
                find(index("s"))
            with pytest.raises(ValueError, match=r"Could not find shard at '.*' for FQN: 's'"):
                find(index("s", elsewhere))
        if dist.get_rank() == 1:
            with pytest.raises(AssertionError, match=r"Key\(s\) present in other ranks but not this one.*difference"):
                namespace._assert_same_keys({"common": 1})
        else:
            namespace._assert_same_keys({"common": 1, "mine": 2})


def test_shards_that_are_not_there_are_said_in_the_words_of_stock(ranks: RankPool) -> None:
    ranks(2).run(shards_that_are_not_there)


def metadata_of_all_shards() -> None:
    state = {"s": sharded(), "t": torch.zeros(2)}
    ours = default_planner._create_default_local_metadata(state)

    assert facts(ours) == facts(stock_default_planner._create_default_local_metadata(state))
    assert [chunk.offsets[0] for chunk in ours.state_dict_metadata["s"].chunks] == [0, 2]
    # What it is for: planning a load on another number of ranks.
    plan = default_planner.create_default_local_load_plan({"s": torch.zeros(4, 3)}, ours)
    assert [item.storage_index.offset[0] for item in plan.items] == [0, 2]


def test_local_metadata_names_all_shards_of_a_sharded_tensor(ranks: RankPool) -> None:
    ranks(2).run(metadata_of_all_shards)


def test_errors_can_be_imported_from_here_too() -> None:
    assert utils.CheckpointException is dcp.CheckpointException
    assert utils._is_wrapped_exception(utils._wrap_exception(ValueError("x")))
