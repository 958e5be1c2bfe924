"""Storages that users write: from the bare contracts, from the file system classes, on their own file systems."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.futures import Future

import holdfast.dcp as dcp
from holdfast.dcp.filesystem import FileSystem, FileSystemBase
from holdfast.dcp.metadata import StorageMeta
from holdfast.dcp.planner import LoadItemType, WriteItemType
from holdfast.dcp.state_dict_loader import _load_state_dict_from_keys
from holdfast.dcp.storage import WriteResult
from tests.rank_pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # stock says so on every call


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class MemoryWriter(dcp.StorageWriter):
    """Keeps a checkpoint in a dict, or anything else that takes bytes by name."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.calls: list[str] = []

    def reset(self, checkpoint_id: Any = None) -> None:
        self.calls.append("reset")
        self.prefix = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.calls.append("set_up_storage_writer")
        self.role = (is_coordinator, kwargs)

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        self.calls.append("prepare_local_plan")
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        self.calls.append("prepare_global_plan")
        return [dcp.SavePlan(plan.items, storage_data=f"part {n}") for n, plan in enumerate(plans)]

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        self.calls.append("write_data")
        results = []
        for number, item in enumerate(plan.items):
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                blob = data.getvalue()
            else:
                stream = io.BytesIO()
                torch.save(data.detach().clone(), stream)
                blob = stream.getvalue()
            name = f"{plan.storage_data}/{number}"
            self.memory[name] = blob
            results.append(WriteResult(item.index, len(blob), name))
        return done(results)

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        self.calls.append("finish")
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        self.memory["index"] = pickle.dumps(metadata)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class MemoryReader(dcp.StorageReader):
    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        return pickle.loads(self.memory["index"])

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.places = metadata.storage_data
        self.role = (is_coordinator, kwargs)

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        return plans

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        for item in plan.items:
            blob = io.BytesIO(self.memory[self.places[item.storage_index]])
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, blob)
                continue
            tensor = torch.load(blob)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        return done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class FolderAsDict:
    """Bytes by name that several processes share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __setitem__(self, name: str, data: bytes) -> None:
        (self.folder / name.replace("/", "-")).write_bytes(data)

    def __getitem__(self, name: str) -> bytes:
        return (self.folder / name.replace("/", "-")).read_bytes()


STATE: dict[str, Any] = {"w": torch.arange(6.0).view(2, 3), "n": {"step": 7, "l": [1, torch.ones(1)]}}


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(2, 3), "n": {"step": 0, "l": [0, torch.zeros(1)]}}


def assert_loaded(target: dict[str, Any]) -> None:
    assert torch.equal(target["w"], STATE["w"])
    assert target["n"]["step"] == 7
    assert target["n"]["l"][0] == 1
    assert target["n"]["l"][1].item() == 1


# From the bare contracts


def test_a_storage_made_from_the_bare_contracts_keeps_a_checkpoint_in_memory() -> None:
    memory: dict[str, bytes] = {}
    writer, target = MemoryWriter(memory), blank()

    metadata = dcp.save(STATE, storage_writer=writer, checkpoint_id="anything")
    dcp.load(target, storage_reader=MemoryReader(memory))

    assert_loaded(target)
    assert writer.prefix == "anything"
    assert writer.calls == [
        *("reset", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish"),
    ]
    assert set(metadata.storage_data.values()) == memory.keys() - {"index"}


def test_keys_are_picked_from_a_storage_of_any_kind() -> None:
    memory: dict[str, bytes] = {}
    dcp.save(STATE, storage_writer=MemoryWriter(memory))

    assert _load_state_dict_from_keys("n.step", storage_reader=MemoryReader(memory)) == {"n": {"step": 7}}


def save_and_load_in_a_shared_memory(folder: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    state = {"d": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]), f"of {dist.get_rank()}": dist.get_rank()}
    memory = FolderAsDict(folder)
    writer = MemoryWriter(memory)
    dcp.save(state, storage_writer=writer)
    assert writer.role == (dist.get_rank() == 0, {"rank": dist.get_rank(), "use_collectives": True})
    target = {"d": distribute_tensor(torch.zeros(5), mesh, [Shard(0)]), f"of {1 - dist.get_rank()}": None}
    reader = MemoryReader(memory)
    dcp.load(target, storage_reader=reader)
    assert reader.role == (dist.get_rank() == 0, {"rank": dist.get_rank(), "use_collectives": True})
    assert target["d"].full_tensor().tolist() == [0, 1, 2, 3, 4]
    assert target[f"of {1 - dist.get_rank()}"] == 1 - dist.get_rank()
    return writer.calls


def test_such_a_storage_works_on_ranks_and_only_the_coordinator_finishes(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(2).run(save_and_load_in_a_shared_memory, tmp_path)

    assert first == ["set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish"]
    assert second == ["set_up_storage_writer", "prepare_local_plan", "write_data"]


class BrokenMemory(FolderAsDict):
    def __setitem__(self, name: str, data: bytes) -> None:
        if name.startswith("part 1"):
            raise OSError(28, "No space left on device")
        super().__setitem__(name, data)


def save_where_rank_1_has_no_space(folder: Path) -> Any:
    writer = MemoryWriter(BrokenMemory(folder))
    with pytest.raises(dcp.CheckpointException, match="No space left") as raised:
        dcp.save({f"of {dist.get_rank()}": 1}, storage_writer=writer)
    return raised.value.args[0], list(raised.value.failures), "finish" in writer.calls


def test_an_error_of_one_ranks_storage_reaches_all_and_nothing_is_finished(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(save_where_rank_1_has_no_space, tmp_path) == [("write", [1], False)] * 2


class Later(Future[Any]):
    """Does its work when it is waited for."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.work = work

    def wait(self) -> Any:
        self.set_result(self.work())
        return super().wait()


