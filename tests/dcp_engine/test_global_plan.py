"""From all ranks' plans to the description of one checkpoint, and the proof that it is complete."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as stock_metadata
from torch.distributed.checkpoint import planner as stock_planner
from torch.distributed.checkpoint.default_planner import _validate_global_plan as stock_validate
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan as stock_create_default_global_save_plan,
)

from holdfast._dcp.global_plan import (
    create_default_global_save_plan,
    merge_planner_data,
    refuse_invalid_plan,
    validate_global_plan,
)
from holdfast._formats.dcp.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast._formats.dcp.plan import SavePlan, TensorWriteData, WriteItem, WriteItemType
from holdfast.errors import InvalidPlanError
from tests.properties import examples

Box = tuple[tuple[int, ...], tuple[int, ...]]


def shard(key: str, offsets, sizes, full, kind=WriteItemType.SHARD) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size(full))
    return WriteItem(MetadataIndex(key, torch.Size(offsets)), kind, tensor_data=data)


def value(key: str) -> WriteItem:
    return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)


@st.composite
def tilings(draw, max_dims: int = 3) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that tile it: cut into a grid at random places."""
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=max_dims)))
    sides = []
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(1, max(1, size - 1)), max_size=2)) if size > 1 else set())
        sides.append(list(itertools.pairwise([0, *cuts, size])))
    boxes = [
        (tuple(first for first, _ in cell), tuple(last - first for first, last in cell))
        for cell in itertools.product(*sides)
    ]
    return shape, draw(st.permutations(boxes))


def plans_of(shape, boxes, ranks: int, key: str = "t") -> list[SavePlan]:
    per_rank = [[shard(key, *box, shape) for box in boxes[rank::ranks]] for rank in range(ranks)]
    return [SavePlan(items) for items in per_rank]


def problems_of(shape, boxes, ranks: int = 2) -> list[str]:
    return validate_global_plan(*create_default_global_save_plan(plans_of(shape, boxes, ranks)))


# --- description -------------------------------------------------------------------------------------------------


def as_stock(item: WriteItem) -> stock_planner.WriteItem:
    kind = stock_planner.WriteItemType[item.type.name]
    index = stock_metadata.MetadataIndex(item.index.fqn, item.index.offset)
    if item.tensor_data is None:
        return stock_planner.WriteItem(index, kind)
    chunk = stock_metadata.ChunkStorageMetadata(item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes)
    properties = stock_metadata.TensorProperties(dtype=item.tensor_data.properties.dtype)
    return stock_planner.WriteItem(
        index, kind, tensor_data=stock_planner.TensorWriteData(chunk, properties, item.tensor_data.size)
    )


def as_text(plans, metadata) -> str:
    items = [[(item.index, item.index.index, item.type.name, item.tensor_data) for item in p.items] for p in plans]
    # Strides are in stock's items since 2.15, and not in ours.
    return re.sub(r", strides=(None|\(.*?\))", "", repr((items, metadata.state_dict_metadata)))


@settings(max_examples=examples(50))
@given(st.lists(tilings(), max_size=3), st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False))
def test_the_description_and_the_hints_are_those_of_stock(tensors, ranks, rewrite, shuffle):
    items = [value(f"value{n}") for n in range(2)]
    items += [shard(f"t{n}", *box, shape) for n, (shape, boxes) in enumerate(tensors) for box in boxes]
    shuffle.shuffle(items)
    plans = [SavePlan(items[rank::ranks]) for rank in range(ranks)]
    stock_plans = [stock_planner.SavePlan([as_stock(item) for item in plan.items]) for plan in plans]
    ours = create_default_global_save_plan(plans, rewrite)
    assert as_text(*ours) == as_text(*stock_create_default_global_save_plan(stock_plans, rewrite))


@settings(max_examples=examples(50))
@given(tilings())
def test_a_hint_says_which_chunk_of_its_tensor_an_item_is(tiling):
    plans, metadata = create_default_global_save_plan(plans_of(*tiling, ranks=2))
    entry = metadata.state_dict_metadata["t"]
    assert isinstance(entry, TensorStorageMetadata)
    for item in (item for plan in plans for item in plan.items):
        assert entry.chunks[item.index.index].offsets == item.index.offset


def test_values_and_whole_tensors_are_described_as_such():
    whole = shard("w", [0, 0], [2, 3], [2, 3], WriteItemType.TENSOR)
    plans, metadata = create_default_global_save_plan([SavePlan([value("v")], planner_data="kept"), SavePlan([whole])])
    assert metadata.state_dict_metadata["v"] == BytesStorageMetadata()
    assert metadata.state_dict_metadata["w"].size == torch.Size([2, 3])
    assert plans[0].planner_data == "kept"


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (value("key"), value("key"), "written twice"),
        (value("key"), shard("key", [0], [1], [2]), "both a tensor and a value"),
        (shard("key", [0], [1], [2]), value("key"), "as a whole and in parts"),
        (shard("key", [0], [1], [2]), shard("key", [0], [2], [2], WriteItemType.TENSOR), "as a whole and in parts"),
        (value("other"), WriteItem(MetadataIndex("key"), WriteItemType.SHARD), "without tensor_data"),
    ],
)
def test_a_key_that_cannot_be_described_is_named_in_the_error(first, second, message):
    with pytest.raises(InvalidPlanError, match=rf"'key'.*{message}") as error:
        create_default_global_save_plan([SavePlan([first]), SavePlan([second])])
    assert list(error.value.problems) == ["key"]


