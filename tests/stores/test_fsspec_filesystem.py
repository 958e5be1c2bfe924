"""File systems of fsspec: what holds for memory, a disk and a real S3 server, and what each does its own way."""

from __future__ import annotations

import errno
import gc
import os
import zipfile
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._stores.durable_files import flush_to_disk
from holdfast._stores.fsspec_filesystem import FsspecFileSystem
from tests import s3_server

needs_s3 = pytest.mark.skipif(bool(s3_server.MISSING), reason=s3_server.WHY_SKIPPED)


class Place:
    """A folder of a file system under test, and a second, independent view of it."""

    def __init__(self, url: str, options: dict[str, Any], other: Any) -> None:
        self.files = FsspecFileSystem()
        self.folder = self.files.init_path(url, **options)
        self.other = other
        self.files.mkdir(self.folder)

    def at(self, name: str) -> str:
        return self.files.concat_path(self.folder, name)

    def write(self, name: str, content: bytes) -> None:
        with self.files.create_stream(self.at(name), "wb") as stream:
            stream.write(content)

    def read(self, name: str) -> bytes:
        with self.files.create_stream(self.at(name), "rb") as stream:
            return stream.read()

    def names(self) -> list[str]:
        return sorted(path.rsplit("/", 1)[1] for path in self.files.ls(self.folder))


@pytest.fixture(scope="module")
def bucket() -> s3_server.Bucket:
    return s3_server.new_bucket()


