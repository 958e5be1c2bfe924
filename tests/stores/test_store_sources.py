"""Checkpoints of every format are read from any store, and from URLs, as they are from a disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file

import holdfast
from holdfast._formats.source import ReadRequest
from holdfast._load.opening import open_source
from holdfast._stores.fsspec_store import FsspecStore
from holdfast._stores.store_files import StoreFiles
from holdfast.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    NotACheckpointError,
    RefusedPickleError,
    UncommittedCheckpointError,
)
from holdfast.stores import MemoryStore, Store
from tests import s3_server
from tests.formats.regions import whole
from tests.stores.s3_requests import Requests

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
needs_s3 = pytest.mark.skipif(bool(s3_server.MISSING), reason=s3_server.WHY_SKIPPED)

STATE = {
    "model": {"w": torch.arange(40_000, dtype=torch.float32).reshape(200, 200)},
    "b": torch.ones(3, dtype=torch.bfloat16),
}
FLAT = {"model.w": STATE["model"]["w"], "b": STATE["b"]}


def of_stock(folder: Path) -> str:
    stock.save({**STATE, "step": 7}, checkpoint_id=folder)
    return "dcp"


def of_dcp(folder: Path) -> str:
    holdfast.dcp.save({**STATE, "step": 7}, checkpoint_id=folder)
    return "dcp"


def of_native(folder: Path) -> str:
    holdfast.save({**STATE, "step": 7}, folder)
    return "native"


def of_hugging_face(folder: Path) -> str:
    save_file({"model.w": FLAT["model.w"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": FLAT["b"]}, folder / "model-00002-of-00002.safetensors")
    weights = {"model.w": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return "safetensors"


def of_safetensors(folder: Path) -> str:
    save_file(FLAT, folder / "model.safetensors")
    return "safetensors"


FOLDERS = [of_stock, of_dcp, of_native, of_hugging_face, of_safetensors]


class Place:
    """A URL, and how to put files there behind the back of what is tested."""

    def __init__(self, url: str, files: Any) -> None:
        self.url = url
        self.files = files

    def take(self, folder: Path) -> None:
        for path in folder.iterdir():
            self.files.pipe_file(f"{self.url}/{path.name}", path.read_bytes())


@pytest.fixture(scope="module")
def bucket() -> s3_server.Bucket:
    return s3_server.new_bucket()


@pytest.fixture(scope="module")
def client(bucket: s3_server.Bucket) -> Any:
    """One for all tests: to make it takes longer than most of them."""
    return bucket.client()


@pytest.fixture(params=["fsspec", pytest.param("s3", marks=needs_s3)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Memory of fsspec is not memory:// to us, so that it gets a name of its own."""
    if request.param == "fsspec":
        fsspec.register_implementation(
            "cloud", type("Cloud", (type(fsspec.filesystem("memory")),), {"protocol": "cloud"}), True
        )
        return Place(f"cloud://{uuid4().hex}/step", fsspec.filesystem("cloud"))
    bucket = request.getfixturevalue("bucket")
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    return Place(bucket.url(uuid4().hex, "step"), request.getfixturevalue("client"))


def into_memory(folder: Path) -> Store:
    store = MemoryStore(uuid4().hex)
    for path in folder.iterdir():
        store.put(path.name, path.read_bytes())
    return store


def assert_all_there(place: Any, **options: Any) -> None:
    with open_source(place, **options) as source:
        for key, tensor in FLAT.items():
            assert whole(source, key) == tensor.view(torch.uint8).numpy().tobytes()
        part = np.empty((3, 5), source.tensors["model.w"].dtype.carrier)
        source.read([ReadRequest("model.w", (7, 100), (3, 5), part)])
        assert part.view(np.float32).tolist() == FLAT["model.w"][7:10, 100:105].tolist()
        assert source.verify() > 0
        sizes = dict(source.files())
        for key in FLAT:
            for piece in source.chunk_places(key):
                assert piece.file in sizes
                assert sizes[piece.file] >= piece.nbytes


