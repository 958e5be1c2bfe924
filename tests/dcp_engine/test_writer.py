"""What the writer of DCP files does when it is driven step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast.dcp as dcp
from holdfast._dcp.data_files import StoredResult
from holdfast._formats.dcp.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)
from holdfast._stores.local_filesystem import FileSystem
from holdfast.dcp.filesystem import FileSystemWriter
from holdfast.errors import CheckpointException, IncompleteSaveError


def written_by(rank: int, folder: Path, state: dict[str, Any]) -> FileSystemWriter:
    """A writer of a rank that saves for itself, with its index written and not yet named."""
    writer, planner = FileSystemWriter(folder), dcp.DefaultSavePlanner()
    writer.share_save("5" * 32)
    planner.set_up_planner(state, writer.storage_meta(), rank == 0)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    results = writer.write_data(planner.finish_plan(writer.prepare_global_plan(plans)[0]), planner).value()
    writer.finish(metadata, [results])
    return writer


class CannotRename(FileSystem):
    def rename(self, path: Any, new_path: Any) -> None:
        raise OSError("the disk is gone")


def test_a_rank_that_cannot_name_its_index_after_the_commit_keeps_it_for_readers(tmp_path):
    first = written_by(0, tmp_path, {"a": torch.ones(2)})
    second = written_by(1, tmp_path, {"b": torch.ones(3)})
    first.commit_rank_local(2)
    second.fs = CannotRename()

    with pytest.raises(OSError, match="the disk is gone"):
        second.finish_rank_local(2)

    state = {"a": torch.zeros(2), "b": torch.zeros(3)}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state["a"].tolist() == [1, 1]
    assert state["b"].tolist() == [1, 1, 1]


def test_a_commit_of_rank_0_that_fails_leaves_nothing_to_load(tmp_path):
    first = written_by(0, tmp_path, {"a": torch.ones(2)})
    first.fs = CannotRename()

    with pytest.raises(OSError, match="the disk is gone"):
        first.commit_rank_local(1)

    with pytest.raises(CheckpointException, match="no checkpoint at"):
        dcp.load({"a": torch.zeros(2)}, checkpoint_id=tmp_path)


def test_chunks_of_one_tensor_that_were_written_in_different_dtypes_are_not_committed(tmp_path):
    chunks = [ChunkStorageMetadata(torch.Size([start]), torch.Size([2])) for start in (0, 2)]
    metadata = Metadata({"w": TensorStorageMetadata(TensorProperties(), torch.Size([4]), chunks)})
    results = [
        StoredResult(MetadataIndex("w", chunk.offsets), 8, _StorageInfo("__0_0.distcp", 8 * n, 8), dtype)
        for n, (chunk, dtype) in enumerate(zip(chunks, [torch.float16, torch.bfloat16], strict=True))
    ]
    (tmp_path / "__0_0.distcp").write_bytes(bytes(16))
    writer = FileSystemWriter(tmp_path)
    writer.set_up_storage_writer(True, rank=0)

    with pytest.raises(IncompleteSaveError, match=r"'w' as .*bfloat16.*float16"):
        writer.finish(metadata, [results])

    assert not (tmp_path / ".metadata").exists()


def test_an_error_while_reading_is_not_its_own_cause(tmp_path):
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])

    with pytest.raises(CheckpointException) as raised:
        dcp.load({"w": torch.zeros(4)}, checkpoint_id=tmp_path)

    (error, _) = raised.value.failures[0]
    assert error.__cause__ is not error
    assert "None of the 1 item(s)" in str(error)
