"""Names of files: which are data, whose they are, and which are left over."""

from __future__ import annotations

from pathlib import PurePath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._formats.dcp import names as layout
from tests.properties import examples

ranks = st.integers(0, 5000)
generations = st.text("0123456789abcdef", min_size=8, max_size=8)


def data_file(rank: int, generation: str | None, number: int) -> str:
    """Our name of a data file; the name that stock gives it without a generation."""
    prefix = f"__{rank}_" if generation is None else layout.data_prefix(rank, generation)
    return f"{prefix}{number}{layout.DATA_SUFFIX}"


data_files = st.builds(data_file, ranks, st.none() | generations, st.integers(0, 99))
indexes = st.builds(layout.metadata_name, st.none() | ranks)
temporaries = st.builds(layout.temporary_name, indexes, generations) | indexes.map(lambda name: f"{name}.tmp")
# What people keep beside a checkpoint.
foreign = st.sampled_from(
    [
        "model.safetensors",
        "README",
        "notes.distcp",
        "__0.distcp",
        "__x_0.distcp",
        "__0_0.distcp.bak",
        "a__0_0.distcp",
        "__0_0_distcp",
        "__-1_0.distcp",
        "metadata",
        ".metadata.bak",
        ".metadata.tmp.old",
        "config.json",
        "__0_zzzzzzzz_0.distcp",
        "__0_0.metadata",
        "__.metadata",
    ]
)
folders = st.sampled_from(["", "/a/b/", "relative/", "/with.distcp/"])


def in_folder(folder: str, names) -> list[str]:
    return [f"{folder}{name}" for name in names]


def test_no_two_saves_share_a_generation():
    assert len({layout.new_generation() for _ in range(100)}) == 100


def test_a_generation_has_the_form_that_names_are_recognized_by():
    assert layout.is_data_file(data_file(0, layout.new_generation(), 0))


@settings(max_examples=examples(50))
@given(ranks, generations, st.integers(0, 99))
def test_our_data_files_are_recognized_as_data_of_their_rank_and_generation(rank, generation, number):
    name = data_file(rank, generation, number)
    assert layout.is_data_file(name)
    assert layout.names_of_generation([f"/folder/{name}"], generation) == [name]
    assert layout.stale_names_of_rank([name], [], rank, rank + 1) == [name]
    assert layout.stale_names_of_rank([name], [], rank + 1, rank + 2) == []


@pytest.mark.parametrize("name", ["__0_0.distcp", "__0_7.distcp", "__123_45.distcp"])
def test_data_files_of_stock_are_recognized(name):
    assert layout.is_data_file(name)


@settings(max_examples=examples(50))
@given(foreign | indexes | temporaries)
def test_other_files_are_not_taken_for_data(name):
    assert not layout.is_data_file(name)


@settings(max_examples=examples(50))
@given(ranks)
def test_a_ranks_own_index_names_its_rank_and_the_common_one_none(rank):
    assert layout.rank_of_index(layout.metadata_name(rank)) == rank
    assert layout.rank_of_index(layout.metadata_name(None)) is None
    assert layout.metadata_name(None) == ".metadata"
    assert layout.metadata_name(rank) == f"__{rank}.metadata"


@settings(max_examples=examples(50))
@given(foreign | data_files | temporaries)
def test_other_files_are_not_taken_for_an_index(name):
    assert layout.rank_of_index(name) is None


@settings(max_examples=examples(50))
@given(indexes, generations | st.uuids().map(str))
def test_a_temporary_index_is_never_taken_for_an_index(name, save_id):
    temporary = layout.temporary_name(name, save_id)
    assert temporary != layout.METADATA_NAME
    assert layout.rank_of_index(temporary) is None
    assert not layout.is_data_file(temporary)
    assert layout.stale_names([temporary], []) == [temporary]


@settings(max_examples=examples(50))
@given(ranks, generations | st.uuids().map(str))
def test_a_temporary_index_names_its_rank(rank, save_id):
    assert layout.rank_of_temporary_index(layout.temporary_name(layout.metadata_name(rank), save_id)) == rank
    assert layout.rank_of_temporary_index(layout.temporary_name(layout.metadata_name(None), save_id)) is None


@settings(max_examples=examples(50))
@given(foreign | data_files | indexes)
def test_other_files_are_not_taken_for_a_temporary_index(name):
    assert layout.rank_of_temporary_index(name) is None