@pytest.mark.parametrize("make", FOLDERS)
def test_folders_of_every_format_are_read_from_urls(place, tmp_path, make):
    kind = make(tmp_path)
    place.take(tmp_path)
    with open_source(place.url) as source:
        assert source.format == kind
        assert source.location == place.url
        if kind != "safetensors":
            assert source.tree["step"] == 7
    assert_all_there(place.url)
    with open_source(tmp_path) as local, open_source(place.url) as remote:
        assert remote.identity == local.identity
        assert sorted(remote.files()) == sorted(local.files())
        assert [remote.chunk_places(key) for key in FLAT] == [local.chunk_places(key) for key in FLAT]


@pytest.mark.parametrize("make", FOLDERS)
def test_folders_of_every_format_are_read_from_any_store(tmp_path, make):
    kind = make(tmp_path)
    store = into_memory(tmp_path)
    assert open_source(store).format == kind
    assert_all_there(store)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("model.safetensors", lambda path: save_file(FLAT, path)),
        ("model.pt", lambda path: torch.save(FLAT, path)),
        ("old.pt", lambda path: torch.save(FLAT, path, _use_new_zipfile_serialization=False)),
        ("no ending", lambda path: torch.save(FLAT, path)),
        ("without.ending", lambda path: save_file(FLAT, path)),
    ],
)
def test_single_files_are_read_from_urls(place, tmp_path, name, write: Callable[[Path], None]):
    write(tmp_path / name)
    place.take(tmp_path)
    assert_all_there(f"{place.url}/{name}")
    with open_source(tmp_path / name) as local, open_source(f"{place.url}/{name}") as remote:
        assert (remote.format, remote.identity) == (local.format, local.identity)
        assert remote.files() == local.files()


@pytest.mark.parametrize("make", [of_stock, of_native, of_hugging_face])
def test_the_url_of_the_index_is_as_good_as_that_of_the_folder(place, tmp_path, make):
    kind = make(tmp_path)
    place.take(tmp_path)
    (index,) = {".metadata", "holdfast.json", "model.safetensors.index.json"} & {
        path.name for path in tmp_path.iterdir()
    }
    assert open_source(f"{place.url}/{index}").format == kind


def test_a_file_with_code_is_refused_by_its_url(place, tmp_path):
    torch.save({"w": torch.ones(2), "layer": torch.nn.Linear(1, 1)}, tmp_path / "model.pt")
    place.take(tmp_path)
    with pytest.raises(RefusedPickleError) as raised:
        open_source(f"{place.url}/model.pt")
    assert f"{place.url}/model.pt" in str(raised.value)
    assert open_source(f"{place.url}/model.pt", allow_pickle=True).tree["w"].shape == (2,)


# --- what is no checkpoint ---------------------------------------------------------------------------------------


def test_nothing_is_told_from_something_else(place, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="there is nothing"):
        open_source(place.url)
    (tmp_path / "notes.txt").write_text("all well")
    place.take(tmp_path)
    with pytest.raises(NotACheckpointError, match=r"holds notes\.txt"):
        open_source(place.url)
    with pytest.raises(NotACheckpointError, match="begins with b'all well'"):
        open_source(f"{place.url}/notes.txt")
    with pytest.raises(CheckpointNotFoundError):
        open_source(f"{place.url}/none.safetensors")


@pytest.mark.parametrize("left", ["__0_0.distcp", "data-00112233aabbccdd-0-0.safetensors"])
def test_what_a_save_has_left_behind_is_not_a_checkpoint(place, tmp_path, left):
    (tmp_path / left).write_bytes(b"1")
    place.take(tmp_path)
    with pytest.raises(UncommittedCheckpointError, match="no checkpoint at"):
        open_source(place.url)


def test_checkpoints_one_step_further_down_are_named(place, tmp_path):
    of_native(tmp_path)
    for name in ("step-1", "step-2"):
        Place(f"{place.url}/{name}", place.files).take(tmp_path)
    with pytest.raises(NotACheckpointError, match=r"checkpoints inside of it: step-1, step-2"):
        open_source(place.url)


