"""Any layout loads into any other: proven for planning alone on random layouts, and on real ranks from N to M."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list as stock_read_items
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import holdfast.dcp as dcp
from holdfast._layout.placements import LocalPiece, local_pieces
from holdfast.dcp.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from holdfast.dcp.planner_helpers import create_read_items_for_chunk_list
from holdfast.errors import StateMismatchError
from tests.dcp.states import (
    DIRECTIONS,
    LAYOUTS,
    LIBRARIES,
    Layouts,
    blank,
    change_index,
    differing,
    distributed,
    load,
    numbered,
    same_parts,
    save,
)
from tests.rank_pool import RankPool

# --- planning alone --------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    mesh_shape: list[int]
    placements: list[Placement]

    def pieces(self, shape: Sequence[int]) -> list[list[LocalPiece]]:
        """What each rank of the mesh holds of a tensor."""
        coordinates = itertools.product(*map(range, self.mesh_shape))
        return [local_pieces(shape, self.mesh_shape, coordinate, self.placements) for coordinate in coordinates]


@st.composite
def layouts(draw: st.DrawFn, ndim: int) -> Layout:
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    kinds: list[st.SearchStrategy[Placement]] = [st.just(Replicate())]
    if ndim:
        dims = st.integers(-ndim, ndim - 1)
        strided = st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(1, 4))
        kinds += [dims.map(Shard), dims.map(Shard), strided]
    return Layout(mesh_shape, [draw(st.one_of(kinds)) for _ in mesh_shape])


@st.composite
def reshardings(draw: st.DrawFn) -> tuple[list[int], Layout, Layout]:
    """A shape, a layout to save and a layout to load."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    return shape, draw(layouts(len(shape))), draw(layouts(len(shape)))


def for_all(*strategies):
    """Hypothesis' `given`, on however slow a machine."""
    return lambda test: settings(deadline=None)(given(*strategies)(test))


def box_in(array, offsets: Sequence[int], sizes: Sequence[int]):
    return array[(*(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True)), ...)]


def chunk(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def stored_as(shape: Sequence[int], pieces_of_ranks: Sequence[Sequence[LocalPiece]]) -> TensorStorageMetadata:
    """The index entry of a tensor that these ranks have saved: every chunk once."""
    chunks = {piece.offsets: chunk(piece.offsets, piece.sizes) for held in pieces_of_ranks for piece in held}
    return TensorStorageMetadata(TensorProperties(), torch.Size(shape), list(chunks.values()))


def carry_out(items, stored: TensorStorageMetadata, targets: Sequence[ChunkStorageMetadata], full: np.ndarray):
    """Copy what the read items say out of the stored chunks. The filled targets, and how often each cell was filled."""
    filled = {tuple(target.offsets): np.full(target.sizes, -1) for target in targets}
    counts = {tuple(target.offsets): np.zeros(target.sizes, int) for target in targets}
    chunks = {tuple(c.offsets): box_in(full, c.offsets, c.sizes) for c in stored.chunks}
    for item in items:
        source = box_in(chunks[tuple(item.storage_index.offset)], item.storage_offsets, item.lengths)
        assert source.shape == tuple(item.lengths)
        where = tuple(item.dest_index.offset)
        box_in(filled[where], item.dest_offsets, item.lengths)[...] = source
        box_in(counts[where], item.dest_offsets, item.lengths)[...] += 1
    return filled, counts


@for_all(reshardings())
def test_the_read_items_of_any_resharding_fill_every_element_once_with_its_value(resharding):
    shape, source, destination = resharding
    full = np.arange(math.prod(shape)).reshape(shape)
    stored = stored_as(shape, source.pieces(shape))
    for held in destination.pieces(shape):
        targets = [chunk(piece.offsets, piece.sizes) for piece in held]
        items = create_read_items_for_chunk_list("key", stored, targets)
        filled, counts = carry_out(items, stored, targets, full)
        for target in targets:
            assert (counts[tuple(target.offsets)] == 1).all()
            assert (filled[tuple(target.offsets)] == box_in(full, target.offsets, target.sizes)).all()


@for_all(reshardings())
def test_read_items_are_named_as_they_can_be_found(resharding):
    """Hints point at the right entries of both lists, nothing empty is read, and nothing is read twice."""
    shape, source, destination = resharding
    stored = stored_as(shape, source.pieces(shape))
    for held in destination.pieces(shape):
        targets = [chunk(piece.offsets, piece.sizes) for piece in held]
        items = create_read_items_for_chunk_list("key", stored, targets)
        for item in items:
            assert item.dest_index.fqn == item.storage_index.fqn == "key"
            assert targets[item.dest_index.index].offsets == item.dest_index.offset
            assert stored.chunks[item.storage_index.index].offsets == item.storage_index.offset
            assert math.prod(item.lengths) > 0
        assert len({(item.dest_index, item.storage_index) for item in items}) == len(items)


@for_all(reshardings())
def test_read_items_are_those_that_stock_makes(resharding):
    shape, source, destination = resharding
    stored = stored_as(shape, source.pieces(shape))

    def listed(items):
        return {
            (i.dest_index.offset, i.dest_offsets, i.storage_index.offset, i.storage_offsets, i.lengths) for i in items
        }

    for held in destination.pieces(shape):
        targets = [chunk(piece.offsets, piece.sizes) for piece in held]
        ours = create_read_items_for_chunk_list("key", stored, targets)
        assert listed(ours) == listed(stock_read_items("key", stored, targets))


@st.composite
def tilings(draw: st.DrawFn, shape: Sequence[int]) -> list[ChunkStorageMetadata]:
    """A tensor cut into boxes again and again, anywhere: no grid, as ShardedTensors may be."""
    boxes = [([0] * len(shape), list(shape))]
    for _ in range(draw(st.integers(0, 8))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, sizes[dim]))
        rest = ([*offsets], [*sizes])
        rest[0][dim], rest[1][dim] = offsets[dim] + cut, sizes[dim] - cut
        boxes += [(offsets, [*sizes[:dim], cut, *sizes[dim + 1 :]]), rest]
    return [chunk(offsets, sizes) for offsets, sizes in boxes if math.prod(sizes)]


