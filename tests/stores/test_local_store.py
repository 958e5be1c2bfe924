"""What a store on a disk does beyond the contract: permissions, full disks, odd files, and commits by processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast._stores import durable_files
from holdfast._stores.local_store import LocalStore
from holdfast._stores.store import Listed
from holdfast.errors import CommitConflictError, DamagedCheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture
def store(folder: Path) -> LocalStore:
    return LocalStore(folder)


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# --- permissions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o027, 0o077])
def test_files_and_folders_get_the_permissions_that_the_umask_leaves(tmp_path, mask):
    store = LocalStore(tmp_path / "runs" / "step")
    with umask(mask):
        store.put("data", b"content")
        store.commit("record", b"first", replaces=None)
        store.commit("other", b"first", replaces=None)
        store.commit("other", b"second", replaces=b"first")
    assert mode_of(tmp_path / "runs") == mode_of(tmp_path / "runs" / "step") == 0o777 & ~mask
    assert {mode_of(path) for path in (tmp_path / "runs" / "step").iterdir()} == {0o666 & ~mask}


def test_what_is_made_in_a_folder_of_a_group_belongs_to_the_group(tmp_path):
    groups = [group for group in os.getgroups() if group != os.getgid()] or [4242]
    try:
        os.chown(tmp_path, -1, groups[0])
    except PermissionError:
        pytest.skip("this user is in one group only")
    tmp_path.chmod(0o2775)
    store = LocalStore(tmp_path / "runs" / "step")
    store.put("data", b"content")
    store.commit("record", b"first", replaces=None)
    store.commit("record", b"second", replaces=b"first")
    made = [tmp_path / "runs", store.folder, *store.folder.iterdir()]
    assert len(made) == 4
    assert {path.stat().st_gid for path in made} == {groups[0]}
    assert all(mode_of(path) & stat.S_ISGID for path in made if path.is_dir())


# --- where it is -------------------------------------------------------------------------------------------------


def test_a_relative_path_is_that_of_the_moment(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    store = LocalStore("step")
    monkeypatch.chdir(tmp_path / "there")
    store.put("data", b"content")
    assert store.location == str(tmp_path / "here" / "step")
    assert names_in(tmp_path / "here" / "step") == ["data"]
    assert names_in(tmp_path / "there") == []


def test_the_parent_of_a_linked_folder_is_not_guessed(tmp_path):
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "deep")
    LocalStore(f"{tmp_path}/link/../step").put("data", b"content")
    assert names_in(tmp_path / "a" / "step") == ["data"]


def test_a_file_is_not_a_place_for_a_checkpoint(tmp_path):
    (tmp_path / "file").write_bytes(b"do not touch")
    for path in (tmp_path / "file", tmp_path / "file" / "step"):
        store = LocalStore(path)
        with pytest.raises(NotADirectoryError, match="file"):
            store.put("data", b"content")
        with pytest.raises(NotADirectoryError, match="file"):
            store.commit("record", b"content", replaces=None)
        with pytest.raises(NotADirectoryError, match="file"):
            store.list()
        assert store.size("data") is None
    assert (tmp_path / "file").read_bytes() == b"do not touch"


def test_a_link_to_nothing_is_not_a_place_for_a_checkpoint(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "unplugged")
    with pytest.raises(NotADirectoryError, match="link"):
        LocalStore(tmp_path / "link").put("data", b"content")


def test_the_folder_is_made_once_if_many_begin_at_once(tmp_path):
    start = threading.Barrier(8)

    def put(number: int) -> None:
        start.wait()
        LocalStore(tmp_path / "a" / "b" / "c" / "d").put(f"data-{number}", b"content")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(put, range(8)))
    assert len(names_in(tmp_path / "a" / "b" / "c" / "d")) == 8


# --- odd files ---------------------------------------------------------------------------------------------------


def test_what_is_not_a_plain_file_is_no_object_and_is_not_waited_for(store, folder):
    store.put("data", b"content")
    os.mkfifo(folder / "pipe")
    (folder / "subfolder").mkdir()
    assert store.list() == [Listed("data", 7)]
    for name in ("pipe", "subfolder"):
        assert store.size(name) is None
        with pytest.raises(OSError, match=f"not a plain file.*{name}"):
            store.read(name)
        with pytest.raises(OSError, match=name):
            store.commit(name, b"x", replaces=None)
    assert names_in(folder) == ["data", "pipe", "subfolder"]


def test_links_to_nothing_do_not_hide_what_is_listed_after_them(store, folder):
    for number in range(20):
        store.put(f"data-{number}", b"content")
        (folder / f"link-{number}").symlink_to(folder / "gone")
    assert {found.name for found in store.list()} == {f"data-{number}" for number in range(20)}


def test_a_file_with_a_name_that_is_not_unicode_is_listed_and_deleted(store, folder):
    store.put("data", b"content")
    with open(os.fsencode(folder) + b"/\xff\xfe", "wb") as file:
        file.write(b"123")
    (odd,) = [found for found in store.list() if found.name != "data"]
    assert odd.size == 3
    assert store.read(odd.name) == b"123"
    store.delete([odd.name])
    assert names_in(folder) == ["data"]


def test_a_commit_replaces_a_link_and_not_the_file_that_it_leads_to(store, folder, tmp_path):
    folder.mkdir()
    (tmp_path / "shared").write_bytes(b"old")
    (folder / "record").symlink_to(tmp_path / "shared")
    store.commit("record", b"new", replaces=b"old")
    assert (tmp_path / "shared").read_bytes() == b"old"
    assert store.read("record") == b"new"
    assert not (folder / "record").is_symlink()


def test_one_that_cannot_be_deleted_does_not_save_the_others(store, folder):
    for name in ("a", "c"):
        store.put(name, b"content")
    (folder / "b").mkdir()
    with pytest.raises(OSError, match="/b"):
        store.delete(["a", "b", "c"])
    assert names_in(folder) == ["b"]


# --- reading -----------------------------------------------------------------------------------------------------


def test_a_file_that_shrinks_while_it_is_open_is_damaged(store, folder):
    store.put("data", b"0123456789")
    with store.reader("data") as reader:
        os.truncate(folder / "data", 6)
        with pytest.raises(DamagedCheckpointError) as raised:
            reader.read_into(2, bytearray(8))
    assert (raised.value.file, raised.value.expected, raised.value.found) == (str(folder / "data"), 10, 6)


@pytest.mark.parametrize("change", ["replace", "delete"])
def test_an_open_file_stays_readable_whatever_happens_to_its_name(store, change):
    store.commit("record", b"old content", replaces=None)
    with store.reader("record") as reader:
        if change == "replace":
            store.commit("record", b"new", replaces=b"old content")
        else:
            store.delete(["record"])
        memory = bytearray(11)
        reader.read_into(0, memory)
    assert memory == b"old content"


def test_reading_and_writing_go_on_where_the_system_stops_early(store, monkeypatch):
    """As it does after 2 GiB, and on signals."""
    write, preadv = os.write, os.preadv
    calls = []

    def write_a_little(descriptor, data):
        calls.append("write")
        return write(descriptor, memoryview(data)[:7])

    def read_a_little(descriptor, buffers, offset):
        calls.append("read")
        return preadv(descriptor, [memoryview(buffers[0]).cast("B")[:5]], offset)

    monkeypatch.setattr(os, "write", write_a_little)
    monkeypatch.setattr(os, "preadv", read_a_little)
    content = bytes(range(100))
    store.put("data", content)
    assert store.read("data") == content
    assert store.read("data", 13, 77) == content[13:77]
    assert (calls.count("write"), calls.count("read")) == (15, 20 + 13)


def test_a_reader_that_outlives_its_block_reads_nothing_of_other_files(store):
    store.put("data", b"content")
    store.put("other", b"secrets")
    with store.reader("data") as reader:
        pass
    with store.reader("other"), pytest.raises(OSError, match="data"):
        reader.read_into(0, bytearray(7))


def test_a_sink_that_outlives_its_block_writes_to_no_other_file(store):
    with store.create("data") as sink:
        pass
    with store.create("other") as other:
        other.write(b"12345")
        with pytest.raises(OSError, match="data"):
            sink.write(b"stray")
    assert store.read("other") == b"12345"


# --- disks that fail ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def files_of_at_most(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_finds_no_room_is_named_and_leaves_nothing(store, folder):
    """The limit is real: the first write comes back short, and the next one fails."""
    store.put("data", b"content")
    store.commit("record", b"old", replaces=None)
    with files_of_at_most(10_000):
        with pytest.raises(OSError, match=str(folder / "large")) as raised:
            store.put("large", bytes(20_000))
        assert raised.value.errno == errno.EFBIG
        with pytest.raises(OSError, match="record") as raised:
            store.commit("record", bytes(20_000), replaces=b"old")
        assert raised.value.errno == errno.EFBIG
    assert names_in(folder) == ["data", "record"]
    assert store.read("record") == b"old"


def fails(code: int, when=lambda *arguments: True, original=None):
    def call(*arguments, **more):
        if when(*arguments):
            raise OSError(code, os.strerror(code))
        return original(*arguments, **more)

    return call


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "fsync", "close"])
def test_an_error_of_the_disk_names_the_file_and_leaves_nothing(store, folder, monkeypatch, call, code):
    store.put("data", b"content")
    original, closed = getattr(os, call), []

    def fail(descriptor, *arguments):
        if call == "close":
            original(descriptor)
        closed.append(os.strerror(code))
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match=str(folder / "new")) as raised:
            store.put("new", b"12345")
        assert raised.value.errno == code
        with pytest.raises(OSError, match="record") as raised:
            store.commit("record", b"12345", replaces=None)
        assert raised.value.errno == code
    assert len(closed) == 2
    assert names_in(folder) == ["data"]


def test_an_error_while_reading_names_the_file(store, folder, monkeypatch):
    store.put("data", b"content")
    monkeypatch.setattr(os, "preadv", fails(errno.EIO))
    with pytest.raises(OSError, match=str(folder / "data")) as raised:
        store.read("data")
    assert raised.value.errno == errno.EIO


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_commit_whose_name_may_not_last_is_an_error_and_whole(store, folder, monkeypatch, old):
    store.put("data", b"content")
    if old is not None:
        store.commit("record", old, replaces=None)
    is_folder = lambda descriptor: stat.S_ISDIR(os.fstat(descriptor).st_mode)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails(errno.EIO, is_folder, os.fsync))
        with pytest.raises(OSError, match=str(folder)) as raised:
            store.commit("record", b"new", replaces=old)
    assert raised.value.errno == errno.EIO
    assert store.read("record") == b"new"
    assert names_in(folder) == ["data", "record"]


def test_an_interrupted_create_leaves_nothing(store, folder, monkeypatch):
    store.put("data", b"content")

    def interrupt(descriptor):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.put("new", b"content")
    assert names_in(folder) == ["data"]


def test_no_descriptor_stays_open(store):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    store.put("data", b"content")
    (store.folder / "folder").mkdir()
    before = descriptors()
    for attempt in range(3):
        store.put(f"data-{attempt}", b"content")
        store.read("data")
        store.commit(f"record-{attempt}", b"content", replaces=None)
        with pytest.raises(CommitConflictError):
            store.commit(f"record-{attempt}", b"content", replaces=None)
        with pytest.raises(ValueError, match="to get 3 bytes"), store.create("wrong", 3):
            pass
        with pytest.raises(OSError, match="plain"):
            store.read("folder")
        store.sync()
    assert descriptors() == before


# --- commits -----------------------------------------------------------------------------------------------------


def test_a_commit_removes_what_killed_commits_left_and_nothing_else(store, folder):
    store.put("data", b"content")
    leftovers = [".record.0123abcd.tmp", ".record.ffffffff.tmp"]
    others = [
        ".other.0123abcd.tmp",
        "x.record.0123abcd.tmp",
        ".record.0123abcd.tmp~",
        ".record.swp",
        ".record.backup.tmp",
        "record.0123abcd.tmp",
    ]
    for name in (*leftovers, *others):
        (folder / name).write_bytes(b"?")
    with pytest.raises(CommitConflictError):
        store.commit("record", b"new", replaces=b"old")
    assert names_in(folder) == sorted([*leftovers, *others, "data"])
    store.commit("record", b"new", replaces=None)
    assert names_in(folder) == sorted([*others, "data", "record"])


def test_leftovers_that_cannot_be_removed_do_not_fail_a_commit(store, folder):
    store.put("data", b"content")
    (folder / ".record.0123abcd.tmp").mkdir()
    store.commit("record", b"new", replaces=None)
    assert store.read("record") == b"new"


def test_a_commit_does_not_wait_for_ever(store, folder, monkeypatch):
    store.put("data", b"content")
    monkeypatch.setattr(durable_files, "_LOCK_PATIENCE", 0.02)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=str(folder)):
            store.commit("record", b"new", replaces=None)
    finally:
        os.close(descriptor)
    assert names_in(folder) == ["data"]


@pytest.fixture
def _no_locks(monkeypatch):
    monkeypatch.setattr(fcntl, "flock", fails(errno.EBADF))


@pytest.mark.usefixtures("_no_locks")
def test_without_locks_one_of_many_first_commits_succeeds(store, folder):
    for number in range(20):
        start = threading.Barrier(6)

        def compete(who: int, number: int = number, start: threading.Barrier = start) -> bool:
            start.wait()
            try:
                LocalStore(folder).commit(f"record-{number}", b"from %d" % who, replaces=None)
            except CommitConflictError:
                return False
            return True

        with ThreadPoolExecutor(6) as threads:
            succeeded = list(threads.map(compete, range(6)))
        assert sum(succeeded) == 1
        assert store.read(f"record-{number}") == b"from %d" % succeeded.index(True)
    assert len(names_in(folder)) == 20


@pytest.mark.usefixtures("_no_locks")
@pytest.mark.parametrize("old", [None, b"old"])
def test_without_locks_a_commit_that_was_overtaken_is_a_conflict(store, folder, monkeypatch, old):
    """The other one commits after we have looked, and takes our file for a leftover."""
    if old is not None:
        store.commit("record", old, replaces=None)
    call = "link" if old is None else "replace"
    original = getattr(os, call)

    def overtaken(source, target):
        monkeypatch.setattr(os, call, original)
        LocalStore(folder).commit("record", b"theirs", replaces=old)
        original(source, target)

    monkeypatch.setattr(os, call, overtaken)
    with pytest.raises(CommitConflictError):
        store.commit("record", b"mine", replaces=old)
    assert store.read("record") == b"theirs"
    assert names_in(folder) == ["record"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_disk_without_links_is_fine(store, folder, monkeypatch, code):
    monkeypatch.setattr(os, "link", fails(code))
    store.commit("record", b"first", replaces=None)
    with pytest.raises(CommitConflictError):
        store.commit("record", b"other", replaces=None)
    store.commit("record", b"second", replaces=b"first")
    assert store.read("record") == b"second"
    assert names_in(folder) == ["record"]


def test_a_link_that_a_network_disk_has_made_twice_is_a_commit(store, folder, monkeypatch):
    original = os.link

    def answer_lost(source, target):
        original(source, target)
        original(source, target)

    monkeypatch.setattr(os, "link", answer_lost)
    store.commit("record", b"first", replaces=None)
    assert store.read("record") == b"first"
    assert names_in(folder) == ["record"]


COUNT = """
import sys
from holdfast.errors import CommitConflictError
from holdfast._stores.local_store import LocalStore

def spelled(number):
    return b"%d " % number * (1 + number * 7919 % 10_000)

def number_in(content):
    number = int(content.split(maxsplit=1)[0])
    assert content == spelled(number), f"a mixture with {number}"
    return number

store, times = LocalStore(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
while times:
    before = store.read("record")
    number = number_in(before)
    try:
        store.commit("record", spelled(number + 1), replaces=before)
        times -= 1
    except CommitConflictError:
        pass
"""


def test_processes_that_commit_at_once_lose_no_commit_and_see_no_half_of_one(store, folder):
    store.commit("record", b"0 ", replaces=None)
    each, counters = 60, []
    try:
        for _ in range(3):
            command = [sys.executable, "-c", COUNT, str(folder), str(each)]
            pipe = subprocess.PIPE
            counters.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        assert [counter.stdout.readline() for counter in counters] == ["ready\n"] * 3
        for counter in counters:
            counter.stdin.write("go\n")
            counter.stdin.flush()
        assert [counter.wait(60) for counter in counters] == [0] * 3
    finally:
        for counter in counters:
            counter.kill()
            counter.communicate()
    assert int(store.read("record").split(maxsplit=1)[0]) == 3 * each
    assert names_in(folder) == ["record"]
