"""From paths and URLs to stores, and stores without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from holdfast._stores.fsspec_store import FsspecRoot, FsspecStore
from holdfast._stores.local_store import LocalStore
from holdfast._stores.memory_store import MemoryStore
from holdfast._stores.places import store_at
from holdfast._stores.roots import root_at
from holdfast.errors import MissingPackageError


def test_a_store_is_its_own_place():
    store = MemoryStore("places")
    assert store_at(store) is store


@pytest.mark.parametrize("kind", [str, Path, os.fsencode], ids=["str", "Path", "bytes"])
def test_a_path_is_a_folder(tmp_path, kind):
    store = store_at(kind(tmp_path / "step"))
    assert isinstance(store, LocalStore)
    assert store.location == str(tmp_path / "step")


def test_a_relative_path_is_that_of_the_moment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stores = [store_at("step"), store_at("./step"), store_at("step/"), store_at(Path("step"))]
    monkeypatch.chdir("/")
    assert {store.location for store in stores} == {str(tmp_path / "step")}


@pytest.mark.parametrize("odd", ["~", "a::b", "a:b", "100%25", "with space", "c:/x"])
def test_a_path_may_be_odd(tmp_path, monkeypatch, odd):
    monkeypatch.chdir(tmp_path)
    assert store_at(odd).location == str(tmp_path / odd)


@pytest.mark.parametrize("nothing", ["", b"", "memory://", "memory:///", "file://"])
def test_an_empty_place_is_refused(nothing):
    with pytest.raises(ValueError, match=r"empty|needs a name|names no folder"):
        store_at(nothing)


@pytest.mark.parametrize("url", ["memory://run/step", "MEMORY://run/step/", "memory:///run/step"])
def test_memory_has_urls(url):
    store = store_at(url)
    assert isinstance(store, MemoryStore)
    assert store.location == "memory://run/step"


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///runs/step", "/runs/step"),
        ("file://localhost/runs/step/", "/runs/step"),
        ("FILE:///runs/with%20space%25", "/runs/with space%"),
        ("file:///runs/größe", "/runs/größe"),
        ("file:///runs/%FF", "/runs/\udcff"),
    ],
)
def test_files_have_urls(url, path):
    store = store_at(url)
    assert isinstance(store, LocalStore)
    assert store.location == path


@pytest.mark.parametrize("url", ["file://runs/step", "file://server/runs/step", "file:///runs?x", "file:///runs#x"])
def test_a_url_of_a_file_that_could_mean_something_else_is_refused(url):
    with pytest.raises(ValueError, match=r"three slashes|%3F"):
        store_at(url)


@pytest.mark.parametrize("url", ["carrier-pigeon://loft/run", "CARRIER-PIGEON://loft"])
def test_other_urls_are_refused_with_what_there_is(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for find, kind in ((store_at, "store"), (root_at, "root")):
        with pytest.raises(ValueError, match=rf"no {kind} for .*paths, file:///folder, memory://name") as raised:
            find(url)
        assert url in str(raised.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("url", ["s3://bucket/run", "simplecache::s3://bucket/run", "carrier-pigeon://loft/run"])
def test_a_url_that_was_made_a_path_is_refused(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="give it as a str"):
        store_at(Path(url))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("url", ["s3://bucket/run", "S3://bucket/run/", "http://x/run", "simplecache::s3://bucket/run"])
def test_other_urls_are_for_fsspec(url):
    pytest.importorskip("s3fs")
    store, root = store_at(url), root_at(url)
    assert isinstance(store, FsspecStore)
    assert isinstance(root, FsspecRoot)
    assert store.location == root.location == url.lower().rstrip("/")


def test_a_protocol_whose_package_is_missing_is_named():
    fsspec.register_implementation("lacking", "no_such_package.Thing", errtxt="Install no_such_package", clobber=True)
    for find in (store_at, root_at):
        with pytest.raises(MissingPackageError, match=r"lacking://x needs a package.*no_such_package") as raised:
            find("lacking://x")
        assert raised.value.install == "no_such_package"


WITHOUT_FSSPEC = """
import sys
sys.modules["fsspec"] = None
from holdfast.errors import MissingPackageError
from holdfast.stores import root_at, store_at
for find in (store_at, root_at):
    try:
        find("s3://bucket/run")
    except MissingPackageError as error:
        print(error.install, "s3://bucket/run" in str(error))
store_at("/path"), root_at("memory://run")
"""


def test_without_fsspec_it_is_said_what_to_install():
    done = subprocess.run([sys.executable, "-c", WITHOUT_FSSPEC], capture_output=True, text=True, check=False)
    assert done.stdout == "holdfast[fsspec] True\n" * 2, done.stderr


@pytest.mark.parametrize("thing", [None, 3, ["path"]])
def test_other_things_are_no_places(thing):
    with pytest.raises(TypeError):
        store_at(thing)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it is an error now
from holdfast._stores.places import store_at
import holdfast.testing
for place in (sys.argv[1], "memory://run"):
    store = store_at(place)
    store.put("data", b"content")
    store.sync()
    store.commit("record", b"complete", replaces=None)
    assert store.read("data") == b"content"
    assert len(store.list()) == 2
    store.delete(["data"])
"""


def test_stores_do_not_need_torch(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


WITHOUT_PYTEST = """
import sys
sys.modules["pytest"] = None
from holdfast.errors import MissingPackageError
try:
    import holdfast.testing
except MissingPackageError as error:
    print(error, error.install)
"""


def test_the_test_suite_says_that_it_needs_pytest():
    done = subprocess.run([sys.executable, "-c", WITHOUT_PYTEST], capture_output=True, text=True, check=False)
    assert done.stdout == "holdfast.testing needs pytest: pip install pytest pytest\n", done.stderr


@pytest.mark.parametrize("place", [None, 7, ["folder"]])
def test_what_is_no_place_is_named(place):
    with pytest.raises(TypeError, match="a path, a URL or a store, not"):
        store_at(place)
