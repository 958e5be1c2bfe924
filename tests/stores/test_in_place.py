"""Memory that nobody changes is written from where it is, past the page cache, between bytes that come in buffers."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._base.tuning import DIRECT_ALIGNMENT, DIRECT_FROM, MIB, WRITE_BUFFER_BYTES
from holdfast._settings import override
from holdfast._stores import large_files
from holdfast._stores.local_store import LocalStore
from tests.properties import examples
from tests.stores.test_direct_files import direct_disk, is_cached, refuses_directness

__all__ = ["direct_disk"]

PAGE = DIRECT_ALIGNMENT


def on_pages(content: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(content) or 1)
    memory[: len(content)] = content
    return memory


def write(store: LocalStore, parts: list[tuple[bytes, bool]]) -> list[bool]:
    """A file of parts, of which some are to be written in place. Returns which of these were."""
    outcomes, kept = [], []
    with store.create("file", sum(len(content) for content, _ in parts)) as sink:
        for content, in_place in parts:
            if in_place:
                kept.append(on_pages(content))
                taken = sink.write_in_place(memoryview(kept[-1])[: len(content)])
                outcomes.append(taken)
                if taken:
                    continue
            sink.write(content)
    return outcomes


def test_whole_pages_are_taken_and_not_copied(direct_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[int] = []
    pwrite = os.pwrite

    def noting(descriptor: int, view: memoryview, position: int) -> int:
        sources.append(np.frombuffer(view, np.uint8).ctypes.data)
        return pwrite(descriptor, view, position)

    monkeypatch.setattr(os, "pwrite", noting)
    content = os.urandom(2 * WRITE_BUFFER_BYTES + PAGE)
    memory = on_pages(content)
    with LocalStore(direct_disk).create("file", PAGE + len(content) + 10) as sink:
        sink.write(b"a" * PAGE)
        assert sink.write_in_place(memoryview(memory))
        sink.write(b"b" * 10)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    assert {address, address + WRITE_BUFFER_BYTES, address + 2 * WRITE_BUFFER_BYTES} <= set(sources)
    assert (direct_disk / "file").read_bytes() == b"a" * PAGE + content + b"b" * 10


@pytest.mark.parametrize("before", [1, PAGE - 1, PAGE + 8])
def test_what_is_not_on_whole_pages_of_the_file_is_left_to_the_caller(tmp_path: Path, before: int) -> None:
    content = os.urandom(2 * MIB)
    assert write(LocalStore(tmp_path), [(b"a" * before, False), (content, True)]) == [False]
    assert (tmp_path / "file").read_bytes() == b"a" * before + content


def test_what_is_not_on_whole_pages_in_memory_is_left_to_the_caller(tmp_path: Path) -> None:
    memory = on_pages(os.urandom(2 * MIB))
    with LocalStore(tmp_path).create("file", 2 * MIB) as sink:
        assert not sink.write_in_place(memoryview(memory)[64 : 64 + MIB])
        assert not sink.write_in_place(memoryview(memory)[: MIB + 1])
        assert sink.size == 0
        sink.write(memory)


def test_small_files_take_nothing_in_place(tmp_path: Path) -> None:
    assert write(LocalStore(tmp_path), [(bytes(DIRECT_FROM - PAGE), True)]) == [False]


def test_what_is_wished_to_stay_in_the_page_cache_does(direct_disk: Path) -> None:
    with override(page_cache="use"):
        assert write(LocalStore(direct_disk), [(os.urandom(2 * MIB), True)]) == [False]
    assert is_cached(direct_disk / "file")


@pytest.mark.parametrize("how", ["open", "write"])
def test_file_systems_without_direct_access_get_all_bytes(tmp_path: Path, monkeypatch, how: str) -> None:
    refuses_directness(monkeypatch, how)
    content = os.urandom(3 * MIB)
    write(LocalStore(tmp_path), [(b"a" * PAGE, False), (content, True)])
    assert (tmp_path / "file").read_bytes() == b"a" * PAGE + content


def test_a_disk_that_fails_is_reported_and_leaves_no_file(direct_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(large_files.os, "pwrite", full)
    with pytest.raises(OSError, match="no space") as raised:
        write(LocalStore(direct_disk), [(os.urandom(64 * MIB), True)])
    assert raised.value.errno == errno.ENOSPC
    assert not (direct_disk / "file").exists()


def test_files_that_are_written_in_place_say_nothing_of_the_two_ways(direct_disk: Path, monkeypatch) -> None:
    noted: list[object] = []
    monkeypatch.setattr(large_files, "note_speed", lambda *arguments: noted.append(arguments))
    write(LocalStore(direct_disk), [(os.urandom(32 * MIB), True)])
    assert not noted


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3 * 260), st.booleans(), st.integers(0, 1)), min_size=1, max_size=8))
def test_any_mixture_of_parts_is_the_file(tmp_path_factory, parts) -> None:
    """Sizes are in pages, and sometimes a byte more, after which nothing is on whole pages any more."""
    contents = [(os.urandom(pages * PAGE + more), in_place) for pages, in_place, more in parts]
    folder = tmp_path_factory.mktemp("mixture")
    write(LocalStore(folder), contents)
    assert (folder / "file").read_bytes() == b"".join(content for content, _ in contents)