@pytest.fixture(params=["memory", "file", pytest.param("s3", marks=needs_s3)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "memory":
        return Place(f"memory://{uuid4().hex}/a b/c", {}, fsspec.filesystem("memory"))
    if request.param == "file":
        return Place(f"file://{tmp_path}/a b/c", {}, fsspec.filesystem("file"))
    bucket = request.getfixturevalue("bucket")
    return Place(bucket.url(uuid4().hex, "a b", "c"), bucket.options, bucket.client())


# --- the contract ------------------------------------------------------------------------------------------------


def test_files_are_written_read_listed_and_deleted(place):
    place.write("one", b"1")
    place.write("two", b"22" * 100_000)
    assert place.read("one") == b"1"
    assert place.read("two") == b"22" * 100_000
    assert place.names() == ["one", "two"]
    assert place.files.exists(place.at("one"))
    place.files.rm_file(place.at("one"))
    assert not place.files.exists(place.at("one"))
    assert place.names() == ["two"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENFILE])
@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_what_cannot_be_asked_for_is_not_called_absent(tmp_path, protocol, number, monkeypatch):
    url = f"file://{tmp_path}/c" if protocol == "file" else f"memory://{uuid4().hex}/c"
    place = Place(url, {}, fsspec.filesystem(protocol))
    place.write("one", b"1")

    def info(self, path, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(type(place.files.fs), "info", info)
    with pytest.raises(OSError, match="one") as raised:
        place.files.exists(place.at("one"))
    assert raised.value.errno == number


def test_the_folder_exists_once_it_holds_a_file_and_others_do_not(place):
    place.write("one", b"1")
    assert place.files.exists(place.folder)
    assert not place.files.exists(place.folder + "-other")
    with pytest.raises(FileNotFoundError):
        place.files.ls(place.folder + "-other")


def test_reading_what_is_not_there_is_a_file_not_found_error(place):
    with pytest.raises(FileNotFoundError), place.files.create_stream(place.at("none"), "rb"):
        pass


def test_renaming_replaces(place):
    place.write("old", b"old")
    place.write("new", b"new")
    place.files.rename(place.at("new"), place.at("old"))
    assert place.names() == ["old"]
    assert place.read("old") == b"new"


def test_putting_makes_and_replaces(place):
    for content in (b"first and longer", b"second"):
        place.files.put(place.at("whole"), content)
        assert place.read("whole") == content


def test_a_file_is_not_a_folder(place):
    place.write("file", b"1")
    with pytest.raises(NotADirectoryError):
        place.files.ls(place.at("file"))


def test_folders_below_are_listed_by_name(place):
    place.files.mkdir(place.at("below"))
    place.write("below/file", b"1")
    assert place.names() == ["below"]


def test_a_file_whose_writing_fails_is_not_there(place):
    def write() -> None:
        with place.files.create_stream(place.at("part"), "wb") as stream:
            stream.write(b"x" * 1000)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    gc.collect()  # the finaliser of an upload would complete it
    assert not place.files.exists(place.at("part"))
    assert not place.other.exists(place.files.inner(place.at("part")))


SEEN = {
    "a listing": lambda place: place.names() == ["mine", "theirs"],
    "a file that came": lambda place: place.files.exists(place.at("theirs")),
    "a file that went": lambda place: not place.files.exists(place.at("gone")),
    "a file that grew": lambda place: place.read("mine") == b"much longer now",
}


@pytest.mark.parametrize("what", SEEN)
def test_what_others_did_is_seen_although_fsspec_remembers(place, what):
    place.write("mine", b"short")
    place.write("gone", b"1")
    folder = place.files.inner(place.folder)
    assert len(place.files.fs.ls(folder, detail=False)) == 2  # from now on fsspec could answer from memory
    place.other.pipe_file(f"{folder}/theirs", b"1")
    place.other.pipe_file(f"{folder}/mine", b"much longer now")
    place.other.rm_file(f"{folder}/gone")
    assert SEEN[what](place)


def test_flushing_a_stream_never_syncs_the_whole_machine(place, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "sync", lambda: pytest.fail("os.sync"))
    monkeypatch.setattr(os, "fsync", synced.append)
    with place.files.create_stream(place.at("file"), "wb") as stream:
        stream.write(b"1")
        flush_to_disk(stream)
    assert len(synced) == (1 if place.folder.startswith("file:") else 0)
    assert place.read("file") == b"1"


def test_it_is_known_how_a_file_is_replaced_in_one_step(place):
    assert place.files.puts_atomically == (not place.folder.startswith("file:"))


class MovesItsOwnWay(type(fsspec.filesystem("memory"))):  # type: ignore[misc]
    protocol = ("gs", "gcs")

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("it is no rename")


@pytest.mark.parametrize("protocol", ["gs", "dir"])
def test_an_object_store_that_can_move_objects_still_does_not_rename(protocol):
    files = FsspecFileSystem()
    files.fs = MovesItsOwnWay() if protocol == "gs" else fsspec.filesystem("dir", path="/", fs=MovesItsOwnWay())
    assert files.puts_atomically


def test_a_folder_of_a_disk_renames_as_the_disk_does(tmp_path):
    files = FsspecFileSystem()
    files.fs = fsspec.filesystem("dir", path=str(tmp_path), fs=fsspec.filesystem("file"))
    assert not files.puts_atomically


# --- paths -------------------------------------------------------------------------------------------------------

names = st.text("ab.-_=+é #", min_size=1, max_size=8).map(str.strip).filter(lambda name: name not in ("", ".", ".."))


@given(st.lists(names, min_size=1, max_size=4), names)
def test_paths_of_any_depth_and_spelling_lead_to_the_same_file(parts, name):
    root = uuid4().hex
    files = FsspecFileSystem()
    plain = files.init_path("/".join([f"memory://{root}", *parts]))
    assert files.init_path(plain + "/") == plain
    files.put(files.concat_path(plain, name), b"content")
    assert fsspec.filesystem("memory").cat_file("/".join([f"/{root}", *parts, name])) == b"content"
    assert files.ls(plain) == ["/".join([f"/{root}", *parts, name])]
    assert FsspecFileSystem().init_path(plain) == plain


def test_the_root_of_a_file_system_is_a_folder_too():
    files = FsspecFileSystem()
    root = files.init_path("memory://")
    name = uuid4().hex
    files.put(files.concat_path(root, name), b"1")
    assert fsspec.filesystem("memory").exists(f"/{name}")
    assert f"/{name}" in files.ls(root)
    files.rm_file(files.concat_path(root, name))


def test_a_folder_whose_name_only_begins_alike_is_another_one():
    files = FsspecFileSystem()
    root = f"memory://{uuid4().hex}"
    files.init_path(f"{root}/step-1")
    files.put(f"{root}/step-10/file", b"1")
    assert files.exists(f"{root}/step-10/file")
    assert not files.exists(f"{root}/step-1/file")


@pytest.mark.parametrize("cache", ["simplecache", "filecache", "blockcache"])
def test_chained_urls_are_read(tmp_path, cache):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"content")
    files = FsspecFileSystem()
    folder = files.init_path(f"{cache}::file://{tmp_path}/folder")
    with files.create_stream(files.concat_path(folder, "file"), "rb") as stream:
        assert stream.read() == b"content"
    assert files.exists(files.concat_path(folder, "file"))
    assert [path.rsplit("/", 1)[1] for path in files.ls(folder)] == ["file"]


def test_folders_inside_of_archives_are_read(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("step-1/file", b"content")
    files = FsspecFileSystem()
    folder = files.init_path(f"zip://step-1::file://{tmp_path}/a.zip")
    with files.create_stream(files.concat_path(folder, "file"), "rb") as stream:
        assert stream.read() == b"content"
    assert files.ls(folder) == ["step-1/file"]


@pytest.mark.parametrize(
    ("checkpoint_id", "takes"),
    [
        ("memory://x", True),
        ("s3://bucket/x", True),
        ("gs://bucket/x", True),  # known, whether its package is installed or not
        ("simplecache::s3://bucket/x", True),
        ("file:///tmp/x", True),
        ("/tmp/x", True),  # as stock
        ("nonsense://x", False),
        (Path("/tmp/x"), False),
    ],
)
def test_urls_of_known_protocols_are_taken(checkpoint_id, takes):
    assert FsspecFileSystem.validate_checkpoint_id(checkpoint_id) == takes


def test_a_protocol_that_was_registered_later_is_known():
    protocol = f"p{uuid4().hex}"
    assert not FsspecFileSystem.validate_checkpoint_id(f"{protocol}://x")
    fsspec.register_implementation(protocol, type(fsspec.filesystem("memory")))
    assert FsspecFileSystem.validate_checkpoint_id(f"{protocol}://x")


def test_init_path_must_be_called_first():
    with pytest.raises(ValueError, match="init_path"):
        FsspecFileSystem().exists("memory://x")


# --- options and errors ------------------------------------------------------------------------------------------


def test_options_stay_until_others_are_given(tmp_path):
    files = FsspecFileSystem()
    files.init_path(f"file://{tmp_path}/a", auto_mkdir=True)
    assert files.fs.auto_mkdir
    files.init_path(f"file://{tmp_path}/b")
    assert files.fs.auto_mkdir
    files.init_path(f"file://{tmp_path}/c", auto_mkdir=False)
    assert not files.fs.auto_mkdir


def test_a_package_that_is_missing_is_named():
    fsspec.register_implementation("lacking", "no_such_package.Thing", errtxt="Install no_such_package", clobber=True)
    with pytest.raises(ImportError, match=r"lacking://x needs a package.*no_such_package"):
        FsspecFileSystem().init_path("lacking://x")


class Broken(type(fsspec.filesystem("memory"))):  # type: ignore[misc]
    protocol = "broken"

    def exists(self, *args: Any, **kwargs: Any) -> bool:
        raise KeyError("strange")

    info = ls = rm_file = mv = pipe_file = makedirs = _open = exists


def test_strange_exceptions_become_os_errors_that_name_the_path():
    fsspec.register_implementation("broken", Broken, clobber=True)
    files = FsspecFileSystem()
    url = files.init_path("broken://folder")

    def read() -> None:
        with files.create_stream(url, "rb"):
            pass

    for act in (
        lambda: files.exists(url),
        lambda: files.ls(url),
        lambda: files.rm_file(url),
        lambda: files.rename(url, url),
        lambda: files.put(url, b""),
        lambda: files.mkdir(url),
        read,
    ):
        with pytest.raises(OSError, match=r"broken://folder: KeyError: 'strange'"):
            act()


# --- disks -------------------------------------------------------------------------------------------------------


def test_names_on_a_disk_are_durable_locked_and_renamed_in_one_step(tmp_path, monkeypatch):
    place = Place(f"file://{tmp_path}/a", {}, None)
    place.write("file", b"1")
    renamed, synced = [], []
    real_replace, real_fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda *paths: (renamed.append(paths), real_replace(*paths)))
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), real_fsync(descriptor)))
    place.files.rename(place.at("file"), place.at("other"))
    assert renamed == [(f"{tmp_path}/a/file", f"{tmp_path}/a/other")]
    place.files.sync_folder(place.folder)
    assert len(synced) == 1
    place.files.mkdir(place.at("b/c"))
    assert len(synced) == 3
    with place.files.lock_folder(place.folder):
        assert _is_locked(tmp_path / "a")
    assert not _is_locked(tmp_path / "a")