# --- proof -------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(50))
@given(tilings(), st.integers(1, 3))
def test_chunks_that_tile_a_tensor_are_accepted(tiling, ranks):
    assert problems_of(*tiling, ranks) == []


def nonempty(boxes: list[Box]) -> list[Box]:
    return [box for box in boxes if all(box[1])]


@settings(max_examples=examples(50))
@given(tilings(), st.randoms(use_true_random=False))
def test_a_missing_chunk_is_found_if_several_ranks_plan_together(tiling, random_):
    shape, boxes = tiling
    full = nonempty(boxes)
    if not full:
        return
    gone = random_.choice(full)
    rest = [box for box in boxes if box != gone]
    if rest:
        (problem,) = problems_of(shape, rest)
        assert "'t'" in problem
        assert "elements" in problem
        assert problems_of(shape, rest, ranks=1) == []


@settings(max_examples=examples(50))
@given(tilings(), st.randoms(use_true_random=False))
def test_a_chunk_that_overlaps_another_is_found(tiling, random_):
    shape, boxes = tiling
    full = nonempty(boxes)
    if not full:
        return
    offsets, sizes = random_.choice(full)
    # One cell of it once more.
    again = (tuple(o + random_.randrange(s) for o, s in zip(offsets, sizes, strict=True)), (1,) * len(shape))
    for ranks in (1, 2):
        assert any("'t'" in problem and "overlap" in problem for problem in problems_of(shape, [*boxes, again], ranks))


@settings(max_examples=examples(50))
@given(tilings(), st.randoms(use_true_random=False))
def test_a_chunk_that_leaves_the_tensor_is_found(tiling, random_):
    shape, boxes = tiling
    dim = random_.randrange(len(shape))
    outside = (tuple(size if d == dim else 0 for d, size in enumerate(shape)), (1,) * len(shape))
    problems = problems_of(shape, [*boxes, outside])
    assert any("'t'" in problem and "outside" in problem and str(list(shape)) in problem for problem in problems)


def test_the_chunk_that_leaves_the_tensor_is_named():
    (problem,) = problems_of((4,), [((0,), (4,)), ((3,), (2,))][1:], ranks=1)
    assert "offsets [3], sizes [2]" in problem


@st.composite
def loose_boxes(draw) -> tuple[tuple[int, ...], list[Box]]:
    """Boxes that may overlap, leave holes or stick out."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)))
    corner = st.tuples(*(st.integers(0, size) for size in shape))
    extent = st.tuples(*(st.integers(1, size) for size in shape))
    return shape, draw(st.lists(st.tuples(corner, extent), min_size=1, max_size=4, unique_by=lambda box: box[0]))


@settings(max_examples=examples(150))
@given(loose_boxes(), st.integers(1, 3))
def test_plans_are_valid_exactly_if_stock_says_so(boxes, ranks):
    shape, chunks = boxes
    plans = plans_of(shape, chunks, ranks)
    stock_plans = [stock_planner.SavePlan([as_stock(item) for item in plan.items]) for plan in plans]
    found = stock_validate(*stock_create_default_global_save_plan(stock_plans))
    if isinstance(found, bool):  # older ones say whether it is valid, and do not let one rank save a part alone
        assume(ranks > 1)
        found = [] if found else ["a problem"]
    assert (validate_global_plan(*create_default_global_save_plan(plans)) != []) == (found != [])


def test_scalars_and_values_are_always_valid():
    plans = [SavePlan([value("v"), shard("s", [], [], [])]), SavePlan([])]
    assert validate_global_plan(*create_default_global_save_plan(plans)) == []


def test_an_invalid_plan_is_refused_with_all_its_problems():
    items = [shard(f"t{n}", [0], [1], [2]) for n in range(25)]
    plans, metadata = create_default_global_save_plan([SavePlan(items), SavePlan([])])
    with pytest.raises(
        InvalidPlanError, match=r"^Failed to validate global plan:\n  't0': 1 of its 2 elements[\s\S]*Nothing was saved"
    ) as error:
        refuse_invalid_plan(plans, metadata)
    assert len(error.value.problems) == 25
    assert "and 5 more" in str(error.value)
    refuse_invalid_plan(plans[:1], metadata)


# --- paths -------------------------------------------------------------------------------------------------------

path_maps = st.dictionaries(st.sampled_from("abc"), st.tuples(st.sampled_from("xyz")), max_size=3)


@settings(max_examples=examples(50))
@given(st.lists(st.none() | path_maps, max_size=4))
def test_the_paths_of_all_ranks_are_merged_and_earlier_ranks_win(maps):
    merged = merge_planner_data([SavePlan([], planner_data=paths) for paths in maps])
    expected: dict[str, tuple[str]] = {}
    for paths in reversed(maps):
        expected.update(paths or {})
    assert merged == expected
