"""Folders of checkpoints: what all roots do, and what only folders of a disk can do."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from holdfast.stores import LocalRoot, MemoryRoot, MemoryStore, Root, root_at
from holdfast.testing import RootConformance


class TestLocalRoot(RootConformance):
    def make_root(self, folder: Path) -> Root:
        return LocalRoot(folder / "runs" / "a")


class TestLocalRootAtAUrl(RootConformance):
    def make_root(self, folder: Path) -> Root:
        return root_at((folder / "100% größe").as_uri())


class TestMemoryRoot(RootConformance):
    def make_root(self, folder: Path) -> Root:
        return MemoryRoot(str(folder))


def test_a_relative_path_is_that_of_now(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = root_at("runs/a")
    monkeypatch.chdir("/")
    root.child("step-1").put("data", b"0123")
    assert (tmp_path / "runs" / "a" / "step-1" / "data").read_bytes() == b"0123"


def test_a_root_of_ones_own_is_taken_as_it_is(tmp_path):
    root = LocalRoot(tmp_path)
    assert root_at(root) is root


@pytest.mark.parametrize(
    ("place", "error", "text"),
    [
        (MemoryStore("a-store"), TypeError, "one checkpoint"),
        ("carrier-pigeon://loft", ValueError, "no root for carrier-pigeon://loft"),
        ("", ValueError, "empty"),
        (7, TypeError, "not 7"),
    ],
)
def test_what_is_no_root_is_refused(place, error, text):
    with pytest.raises(error, match=text):
        root_at(place)


def test_a_link_to_a_folder_is_a_sub_folder_that_is_never_removed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-1").symlink_to(elsewhere)
    (tmp_path / "run" / "to-nothing").symlink_to(tmp_path / "nowhere")
    root = LocalRoot(tmp_path / "run")
    assert root.children() == ["step-1"]
    assert not root.remove("step-1")
    assert elsewhere.is_dir()
    assert (tmp_path / "run" / "step-1").is_symlink()


def test_a_file_is_not_removed_in_place_of_a_folder(tmp_path):
    (tmp_path / "step-1").write_text("a file")
    assert LocalRoot(tmp_path).remove("step-1")
    assert (tmp_path / "step-1").read_text() == "a file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do anything")
def test_a_folder_that_may_not_be_removed_is_an_error(tmp_path):
    (tmp_path / "run" / "step-1").mkdir(parents=True)
    (tmp_path / "run").chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            LocalRoot(tmp_path / "run").remove("step-1")
    finally:
        (tmp_path / "run").chmod(0o700)


def test_free_space_is_that_of_the_disk_before_the_folder_exists(tmp_path):
    free = LocalRoot(tmp_path / "not" / "yet").free_bytes()
    total = shutil.disk_usage(tmp_path).total
    assert free is not None
    assert 0 < free <= total


def test_stores_below_a_sub_folder_in_memory_count_as_that_sub_folder(tmp_path):
    MemoryStore(f"{tmp_path}/run/step-1/part").put("data", b"")
    root = MemoryRoot(f"{tmp_path}/run")
    assert root.children() == ["step-1"]
    assert not root.remove("step-1")