@st.composite
def irregular_reshardings(draw: st.DrawFn):
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    return shape, draw(tilings(shape)), draw(tilings(shape))


@for_all(irregular_reshardings())
def test_boxes_that_form_no_grid_are_resharded_too(resharding):
    shape, chunks, targets = resharding
    full = np.arange(math.prod(shape)).reshape(shape)
    stored = TensorStorageMetadata(TensorProperties(), torch.Size(shape), chunks)
    filled, counts = carry_out(create_read_items_for_chunk_list("key", stored, targets), stored, targets, full)
    assert all((count == 1).all() for count in counts.values())
    for target in targets:
        assert (filled[tuple(target.offsets)] == box_in(full, target.offsets, target.sizes)).all()


@for_all(irregular_reshardings(), st.data())
def test_a_lost_chunk_is_an_error_for_those_that_need_it_and_only_for_them(resharding, data):
    shape, chunks, targets = resharding
    lost = data.draw(st.sampled_from(chunks))
    kept = [c for c in chunks if c is not lost]
    stored = TensorStorageMetadata(TensorProperties(), torch.Size(shape), kept)
    held = np.zeros(shape, bool)
    box_in(held, lost.offsets, lost.sizes)[...] = True
    for target in targets:
        if box_in(held, target.offsets, target.sizes).any():
            with pytest.raises(StateMismatchError, match=r"no chunk covers the region at offsets \[") as caught:
                create_read_items_for_chunk_list("key", stored, [target])
            assert list(caught.value.uncovered) == ["key"]
        else:
            create_read_items_for_chunk_list("key", stored, [target])


@for_all(reshardings())
def test_a_tensor_without_stored_chunks_is_an_error_unless_nothing_is_wanted(resharding):
    shape, _, destination = resharding
    assume(math.prod(shape) > 0)
    stored = TensorStorageMetadata(TensorProperties(), torch.Size(shape), [])
    for held in destination.pieces(shape):
        targets = [chunk(piece.offsets, piece.sizes) for piece in held]
        if any(math.prod(target.sizes) for target in targets):
            with pytest.raises(StateMismatchError):
                create_read_items_for_chunk_list("key", stored, targets)
        else:
            assert create_read_items_for_chunk_list("key", stored, targets) == []


# --- real ranks: from N to M -----------------------------------------------------------------------------------------

SHAPE = (7, 5)  # divides by none of 2, 3 and 4, and leaves a rank without columns where there are 4
FULL = {layout: numbered(*SHAPE, start=1000 * n) for n, layout in enumerate(LAYOUTS)}
"""What is saved in each layout: tensors that are not taken for each other."""


def save_all_layouts(library, path):
    layouts = Layouts()
    state = {name: layouts.lay_out(name, full) for name, full in FULL.items()}
    save(library, {"saved as": state, "world size": dist.get_world_size()}, path)


def load_all_layouts(loads):
    """Carry out loads, given as (library, path, shift): what was saved in one layout goes into the one `shift` further.

    What did not arrive, and how many ranks had saved.
    """
    layouts = Layouts()
    lost, world_sizes = [], set()
    for library, path, shift in loads:
        into = {name: LAYOUTS[(n + shift) % len(LAYOUTS)] for n, name in enumerate(LAYOUTS)}
        state = {name: layouts.lay_out(into[name], blank(full)) for name, full in FULL.items()}
        given = dict(state)
        top = {"saved as": state, "world size": None}
        load(library, top, path)
        world_sizes.add(top["world size"])
        for name, full in FULL.items():
            assert state[name] is given[name]
            if not same_parts(state[name], layouts.lay_out(into[name], full)):
                lost.append(f"{library}: {name} into {into[name]}")
    return lost, world_sizes


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory):
    """Checkpoints of all layouts, by library and number of ranks; each is made when it is first asked for."""
    made = {}

    def checkpoint(library: str, world_size: int):
        if (library, world_size) not in made:
            made[library, world_size] = tmp_path_factory.mktemp(f"{library}-{world_size}")
            ranks(world_size).run(save_all_layouts, library, made[library, world_size])
        return made[library, world_size]

    return checkpoint


