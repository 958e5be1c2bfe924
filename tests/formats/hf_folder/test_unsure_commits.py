"""A Hugging Face folder whose commit failed: what surely does not count is removed, and nothing else."""

from __future__ import annotations

import errno
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import holdfast.dcp as dcp
from holdfast._formats.hf_folder.names import COMMIT_NAME
from holdfast._stores.local_filesystem import FileSystem
from holdfast.dcp._consolidate_hf_safetensors import consolidate_safetensors_files
from holdfast.dcp.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from holdfast.errors import CheckpointException

FAULTS = ["before", "after", "without an answer"]
rename_file = FileSystem.rename


def failing_rename(fault: str) -> Any:
    def rename(self: FileSystem, path: Any, new_path: Any) -> None:
        if Path(new_path).name != COMMIT_NAME:
            rename_file(self, path, new_path)
            return
        if fault == "after":
            rename_file(self, path, new_path)
        raise TimeoutError("no answer") if fault == "without an answer" else OSError(errno.EIO, "Input/output error")

    return mock.patch.object(FileSystem, "rename", rename)


def save(number: int, path: Path, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = HuggingFaceStorageWriter(path, **options)
        dcp.save({"a": torch.full((5,), float(number))}, storage_writer=writer, no_dist=True)


def found_in(path: Path) -> float:
    state = {"a": torch.zeros(5)}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
    return state["a"][0].item()


def names_in(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("options", [{}, {"save_distributed": True}])
def test_a_save_removes_its_files_if_it_surely_is_not_committed(tmp_path, fault, options):
    save(1, tmp_path, **options)
    before = names_in(tmp_path)
    with failing_rename(fault), pytest.raises(CheckpointException):
        save(2, tmp_path, **options)
    assert found_in(tmp_path) == (2 if fault == "after" else 1)
    assert (names_in(tmp_path) == before) == (fault == "before")
    save(3, tmp_path, **options)
    assert found_in(tmp_path) == 3
    assert names_in(tmp_path) == before


@pytest.mark.parametrize("fault", FAULTS)
def test_model_files_made_of_parts_are_removed_if_they_surely_are_not_committed(tmp_path, fault):
    parts, model = tmp_path / "parts", tmp_path / "model"
    save(1, model)
    before = names_in(model)
    save(2, parts, save_distributed=True)
    with failing_rename(fault), pytest.raises(OSError, match=r"no answer|Input/output"):
        consolidate_safetensors_files(parts, model, {"a": 1})
    assert found_in(model) == (2 if fault == "after" else 1)
    assert (names_in(model) == before) == (fault == "before")
