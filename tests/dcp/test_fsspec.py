"""Checkpoints at URLs: in memory and on disks, found by their protocol, and exchanged with stock."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader as StockReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter as StockWriter

import holdfast.dcp as dcp
from holdfast.dcp._fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter
from holdfast.dcp._storage_utils import _storage_setup
from holdfast.dcp.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from holdfast.dcp.state_dict_saver import AsyncCheckpointerType
from holdfast.errors import CheckpointException, DamagedCheckpointError
from tests.dcp.states import LIBRARIES
from tests.sharding import sharded

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # stock says so on every call
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:.*holds a checkpoint"),
]


def state(seed: int = 0) -> dict[str, Any]:
    return {"weights": torch.arange(24.0).reshape(4, 6) + seed, "nested": {"step": 7 + seed, "name": "run"}}


def blank() -> dict[str, Any]:
    return {"weights": torch.full((4, 6), -1.0), "nested": {"step": 0, "name": ""}}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert torch.equal(found["weights"], expected["weights"])
    assert found["nested"] == expected["nested"]


@pytest.fixture
def url() -> str:
    return f"memory://{uuid4().hex}/step-1"


def names(url: str) -> set[str]:
    fs, path = fsspec.core.url_to_fs(url)
    return {name.rsplit("/", 1)[1] for name in fs.find(path)}


# --- one process -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}, {"sync_files": False}])
def test_a_state_comes_back_from_memory(url, options):
    dcp.save(state(), storage_writer=FsspecWriter(url, **options))
    loaded = blank()
    dcp.load(loaded, storage_reader=FsspecReader(url))
    assert_same(loaded, state())


def test_saving_again_replaces_the_checkpoint_and_leaves_nothing_of_the_old_one(url):
    for seed in range(3):
        dcp.save(state(seed), checkpoint_id=url)
        loaded = blank()
        dcp.load(loaded, checkpoint_id=url)
        assert_same(loaded, state(seed))
    assert len(names(url)) == 2


def test_overwriting_can_be_forbidden(url):
    dcp.save(state(), storage_writer=FsspecWriter(url))
    with pytest.raises(CheckpointException, match="already exists"):
        dcp.save(state(1), storage_writer=FsspecWriter(url, overwrite=False))
    loaded = blank()
    dcp.load(loaded, checkpoint_id=url)
    assert_same(loaded, state())


class FailsAtTheSecondItem(dcp.DefaultSavePlanner):
    resolved = 0

    def resolve_data(self, write_item: Any) -> Any:
        self.resolved += 1
        if self.resolved == 2:
            raise OSError("no space")
        return super().resolve_data(write_item)


def test_a_save_that_fails_leaves_the_old_checkpoint_alone(url):
    dcp.save(state(), checkpoint_id=url)
    before = names(url)
    with pytest.raises(CheckpointException, match="no space"):
        dcp.save(state(1), checkpoint_id=url, planner=FailsAtTheSecondItem())
    assert names(url) == before
    loaded = blank()
    dcp.load(loaded, checkpoint_id=url)
    assert_same(loaded, state())


def test_the_index_appears_in_one_step_and_an_old_one_survives_if_it_cannot(url, monkeypatch):
    dcp.save(state(), checkpoint_id=url)

    def fail(self: Any, *args: Any) -> None:
        raise ConnectionError("cut off")

    monkeypatch.setattr(FileSystem, "put", fail)
    with pytest.raises(CheckpointException, match="cut off"):
        dcp.save(state(1), checkpoint_id=url)
    monkeypatch.undo()
    loaded = blank()
    dcp.load(loaded, checkpoint_id=url)
    assert_same(loaded, state())
    dcp.save(state(2), checkpoint_id=url)
    assert len(names(url)) == 2  # what the failed save could not be sure about was cleared


def test_no_stream_ever_opens_the_index_for_writing(url, monkeypatch):
    opened = []
    real = FileSystem.create_stream
    monkeypatch.setattr(FileSystem, "create_stream", lambda self, *args: opened.append(args) or real(self, *args))
    dcp.save(state(), checkpoint_id=url)
    assert len(opened) == 1
    assert opened[0][0].endswith(".distcp")


def test_damage_is_noticed(url):
    dcp.save(state(), checkpoint_id=url)
    (name,) = names(url) - {".metadata"}
    memory, path = fsspec.core.url_to_fs(f"{url}/{name}")
    content = bytearray(memory.cat_file(path))
    content[len(content) // 2] ^= 1
    memory.pipe_file(path, bytes(content))
    with pytest.raises(CheckpointException) as caught:
        dcp.load(blank(), checkpoint_id=url)
    (error, _) = caught.value.failures[0]
    assert isinstance(error, DamagedCheckpointError)
    assert error.file == f"{url}/{name}"


def test_a_path_without_a_checkpoint_is_described(url):
    with pytest.raises(CheckpointException, match=rf"no checkpoint at {url}: the path does not exist"):
        dcp.load(blank(), checkpoint_id=url)
    dcp.save(state(), checkpoint_id=f"{url}/inner")
    with pytest.raises(CheckpointException, match=r"checkpoints inside of it: inner"):
        dcp.load(blank(), checkpoint_id=url)


# --- in the background -------------------------------------------------------------------------------------------


def test_a_background_save_goes_to_memory_and_sees_nothing_of_later_changes(url):
    changing = state(1)
    for writer in (None, FsspecWriter(url)):
        saved = dcp.async_save(changing, checkpoint_id=url, storage_writer=writer)
        changing["weights"] += 100
        saved.result()
        changing = state(1)
        loaded = blank()
        dcp.load(loaded, checkpoint_id=url)
        assert_same(loaded, state(1))


def save_in_background(url: str, seed: int, kind: str) -> None:
    whole = torch.arange(70.0).reshape(10, 7) + seed
    value = {"sharded": sharded(whole), "whole": whole.clone(), "seed": seed}
    writer = FsspecWriter(url, auto_mkdir=True)
    saved = dcp.async_save(value, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType(kind))
    value["whole"].zero_()
    saved.result()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_ranks_save_to_a_url_in_the_background(ranks, tmp_path, kind):
    url = f"file://{tmp_path}/a"
    ranks(2).run(save_in_background, url, 1, kind)
    assert_all_loaded(ranks(2).run(load_sharded, url), 1)


def test_a_writer_travels_to_another_process_with_its_options(tmp_path):
    writer = FsspecWriter(f"file://{tmp_path}/a", auto_mkdir=True)
    copy = pickle.loads(pickle.dumps(writer))
    copy.reset(f"file://{tmp_path}/b")
    assert copy.fs.fs.auto_mkdir
    assert copy.path == f"file://{tmp_path}/b"


# --- options -----------------------------------------------------------------------------------------------------


def test_options_of_the_protocol_survive_a_new_path(tmp_path):
    """Stock forgets them when it gets a new path."""
    for kind in (FsspecWriter, FsspecReader):
        storage = kind(f"file://{tmp_path}/a", auto_mkdir=True)
        storage.reset(f"file://{tmp_path}/b")
        assert storage.fs.fs.auto_mkdir
        assert storage.checkpoint_id == storage.path == f"file://{tmp_path}/b"


def test_save_and_load_pass_the_path_to_a_storage_with_options(tmp_path):
    writer = FsspecWriter(f"file://{tmp_path}/a", auto_mkdir=True)
    reader = FsspecReader(f"file://{tmp_path}/a", auto_mkdir=True)
    dcp.save(state(), checkpoint_id=f"file://{tmp_path}/b", storage_writer=writer)
    loaded = blank()
    dcp.load(loaded, checkpoint_id=f"file://{tmp_path}/b", storage_reader=reader)
    assert_same(loaded, state())
    assert writer.fs.fs.auto_mkdir
    assert reader.fs.fs.auto_mkdir
    assert not (tmp_path / "a").exists()


def test_the_classes_have_the_bases_that_programs_test_for():
    assert issubclass(FsspecWriter, FileSystemWriter)
    assert issubclass(FsspecReader, FileSystemReader)
    assert issubclass(FileSystem, FileSystemBase)


# --- detection ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reader", "kind"), [(True, FsspecReader), (False, FsspecWriter)])
def test_urls_get_the_storage_of_fsspec(tmp_path, reader, kind):
    for checkpoint_id in ("memory://x", f"file://{tmp_path}", f"simplecache::file://{tmp_path}"):
        assert type(_storage_setup(None, checkpoint_id, reader=reader)) is kind


@pytest.mark.parametrize(("reader", "kind"), [(True, FileSystemReader), (False, FileSystemWriter)])
def test_local_paths_go_on_as_before(tmp_path, reader, kind):
    for checkpoint_id in (str(tmp_path / "x"), tmp_path / "x"):
        assert type(_storage_setup(None, checkpoint_id, reader=reader)) is kind


@pytest.mark.parametrize("reader", [True, False])
def test_an_unknown_protocol_is_refused(reader):
    with pytest.raises(RuntimeError, match=r"Cannot detect.*'nonsense://x'.*protocol that fsspec knows"):
        _storage_setup(None, "nonsense://x", reader=reader)


@pytest.mark.parametrize("reader", [True, False])
def test_without_fsspec_the_error_says_how_to_get_it(reader, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "fsspec" or "fsspec" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(RuntimeError, match=r"'s3://b/x'.*pip install 'holdfast\[fsspec\]'.*s3fs"):
        _storage_setup(None, "s3://b/x", reader=reader)


def test_without_the_package_of_a_protocol_the_error_names_it():
    fsspec.register_implementation("lacking", "no_such_package.Thing", errtxt="Install no_such_package", clobber=True)
    with pytest.raises(ImportError, match="no_such_package"):
        dcp.save(state(), checkpoint_id="lacking://x")


def test_fsspec_is_only_imported_when_a_url_asks_for_it():
    program = "import sys, holdfast.dcp; sys.exit('fsspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# --- several ranks -----------------------------------------------------------------------------------------------


def save_sharded(url: str, seed: int, library: str = "ours", **options: Any) -> None:
    whole = torch.arange(70.0).reshape(10, 7) + seed
    value = {"sharded": sharded(whole), "whole": whole, "seed": seed}
    if library == "stock":
        LIBRARIES["stock"].save(value, storage_writer=StockWriter(url))
    else:
        LIBRARIES["ours"].save(value, checkpoint_id=url, **options)


def load_sharded(url: str, library: str = "ours") -> tuple[torch.Tensor, torch.Tensor, int]:
    value = {"sharded": sharded(torch.zeros(10, 7)), "whole": torch.zeros(10, 7), "seed": -1}
    if library == "stock":
        LIBRARIES["stock"].load(value, storage_reader=StockReader(url))
    else:
        LIBRARIES["ours"].load(value, checkpoint_id=url)
    return value["sharded"].full_tensor(), value["whole"], value["seed"]


def assert_all_loaded(results: list[tuple[torch.Tensor, torch.Tensor, int]], seed: int) -> None:
    expected = torch.arange(70.0).reshape(10, 7) + seed
    for tensor, whole, found in results:
        assert torch.equal(tensor, expected)
        assert torch.equal(whole, expected)
        assert found == seed


@pytest.mark.parametrize(("savers", "loaders"), [(1, 2), (2, 4), (4, 2), (4, 1)])
def test_any_number_of_ranks_loads_from_a_file_url(ranks, tmp_path, savers, loaders):
    url = f"file://{tmp_path}/a/b"
    for seed in (1, 2):
        ranks(savers).run(save_sharded, url, seed)
        assert_all_loaded(ranks(loaders).run(load_sharded, url), seed)
    assert sum(name.endswith(".distcp") for name in names(url)) == savers


@pytest.mark.parametrize(("savers", "loaders"), [(2, 2), (2, 3)])
def test_ranks_that_save_for_themselves_do_so_at_a_url(ranks, tmp_path, savers, loaders):
    url = f"file://{tmp_path}/a"
    ranks(savers).run(save_sharded, url, 1, use_collectives=False)
    assert_all_loaded(ranks(loaders).run(load_sharded, url), 1)


@pytest.mark.parametrize(("saver", "loader"), [("ours", "stock"), ("stock", "ours")])
def test_stock_and_ours_load_what_the_other_saved(ranks, tmp_path, saver, loader):
    url = f"file://{tmp_path}/a"
    Path(tmp_path / "a").mkdir()
    ranks(2).run(save_sharded, url, 3, saver)
    assert_all_loaded(ranks(3).run(load_sharded, url, loader), 3)


def test_stock_reads_our_memory_and_we_read_stocks(url):
    dcp.save(state(1), checkpoint_id=url)
    loaded = blank()
    LIBRARIES["stock"].load(loaded, storage_reader=StockReader(url))
    assert_same(loaded, state(1))
    LIBRARIES["stock"].save(state(2), storage_writer=StockWriter(f"{url}-stock"))
    loaded = blank()
    dcp.load(loaded, checkpoint_id=f"{url}-stock")
    assert_same(loaded, state(2))


def test_we_replace_a_checkpoint_of_stock(url):
    LIBRARIES["stock"].save(state(1), storage_writer=StockWriter(url))
    dcp.save(state(2), checkpoint_id=url)
    loaded = blank()
    dcp.load(loaded, checkpoint_id=url)
    assert_same(loaded, state(2))
    assert "__0_0.distcp" not in names(url)