def _is_locked(folder: Path) -> bool:
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


# --- S3 ----------------------------------------------------------------------------------------------------------

MANY_PARTS = 12 << 20


@pytest.fixture
def remote(bucket: s3_server.Bucket) -> Place:
    options = {**bucket.options, "default_block_size": 5 << 20}
    return Place(bucket.url(uuid4().hex), options, bucket.client())


@needs_s3
def test_an_upload_that_fails_half_way_is_aborted(remote, bucket):
    def write() -> None:
        with remote.files.create_stream(remote.at("part"), "wb") as stream:
            stream.write(b"x" * MANY_PARTS)
            assert len(bucket.unfinished_uploads()) == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    gc.collect()
    assert bucket.unfinished_uploads() == []
    assert not remote.files.exists(remote.at("part"))


@needs_s3
def test_an_upload_whose_end_fails_leaves_nothing(remote, bucket, monkeypatch):
    import s3fs.core

    def fail(self: Any) -> None:
        raise ConnectionResetError("the server is gone")

    monkeypatch.setattr(s3fs.core.S3File, "commit", fail)
    with (
        pytest.raises(ConnectionResetError),
        remote.files.create_stream(remote.at("part"), "wb") as stream,
    ):
        stream.write(b"x" * MANY_PARTS)
    monkeypatch.undo()
    del stream
    gc.collect()
    assert bucket.unfinished_uploads() == []
    assert not remote.files.exists(remote.at("part"))


