"""One index out of the indexes that each rank wrote for itself."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._dcp.index_files import merge_rank_metadata, shared_save_id
from holdfast._formats.dcp.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    Seal,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)
from holdfast.errors import RankDisagreementError
from tests.properties import examples

SEAL = Seal(*[0] * len(Seal._fields))


def info(rank: int, *, ours: bool = True) -> _StorageInfo:
    return _StorageInfo(f"__{rank}_0.distcp", 0, 1, None, SEAL if ours else None)


def tensor(size, *boxes) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(size), chunks)


def part(rank: int, entries, *, save_id: str = "one save", ours: bool = True) -> Metadata:
    storage = {}
    for key, entry in entries.items():
        offsets = [c.offsets for c in entry.chunks] if isinstance(entry, TensorStorageMetadata) else [None]
        storage.update({MetadataIndex(key, offset): info(rank, ours=ours) for offset in offsets})
    paths = {key: (key,) for key in entries}
    return Metadata(entries, paths, storage, StorageMeta(save_id=save_id), "1.0.0")


def file_of(metadata: Metadata, key: str, offset=None) -> str:
    return metadata.storage_data[MetadataIndex(key, offset)].relative_path


def sharded(rank: int, ranks: int, length: int = 2) -> TensorStorageMetadata:
    return tensor([ranks * length], ([rank * length], [length]))


@settings(max_examples=examples(50))
@given(st.integers(1, 5), st.data())
def test_every_ranks_chunks_are_in_the_merged_index_once_and_lead_to_its_file(ranks, data):
    own = data.draw(st.integers(0, ranks - 1))
    parts = {
        rank: part(
            rank,
            {"sharded": sharded(rank, ranks), "same": tensor([3], ([0], [3])), f"only{rank}": BytesStorageMetadata()},
        )
        for rank in data.draw(st.permutations(range(ranks)))
    }
    merged = merge_rank_metadata(parts, own)
    chunks = merged.state_dict_metadata["sharded"].chunks
    assert sorted(tuple(chunk.offsets) for chunk in chunks) == [(2 * rank,) for rank in range(ranks)]
    for rank in range(ranks):
        assert file_of(merged, "sharded", [2 * rank]) == f"__{rank}_0.distcp"
        assert file_of(merged, f"only{rank}") == f"__{rank}_0.distcp"
        assert merged.planner_data[f"only{rank}"] == (f"only{rank}",)
    assert len(merged.state_dict_metadata["same"].chunks) == 1
    assert file_of(merged, "same", [0]) == f"__{own}_0.distcp"


@settings(max_examples=examples(50))
@given(st.integers(2, 4), st.integers(4, 9))
def test_a_rank_that_wrote_no_part_gets_the_copy_of_the_lowest_one(ranks, own):
    parts = {rank: part(rank, {"same": BytesStorageMetadata()}) for rank in reversed(range(ranks))}
    assert file_of(merge_rank_metadata(parts, own), "same") == "__0_0.distcp"


def test_the_parts_are_not_changed():
    parts = {rank: part(rank, {"t": sharded(rank, 2)}) for rank in range(2)}
    before = copy.deepcopy(parts)
    merged = merge_rank_metadata(parts, 0)
    merged.state_dict_metadata["t"].chunks.clear()
    merged.storage_data.clear()
    merged.planner_data.clear()
    assert parts == before


def test_what_is_common_to_all_parts_is_kept():
    merged = merge_rank_metadata({0: part(0, {"v": BytesStorageMetadata()})}, 0)
    assert merged.version == "1.0.0"
    assert merged.storage_meta.save_id == "one save"


def test_parts_without_paths_are_merged_too():
    parts = {rank: part(rank, {"t": sharded(rank, 2)}) for rank in range(2)}
    for each in parts.values():
        each.planner_data = None
    assert len(merge_rank_metadata(parts, 0).state_dict_metadata["t"].chunks) == 2


@pytest.mark.parametrize("own", [0, 1])
def test_where_ranks_have_different_things_under_one_key_each_gets_its_own(own):
    parts = {
        0: part(0, {"kind": BytesStorageMetadata(), "shape": tensor([4], ([0], [4])), "dims": tensor([4], ([0], [4]))}),
        1: part(
            1,
            {
                "kind": tensor([2], ([0], [2])),
                "shape": tensor([6], ([0], [3]), ([3], [3])),
                "dims": tensor([2, 2], ([0, 0], [2, 2])),
            },
        ),
    }
    merged = merge_rank_metadata(parts, own)
    for key in ("kind", "shape", "dims"):
        assert merged.state_dict_metadata[key] == parts[own].state_dict_metadata[key], key


def test_the_save_of_rank_0_counts_and_parts_of_another_are_left_out():
    parts = {rank: part(rank, {"t": sharded(rank, 3)}, save_id=f"save{rank == 1}") for rank in range(3)}
    for own in range(3):
        merged = merge_rank_metadata(parts, own)
        assert merged.storage_meta.save_id == "saveFalse"
        offsets = [tuple(chunk.offsets) for chunk in merged.state_dict_metadata["t"].chunks]
        assert sorted(offsets) == [(0,), (4,)]
        assert MetadataIndex("t", [2]) not in merged.storage_data


def test_parts_of_different_saves_without_one_of_rank_0_are_refused_by_rank():
    parts = {rank: part(rank, {"t": sharded(rank, 3)}, save_id=f"save{rank}") for rank in (1, 2)}
    with pytest.raises(RankDisagreementError, match="different saves") as error:
        merge_rank_metadata(parts, 1)
    assert error.value.views == {1: "save save1", 2: "save save2"}
    same = {rank: part(rank, {"t": sharded(rank, 3)}) for rank in (1, 2)}
    assert len(merge_rank_metadata(same, 1).state_dict_metadata["t"].chunks) == 2


def test_only_our_own_parts_have_an_id_in_common():
    entries = {"v": BytesStorageMetadata()}
    assert shared_save_id(part(0, entries, save_id="one")) == "one"
    assert shared_save_id(part(0, entries, save_id="one", ours=False)) is None
    assert shared_save_id(part(0, {}, save_id="one")) is None
    without = part(0, entries)
    without.storage_meta = None
    assert shared_save_id(without) is None


def test_parts_by_other_writers_have_an_id_per_rank_and_are_accepted():
    parts = {rank: part(rank, {"t": sharded(rank, 3)}, save_id=f"save{rank}", ours=False) for rank in range(3)}
    assert len(merge_rank_metadata(parts, 0).state_dict_metadata["t"].chunks) == 3


def test_a_rank_that_had_nothing_to_write_does_not_matter():
    parts = {0: part(0, {"t": tensor([1], ([0], [1]))}), 1: part(1, {}, save_id="another")}
    assert list(merge_rank_metadata(parts, 1).state_dict_metadata) == ["t"]


def test_metadata_without_storage_meta_is_accepted():
    old = part(0, {"v": BytesStorageMetadata()})
    old.storage_meta = None
    assert list(merge_rank_metadata({0: old}, 0).state_dict_metadata) == ["v"]
