"""One folder, two libraries: what either writes the other reads, however the writer was told to lay out its files."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys as stock_load_keys
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import holdfast.dcp as dcp
from holdfast.dcp.state_dict_loader import _load_state_dict_from_keys
from tests.dcp.states import (
    DIRECTIONS,
    LAYOUTS,
    LIBRARIES,
    Layouts,
    blank,
    distributed,
    load,
    numbered,
    parts,
    read_index,
    same_bits,
    same_parts,
    save,
)
from tests.ranks import RankPool

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is", "ignore:.*holds a checkpoint", "ignore:Detected an existing checkpoint"
)

in_all_directions = pytest.mark.parametrize(("saver", "loader"), DIRECTIONS)

FULL = {name: numbered(6, 5, start=100 * n) for n, name in enumerate(LAYOUTS)}


def state_of(layouts: Layouts | None, version: float = 1.0):
    """A bit of everything: every layout, tensors of several sizes, values of several kinds."""
    full = {name: tensor + version for name, tensor in FULL.items()}
    return {
        "model": full if layouts is None else {name: layouts.lay_out(name, tensor) for name, tensor in full.items()},
        "sizes": [torch.full((n,), version) for n in (0, 1, 10, 1000)],
        "optimizer": {"state": {"0": {"step": torch.tensor(version)}}, "lr": 0.1 * version, "betas": (0.9, version)},
        "step": int(version),
        "name": f"version {version}",
        "nothing": None,
    }


def blank_state(layouts: Layouts | None):
    state = state_of(layouts, version=0.0)
    state["nothing"] = "something"
    return state


def arrived(state, layouts: Layouts | None, version: float = 1.0) -> bool:
    expected = state_of(layouts, version)
    tensors = [(state["model"][name], expected["model"][name]) for name in FULL]
    tensors += list(zip(state["sizes"], expected["sizes"], strict=True))
    tensors.append((state["optimizer"]["state"]["0"]["step"], expected["optimizer"]["state"]["0"]["step"]))
    values = [(state["optimizer"][k], expected["optimizer"][k]) for k in ("lr", "betas")]
    values += [(state[key], expected[key]) for key in ("step", "name", "nothing")]
    return all(same_parts(*pair) for pair in tensors) and all(one == other for one, other in values)


def data_files(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("*.distcp") if file.stat().st_size)


# --- how files are laid out ------------------------------------------------------------------------------------------


def save_with(library, path, version=1.0, **options):
    writer = LIBRARIES[library].FileSystemWriter(path, **options)
    LIBRARIES[library].save(state_of(Layouts(), version), storage_writer=writer)


def load_all(loads):
    """Which of the loads, given as (library, path), gave what was saved."""
    layouts = Layouts()
    results = []
    for library, path in loads:
        state = blank_state(layouts)
        load(library, state, path)
        results.append(arrived(state, layouts))
    return results


FILE_LAYOUTS = [
    {"single_file_per_rank": single, "thread_count": threads} for single in (True, False) for threads in (1, 3)
]


@pytest.mark.parametrize("options", FILE_LAYOUTS, ids=str)
def test_files_per_rank_or_per_item_with_one_or_several_threads_load_everywhere(ranks: RankPool, tmp_path, options):
    for library in LIBRARIES:
        ranks(2).run(save_with, library, tmp_path / library, **options)
    loads = [(loader, tmp_path / saver) for saver, loader in DIRECTIONS]
    for world_size in (2, 3):
        assert ranks(world_size).run(load_all, loads) == [[True] * len(loads)] * world_size


@pytest.mark.parametrize("options", FILE_LAYOUTS, ids=str)
def test_there_are_as_many_files_as_was_asked_for(ranks: RankPool, tmp_path, options):
    ranks(2).run(save_with, "ours", tmp_path, **options)
    stored = read_index(tmp_path).storage_data
    used = {place.relative_path for place in stored.values()}
    assert used == set(data_files(tmp_path))
    per_rank = [sum(name.startswith(f"__{rank}_") for name in used) for rank in range(2)]
    if options["single_file_per_rank"]:
        assert per_rank == [options["thread_count"]] * 2
    else:
        assert sum(per_rank) == len(stored)


@in_all_directions
def test_a_process_without_a_group_exchanges_checkpoints_with_stock(tmp_path, saver, loader):
    for n, options in enumerate(FILE_LAYOUTS):
        path = tmp_path / str(n)
        writer = LIBRARIES[saver].FileSystemWriter(path, **options)
        LIBRARIES[saver].save(state_of(None), storage_writer=writer)
        state = blank_state(None)
        LIBRARIES[loader].load(state, storage_reader=LIBRARIES[loader].FileSystemReader(path))
        assert arrived(state, None)


# --- values ----------------------------------------------------------------------------------------------------------

VALUES = {
    "numbers": [1, -(2**70), 1.5, float("inf"), 1 + 2j, True],
    "text": ["", "plain", "ünïcödé ☃", "a\nb"],
    "bytes": b"\x00\xff",
    "none": None,
    "tuple": (1, ("nested", 2.5)),
    "set": {1, 2, 3},
    "empty list": [],
    "ordered": (OrderedDict([("b", 1), ("a", 2)]),),
    "dtype": torch.float16,
    "size": torch.Size([2, 3]),
    "device": torch.device("cpu"),
    "random state": torch.get_rng_state(),
    "tensor in a tuple": (torch.arange(3), "and text"),
    "array": np.arange(6.0).reshape(2, 3),
    "numpy number": np.float32(2.5),
    "slice": slice(1, 5, 2),
}


def is_equal(one, other) -> bool:
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return type(one) is type(other) and one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(is_equal, one, other))
    return type(one) is type(other) and one == other


@in_all_directions
def test_values_of_all_kinds_arrive(tmp_path, saver, loader):
    save(saver, {"values": VALUES}, tmp_path)
    state = {"values": {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else "blank" for k, v in VALUES.items()}}
    load(loader, state, tmp_path)
    for key, value in VALUES.items():
        assert is_equal(state["values"][key], value), key


@in_all_directions
def test_keys_with_dots_numbers_and_tuples_lead_to_the_same_places(tmp_path, saver, loader):
    def make(factor):
        return {
            "a.b": numbered(2) * factor,
            "a": {"c": numbered(3) * factor, 0: numbered(4) * factor, (1, 2): numbered(5) * factor},
            "list": [numbered(2) * factor, {"deep": [numbered(3) * factor]}, [numbered(1) * factor]],
            "": {"": numbered(2) * factor},
        }

    def leaves(state):
        a, entries = state["a"], state["list"]
        return [state["a.b"], a["c"], a[0], a[1, 2], entries[0], entries[1]["deep"][0], entries[2][0], state[""][""]]

    save(saver, make(3), tmp_path)
    state = make(0)
    load(loader, state, tmp_path)
    assert all(same_bits(*pair) for pair in zip(leaves(state), leaves(make(3)), strict=True))


def test_checkpoints_loaded_by_key_are_the_same_in_both_libraries(ranks: RankPool, tmp_path):
    for library in LIBRARIES:
        ranks(3).run(save_with, library, tmp_path / library)
    theirs = stock_load_keys("model", checkpoint_id=tmp_path / "ours")
    mine = _load_state_dict_from_keys("model", checkpoint_id=tmp_path / "stock")
    assert theirs["model"].keys() == mine["model"].keys() == FULL.keys()
    for name, tensor in FULL.items():
        assert same_bits(theirs["model"][name], tensor + 1)
        assert same_bits(mine["model"][name], tensor + 1)


def index_of(library, path):
    save(library, state_of(Layouts()), path)


def five_fields(entry: Any) -> Any:
    """The properties that every torch knows: the strides of 2.15 are nothing that we store."""
    return entry.properties.__getstate__()[:5]


def test_the_index_describes_the_same_tensors_in_both_libraries(ranks: RankPool, tmp_path):
    """Keys, paths, sizes, chunks and properties: all but where the bytes lie, and who wrote what both ranks hold."""
    for library in LIBRARIES:
        ranks(3).run(index_of, library, tmp_path / library)
    mine, theirs = (read_index(tmp_path / library) for library in ("ours", "stock"))
    assert type(mine) is type(theirs)
    assert mine.planner_data == theirs.planner_data
    assert mine.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    assert mine.storage_data.keys() == theirs.storage_data.keys()
    if hasattr(Metadata, "version"):  # older ones have none and write none
        assert mine.version == theirs.version
    for key, entry in theirs.state_dict_metadata.items():
        found = mine.state_dict_metadata[key]
        assert type(found) is type(entry)
        if hasattr(entry, "chunks"):
            assert (found.size, five_fields(found)) == (entry.size, five_fields(entry)), key
            assert sorted((c.offsets, c.sizes) for c in found.chunks) == sorted(
                (c.offsets, c.sizes) for c in entry.chunks
            )


# --- one folder, several saves ---------------------------------------------------------------------------------------


def load_version(library, path, version):
    layouts = Layouts()
    state = blank_state(layouts)
    load(library, state, path)
    return arrived(state, layouts, version)


@pytest.mark.parametrize(("first", "second"), [("stock", "ours"), ("ours", "stock"), ("ours", "ours")])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_either_library_overwrites_the_checkpoint_of_the_other(ranks: RankPool, tmp_path, first, second, before, after):
    ranks(before).run(save_with, first, tmp_path, version=1.0)
    old = set(data_files(tmp_path))
    ranks(after).run(save_with, second, tmp_path, version=2.0)
    if second == "ours":
        assert not old & set(data_files(tmp_path))
    for library in LIBRARIES:
        assert ranks(before).run(load_version, library, tmp_path, 2.0) == [True] * before


# --- who takes part --------------------------------------------------------------------------------------------------


def save_alone(saver, loader, path):
    """In a job of three, rank 1 saves by itself; then every rank loads by itself."""
    if dist.get_rank() == 1:
        save(saver, state_of(None), path, no_dist=True)
    dist.barrier()
    state = blank_state(None)
    load(loader, state, path, no_dist=True)
    return arrived(state, None)


@in_all_directions
def test_a_rank_saves_and_loads_alone_with_no_dist(ranks: RankPool, tmp_path, saver, loader):
    assert ranks(3).run(save_alone, saver, loader, tmp_path) == [True] * 3
    assert all(name.startswith("__0_") for name in data_files(tmp_path))


def save_on_subgroups(saver, loader, path):
    """Ranks 1 and 3 save a sharded tensor, ranks 0 and 2 another; each group loads what the other has saved."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    meshes = [DeviceMesh("cpu", [0, 2]), DeviceMesh("cpu", [1, 3])]
    mine = dist.get_rank() % 2
    full = [numbered(5, 2), numbered(7, 3, start=50)]
    state = {
        "part": distributed(full[mine], meshes[mine], [Shard(0)]),
        "plain": torch.full((2,), float(mine)),
        "who": mine,
    }
    save(saver, state, f"{path}/{mine}", process_group=groups[mine])
    dist.barrier()
    other = 1 - mine
    target = {"part": distributed(blank(full[other]), meshes[mine], [Shard(1)]), "plain": torch.zeros(2), "who": None}
    load(loader, target, f"{path}/{other}", process_group=groups[mine])
    expected = distributed(full[other], meshes[mine], [Shard(1)])
    return len(parts(expected)), same_parts(target["part"], expected), target["plain"].tolist(), target["who"]


