"""Large files go past the page cache where that is possible, and are the same files where it is not."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._base.tuning import (
    DIRECT_ALIGNMENT,
    DIRECT_FROM,
    READ_BYTES,
    SMALLEST_BUFFER,
    WRITE_BUFFER_BYTES,
    WRITERS,
)
from holdfast._settings import override
from holdfast._stores import direct_files as direct_access
from holdfast._stores import file_reader, large_files
from holdfast._stores.direct_files import count_cached_pages
from holdfast._stores.file_reader import open_file
from holdfast._stores.large_files import LargeFile
from holdfast._stores.local_store import LocalStore
from holdfast.errors import DamagedCheckpointError
from tests.properties import examples

MIB = 1 << 20

edges = st.sampled_from([DIRECT_ALIGNMENT, SMALLEST_BUFFER, DIRECT_FROM, READ_BYTES, WRITE_BUFFER_BYTES])
near_edges = st.builds(
    lambda edge, times, more: max(0, edge * times + more), edges, st.integers(0, 3), st.integers(-2, 2)
)
sizes = near_edges.filter(lambda size: size <= 20 * MIB) | st.integers(0, 3 * MIB)


@pytest.fixture(autouse=True)
def past_the_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_PAGE_CACHE", "avoid")


def some_bytes(size: int) -> bytes:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()


def reaches_past_the_page_cache(folder: Path) -> bool:
    """Whether the file system below the tests has direct access, and tells what is cached."""
    path = folder / "probe"
    path.write_bytes(bytes(2 * DIRECT_ALIGNMENT))
    with path.open("rb") as stream:
        direct = direct_access.open_directly(str(path), stream.fileno(), os.O_RDONLY)
        if direct is None:
            return False
        os.close(direct)
        return count_cached_pages(stream.fileno(), 0, 1) is not None


@pytest.fixture
def direct_disk(tmp_path: Path) -> Path:
    if not reaches_past_the_page_cache(tmp_path):
        pytest.skip("the file system of the temporary folder has no direct access")
    return tmp_path


def drop_from_cache(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def is_cached(path: Path) -> bool:
    """Whether anything at its beginning is."""
    with path.open("rb") as stream:
        return count_cached_pages(stream.fileno(), 0, READ_BYTES) != 0


def refuses_directness(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A file system without direct access: it says so when the file is opened, or not before it is used."""
    if how == "open":
        monkeypatch.setattr(direct_access, "_O_DIRECT", 0)
        return
    direct: set[int] = set()
    for module in (large_files, file_reader):
        monkeypatch.setattr(module, "open_directly", noting(module.open_directly, direct))
    for call in ("pwrite", "preadv"):
        monkeypatch.setattr(os, call, refusing(getattr(os, call), direct))


def noting(function: Callable[..., int | None], found: set[int]) -> Callable[..., int | None]:
    def call(*arguments: Any) -> int | None:
        descriptor = function(*arguments)
        if descriptor is not None:
            found.add(descriptor)
        return descriptor

    return call


def refusing(function: Callable[..., int], descriptors: set[int]) -> Callable[..., int]:
    def call(descriptor: int, *arguments: Any) -> int:
        if descriptor in descriptors:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return function(descriptor, *arguments)

    return call


# --- writing -----------------------------------------------------------------------------------------------------


@settings(max_examples=examples(30))
@given(
    size=sizes,
    cuts=st.lists(st.floats(0, 1), max_size=4),
    through_buffers=st.booleans(),
    memory=st.none() | sizes,
    page_cache=st.sampled_from(["use", "avoid"]),
)
def test_a_file_of_any_size_written_in_any_parts_has_just_these_bytes(size, cuts, through_buffers, memory, page_cache):
    content = some_bytes(size)
    bounds = [0, *sorted(int(cut * size) for cut in cuts), size]
    with tempfile.TemporaryDirectory() as folder, override(page_cache=page_cache):
        store = LocalStore(folder)
        with store.create("file", size, memory) as sink:
            for begin, end in pairwise(bounds):
                if through_buffers:
                    fill_buffers(sink, content[begin:end])
                else:
                    sink.write(content[begin:end])
        assert Path(folder, "file").read_bytes() == content


