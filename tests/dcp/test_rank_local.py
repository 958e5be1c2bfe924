"""`use_collectives=False`: every rank writes an index of its own part. With stock in both directions, on any number of
ranks, beside other checkpoints; whatever happens, a load gives everything or an error, never a part."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import holdfast.dcp as dcp
from holdfast.dcp.state_dict_loader import _load_state_dict_from_keys
from holdfast.errors import StateMismatchError
from tests.dcp.states import (
    DIRECTIONS,
    LIBRARIES,
    Layouts,
    blank,
    load,
    numbered,
    parts,
    same_parts,
    save,
)
from tests.rank_pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*holds a checkpoint")

FULL = {"rows": numbered(7, 3), "columns": numbered(4, 5, start=100), "blocks": numbered(5, 6, start=200)}


def state_of(version: float, layouts: Layouts | None = None):
    """Sharded tensors, a plain one and a value, all of which tell the version that they are of."""
    full = {name: tensor * version for name, tensor in FULL.items()}
    tensors = full if layouts is None else {name: layouts.lay_out(name, tensor) for name, tensor in full.items()}
    return {**tensors, "plain": torch.full((3,), version), "step": version}


def versions_in(state, layouts: Layouts | None = None) -> list[float]:
    """The versions that the parts of a state are of: more than one if it is a mix, None for what is of no version."""
    known = {version: state_of(version, layouts) for version in (0.0, 1.0, 2.0)}
    found = {next((v for v in known if state["step"] == known[v]["step"]), None)}
    for key in (*FULL, "plain"):
        if any(part.numel() for part in parts(state[key])):
            found.add(next((v for v in known if same_parts(state[key], known[v][key])), None))
    return sorted(found, key=str)


def save_version(library, path, version, use_collectives):
    save(library, state_of(version, Layouts()), path, use_collectives=use_collectives)


def load_version(library, path):
    layouts = Layouts()
    state = state_of(0.0, layouts)
    load(library, state, path)
    return versions_in(state, layouts)


def save_rank_by_rank(ranks: RankPool, library: str, world_size: int, path: Path, version: float = 1.0) -> None:
    ranks(world_size).run(save_version, library, path, version, False)


def save_together(ranks: RankPool, library: str, world_size: int, path: Path, version: float = 1.0) -> None:
    ranks(world_size).run(save_version, library, path, version, True)


def loaded_versions(ranks: RankPool, world_size: int, path: Path, library: str = "ours"):
    return ranks(world_size).run(load_version, library, path)


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def indexes(path: Path) -> list[str]:
    return [name for name in names(path) if name.endswith(".metadata")]


# --- the same number of ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saver", "loader"), DIRECTIONS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_local_checkpoints_load_on_the_same_number_of_ranks(ranks: RankPool, tmp_path, world_size, saver, loader):
    save_rank_by_rank(ranks, saver, world_size, tmp_path)
    assert indexes(tmp_path) == [f"__{rank}.metadata" for rank in range(world_size)]
    assert loaded_versions(ranks, world_size, tmp_path, loader) == [[1.0]] * world_size


def every_rank_keeps_its_own(path, saver, loader):
    """Values and tensors that differ per rank under one key: what stock's users have rank-local files for."""
    rank = dist.get_rank()
    save(saver, {"seed": f"rank {rank}", "noise": torch.full((2 + rank,), float(rank))}, path, use_collectives=False)
    state = {"seed": "", "noise": torch.zeros(2 + rank)}
    load(loader, state, path)
    return state["seed"], state["noise"].tolist()


@pytest.mark.parametrize(("saver", "loader"), DIRECTIONS)
def test_every_rank_gets_back_its_own_values_and_tensors(ranks: RankPool, tmp_path, saver, loader):
    expected = [(f"rank {rank}", [float(rank)] * (2 + rank)) for rank in range(3)]
    assert ranks(3).run(every_rank_keeps_its_own, tmp_path, saver, loader) == expected


def own_values_and_others_keys(path, saver):
    """Keys that only the other rank has saved are wanted too, so that a rank's own part is not enough."""
    rank = dist.get_rank()
    save(saver, {"seed": rank, "noise": torch.full((2,), float(rank)), f"of {rank}": rank}, path, use_collectives=False)
    state = {"seed": None, "noise": torch.full((2,), -1.0), f"of {1 - rank}": None}
    load("ours", state, path)
    return state["seed"], state["noise"].tolist(), state[f"of {1 - rank}"]