@in_all_directions
def test_subgroups_save_and_load_beside_each_other(ranks: RankPool, tmp_path, saver, loader):
    even, odd = (1, True, [1.0, 1.0], 1), (1, True, [0.0, 0.0], 0)
    assert ranks(4).run(save_on_subgroups, saver, loader, tmp_path) == [even, odd, even, odd]
    for group in ("0", "1"):
        assert {name.split("_")[2] for name in data_files(tmp_path / group)} == {"0", "1"}


class NotingWriter(dcp.FileSystemWriter):
    """Notes on which rank the index is written."""

    finished = False

    def finish(self, metadata, results):
        self.finished = True
        super().finish(metadata, results)


class NotingPlanner(dcp.DefaultLoadPlanner):
    """Notes on which rank the plans of all are looked at."""

    planned_for = 0

    def create_global_plan(self, global_plan):
        self.planned_for = len(global_plan)
        return super().create_global_plan(global_plan)


def save_and_load_with_coordinator(coordinator, path):
    layouts = Layouts()
    writer = NotingWriter(path)
    with pytest.warns(FutureWarning):
        metadata = dcp.save_state_dict(state_of(layouts), writer, coordinator_rank=coordinator)
    state, planner = blank_state(layouts), NotingPlanner()
    with pytest.warns(FutureWarning):
        dcp.load_state_dict(state, dcp.FileSystemReader(path), coordinator_rank=coordinator, planner=planner)
    return writer.finished, planner.planned_for, arrived(state, layouts), sorted(metadata.state_dict_metadata)


