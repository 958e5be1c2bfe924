"""The local disk: names, permissions, folders made by several at once, and renames that leave no gap."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystem as StockFileSystem

from holdfast._stores.local_filesystem import FileSystem
from tests.properties import examples
from tests.rank_pool import RankPool

fs = FileSystem()


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- permissions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o027, 0o077, 0o002])
def test_files_and_folders_get_the_permissions_that_the_umask_leaves(tmp_path, mask):
    with umask(mask):
        fs.mkdir(tmp_path / "a" / "b")
        with fs.create_stream(tmp_path / "a" / "b" / "file", "wb") as stream:
            stream.write(b"content")
    assert mode_of(tmp_path / "a") == mode_of(tmp_path / "a" / "b") == 0o777 & ~mask
    assert mode_of(tmp_path / "a" / "b" / "file") == 0o666 & ~mask


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Run without the rights of the superuser, if we are it."""
    if os.getuid() != 0:
        yield
        return
    nobody = 65534
    os.setresuid(nobody, nobody, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def read_where_nothing_may_be_written():
    folder = Path(tempfile.mkdtemp(prefix="read-only-"))
    try:
        checkpoint = folder / "checkpoint"
        checkpoint.mkdir()
        (checkpoint / ".metadata").write_bytes(b"content")
        (checkpoint / ".metadata").chmod(0o444)
        for path in (checkpoint, folder):
            path.chmod(0o555)
        with as_nobody():
            with fs.create_stream(checkpoint / ".metadata", "rb") as stream:
                content = stream.read()
            try:
                with fs.create_stream(checkpoint / "new", "wb"):
                    refused = False
            except PermissionError:
                refused = True
            return {
                "content": content,
                "exists": fs.exists(checkpoint / ".metadata"),
                "names": [Path(path).name for path in fs.ls(checkpoint)],
                "may read": fs.validate_for_reading(str(checkpoint)),
                "refused": refused,
            }
    finally:
        for path in (folder, checkpoint):
            path.chmod(0o755)
        shutil.rmtree(folder)


def test_reading_needs_no_permission_to_write(ranks: RankPool):
    (seen,) = ranks(1).run(read_where_nothing_may_be_written, process_group=False)
    assert seen == {
        "content": b"content",
        "exists": True,
        "names": [".metadata"],
        "may read": True,
        "refused": True,
    }


# --- which ids are paths -----------------------------------------------------------------------------------------


def both_validate(checkpoint_id) -> bool:
    answer = FileSystem.validate_checkpoint_id(checkpoint_id)
    assert answer == StockFileSystem.validate_checkpoint_id(checkpoint_id)
    return answer


def test_a_path_below_a_folder_that_can_be_written_to_is_taken(tmp_path):
    assert both_validate(str(tmp_path))
    assert both_validate(str(tmp_path / "not" / "there" / "yet"))
    assert both_validate("relative")
    assert both_validate(PurePosixPath(tmp_path))


def test_a_url_is_not_a_path():
    for url in ("s3://bucket/checkpoint", "memory://x", "file:///tmp/x"):
        assert not both_validate(url)
        assert not FileSystem.validate_for_reading(url)


def test_a_path_object_is_always_taken():
    assert both_validate(Path("/no/such/place"))
    assert FileSystem.validate_for_reading(Path("/no/such/place"))


def test_the_root_itself_is_not_taken():
    assert not both_validate("/")


def ids_without_write_access():
    with as_nobody():
        place = "/" if os.access("/", os.W_OK) else "/no/such/place"
        return both_validate(place), FileSystem.validate_for_reading(place)


def test_a_path_without_a_folder_that_can_be_written_to_is_not_taken_for_writing(ranks: RankPool):
    assert ranks(1).run(ids_without_write_access, process_group=False) == [(False, True)]


@settings(max_examples=examples(50))
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12))
def test_ids_are_taken_as_stock_takes_them(text):
    both_validate(text)


# --- folders -----------------------------------------------------------------------------------------------------


def make_the_same_folders(root: str):
    made = []
    for round_ in range(15):
        path = Path(root) / f"{round_}" / "a" / "b" / "c"
        dist.barrier()
        fs.mkdir(path)
        made.append(path.is_dir())
    return all(made)


def test_several_processes_may_make_the_same_folders_at_once(ranks: RankPool, tmp_path):
    assert ranks(4).run(make_the_same_folders, str(tmp_path)) == [True] * 4
    assert len(list(tmp_path.glob("*/a/b/c"))) == 15


