"""What a store in memory does beyond the contract."""

from __future__ import annotations

import uuid

import pytest

from holdfast._stores.memory_store import MemoryStore


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


def test_a_name_is_one_place_however_many_slashes_are_around_it(name):
    MemoryStore(f"{name}/step").put("data", b"content")
    assert MemoryStore(f"/{name}/step/").read("data") == b"content"
    assert MemoryStore(f"{name}/step/deeper").list() == []
    assert MemoryStore(f"/{name}/step/").location == f"memory://{name}/step"


@pytest.mark.parametrize("nothing", ["", "/", "//"])
def test_a_place_without_a_name_is_refused(nothing):
    with pytest.raises(ValueError, match="needs a name"):
        MemoryStore(nothing)


def test_an_object_that_is_being_written_cannot_be_seen_and_its_name_is_taken(name):
    store = MemoryStore(name)
    with store.create("data") as sink:
        sink.write(b"half")
        assert store.list() == []
        assert store.size("data") is None
        with pytest.raises(FileExistsError, match=f"memory://{name}/data"), MemoryStore(name).create("data"):
            pass
        sink.write(b" and half")
    assert store.read("data") == b"half and half"


def test_what_was_committed_meanwhile_is_not_overwritten(name):
    def write_while_another_commits():
        with MemoryStore(name).create("record") as sink:
            MemoryStore(name).commit("record", b"theirs", replaces=None)
            sink.write(b"mine")

    with pytest.raises(FileExistsError, match="record"):
        write_while_another_commits()
    assert MemoryStore(name).read("record") == b"theirs"


def test_committed_content_cannot_be_changed_from_outside(name):
    content = bytearray(b"content")
    MemoryStore(name).commit("record", content, replaces=None)
    content[:] = b"changed"
    assert MemoryStore(name).read("record") == b"content"


@pytest.mark.parametrize("change", ["replace", "delete"])
def test_an_open_reader_goes_on_whatever_happens_to_the_name(name, change):
    store = MemoryStore(name)
    store.commit("record", b"old", replaces=None)
    with store.reader("record") as reader:
        if change == "replace":
            store.commit("record", b"new", replaces=b"old")
        else:
            store.delete(["record"])
        memory = bytearray(3)
        reader.read_into(0, memory)
    assert memory == b"old"