@pytest.mark.parametrize("coordinator", [0, 1, 2])
def test_any_rank_may_be_the_coordinator(ranks: RankPool, tmp_path, coordinator):
    results = ranks(3).run(save_and_load_with_coordinator, coordinator, tmp_path)
    assert [finished for finished, _, _, _ in results] == [rank == coordinator for rank in range(3)]
    assert [plans for _, plans, _, _ in results] == [3 if rank == coordinator else 0 for rank in range(3)]
    assert all(complete for _, _, complete, _ in results)
    assert all(keys == results[0][3] for _, _, _, keys in results)
    assert ranks(2).run(load_all, [("stock", tmp_path)]) == [[True]] * 2


def save_with_stock_coordinator(coordinator, path):
    LIBRARIES["stock"].save_state_dict(
        state_of(Layouts()), LIBRARIES["stock"].FileSystemWriter(path), coordinator_rank=coordinator
    )


def load_with_coordinator(coordinator, path):
    layouts = Layouts()
    state = blank_state(layouts)
    dcp.load_state_dict(state, dcp.FileSystemReader(path), coordinator_rank=coordinator)
    return arrived(state, layouts)


def test_what_stock_saved_under_another_coordinator_loads_under_yet_another(ranks: RankPool, tmp_path):
    ranks(3).run(save_with_stock_coordinator, 2, tmp_path)
    assert ranks(3).run(load_with_coordinator, 1, tmp_path) == [True] * 3


