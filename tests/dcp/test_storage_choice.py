"""Which storage a path or URL gets when none is given."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast.dcp as dcp
from holdfast._stores.fsspec_filesystem import FsspecFileSystem
from holdfast._stores.local_filesystem import FileSystem
from holdfast.dcp._storage_utils import _storage_setup
from holdfast.dcp.fsspec_filesystem import FsspecReader, FsspecWriter
from holdfast.errors import MissingPackageError


def test_local_paths_get_the_local_storage_and_urls_that_of_fsspec(tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path)):
        assert type(_storage_setup(None, path)) is dcp.FileSystemWriter
        assert type(_storage_setup(None, path, reader=True)) is dcp.FileSystemReader
    assert isinstance(_storage_setup(None, "memory://a/b"), FsspecWriter)
    assert isinstance(_storage_setup(None, "memory://a/b", reader=True), FsspecReader)


def test_a_path_that_the_local_storage_refuses_is_offered_to_fsspec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (dcp.FileSystemWriter, dcp.FileSystemReader):
        # FsspecWriter and FsspecReader answer for themselves.
        monkeypatch.setattr(kind, "validate_checkpoint_id", classmethod(lambda cls, checkpoint_id: False))
    path = str(tmp_path / "checkpoint")

    writer, reader = _storage_setup(None, path), _storage_setup(None, path, reader=True)

    assert isinstance(writer, FsspecWriter)
    assert isinstance(reader, FsspecReader)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=path)
    state = {"w": torch.zeros(2)}
    dcp.load(state, checkpoint_id=path)
    assert state["w"].tolist() == [1, 1]
    assert (tmp_path / "checkpoint" / ".metadata").exists()
    with pytest.raises(RuntimeError, match="Cannot detect which StorageReader or StorageWriter to use"):
        _storage_setup(None, tmp_path)  # a Path is never a URL


def test_a_path_that_cannot_be_written_to_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileSystem, "validate_checkpoint_id", classmethod(lambda cls, checkpoint_id: False))

    with pytest.raises(RuntimeError, match="Give a path below a folder that exists and can be written to"):
        _storage_setup(None, "/read/only")


def test_the_public_module_and_the_former_one_have_the_same_storages(tmp_path: Path) -> None:
    from holdfast.dcp import _fsspec_filesystem, fsspec_filesystem

    assert fsspec_filesystem._FileSystem is _fsspec_filesystem.FileSystem is FsspecFileSystem
    assert issubclass(_fsspec_filesystem.FsspecWriter, fsspec_filesystem.FsspecWriter)
    assert dcp.FsspecReader is fsspec_filesystem.FsspecReader is _fsspec_filesystem.FsspecReader
    new = dcp.FsspecWriter("memory://x", True, True, 1, 1000, True, False)
    assert (new.cache_staged_state_dict, new.overwrite) == (True, False)
    former = _fsspec_filesystem.FsspecWriter("memory://x", True, True, 1, 1000, False)
    assert (former.cache_staged_state_dict, former.overwrite) == (False, False)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        fsspec_filesystem.missing  # noqa: B018


def test_without_fsspec_the_package_works_and_urls_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "holdfast._stores.fsspec_filesystem", None)
    storages: list[Any] = [dcp.FsspecWriter, dcp.FsspecReader]

    for kind in storages:
        assert not kind.validate_checkpoint_id("memory://a")
        with pytest.raises(MissingPackageError, match=r"pip install 'holdfast\[fsspec\]'"):
            kind("memory://a")
    with pytest.raises(RuntimeError, match=r"Cannot detect.*pip install 'holdfast\[fsspec\]'"):
        _storage_setup(None, "memory://a")