def fill_buffers(sink: Any, content: bytes) -> None:
    while content:
        buffer = sink.buffer()
        if buffer is None:
            sink.write(content)
            return
        count = min(len(buffer), len(content))
        buffer[:count] = content[:count]
        sink.advance(count)
        content = content[count:]


@pytest.mark.parametrize("how", ["open", "use"])
@pytest.mark.parametrize("size", [DIRECT_FROM, 2 * WRITE_BUFFER_BYTES + 12_345])
def test_a_file_system_without_direct_writes_gets_ordinary_ones(tmp_path, monkeypatch, how, size):
    refuses_directness(monkeypatch, how)
    content = some_bytes(size)
    LocalStore(tmp_path).put("file", content)
    assert (tmp_path / "file").read_bytes() == content


def test_writes_that_come_back_short_are_continued(tmp_path, monkeypatch):
    """By whole pages as direct writes are, and by odd numbers of bytes, after which nothing is aligned any more."""
    original, lengths = os.pwrite, iter([DIRECT_ALIGNMENT, 3 * DIRECT_ALIGNMENT, 1000, 77] * 4)

    def short(descriptor: int, view: memoryview, position: int) -> int:
        limit = next(lengths, None)
        try:
            return original(descriptor, view[:limit], position)
        except OSError:  # a direct write of an odd number of bytes: what a system would not do
            return original(descriptor, view[:DIRECT_ALIGNMENT], position)

    monkeypatch.setattr(os, "pwrite", short)
    content = some_bytes(WRITE_BUFFER_BYTES + 5)
    LocalStore(tmp_path).put("file", content)
    assert (tmp_path / "file").read_bytes() == content