@pytest.mark.parametrize("saver", LIBRARIES)
def test_a_ranks_own_part_comes_first_even_if_others_are_needed(ranks: RankPool, tmp_path, saver):
    assert ranks(2).run(own_values_and_others_keys, tmp_path, saver) == [(0, [0.0, 0.0], 1), (1, [1.0, 1.0], 0)]


def metadata_on_ranks(path):
    layouts = Layouts()
    metadata = dcp.save(state_of(1.0, layouts), checkpoint_id=path, use_collectives=False)
    return [tuple(c.offsets) for c in metadata.state_dict_metadata["rows"].chunks]


def test_every_rank_is_given_the_index_of_its_own_part(ranks: RankPool, tmp_path):
    assert ranks(3).run(metadata_on_ranks, tmp_path) == [[(0, 0)], [(3, 0)], [(6, 0)]]


# --- other numbers of ranks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saver", LIBRARIES)
@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (3, 2), (2, 4), (4, 3), (1, 2)])
def test_rank_local_checkpoints_load_completely_on_fewer_and_on_more_ranks(
    ranks: RankPool, tmp_path, saver, saving, loading
):
    save_rank_by_rank(ranks, saver, saving, tmp_path)
    assert loaded_versions(ranks, loading, tmp_path) == [[1.0]] * loading


@pytest.mark.parametrize("saver", LIBRARIES)
def test_a_rank_local_checkpoint_loads_completely_without_a_process_group(ranks: RankPool, tmp_path, saver):
    save_rank_by_rank(ranks, saver, 3, tmp_path)
    state = state_of(0.0)
    load("ours", state, tmp_path)
    assert versions_in(state) == [1.0]


def save_one_key_per_rank(library, path):
    """No rank's part has all keys, and no tensor is in parts: nothing but the keys tells that some are missing."""
    rank = dist.get_rank()
    state = {"common": torch.ones(2), f"only {rank}": torch.full((2,), float(rank)), f"value {rank}": rank}
    save(library, state, path, use_collectives=False)


def all_keys(world_size: int) -> list[str]:
    return ["common", *(f"{kind} {rank}" for rank in range(world_size) for kind in ("only", "value"))]


@pytest.mark.parametrize("saver", LIBRARIES)
@pytest.mark.parametrize("partial", [False, True])
def test_keys_of_other_ranks_are_found_even_if_a_partial_load_would_do_without_them(
    ranks: RankPool, tmp_path, saver, partial
):
    ranks(3).run(save_one_key_per_rank, saver, tmp_path)
    state = {key: -1 if key.startswith("value") else torch.full((2,), -1.0) for key in all_keys(3)}
    load("ours", state, tmp_path, planner=dcp.DefaultLoadPlanner(allow_partial_load=partial))
    assert torch.equal(state["common"], torch.ones(2))
    for rank in range(3):
        assert state[f"value {rank}"] == rank
        assert torch.equal(state[f"only {rank}"], torch.full((2,), float(rank)))


@pytest.mark.parametrize("saver", LIBRARIES)
def test_loading_all_keys_gives_the_keys_of_all_ranks(ranks: RankPool, tmp_path, saver):
    ranks(3).run(save_one_key_per_rank, saver, tmp_path)
    assert _load_state_dict_from_keys(checkpoint_id=tmp_path).keys() == set(all_keys(3))


def load_with_a_missing_part(path):
    layouts = Layouts()
    state = state_of(0.0, layouts)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(state, checkpoint_id=path)
    errors = [error for error, _ in caught.value.failures.values()]
    return versions_in(state, layouts), all(isinstance(e, StateMismatchError) and e.uncovered for e in errors)


@pytest.mark.parametrize("loading", [1, 2, 3, 4])
@pytest.mark.parametrize("saver", LIBRARIES)
@pytest.mark.parametrize("lost", [1, 2])
def test_a_checkpoint_that_lacks_a_ranks_index_is_refused_on_every_rank_and_nothing_changes(
    ranks: RankPool, tmp_path, saver, loading, lost
):
    save_rank_by_rank(ranks, saver, 3, tmp_path)
    (tmp_path / f"__{lost}.metadata").unlink()
    assert ranks(loading).run(load_with_a_missing_part, tmp_path) == [([0.0], True)] * loading


