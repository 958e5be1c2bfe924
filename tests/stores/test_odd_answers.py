"""Storages that contradict themselves: every such answer is an error that names the object, and none is waited for."""

from __future__ import annotations

import errno
import os
from typing import Any
from uuid import uuid4

import fsspec
import pytest

import holdfast
from holdfast._base.tuning import DIRECT_FROM
from holdfast._stores.fsspec_store import FsspecStore
from holdfast._stores.local_store import LocalStore
from holdfast.errors import InconsistentStorageError

Memory: Any = type(fsspec.filesystem("memory"))


class Odd(Memory):
    """Memory whose objects are read with other lengths than they have."""

    protocol = "odd"
    added = 0
    """How many bytes are read too many, or too few."""
    reads = 0
    odd_reads = 10**9
    """After how many reads it answers as it should."""

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        cls = type(self)
        cls.reads += 1
        content: bytes = super().cat_file(path, start=start, end=end, **kwargs)
        if cls.reads > cls.odd_reads:
            return content
        if cls.added <= -100:
            raise FileNotFoundError(path)
        return content + bytes(cls.added) if cls.added > 0 else content[: len(content) + cls.added]


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> FsspecStore:
    fsspec.register_implementation("odd", Odd, clobber=True)
    monkeypatch.setattr(Odd, "reads", 0)
    monkeypatch.setattr(Odd, "added", 0)
    monkeypatch.setattr(Odd, "odd_reads", 10**9)
    return FsspecStore(f"odd://{uuid4().hex}/step")


@pytest.mark.parametrize(("added", "found"), [(-1, 9), (3, 13), (-100, 0)])
def test_a_small_object_with_another_length_than_announced_is_an_error_after_a_few_tries(odd, added, found) -> None:
    odd.put("data", b"0123456789")
    Odd.added, Odd.reads = added, 0
    with pytest.raises(InconsistentStorageError) as caught:
        odd.read("data")
    error = caught.value
    assert (error.file, error.expected, error.found, error.errno) == (odd.path_of("data"), 10, found, errno.EIO)
    assert f"it has 10 bytes, and reading them gives {found}." in str(error)
    assert odd.path_of("data") in str(error)
    assert Odd.reads <= 10


@pytest.mark.parametrize(("added", "found"), [(-1, 99), (3, 103)])
def test_so_is_a_part_of_a_large_object(odd, added, found) -> None:
    odd.put("data", bytes(3 << 20))
    Odd.added = added
    with odd.reader("data") as reader, pytest.raises(InconsistentStorageError) as caught:
        reader.read_into(2 << 20, bytearray(100))
    assert (caught.value.expected, caught.value.found) == (100, found)
    assert f"there are 100 bytes from byte {2 << 20} on" in str(caught.value)


def test_an_odd_answer_that_is_followed_by_a_right_one_is_nothing(odd) -> None:
    odd.put("data", b"0123456789")
    Odd.added, Odd.reads, Odd.odd_reads = -1, 0, 2
    assert odd.read("data") == b"0123456789"


def test_a_commit_to_such_a_storage_is_an_error_and_changes_nothing(odd) -> None:
    odd.put("record", b"before")
    Odd.added, Odd.reads = 1, 0
    with pytest.raises(InconsistentStorageError):
        odd.commit("record", b"after", replaces=b"before")
    Odd.added = 0
    assert odd.read("record") == b"before"


def test_a_checkpoint_in_such_a_storage_is_not_called_damaged(odd) -> None:
    holdfast.save({"a": 1}, odd)
    Odd.added = 1
    with pytest.raises(InconsistentStorageError):
        holdfast.load({"a": 0}, odd)


class Restless(Odd):
    """Memory in which somebody replaces every object whenever it is read."""

    protocol = "restless"

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        content: bytes = super().cat_file(path, start=start, end=end, **kwargs)
        self.pipe_file(path, b"x" * (len(content) % 7 + 1))
        return content


def test_an_object_that_is_replaced_all_the_time_is_an_error(odd) -> None:
    fsspec.register_implementation("restless", Restless, clobber=True)
    store = FsspecStore(f"restless://{uuid4().hex}/step")
    store.put("data", b"0")
    with pytest.raises(OSError, match="was replaced while it was read") as caught:
        store.read("data")
    assert caught.value.errno == errno.ESTALE


@pytest.mark.parametrize("size", [10, DIRECT_FROM])
def test_a_file_system_that_takes_no_bytes_and_reports_no_error_is_not_asked_for_ever(
    tmp_path, monkeypatch, size
) -> None:
    """POSIX allows a write to return 0, and file systems in user space have done so. There is none at hand."""
    store = LocalStore(tmp_path)
    monkeypatch.setattr(os, "write", lambda descriptor, content: 0)
    monkeypatch.setattr(os, "pwrite", lambda descriptor, content, position: 0)
    with pytest.raises(OSError, match="takes no more bytes") as caught, store.create("data", size) as sink:
        sink.write(bytes(size))
    assert caught.value.errno == errno.EIO
    assert not (tmp_path / "data").exists()