class WritesLater(MemoryWriter):
    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        return Later(lambda: MemoryWriter.write_data(self, plan, planner).value())


class ReadsLater(MemoryReader):
    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        return Later(lambda: MemoryReader.read_data(self, plan, planner).value())


def test_what_a_storage_does_in_the_background_is_waited_for() -> None:
    memory: dict[str, bytes] = {}
    target = blank()

    dcp.save(STATE, storage_writer=WritesLater(memory))
    dcp.load(target, storage_reader=ReadsLater(memory))

    assert_loaded(target)


class FailsInTheFuture(MemoryWriter):
    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        future.set_exception(OSError("the upload failed"))
        return future


def test_an_error_in_the_future_that_write_data_returns_fails_the_save() -> None:
    memory: dict[str, bytes] = {}

    with pytest.raises(dcp.CheckpointException, match="the upload failed"):
        dcp.save(STATE, storage_writer=FailsInTheFuture(memory))

    assert memory == {}


def test_an_error_in_the_future_that_read_data_returns_fails_the_load() -> None:
    class Fails(MemoryReader):
        def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
            future: Future[None] = Future()
            future.set_exception(OSError("the download failed"))
            return future

    memory: dict[str, bytes] = {}
    dcp.save(STATE, storage_writer=MemoryWriter(memory))
    with pytest.raises(dcp.CheckpointException, match="the download failed"):
        dcp.load(blank(), storage_reader=Fails(memory))


# What is told to whom


class OldWriter(MemoryWriter):
    """From before roles were passed by name: no `kwargs`."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:  # type: ignore[override]
        self.role = (is_coordinator, None)


class OldReader(MemoryReader):
    def read_metadata(self) -> dcp.Metadata:  # type: ignore[override]
        return super().read_metadata()

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool) -> None:  # type: ignore[override]
        super().set_up_storage_reader(metadata, is_coordinator)


class OtherwiseNamed(MemoryWriter):
    """Takes any keyword, but not under the name that is looked for; stock tells it nothing either."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **options: Any) -> None:
        self.role = (is_coordinator, options)


def test_a_storage_is_given_its_role_only_if_it_takes_kwargs() -> None:
    memory: dict[str, bytes] = {}
    roles = []
    for kind in (MemoryWriter, OldWriter, OtherwiseNamed):
        writer = kind(memory)
        dcp.save(STATE, storage_writer=writer)
        roles.append(writer.role)

    assert roles == [(True, {"rank": 0, "use_collectives": True}), (True, None), (True, {})]
    target = blank()
    dcp.load(target, storage_reader=OldReader(memory))
    assert_loaded(target)


