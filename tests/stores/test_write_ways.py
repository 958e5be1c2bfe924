"""Large files go through the page cache or past it: whichever was faster on the disk, if there is memory for it."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast._base.tuning import (
    CACHED_WRITE_BYTES,
    FIRST_TRY_AGAIN,
    LEFT_IN_PAGE_CACHE,
    MIB,
    NOTED_WRITE_BYTES,
    TRY_AGAIN_AFTER,
    WRITE_BACK_BYTES,
)
from holdfast._settings import override
from holdfast._stores import direct_files, write_ways
from holdfast._stores.direct_files import count_cached_pages
from holdfast._stores.large_files import LargeFile
from holdfast._stores.local_store import LocalStore
from holdfast._stores.write_ways import WriteWay, choose_way, note_speed
from tests.stores.test_direct_files import direct_disk, is_cached

__all__ = ["direct_disk"]

SIZE = 2 * NOTED_WRITE_BYTES


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_ways, "_disks", {})
    monkeypatch.delenv("HOLDFAST_PAGE_CACHE", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    with (tmp_path / "file").open("wb") as stream:
        yield stream.fileno()


@pytest.mark.parametrize("faster", list(WriteWay))
def test_both_ways_are_tried_and_the_faster_one_is_kept_and_now_and_then_compared(file, faster):
    taken = write_many(file, 300, lambda way, _: 1.0 if way is faster else 1.1)
    assert taken[:3] == [WriteWay.CACHED, WriteWay.CACHED, WriteWay.DIRECT]
    others = [number for number, way in enumerate(taken) if way is not faster and number > 3]
    assert others[0] == FIRST_TRY_AGAIN
    pauses = [later - earlier for earlier, later in itertools.pairwise(others)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == TRY_AGAIN_AFTER + 1
    assert pauses[0] < TRY_AGAIN_AFTER


@pytest.mark.parametrize("faster", list(WriteWay))
@pytest.mark.parametrize("slow", [1, 2])
def test_slow_first_files_do_not_decide(file, faster, slow):
    """The first ones of a program get memory that nobody has used yet, which can take several times as long."""
    taken = write_many(
        file, FIRST_TRY_AGAIN, lambda way, number: 5.0 if number < slow else 1.0 if way is faster else 1.1
    )
    assert set(taken[4:]) == {faster}


def test_one_file_that_something_else_slows_down_changes_nothing(file):
    write_many(file, 4, lambda way, _: 1.0 if way is WriteWay.CACHED else 1.1)
    note_speed(file, WriteWay.CACHED, SIZE, 5.0)
    assert choose_way(file) is WriteWay.CACHED


def write_many(file: int, count: int, seconds: Callable[[WriteWay, int], float]) -> list[WriteWay]:
    """Note files in the ways that are chosen for them, which are returned."""
    taken = []
    for number in range(count):
        taken.append(choose_way(file))
        note_speed(file, taken[-1], SIZE, seconds(taken[-1], number))
    return taken


def test_a_disk_that_changes_is_noticed(file):
    write_many(file, 4, lambda way, _: 1.0 if way is WriteWay.CACHED else 2.0)
    assert choose_way(file) is WriteWay.CACHED
    for _ in range(3):
        note_speed(file, WriteWay.CACHED, SIZE, 8.0)
    assert choose_way(file) is WriteWay.DIRECT


def test_small_files_say_nothing_about_a_disk(file):
    for _ in range(3):
        note_speed(file, choose_way(file), NOTED_WRITE_BYTES - 1, 1.0)
    assert choose_way(file) is WriteWay.CACHED


def test_what_a_file_took_until_it_was_on_the_disk_is_noted(tmp_path, monkeypatch):
    noted: list[tuple[WriteWay, int]] = []
    monkeypatch.setattr(
        "holdfast._stores.large_files.note_speed", lambda _, way, size, seconds: noted.append((way, size))
    )
    store, expected = LocalStore(tmp_path), []
    for way, page_cache in ((WriteWay.CACHED, "use"), (WriteWay.DIRECT, "avoid")):
        with override(page_cache=page_cache):
            store.put(page_cache, bytes(SIZE))
        can_be = way is WriteWay.CACHED or not is_cached(tmp_path / page_cache)
        expected.append((way if can_be else WriteWay.CACHED, SIZE))
    assert noted == expected


def test_what_is_wished_to_stay_in_the_page_cache_is_still_there(direct_disk):
    with override(page_cache="use"):
        LocalStore(direct_disk).put("used", bytes(2 * LEFT_IN_PAGE_CACHE))
    with override(page_cache="avoid"):
        LocalStore(direct_disk).put("avoided", bytes(SIZE))
    assert is_cached(direct_disk / "used")
    assert not is_cached(direct_disk / "avoided")


def test_the_system_is_told_early_to_write_back_and_only_what_it_has_not_been_told(tmp_path, monkeypatch):
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "holdfast._stores.large_files.begin_to_write_back", lambda _, begin, size: told.append((begin, size))
    )
    with (tmp_path / "file").open("wb") as stream, override(page_cache="use"):
        file = LargeFile(stream.fileno(), stream.name, SIZE)
        file.write(memoryview(bytes(SIZE)))
        file.finish()
    assert len(told) > 1
    assert [begin for begin, _ in told] == [0, *(begin + size for begin, size in told[:-1])]
    assert sum(size for _, size in told) == SIZE
    assert os.path.getsize(tmp_path / "file") == SIZE


def test_a_file_that_goes_through_the_page_cache_takes_little_of_it_and_leaves_nothing(direct_disk, monkeypatch):
    largest = 0
    written = os.pwrite

    def pwrite(descriptor: int, *arguments: Any) -> int:
        nonlocal largest
        count = written(descriptor, *arguments)
        largest = max(largest, (count_cached_pages(descriptor, 0, 1 << 40) or 0) * mmap.PAGESIZE)
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    content = os.urandom(MIB) * (3 * LEFT_IN_PAGE_CACHE // MIB) + b"end"
    LocalStore(direct_disk).put("file", content)
    assert (direct_disk / "file").read_bytes() == content
    os.truncate(direct_disk / "file", 0)  # what was just read is in the page cache
    LocalStore(direct_disk).put("other", content)
    assert LEFT_IN_PAGE_CACHE <= largest <= LEFT_IN_PAGE_CACHE + WRITE_BACK_BYTES + CACHED_WRITE_BYTES
    assert not is_cached(direct_disk / "other")


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_what_the_disk_reports_of_early_write_back_is_raised(tmp_path, monkeypatch, code):
    """The system reports it once: a flush after that would succeed."""
    calls = sync_file_range_that_fails(monkeypatch, code)
    with pytest.raises(OSError, match=str(tmp_path / "file")) as raised:
        LocalStore(tmp_path).put("file", bytes(2 * LEFT_IN_PAGE_CACHE))
    assert raised.value.errno == code
    assert not (tmp_path / "file").exists()
    assert len(calls) == 1


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.ESPIPE])
def test_file_systems_that_cannot_write_back_a_part_get_all_bytes(tmp_path, monkeypatch, code):
    calls = sync_file_range_that_fails(monkeypatch, code)
    content = bytes(2 * LEFT_IN_PAGE_CACHE)
    LocalStore(tmp_path).put("file", content)
    assert (tmp_path / "file").read_bytes() == content
    assert calls


def sync_file_range_that_fails(monkeypatch: pytest.MonkeyPatch, code: int) -> list[int]:
    """Where it waits, which is noted. It is told how to fail, as no disk here can be."""
    calls: list[int] = []

    def fail(_: int, begin: int, __: int, flags: int) -> int:
        if flags != 7:
            return 0
        calls.append(begin)
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(direct_files, "_sync_file_range", fail)
    return calls
