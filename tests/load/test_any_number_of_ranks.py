"""What any number of real ranks saved in any layout, any other number of them loads in any other layout."""

from __future__ import annotations

import math
import shutil
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

import holdfast
from tests.many_ranks import run_forked
from tests.properties import examples
from tests.sharding import dtensor_of

pytestmark = pytest.mark.ranks

WORLD = 16
CASES = 8
"""Of one job: starting sixteen processes takes longer than what they do."""


class Layout(NamedTuple):
    mesh_shape: tuple[int, ...]
    placements: list[list[Placement]]
    """Of each tensor."""


class Case(NamedTuple):
    shapes: list[list[int]]
    saved: Layout
    loaded: Layout


@st.composite
def layouts(draw: st.DrawFn, shapes: list[list[int]]) -> Layout:
    ranks = draw(st.integers(1, WORLD))
    rows = draw(st.sampled_from([rows for rows in range(1, ranks + 1) if ranks % rows == 0]))
    mesh_shape = draw(st.sampled_from([(ranks,), (rows, ranks // rows)]))
    placements = [
        [draw(st.just(Replicate()) | st.integers(0, len(shape) - 1).map(Shard)) for _ in mesh_shape] for shape in shapes
    ]
    return Layout(mesh_shape, placements)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shapes = draw(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3), min_size=1, max_size=4))
    return Case(shapes, draw(layouts(shapes)), draw(layouts(shapes)))


def laid_out(layout: Layout, tensors: list[torch.Tensor]) -> tuple[dict[str, Any] | None, Any]:
    """A state on the first ranks, and their group. All ranks help to make the groups of the mesh."""
    size = math.prod(layout.mesh_shape)
    group = dist.new_group(range(size))
    mesh = DeviceMesh("cpu", torch.arange(size).view(layout.mesh_shape))
    if dist.get_rank() >= size:
        return None, group
    state = {
        f"t{number}": dtensor_of(tensor.clone(), mesh, placements)
        for number, (tensor, placements) in enumerate(zip(tensors, layout.placements, strict=True))
    }
    return state, group


def save_and_load(folder: str, found: list[Case]) -> list[list[bool] | None]:
    """Whether what this rank got of each tensor is what it must be."""
    outcomes: list[list[bool] | None] = []
    for number, case in enumerate(found):
        place = f"{folder}/{number}"
        tensors = [torch.arange(1, math.prod(shape) + 1).view(shape) for shape in case.shapes]
        state, group = laid_out(case.saved, tensors)
        if state is not None:
            holdfast.save(state, place, process_group=group)
        dist.barrier()
        expected, _ = laid_out(case.loaded, tensors)
        state, group = laid_out(case.loaded, [torch.zeros_like(tensor) for tensor in tensors])
        if state is None or expected is None:
            outcomes.append(None)
            continue
        holdfast.load(state, place, process_group=group)
        outcomes.append([torch.equal(state[key].to_local(), expected[key].to_local()) for key in expected])
    return outcomes


@settings(max_examples=examples(2), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(cases(), min_size=CASES, max_size=CASES))
def test_any_number_of_ranks_loads_what_any_other_number_saved(tmp_path_factory, found):
    folder = tmp_path_factory.mktemp("saved")
    by_rank = run_forked(WORLD, save_and_load, str(folder), found)
    for rank, outcomes in enumerate(by_rank):
        for case, outcome in zip(found, outcomes, strict=True):
            takes_part = rank < math.prod(case.loaded.mesh_shape)
            assert outcome == ([True] * len(case.shapes) if takes_part else None), (rank, case)
    shutil.rmtree(folder)