def test_large_files_leave_nothing_in_the_page_cache(direct_disk):
    store = LocalStore(direct_disk)
    store.put("large", some_bytes(4 * DIRECT_FROM))
    store.put("small", some_bytes(DIRECT_FROM // 2))
    assert not is_cached(direct_disk / "large")
    assert is_cached(direct_disk / "small")


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_write_that_fails_in_the_background_names_the_file_and_leaves_nothing(tmp_path, monkeypatch, code):
    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match=str(tmp_path / "file")) as raised:
        LocalStore(tmp_path).put("file", bytes(5 * WRITE_BUFFER_BYTES))
    assert raised.value.errno == code
    assert not (tmp_path / "file").exists()


def test_an_interrupt_does_not_overtake_a_write(tmp_path, monkeypatch):
    """It would be of a descriptor that is closed by then, and may already be that of another file."""
    finishing, closed, overtaken = threading.Event(), threading.Event(), threading.Event()
    finish, write_all, close = LargeFile.finish, LargeFile._write_all, os.close

    def finish_and_tell(self: LargeFile) -> None:
        finishing.set()
        finish(self)

    def write_and_interrupt(self: LargeFile, *args: Any) -> None:
        finishing.wait(60)
        for _ in range(3):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            if closed.wait(0.1):
                overtaken.set()
        write_all(self, *args)

    def close_and_tell(descriptor: int) -> None:
        closed.set()
        close(descriptor)

    store, open_before = LocalStore(tmp_path), len(os.listdir("/dev/fd"))
    monkeypatch.setattr(LargeFile, "finish", finish_and_tell)
    monkeypatch.setattr(LargeFile, "_write_all", write_and_interrupt)
    monkeypatch.setattr(os, "close", close_and_tell)
    with pytest.raises(KeyboardInterrupt):
        store.put("data", bytes(DIRECT_FROM))
    assert closed.is_set()
    assert not overtaken.is_set()
    assert list(store.list()) == []
    assert len(os.listdir("/dev/fd")) == open_before


def test_a_file_that_failed_says_so_as_often_as_it_is_asked(tmp_path, monkeypatch):
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", fail)
    with (tmp_path / "file").open("wb") as stream:
        file = LargeFile(stream.fileno(), stream.name, 20 * WRITE_BUFFER_BYTES)
        for _ in range(3 * WRITERS):
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                file.write(memoryview(bytes(10 * WRITE_BUFFER_BYTES)))
        file.close()


def test_space_is_found_missing_before_anything_is_written(tmp_path, monkeypatch):
    written: list[int] = []
    monkeypatch.setattr(large_files, "reserve", no_space)
    monkeypatch.setattr(os, "pwrite", lambda *_: written.append(1))
    with pytest.raises(OSError, match=str(tmp_path / "file")) as raised:
        LocalStore(tmp_path).put("file", bytes(2 * WRITE_BUFFER_BYTES))
    assert raised.value.errno == errno.ENOSPC
    assert written == []
    assert not (tmp_path / "file").exists()


def no_space(_descriptor: int, _size: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@given(size=st.integers(1, 1 << 40), memory=st.integers(0, 1 << 30), page_cache=st.sampled_from(["use", "avoid"]))
def test_buffers_keep_to_the_memory_that_they_are_given(size, memory, page_cache):
    """Unless it is less than the smallest buffers take."""
    with (
        tempfile.NamedTemporaryFile() as stream,
        pytest.MonkeyPatch.context() as patch,
        override(page_cache=page_cache),
    ):
        patch.setattr(large_files, "reserve", lambda *_: None)
        file = LargeFile(stream.fileno(), stream.name, size, memory)
        file.close()
    assert file.buffer_bytes * file.buffer_count <= max(memory, file.buffer_count * SMALLEST_BUFFER)
    assert file.buffer_bytes % DIRECT_ALIGNMENT == 0


# --- reading -----------------------------------------------------------------------------------------------------

READ_FROM = some_bytes(3 * READ_BYTES + 4321)


@pytest.fixture(scope="module")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reading") / "large"
    path.write_bytes(READ_FROM)
    drop_from_cache(path)
    return path


@contextmanager
def reader_of(path: Path) -> Iterator[file_reader.FileReader]:
    reader = open_file(str(path))
    try:
        yield reader
    finally:
        reader.close()


ranges = st.tuples(sizes, sizes).map(lambda pair: (min(pair[0], len(READ_FROM)), pair[1]))


@settings(max_examples=examples(60))
@given(part=ranges, cached=st.lists(ranges, max_size=2), method=st.sampled_from(["read_into", "read_shared"]))
def test_any_part_is_read_whatever_is_cached(large_file, part, cached, method):
    drop_from_cache(large_file)
    with large_file.open("rb") as stream:
        for begin, size in cached:
            os.pread(stream.fileno(), size, begin)
    begin, size = part
    size = min(size, len(READ_FROM) - begin)
    around = bytearray(b"\xaa" * (size + 2))
    with reader_of(large_file) as reader:
        getattr(reader, method)(begin, memoryview(around)[1:-1])
    assert around == b"\xaa" + READ_FROM[begin : begin + size] + b"\xaa"


@pytest.mark.parametrize("how", ["open", "use"])
def test_a_file_system_without_direct_reads_is_read_all_the_same(large_file, monkeypatch, how):
    drop_from_cache(large_file)
    refuses_directness(monkeypatch, how)
    content = bytearray(len(READ_FROM) - 7)
    with reader_of(large_file) as reader:
        reader.read_into(7, content)
    assert content == READ_FROM[7:]


def test_where_nobody_knows_what_is_cached_all_is_read_through_the_cache(large_file, monkeypatch):
    drop_from_cache(large_file)
    monkeypatch.setattr(file_reader, "count_cached_pages", lambda *_: None)
    monkeypatch.setattr(file_reader, "open_directly", lambda *_: pytest.fail("it was opened for direct reads"))
    content = bytearray(len(READ_FROM))
    with reader_of(large_file) as reader:
        assert not reader.read_cached(0, bytearray(100))
        reader.read_into(0, content)
    assert content == READ_FROM


def test_what_is_cached_is_known_and_large_reads_leave_no_more_of_it(direct_disk):
    path = direct_disk / "large"
    path.write_bytes(READ_FROM)
    drop_from_cache(path)
    content = bytearray(len(READ_FROM))
    with reader_of(path) as reader:
        assert not reader.read_cached(0, content)
        reader.read_into(0, content)
        assert content == READ_FROM
        assert not is_cached(path)
        reader.read_shared(0, content)
        assert is_cached(path)
        content[:] = bytes(len(content))
        assert reader.read_cached(0, content)
        assert content == READ_FROM


@settings(max_examples=examples(60))
@given(part=ranges, cached=st.lists(ranges, max_size=2), step=st.sampled_from([4096, 12_000, 1 << 19, 5 * MIB]))
def test_pieces_are_whole_steps_that_follow_each_other_whatever_is_cached(large_file, part, cached, step):
    """As the blocks that digests are of need it."""
    drop_from_cache(large_file)
    with large_file.open("rb") as stream:
        for begin, size in cached:
            os.pread(stream.fileno(), size, begin)
    begin, size = part
    memory = bytearray(min(size, len(READ_FROM) - begin))
    reached = 0
    with reader_of(large_file) as reader:
        for low, high in reader.read_in_pieces(begin, memory, step):
            assert low == reached
            assert high % step == 0 or high == len(memory)
            assert memory[low:high] == READ_FROM[begin + low : begin + high]
            reached = high
    assert reached == len(memory)


def test_what_is_aligned_is_read_to_where_it_goes_without_a_copy(direct_disk, monkeypatch):
    path = direct_disk / "large"
    path.write_bytes(READ_FROM)
    drop_from_cache(path)
    monkeypatch.setattr(file_reader, "_aligned_buffer", lambda _: pytest.fail("it was read somewhere else"))
    memory = direct_access.aligned_memory(2 * READ_BYTES)
    with reader_of(path) as reader:
        reader.read_into(DIRECT_ALIGNMENT, memory)
    assert memory[:] == READ_FROM[DIRECT_ALIGNMENT : DIRECT_ALIGNMENT + 2 * READ_BYTES]
    assert not is_cached(path)


def test_a_disk_that_refuses_memory_is_still_read_past_the_cache(direct_disk, monkeypatch):
    path = direct_disk / "large"
    path.write_bytes(READ_FROM)
    drop_from_cache(path)
    direct: set[int] = set()
    monkeypatch.setattr(file_reader, "open_directly", noting(file_reader.open_directly, direct))
    memory = np.zeros(2 * READ_BYTES, np.uint8)
    original, refused = os.preadv, []

    def preadv(descriptor: int, buffers: Any, position: int) -> int:
        if descriptor in direct and np.shares_memory(np.frombuffer(buffers[0], np.uint8), memory):
            refused.append(position)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(descriptor, buffers, position)

    monkeypatch.setattr(os, "preadv", preadv)
    with reader_of(path) as reader:
        reader.read_into(0, memory)
    assert memory.tobytes() == READ_FROM[: 2 * READ_BYTES]
    assert refused == [0], "it is asked once"
    assert not is_cached(path)


def test_a_reader_stays_with_the_file_it_opened(direct_disk):
    """Its path is looked up a second time for direct reads, and may lead to another file by then."""
    path, other = direct_disk / "large", direct_disk / "other"
    path.write_bytes(READ_FROM)
    other.write_bytes(bytes(len(READ_FROM)))
    drop_from_cache(path)
    content = bytearray(len(READ_FROM))
    with reader_of(path) as reader:
        os.replace(other, path)
        reader.read_into(0, content)
    assert content == READ_FROM


@pytest.mark.parametrize("left", [0, 5000, READ_BYTES + 5])
def test_a_file_that_became_shorter_is_damaged(direct_disk, left):
    path = direct_disk / "large"
    path.write_bytes(READ_FROM)
    with reader_of(path) as reader:
        os.truncate(path, left)
        drop_from_cache(path)
        with pytest.raises(DamagedCheckpointError, match="too short") as raised:
            reader.read_into(100, bytearray(len(READ_FROM) - 100))
    assert (raised.value.expected, raised.value.file) == (len(READ_FROM), str(path))


def test_no_file_is_mapped(large_file, monkeypatch):
    """A page of a network disk that cannot be read would kill the process instead of raising an error."""
    seen: list[str] = []
    original = os.preadv

    def preadv(*arguments: Any) -> int:
        seen.append(Path("/proc/self/maps").read_text())
        return original(*arguments)

    drop_from_cache(large_file)
    monkeypatch.setattr(os, "preadv", preadv)
    with reader_of(large_file) as reader:
        reader.read_into(0, bytearray(len(READ_FROM)))
    assert seen
    assert not any(large_file.name in maps for maps in seen)