@needs_s3
def test_an_object_that_is_being_replaced_is_the_old_one_until_its_upload_is_complete(remote):
    remote.files.put(remote.at("file"), b"old")
    with remote.files.create_stream(remote.at("file"), "wb") as stream:
        stream.write(b"x" * MANY_PARTS)
        assert remote.other.cat_file(remote.files.inner(remote.at("file"))) == b"old"
    assert remote.other.size(remote.files.inner(remote.at("file"))) == MANY_PARTS


@needs_s3
def test_the_object_that_stands_for_a_folder_is_not_in_it(remote, bucket):
    key = remote.files.inner(remote.folder).removeprefix(f"{bucket.name}/")
    bucket.client().call_s3("put_object", Bucket=bucket.name, Key=f"{key}/", Body=b"")
    assert remote.files.ls(remote.folder) == []
    remote.write("file", b"1")
    assert remote.names() == ["file"]


@needs_s3
def test_chained_urls_reach_the_server(remote, bucket, tmp_path):
    remote.write("file", b"content")
    files = FsspecFileSystem()
    options = {"s3": bucket.options, "simplecache": {"cache_storage": str(tmp_path)}}
    folder = files.init_path(f"simplecache::{remote.folder}", **options)
    with files.create_stream(files.concat_path(folder, "file"), "rb") as stream:
        assert stream.read() == b"content"
    assert files.exists(files.concat_path(folder, "file"))
    assert not files.exists(files.concat_path(folder, "none"))


@needs_s3
def test_a_server_that_cannot_be_reached_is_an_os_error():
    config = {"retries": {"max_attempts": 0}, "connect_timeout": 1}
    files = FsspecFileSystem()
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s", "config_kwargs": config}
    files.init_path("s3://bucket/folder", **options)
    files.fs.retries = 1
    with pytest.raises(OSError, match=r"127\.0\.0\.1:9"):
        files.ls("s3://bucket/folder")