def test_making_a_folder_that_exists_is_fine(tmp_path):
    fs.mkdir(tmp_path)
    fs.mkdir(str(tmp_path / "a" / "b"))
    (tmp_path / "a" / "b" / "file").touch()
    fs.mkdir(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "file").exists()


def test_a_relative_folder_is_made_where_we_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fs.mkdir("a/b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_folder_behind_a_link_is_used(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    fs.mkdir(tmp_path / "link")
    fs.mkdir(tmp_path / "link" / "sub")
    assert (tmp_path / "real" / "sub").is_dir()


def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for blocked in ("file", "dangling"):
        with pytest.raises(FileExistsError):
            fs.mkdir(tmp_path / blocked)
    with pytest.raises(OSError, match="file"):
        fs.mkdir(tmp_path / "file" / "sub")


def test_a_folder_can_be_made_durable(tmp_path):
    fs.sync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        fs.sync_folder(tmp_path / "gone")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        fs.sync_folder(tmp_path / "file")


# --- files -------------------------------------------------------------------------------------------------------


class FolderEvents:
    """What the kernel reports to happen to the names in a folder."""

    CREATE, DELETE, MOVED_FROM, MOVED_TO = 0x100, 0x200, 0x40, 0x80

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.inotify_init1(os.O_NONBLOCK)
        kinds = self.CREATE | self.DELETE | self.MOVED_FROM | self.MOVED_TO
        assert libc.inotify_add_watch(self.descriptor, os.fsencode(folder), kinds) >= 0

    def read(self) -> list[tuple[int, str]]:
        data = os.read(self.descriptor, 65536)
        os.close(self.descriptor)
        events = []
        while data:
            _, kind, _, length = struct.unpack_from("iIII", data)
            events.append((kind, data[16 : 16 + length].rstrip(b"\0").decode()))
            data = data[16 + length :]
        return events


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel by inotify")
def test_a_rename_replaces_a_file_without_a_moment_in_which_there_is_none(tmp_path):
    old, new = tmp_path / "index", tmp_path / "index.tmp"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    events = FolderEvents(tmp_path)
    fs.rename(new, old)
    assert old.read_bytes() == b"new"
    assert not new.exists()
    assert events.read() == [(FolderEvents.MOVED_FROM, "index.tmp"), (FolderEvents.MOVED_TO, "index")]


def test_whoever_has_a_replaced_file_open_keeps_the_old_content(tmp_path):
    (tmp_path / "index").write_bytes(b"old")
    (tmp_path / "index.tmp").write_bytes(b"new")
    with fs.create_stream(tmp_path / "index", "rb") as stream:
        fs.rename(str(tmp_path / "index.tmp"), str(tmp_path / "index"))
        assert stream.read() == b"old"
    with fs.create_stream(tmp_path / "index", "rb") as stream:
        assert stream.read() == b"new"


def test_renaming_what_is_not_there_leaves_the_target_alone(tmp_path):
    (tmp_path / "index").write_bytes(b"old")
    with pytest.raises(FileNotFoundError):
        fs.rename(tmp_path / "gone", tmp_path / "index")
    assert (tmp_path / "index").read_bytes() == b"old"


def test_files_are_written_read_listed_and_removed_by_strings_and_paths_alike(tmp_path):
    for kind in (str, Path):
        folder = fs.init_path(kind(tmp_path))
        file = fs.concat_path(kind(folder), "file")
        assert file == Path(tmp_path) / "file"
        assert not fs.exists(kind(file))
        with fs.create_stream(kind(file), "wb") as stream:
            stream.write(b"content")
        with fs.create_stream(kind(file), "rb") as stream:
            assert stream.read() == b"content"
        assert fs.exists(kind(file))
        assert fs.ls(kind(folder)) == [str(file)]
        fs.rm_file(kind(file))
        assert fs.ls(kind(folder)) == []
        with pytest.raises(FileNotFoundError):
            fs.rm_file(kind(file))


def test_a_stream_is_closed_when_its_block_ends(tmp_path):
    with fs.create_stream(tmp_path / "file", "wb") as stream:
        pass
    assert stream.closed
    with pytest.raises(KeyError), fs.create_stream(tmp_path / "file", "rb") as stream:
        raise KeyError
    assert stream.closed
