"""Slices of a stored tensor: how many bytes are read for them, and how long that takes.

Stock DCP has no call for a slice. It gets a planner that asks for one box, as its own planner does for the shard of a
distributed tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import holdfast
from benchmarks import page_cache
from benchmarks.contenders import OURS, STOCK
from benchmarks.counting import (
    DIGEST_BLOCK,
    CountingLocalStore,
    bytes_in,
    bytes_read_by_this_process,
    bytes_twice,
    files_in,
    separate_ranges,
)
from benchmarks.rounds import Turn, measure
from benchmarks.suite import Suite, remove

Box = tuple[slice, slice]


def measure_slices(suite: Suite) -> None:
    """Some rows, and columns of some rows: a few of them and half of them."""
    rows, columns = suite.scale.sliced_shape
    state = {"model.weight": torch.rand(rows, columns, generator=torch.Generator().manual_seed(3))}
    folders = {OURS: suite.place("slices holdfast"), STOCK: suite.place("slices stock")}
    holdfast.save(state, folders[OURS])
    dcp.save(state, checkpoint_id=folders[STOCK])
    some = slice(rows // 8 + 3, rows // 4 + 3)
    boxes = {
        "rows": (some, slice(0, columns)),
        "few columns": (some, slice(columns // 4 + 5, columns // 4 + 5 + columns // 64)),
        "half of the columns": (some, slice(columns // 4, columns // 4 + columns // 2)),
    }
    suite.log("slices")
    for name, box in boxes.items():
        expected = state["model.weight"][box]
        suite.facts[f"slice {name}"] = _bytes(folders, box, expected, columns)
        turns = _turns(folders, box, torch.zeros_like(expected))
        title = f"slice: {name}"
        suite.measures[title] = measure(title, expected.nbytes, turns, suite.allowance(0.01, has_target=False))
    for folder in folders.values():
        remove(folder)


def _turns(folders: dict[str, Path], box: Box, place: torch.Tensor) -> list[Turn]:
    ours, stock = folders[OURS], folders[STOCK]
    return [
        Turn(OURS, timed=lambda: _ours(ours, box, place), before=lambda: page_cache.fill(ours)),
        Turn(STOCK, timed=lambda: _stock(stock, box, place), before=lambda: page_cache.fill(stock)),
    ]


def _bytes(folders: dict[str, Path], box: Box, expected: torch.Tensor, columns: int) -> dict[str, Any]:
    store = CountingLocalStore(folders[OURS])
    with holdfast.open(store) as checkpoint:
        before = bytes_read_by_this_process()
        found = checkpoint["model.weight"][box]
        by_kernel = bytes_read_by_this_process() - before
    if not torch.equal(found, expected):
        raise AssertionError("holdfast read another slice than it was asked for")
    place = torch.zeros_like(expected)
    before = bytes_read_by_this_process()
    _stock(folders[STOCK], box, place)
    stock = bytes_read_by_this_process() - before
    if not torch.equal(place, expected):
        raise AssertionError("stock DCP read another slice than it was asked for")
    ranges = store.data_reads()
    touched = len(range(*box[0].indices(1 << 60))) * columns * expected.element_size()
    return {
        "needed": expected.nbytes,
        "read": bytes_in(ranges),
        "read_as_the_kernel_counts": by_kernel,
        "read_twice": bytes_twice(ranges),
        "ranges": separate_ranges(ranges),
        "files": files_in(ranges),
        "rows_touched": touched,
        "digest_block": DIGEST_BLOCK,
        "read_by_stock": stock,
    }


def _ours(folder: Path, box: Box, place: torch.Tensor) -> None:
    with holdfast.open(folder) as checkpoint:
        place.copy_(checkpoint["model.weight"][box])


def _stock(folder: Path, box: Box, place: torch.Tensor) -> None:
    dcp.load({"model.weight": place}, checkpoint_id=folder, planner=_BoxPlanner(box, place))


class _BoxPlanner(dcp.DefaultLoadPlanner):
    """Asks for one box of one tensor."""

    def __init__(self, box: Box, place: torch.Tensor) -> None:
        super().__init__()
        self._chunk = ChunkStorageMetadata(torch.Size([part.start for part in box]), place.shape)
        self._place = place

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata["model.weight"]
        assert isinstance(stored, TensorStorageMetadata)
        return LoadPlan(create_read_items_for_chunk_list("model.weight", stored, [self._chunk]))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        place = self._place
        for dimension, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            place = place.narrow(dimension, offset, length)
        return place