def load_and_fail(path):
    layouts = Layouts()
    state = state_of(0.0, layouts)
    with pytest.raises(dcp.CheckpointException):
        dcp.load(state, checkpoint_id=path)
    return True


@pytest.mark.parametrize("saver", LIBRARIES)
def test_a_checkpoint_that_lacks_a_ranks_data_is_refused_on_every_rank(ranks: RankPool, tmp_path, saver):
    save_rank_by_rank(ranks, saver, 2, tmp_path)
    for file in tmp_path.glob("__1_*.distcp"):
        file.unlink()
    for loading in (1, 2, 3):
        assert ranks(loading).run(load_and_fail, tmp_path) == [True] * loading


# --- beside other checkpoints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", LIBRARIES)
@pytest.mark.parametrize("loading", [1, 3])
def test_saving_rank_by_rank_over_a_common_checkpoint_replaces_it(ranks: RankPool, tmp_path, old, loading):
    """Stock leaves the old `.metadata`, and its reader prefers that."""
    save_together(ranks, old, 3, tmp_path, version=1.0)
    save_rank_by_rank(ranks, "ours", 3, tmp_path, version=2.0)
    assert indexes(tmp_path) == ["__0.metadata", "__1.metadata", "__2.metadata"]
    assert loaded_versions(ranks, loading, tmp_path) == [[2.0]] * loading
    if loading == 3:
        assert loaded_versions(ranks, 3, tmp_path, "stock") == [[2.0]] * 3


@pytest.mark.parametrize("old", LIBRARIES)
@pytest.mark.parametrize("loading", [1, 3])
def test_saving_together_over_a_rank_local_checkpoint_replaces_it(ranks: RankPool, tmp_path, old, loading):
    save_rank_by_rank(ranks, old, 3, tmp_path, version=1.0)
    before = set(names(tmp_path))
    save_together(ranks, "ours", 2, tmp_path, version=2.0)
    assert indexes(tmp_path) == [".metadata"]
    assert not before & set(names(tmp_path))
    for library in LIBRARIES:
        assert loaded_versions(ranks, loading, tmp_path, library) == [[2.0]] * loading


@pytest.mark.parametrize("old", LIBRARIES)
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 2)])
def test_a_rank_local_checkpoint_replaces_an_earlier_one_of_its_kind(ranks: RankPool, tmp_path, old, before, after):
    save_rank_by_rank(ranks, old, before, tmp_path, version=1.0)
    earlier = set(names(tmp_path)) - set(indexes(tmp_path))
    save_rank_by_rank(ranks, "ours", after, tmp_path, version=2.0)
    assert indexes(tmp_path) == [f"__{rank}.metadata" for rank in range(after)]
    assert not earlier & set(names(tmp_path))
    for loading in (1, before, after):
        assert loaded_versions(ranks, loading, tmp_path) == [[2.0]] * loading


def load_or_fail(path):
    layouts = Layouts()
    state = state_of(0.0, layouts)
    try:
        dcp.load(state, checkpoint_id=path)
    except dcp.CheckpointException:
        return "refused"
    return versions_in(state, layouts)


@pytest.mark.parametrize("first_together", [False, True])
def test_whatever_stock_leaves_behind_in_one_folder_a_load_never_gives_a_mix(ranks: RankPool, tmp_path, first_together):
    """Stock overwrites data files that the other kind of index still refers to."""
    ranks(2).run(save_version, "stock", tmp_path, 1.0, first_together)
    ranks(2).run(save_version, "stock", tmp_path, 2.0, not first_together)
    for loading in (1, 2, 3):
        (outcome, *others) = ranks(loading).run(load_or_fail, tmp_path)
        assert outcome in ("refused", [1.0], [2.0])
        assert others == [outcome] * (loading - 1)