@settings(max_examples=examples(50))
@given(
    st.lists(data_files | indexes | temporaries | foreign, unique=True, max_size=12),
    st.data(),
    folders,
)
def test_what_a_new_checkpoint_made_useless_is_everything_of_the_format_that_it_does_not_use(present, data, folder):
    in_use = data.draw(st.sets(st.sampled_from(present))) if present else set()
    stale = layout.stale_names(in_folder(folder, present), in_use)
    for name in present:
        is_of_the_format = (
            layout.is_data_file(name) or layout.rank_of_index(name) is not None or name.endswith("metadata.tmp")
        )
        is_of_the_format |= name.endswith(".tmp") and "metadata." in name
        assert (name in stale) == (is_of_the_format and name not in in_use), name
    assert set(stale) <= set(present)


@settings(max_examples=examples(50))
@given(st.lists(foreign, unique=True), folders)
def test_files_of_others_are_never_stale(present, folder):
    assert layout.stale_names(in_folder(folder, present), []) == []
    assert layout.stale_names_of_rank(in_folder(folder, present), [], 0, 1) == []


def test_the_index_itself_is_never_stale():
    assert layout.stale_names([".metadata", "/folder/.metadata"], []) == []


few_ranks = st.integers(0, 6)
parts_of_ranks = st.builds(data_file, few_ranks, st.none() | generations, st.integers(0, 9)) | st.builds(
    layout.temporary_name, st.builds(layout.metadata_name, st.none() | few_ranks), generations
)


@settings(max_examples=examples(50))
@given(st.lists(parts_of_ranks, unique=True, max_size=12), st.integers(1, 4), st.data())
def test_where_ranks_save_for_themselves_every_stale_file_is_removed_by_exactly_one_rank(present, world_size, data):
    in_use = data.draw(st.sets(st.sampled_from(present))) if present else set()
    removed = [
        name for rank in range(world_size) for name in layout.stale_names_of_rank(present, in_use, rank, world_size)
    ]
    assert sorted(removed) == sorted(set(present) - in_use)


@settings(max_examples=examples(50))
@given(st.lists(parts_of_ranks, unique=True), st.integers(1, 6))
def test_where_ranks_save_for_themselves_none_but_rank_0_touches_files_of_others(present, rank):
    for name in layout.stale_names_of_rank(present, [], rank, rank + 1):
        assert name.startswith((f"__{rank}_", f"__{rank}."))


@settings(max_examples=examples(50))
@given(st.lists(indexes, unique=True))
def test_where_ranks_save_for_themselves_indexes_in_place_are_not_stale(present):
    assert layout.stale_names_of_rank(present, [], 0, 1) == []


@settings(max_examples=examples(50))
@given(st.lists(data_files | indexes | temporaries | foreign, unique=True), generations, folders)
def test_the_files_of_a_save_are_told_from_all_others_by_its_generation(present, generation, folder):
    present = [name for name in present if generation not in name]
    mine = [data_file(rank, generation, number) for rank, number in [(0, 0), (0, 1), (3, 0)]]
    found = layout.names_of_generation(in_folder(folder, [*present, *mine]), generation)
    assert sorted(found) == sorted(mine)
    assert all(PurePath(name).name == name for name in found)


@settings(max_examples=examples(50))
@given(
    st.lists(data_files | indexes | temporaries | foreign, unique=True, max_size=8),
    st.lists(st.tuples(generations, st.booleans()), unique_by=lambda save: save[0], max_size=4),
    folders,
)
def test_data_of_a_save_that_has_written_since_is_spared_and_all_else_is_not(others, saves, folder):
    ids = [generation for generation, _ in saves]
    others = [name for name in others if not any(generation in name for generation in ids)]
    old = [data_file(rank, generation, 0) for generation in ids for rank in (0, 1)]
    fresh = [data_file(2, generation, 0) for generation, still_writes in saves if still_writes]
    before = [*others, *old]
    spared = {data_file(rank, generation, 0) for generation, still_writes in saves if still_writes for rank in (0, 1)}
    removable = layout.without_running_saves(before, before, in_folder(folder, [*before, *fresh]))
    assert removable == [name for name in before if name not in spared]


def test_files_of_stock_have_no_generation_and_spare_nothing():
    before, now = ["__0_0.distcp", "__0_1.distcp"], ["__0_0.distcp", "__0_1.distcp", "__1_0.distcp"]
    assert layout.without_running_saves(before, before, now) == before