def save_with_coordinator_of_a_subgroup(path):
    """The coordinator's number is one inside of the group: 1 of ranks 2 and 3 is rank 3."""
    group = dist.new_group([2, 3])
    if dist.get_rank() < 2:
        return None
    writer = NotingWriter(path)
    with pytest.warns(FutureWarning):
        dcp.save_state_dict({"plain": torch.ones(2)}, writer, process_group=group, coordinator_rank=1)
    state = {"plain": torch.zeros(2)}
    with pytest.warns(FutureWarning):
        dcp.load_state_dict(state, dcp.FileSystemReader(path), process_group=group, coordinator_rank=1)
    return writer.finished, state["plain"].tolist()


def test_the_coordinator_of_a_subgroup_is_counted_inside_of_it(ranks: RankPool, tmp_path):
    outcome = ranks(4).run(save_with_coordinator_of_a_subgroup, tmp_path)
    assert outcome == [None, None, (False, [1.0, 1.0]), (True, [1.0, 1.0])]


def test_the_helpers_of_this_file_notice_what_is_missing():
    for spoil in (
        lambda s: s["model"].update(rows=blank(FULL["rows"])),
        lambda s: s["sizes"][3].zero_(),
        lambda s: s["optimizer"].update(betas=(0.9, 0.0)),
        lambda s: s.update(nothing="something"),
    ):
        state = state_of(None)
        assert arrived(state, None)
        spoil(state)
        assert not arrived(state, None)
    assert not any(arrived(blank_state(None), None, version) for version in (1.0, 2.0))
