"""Large files go through the page cache or past it: whichever was faster on the disk, if there is memory for it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast._base.tuning import FIRST_TRY_AGAIN, NOTED_WRITE_BYTES, TRY_AGAIN_AFTER
from holdfast._settings import override
from holdfast._stores import write_ways
from holdfast._stores.large_files import LargeFile
from holdfast._stores.local_store import LocalStore
from holdfast._stores.write_ways import WriteWay, available_memory, choose_way, note_speed
from tests.stores.test_direct_files import direct_disk, is_cached

__all__ = ["direct_disk"]

SIZE = 2 * NOTED_WRITE_BYTES


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_ways, "_disks", {})
    monkeypatch.setattr(write_ways, "available_memory", lambda: float("inf"))
    monkeypatch.delenv("HOLDFAST_PAGE_CACHE", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    with (tmp_path / "file").open("wb") as stream:
        yield stream.fileno()


@pytest.mark.parametrize("faster", list(WriteWay))
def test_both_ways_are_tried_and_the_faster_one_is_kept_and_now_and_then_compared(file, faster):
    taken = write_many(file, 300, lambda way, _: 1.0 if way is faster else 1.1)
    assert taken[:3] == [WriteWay.CACHED, WriteWay.CACHED, WriteWay.DIRECT]
    others = [number for number, way in enumerate(taken) if way is not faster and number > 2]
    assert others[0] == FIRST_TRY_AGAIN
    pauses = [later - earlier for earlier, later in itertools.pairwise(others)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == TRY_AGAIN_AFTER + 1
    assert pauses[0] < TRY_AGAIN_AFTER


@pytest.mark.parametrize("faster", list(WriteWay))
def test_a_slow_first_file_does_not_decide(file, faster):
    """The first one of a program gets memory that nobody has used yet, which can take several times as long."""
    taken = write_many(file, FIRST_TRY_AGAIN, lambda way, number: 5.0 if number == 0 else 1.0 if way is faster else 1.1)
    assert set(taken[3:]) == {faster}


def test_one_file_that_something_else_slows_down_changes_nothing(file):
    write_many(file, 4, lambda way, _: 1.0 if way is WriteWay.CACHED else 1.1)
    note_speed(file, WriteWay.CACHED, SIZE, 5.0)
    assert choose_way(file, SIZE) is WriteWay.CACHED


def write_many(file: int, count: int, seconds: Callable[[WriteWay, int], float]) -> list[WriteWay]:
    """Note files in the ways that are chosen for them, which are returned."""
    taken = []
    for number in range(count):
        taken.append(choose_way(file, SIZE))
        note_speed(file, taken[-1], SIZE, seconds(taken[-1], number))
    return taken


def test_a_disk_that_changes_is_noticed(file):
    write_many(file, 4, lambda way, _: 1.0 if way is WriteWay.CACHED else 2.0)
    assert choose_way(file, SIZE) is WriteWay.CACHED
    for _ in range(3):
        note_speed(file, WriteWay.CACHED, SIZE, 8.0)
    assert choose_way(file, SIZE) is WriteWay.DIRECT


def test_small_files_say_nothing_about_a_disk(file):
    for _ in range(3):
        note_speed(file, choose_way(file, NOTED_WRITE_BYTES - 1), NOTED_WRITE_BYTES - 1, 1.0)
    assert choose_way(file, SIZE) is WriteWay.CACHED


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


def test_what_was_written_through_the_page_cache_is_still_there(direct_disk):
    with override(page_cache="use"):
        LocalStore(direct_disk).put("used", bytes(SIZE))
    with override(page_cache="avoid"):
        LocalStore(direct_disk).put("avoided", bytes(SIZE))
    assert is_cached(direct_disk / "used")
    assert not is_cached(direct_disk / "avoided")


def test_a_file_for_which_there_is_not_enough_memory_goes_past_the_page_cache(file, monkeypatch):
    monkeypatch.setattr(write_ways, "available_memory", lambda: 2 * SIZE)
    assert choose_way(file, SIZE) is WriteWay.CACHED
    assert choose_way(file, SIZE + 1) is WriteWay.DIRECT
    with override(page_cache="use"):
        assert choose_way(file, SIZE + 1) is WriteWay.CACHED


def test_available_memory_is_the_least_that_the_machine_and_the_container_have(tmp_path):
    system, group = tmp_path / "meminfo", tmp_path / "group"
    assert available_memory(system, group) == float("inf")
    system.write_text("MemTotal:       24684100 kB\nMemAvailable:       1000 kB\n")
    assert available_memory(system, group) == 1000 * 1024
    group.mkdir()
    (group / "memory.max").write_text("max\n")
    (group / "memory.stat").write_text("anon 100000\nfile 5\nshmem 24000\n")
    assert available_memory(system, group) == 1000 * 1024
    (group / "memory.max").write_text("500000\n")
    assert available_memory(system, group) == 500_000 - 124_000


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