def test_a_reader_that_takes_no_rank_is_not_asked_for_one_ranks_index() -> None:
    asked: list[Any] = []

    class Empty(MemoryReader):
        def read_metadata(self) -> dcp.Metadata:  # type: ignore[override]
            asked.append("whole")
            raise FileNotFoundError("nothing here")

    class EmptyWithRank(MemoryReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
            asked.append(kwargs)
            raise FileNotFoundError("nothing here")

    for kind in (Empty, EmptyWithRank):
        with pytest.raises(dcp.CheckpointException, match="nothing here"):
            dcp.load(blank(), storage_reader=kind({}))
    assert asked == ["whole", {}, {"rank": 0}]


def test_what_a_writer_says_about_itself_reaches_the_planner() -> None:
    class Named(MemoryWriter):
        def storage_meta(self) -> StorageMeta:
            return StorageMeta(checkpoint_id="in memory", save_id="42")

    class Curious(dcp.DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            self.heard = storage_meta
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    told, untold = Curious(), Curious()
    dcp.save(STATE, storage_writer=Named({}), planner=told)
    dcp.save(STATE, storage_writer=MemoryWriter({}), planner=untold)

    assert told.heard == StorageMeta(checkpoint_id="in memory", save_id="42")
    assert untold.heard is None


# From the file system classes


class CountingWriter(dcp.FileSystemWriter):
    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        self.planned = [len(plan.items) for plan in plans]
        return super().prepare_global_plan(plans)

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        (Path(self.path) / "DONE").write_text(str(sum(result.size_in_bytes for part in results for result in part)))


class OneKeyOnly(dcp.FileSystemReader):
    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        kept = [item for item in plan.items if item.dest_index.fqn == "w"]
        return super().prepare_local_plan(dcp.LoadPlan(kept))


def test_subclasses_of_the_file_system_storage_see_and_change_plans(tmp_path: Path) -> None:
    writer = CountingWriter(tmp_path)
    dcp.save(STATE, storage_writer=writer)
    target = blank()
    dcp.load(target, storage_reader=OneKeyOnly(tmp_path))

    assert writer.planned == [4]
    written = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert int((tmp_path / "DONE").read_text()) == written
    assert torch.equal(target["w"], STATE["w"])
    assert target["n"]["step"] == 0


class OwnNames(dcp.FileSystemWriter):
    """Names its files itself, as a writer of stock may: plans that have a prefix keep it."""

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        from dataclasses import replace

        from holdfast.dcp.filesystem import _StoragePrefix

        return replace(super().prepare_local_plan(plan), storage_data=_StoragePrefix(f"mine-{self.rank}-"))


def save_under_own_names(folder: Path) -> None:
    dcp.save({f"of {dist.get_rank()}": 1}, storage_writer=OwnNames(folder))


def test_a_writer_may_name_its_files_itself(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save_under_own_names, tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == [".metadata", "mine-0-0.distcp", "mine-1-0.distcp"]
    target = {"of 0": None, "of 1": None}
    stock.load(target, checkpoint_id=tmp_path)
    assert target == {"of 0": 1, "of 1": 1}


class ReadsCounted(dcp.FileSystemReader):
    """Looks at each stored item on its own, as readers with caches do."""

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        self.lengths = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            with self.fs.create_stream(self.fs.concat_path(self.path, info.relative_path), "rb") as stream:
                self.lengths[item.storage_index.fqn] = len(self._slice_file(stream, info).read())
        return super().read_data(plan, planner)


def test_a_reader_finds_the_bytes_of_every_item_through_storage_data(tmp_path: Path) -> None:
    metadata = dcp.save(STATE, checkpoint_id=tmp_path)
    reader = ReadsCounted(tmp_path)
    dcp.load(blank(), storage_reader=reader)

    assert reader.lengths == {index.fqn: info.length for index, info in metadata.storage_data.items()}


# On a file system of one's own


class MemoryFileSystem(FileSystemBase):
    """The smallest file system that stock's contract asks for: no listing, no syncing."""

    files: ClassVar[dict[str, bytes]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        if mode == "rb":
            if path not in self.files:
                raise FileNotFoundError(path)
            yield io.BytesIO(self.files[path])
            return
        stream = io.BytesIO()
        yield stream
        self.files[path] = stream.getvalue()

    def concat_path(self, path: Any, suffix: str) -> Any:
        return f"{path}/{suffix}"

    def rename(self, path: Any, new_path: Any) -> None:
        self.files[new_path] = self.files.pop(path)

    def init_path(self, path: Any) -> Any:
        return str(path)

    def mkdir(self, path: Any) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return str(checkpoint_id).startswith("mem://")

    def exists(self, path: Any) -> bool:
        return path in self.files

    def rm_file(self, path: Any) -> None:
        del self.files[path]


class MemoryFileSystemWriter(dcp.FileSystemWriter):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.fs = MemoryFileSystem()
        self.path = self.fs.init_path(path)


class MemoryFileSystemReader(dcp.FileSystemReader):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.fs = MemoryFileSystem()
        self.path = self.fs.init_path(path)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    monkeypatch.setattr(MemoryFileSystem, "files", files)
    return files


def test_checkpoints_live_on_a_file_system_that_a_user_wrote(files: dict[str, bytes]) -> None:
    dcp.save(STATE, storage_writer=MemoryFileSystemWriter("mem://run"))
    target = blank()
    dcp.load(target, storage_reader=MemoryFileSystemReader("mem://run"))

    assert_loaded(target)
    assert sorted(name.rsplit(".")[-1] for name in files) == ["distcp", "metadata"]


def test_overwriting_on_such_a_file_system_switches_and_warns(files: dict[str, bytes]) -> None:
    writer = MemoryFileSystemWriter("mem://run")
    dcp.save(STATE, storage_writer=writer)
    with pytest.warns(UserWarning, match="mem://run holds a checkpoint"):
        dcp.save({"w": torch.full((2, 3), 9.0)}, storage_writer=writer)
    target = {"w": torch.zeros(2, 3)}
    dcp.load(target, storage_reader=MemoryFileSystemReader("mem://run"))

    assert target["w"].unique().tolist() == [9]


def test_a_file_system_that_cannot_be_written_to_fails_the_save(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, path: Any, new_path: Any) -> None:
        raise PermissionError(f"cannot rename {path}")

    monkeypatch.setattr(MemoryFileSystem, "rename", refuse)

    with pytest.raises(dcp.CheckpointException, match="cannot rename"):
        dcp.save(STATE, storage_writer=MemoryFileSystemWriter("mem://run"))
    with pytest.raises(dcp.CheckpointException, match="no checkpoint at mem://run"):
        dcp.load(blank(), storage_reader=MemoryFileSystemReader("mem://run"))


def test_a_missing_method_of_a_file_system_is_noticed_when_it_is_made() -> None:
    class Incomplete(FileSystemBase): ...

    with pytest.raises(TypeError, match="rm_file"):
        Incomplete()


def test_the_local_file_system_does_what_its_contract_says(tmp_path: Path) -> None:
    files = FileSystem()
    folder = files.init_path(str(tmp_path / "a" / "b"))
    files.mkdir(folder)
    files.mkdir(folder)
    file, other = files.concat_path(folder, "x"), files.concat_path(folder, "y")
    with files.create_stream(file, "wb") as stream:
        stream.write(b"1")
    with files.create_stream(other, "wb") as stream:
        stream.write(b"2")
    files.rename(file, other)

    assert isinstance(folder, Path)
    assert (files.exists(file), files.exists(other)) == (False, True)
    assert files.ls(folder) == [os.fspath(other)]
    with files.create_stream(other, "rb") as stream:
        assert stream.read() == b"1"
    files.rm_file(other)
    assert files.ls(folder) == []


class SharedFolderFileSystem(FileSystem):
    """A local file system that only ever sees what the base contract offers."""

    def ls(self, path: Any) -> list[str]:
        raise OSError("listing is not allowed here")


def save_and_load_without_listing(folder: Path) -> None:
    writer, reader = dcp.FileSystemWriter(folder), dcp.FileSystemReader(folder)
    writer.fs = reader.fs = SharedFolderFileSystem()
    state = {f"of {dist.get_rank()}": dist.get_rank()}
    dcp.save(state, storage_writer=writer)
    target = {"of 0": None, "of 1": None}
    dcp.load(target, storage_reader=reader)
    assert target == {"of 0": 0, "of 1": 1}


def test_a_file_system_without_listing_works_on_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save_and_load_without_listing, tmp_path)