@pytest.mark.parametrize("make", [of_stock, of_safetensors])
def test_a_file_that_was_replaced_since_is_noticed(tmp_path, make):
    make(tmp_path)
    store = into_memory(tmp_path)
    with open_source(store) as source:
        (name,) = [name for name, _ in source.files() if name.endswith(("distcp", "safetensors"))]
        store.delete([name])
        store.put(name, bytes(100))
        with pytest.raises(DamagedCheckpointError, match=name):
            whole(source, "model.w")


# --- what is asked for -------------------------------------------------------------------------------------------


@needs_s3
@pytest.mark.parametrize("make", [of_dcp, of_native, of_hugging_face])
def test_a_slice_reads_ranges_and_not_files(bucket, client, monkeypatch, tmp_path, make):
    place = Place(bucket.url(uuid4().hex), client)
    monkeypatch.setitem(STATE, "model", {"w": torch.arange(4_000_000, dtype=torch.float32).reshape(2000, 2000)})
    monkeypatch.setitem(FLAT, "model.w", STATE["model"]["w"])
    make(tmp_path)
    place.take(tmp_path)
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    requests = Requests(monkeypatch)
    checkpoint = holdfast.open(place.url)
    assert checkpoint["model.w"][1500:1502, 7].tolist() == [1500 * 2000 + 7, 1501 * 2000 + 7]
    assert sum(last - first + 1 for first, last in requests.ranges()) < 16_000_000 / 20
    assert len(requests.made) < 20


@needs_s3
def test_a_file_of_many_small_tensors_takes_few_requests(bucket, client, monkeypatch, tmp_path):
    state = {f"w{number}": torch.full((100,), float(number)) for number in range(500)}
    torch.save({**state, "large": torch.ones(1_000_000)}, tmp_path / "model.pt")
    place = Place(bucket.url(uuid4().hex), client)
    place.take(tmp_path)
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    requests = Requests(monkeypatch)
    checkpoint = holdfast.open(f"{place.url}/model.pt")
    for key, tensor in state.items():
        assert torch.equal(checkpoint[key][...], tensor)
    assert len(requests.made) < 30
    assert sum(last - first + 1 for first, last in requests.ranges()) < 1_000_000


# --- files -------------------------------------------------------------------------------------------------------


def test_objects_seen_as_files_are_only_read():
    store = MemoryStore(uuid4().hex)
    store.put("data", bytes(range(200)) * 1000)
    files = StoreFiles(store)
    path = files.concat_path(store.location, "data")
    assert files.ls(store.location) == [path]
    assert files.exists(path)
    assert files.exists(store.location)
    assert not files.exists(f"{path}-other")
    assert not StoreFiles(MemoryStore(uuid4().hex)).exists(store.location + "x/inner/file")
    with files.create_stream(path, "rb") as stream:
        assert stream.read(3) == b"\0\1\2"
        assert stream.seek(-2, 2) == 199_998
        assert stream.read() == b"\xc6\xc7"
        stream.seek(190_000)
        assert len(stream.read()) == 10_000
        memory = bytearray(150_000)
        stream.seek(10)
        assert stream.readinto(memory) == 150_000
        assert memory == (bytes(range(200)) * 1000)[10:150_010]
    for act in (
        lambda: files.create_stream(path, "wb").__enter__(),
        lambda: files.rename(path, path),
        lambda: files.mkdir(path),
        lambda: files.rm_file(path),
    ):
        with pytest.raises(OSError, match="only read here"):
            act()


def test_options_are_for_one_store(bucket, tmp_path):
    if s3_server.MISSING:
        pytest.skip(s3_server.WHY_SKIPPED)
    url = bucket.url(uuid4().hex)
    holdfast.save({**STATE, "step": 7}, FsspecStore(url, **bucket.options))
    assert_all_there(FsspecStore(url, **bucket.options))