@pytest.mark.parametrize("damaged", [".metadata", "__1.metadata"])
@pytest.mark.parametrize("saver", LIBRARIES)
def test_an_index_that_cannot_be_read_is_not_replaced_by_what_lies_beside_it(ranks: RankPool, tmp_path, saver, damaged):
    path, beside = tmp_path / "path", tmp_path / "beside"
    save_rank_by_rank(ranks, saver, 2, path, version=1.0)
    if damaged == ".metadata":
        save_together(ranks, saver, 2, beside, version=2.0)
        shutil.copy(beside / damaged, path)
    index = path / damaged
    index.write_bytes(index.read_bytes()[:-40])
    for loading in (1, 2, 3):
        assert ranks(loading).run(load_or_fail, path) == ["refused"] * loading


def test_parts_of_two_saves_are_not_put_together(ranks: RankPool, tmp_path):
    """As a copy that was interrupted, or a sync of half of a folder, leaves them."""
    save_rank_by_rank(ranks, "ours", 2, tmp_path / "old", version=1.0)
    save_rank_by_rank(ranks, "ours", 2, tmp_path / "new", version=2.0)
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for source, pattern in (("new", "__0*"), ("old", "__1*")):
        for file in (tmp_path / source).glob(pattern):
            shutil.copy(file, mixed)
    for loading in (1, 2, 3):
        assert ranks(loading).run(load_or_fail, mixed) == ["refused"] * loading


# --- errors ----------------------------------------------------------------------------------------------------------


class FailingPlanner(dcp.DefaultSavePlanner):
    """Cannot resolve its data on one rank."""

    def resolve_data(self, write_item):
        if dist.get_rank() == 1:
            raise OSError("rank 1 cannot")
        return super().resolve_data(write_item)


def fail_on_rank_1(path):
    with pytest.raises(dcp.CheckpointException, match="rank 1 cannot") as caught:
        dcp.save(state_of(2.0, Layouts()), checkpoint_id=path, planner=FailingPlanner(), use_collectives=False)
    return list(caught.value.failures)


def test_an_error_of_one_rank_reaches_all_and_the_earlier_checkpoint_stays(ranks: RankPool, tmp_path):
    """Stock's other ranks wait in a barrier."""
    save_rank_by_rank(ranks, "ours", 3, tmp_path, version=1.0)
    before = names(tmp_path)
    assert ranks(3).run(fail_on_rank_1, tmp_path) == [[1]] * 3
    assert names(tmp_path) == before
    assert loaded_versions(ranks, 3, tmp_path) == [[1.0]] * 3


def save_where_one_exists(path):
    writer = dcp.FileSystemWriter(path, overwrite=False)
    with pytest.raises(dcp.CheckpointException, match=r"Checkpoint already exists and self\.overwrite=False"):
        dcp.save(state_of(2.0, Layouts()), storage_writer=writer, use_collectives=False)


@pytest.mark.parametrize("old", LIBRARIES)
@pytest.mark.parametrize("old_together", [False, True])
def test_a_checkpoint_of_either_kind_is_in_the_way_if_overwriting_is_forbidden(
    ranks: RankPool, tmp_path, old, old_together
):
    ranks(2).run(save_version, old, tmp_path, 1.0, old_together)
    before = names(tmp_path)
    ranks(2).run(save_where_one_exists, tmp_path)
    assert names(tmp_path) == before
    assert loaded_versions(ranks, 2, tmp_path) == [[1.0]] * 2


def save_on_a_subgroup(path, saver):
    """Ranks 1 and 3 of 4: files are named by the ranks of the group."""
    group = dist.new_group([1, 3])
    if dist.get_rank() in (0, 2):
        return None
    save(saver, {"part": torch.full((2,), float(dist.get_rank()))}, path, use_collectives=False, process_group=group)
    state = {"part": torch.zeros(2)}
    load("ours", state, path, process_group=group)
    return state["part"].tolist()


@pytest.mark.parametrize("saver", LIBRARIES)
def test_a_subgroup_saves_and_loads_rank_by_rank(ranks: RankPool, tmp_path, saver):
    assert ranks(4).run(save_on_a_subgroup, tmp_path, saver) == [None, [1.0, 1.0], None, [3.0, 3.0]]
    assert indexes(tmp_path) == ["__0.metadata", "__1.metadata"]


def test_the_helpers_of_this_file_notice_a_mix():
    state = state_of(1.0)
    assert versions_in(state) == [1.0]
    state["plain"] = state_of(2.0)["plain"]
    assert versions_in(state) == [1.0, 2.0]
    state["rows"] = blank(state["rows"])
    assert versions_in(state) == [1.0, 2.0, None]