def some_shifts(saving: int, loading: int) -> dict[tuple[str, str], list[int]]:
    """One shift per direction. Over all numbers of ranks every layout is loaded into every other, more than once."""
    first = 3 * (4 * (saving - 1) + loading - 1)
    return {direction: [(first + n) % len(LAYOUTS)] for n, direction in enumerate(DIRECTIONS)}


def all_shifts(saving: int, loading: int) -> dict[tuple[str, str], list[int]]:
    return {direction: list(range(len(LAYOUTS))) for direction in DIRECTIONS}


def test_every_layout_meets_every_other_in_every_direction():
    for direction in DIRECTIONS:
        met = {shift for n, m in itertools.product(range(1, 5), repeat=2) for shift in some_shifts(n, m)[direction]}
        assert met == set(range(len(LAYOUTS)))


@pytest.mark.parametrize("loading", [1, 2, 3, 4])
@pytest.mark.parametrize("saving", [1, 2, 3, 4])
@pytest.mark.parametrize("choose", [some_shifts, pytest.param(all_shifts, marks=pytest.mark.long)])
def test_every_layout_on_n_ranks_loads_into_another_on_m(ranks: RankPool, saved, choose, saving, loading):
    loads = [
        (loader, saved(saver, saving), shift)
        for (saver, loader), shifts in choose(saving, loading).items()
        for shift in shifts
    ]
    assert ranks(loading).run(load_all_layouts, loads) == [([], {saving})] * loading


@pytest.mark.parametrize("saving", [1, 2, 3, 4])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_layout_on_n_ranks_loads_without_a_process_group(saved, saving):
    for saver, loader in DIRECTIONS:
        state = {name: blank(full) for name, full in FULL.items()}
        load(loader, {"saved as": state}, saved(saver, saving))
        assert differing(state, FULL) == []


def save_without_a_group(library, path):
    assert not dist.is_initialized()
    save(library, {"saved as": FULL, "world size": 0}, path)


@pytest.mark.parametrize("saver", LIBRARIES)
def test_what_a_single_process_saved_loads_into_every_layout(ranks: RankPool, tmp_path, saver):
    ranks(1).run(save_without_a_group, saver, tmp_path, process_group=False)
    assert ranks(4).run(load_all_layouts, [("ours", tmp_path, 0)]) == [([], {0})] * 4


# --- what no chunk covers --------------------------------------------------------------------------------------------


def load_with_a_hole(path):
    """The third of four row blocks is gone: on 2 ranks only rank 1 needs it. The state before and after."""
    mesh = init_device_mesh("cpu", (2,))
    full = numbered(8, 3)
    state = {
        "whole": distributed(blank(full), mesh, [Shard(0)]),
        "with a hole": distributed(blank(full), mesh, [Shard(0)]),
        "step": 5,
    }
    before = {key: tensor.to_local().clone() for key, tensor in state.items() if key != "step"}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(state, checkpoint_id=path)
    unchanged = all(torch.equal(state[key].to_local(), before[key]) for key in before) and state["step"] == 5
    failures = {
        rank: (type(error), list(error.uncovered), "offsets [4, 0] of sizes [2, 3]" in str(error))
        for rank, (error, _) in caught.value.failures.items()
    }
    return failures, unchanged


def save_four_row_blocks(library, path):
    mesh = init_device_mesh("cpu", (4,))
    tensors = {key: distributed(numbered(8, 3), mesh, [Shard(0)]) for key in ("whole", "with a hole")}
    save(library, {**tensors, "step": 1}, path)


@pytest.mark.parametrize("saver", LIBRARIES)
def test_an_element_that_no_chunk_covers_is_an_error_on_every_rank_and_nothing_changes(
    ranks: RankPool, tmp_path, saver
):
    ranks(4).run(save_four_row_blocks, saver, tmp_path)
    change_index(tmp_path, lambda metadata: metadata.state_dict_metadata["with a hole"].chunks.pop(2))
    failed = {1: (StateMismatchError, ["with a hole"], True)}
    assert ranks(2).run(load_with_a_hole, tmp_path) == [(failed, True)] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_loads_the_same_checkpoint_and_leaves_a_hole(ranks: RankPool, tmp_path):
    """Why the test above is needed."""
    ranks(4).run(save_four_row_blocks, "ours", tmp_path)
    change_index(tmp_path, lambda metadata: metadata.state_dict_metadata["with a hole"].chunks.pop(2))
    state = {"with a hole": torch.full((8, 3), -1.0)}
    stock.load(state, checkpoint_id=tmp_path)
    assert (state["with a hole"][4:6] == -1.0).all()
