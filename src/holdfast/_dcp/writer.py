"""Carries out save plans as files in DCP's format.

The order of things is what makes it safe: data goes into files with names nobody used before, these and the folder
are made durable, and only then the new index replaces the old one in one step. Whatever dies on the way, the folder
holds either the old checkpoint or the new one; files that neither needs are removed after that.
"""

from __future__ import annotations

import logging
import socket
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch.futures import Future

from holdfast._base.commits import Commit
from holdfast._base.notices import warn_caller
from holdfast._base.threads import map_in_threads
from holdfast._base.tuning import DIRECT_FROM, MEMORY_BUDGET
from holdfast._dcp.data_files import DataFile, ValueNeedingPickle, large_stream, split_by_size_and_type, write_file
from holdfast._dcp.planner import SavePlanner
from holdfast._dcp.storage import StorageWriter, WriteResult
from holdfast._formats.dcp import names as layout
from holdfast._formats.dcp.blobs import IN_MEMORY
from holdfast._formats.dcp.columns import PlaceColumns
from holdfast._formats.dcp.index import encode_index
from holdfast._formats.dcp.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata, _StoragePrefix
from holdfast._formats.dcp.plan import SavePlan
from holdfast._formats.dcp.transforms import StreamTransform, WriterTransforms
from holdfast._formats.hf_folder.commit import holds, put_has_failed, rename_has_failed
from holdfast._formats.ranged_files import is_plain
from holdfast._stores.durable_files import write_durably
from holdfast._stores.filesystem import AnyPath, FileSystemBase
from holdfast._stores.local_filesystem import FileSystem
from holdfast.errors import CheckpointExistsError, IncompleteSaveError

logger = logging.getLogger(__name__)


class SerializationFormat(Enum):
    """How items are serialized."""

    TORCH_SAVE = "torch_save"
    SAFETENSORS = "safetensors"


class _FileSystemWriter(StorageWriter):
    """Writes DCP checkpoints to a file system."""

    def __init__(
        self,
        path: AnyPath,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransform] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if thread_count < 1:
            raise ValueError(f"thread_count is {thread_count}; it takes at least 1 thread to write")
        if serialization_format is not SerializationFormat.TORCH_SAVE:
            raise ValueError(
                f"{type(self).__name__} writes {SerializationFormat.TORCH_SAVE} only: no reader of the format could "
                f"load {serialization_format} from .distcp files"
            )
        self.fs: FileSystemBase = FileSystem()
        self.path = self.fs.init_path(path)
        self.overwrite = overwrite
        self.sync_files = sync_files
        self.single_file_per_rank = single_file_per_rank
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.serialization_format = serialization_format
        self.transforms = WriterTransforms(_extensions)
        self._memory_budget = MEMORY_BUDGET
        self._elements = IN_MEMORY
        self.save_id = str(uuid.uuid4())
        self.is_coordinator = False
        self.rank: int | None = None
        self.use_collectives = True
        self._generation = ""
        self._has_looked = False
        self._index = b""
        self._in_use: set[str] = set()
        self._present_before: set[str] = set()
        self._commit = Commit()
        self._switches_together = False
        self._last_committed_id: str | None = None

    @property
    def checkpoint_id(self) -> AnyPath:
        """Where the checkpoint goes."""
        return self.path

    @property
    def metadata_path(self) -> AnyPath:
        """Where the index goes."""
        return self.fs.concat_path(self.path, layout.METADATA_NAME)

    def storage_meta(self) -> StorageMeta | None:
        """Path and id of this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Whether the local file system takes this path."""
        return FileSystem.validate_checkpoint_id(checkpoint_id)

    def reset(self, checkpoint_id: AnyPath | None = None) -> None:
        """A new save begins."""
        if checkpoint_id is not None and checkpoint_id != "":
            self.path = self.fs.init_path(checkpoint_id)
        self.save_id = str(uuid.uuid4())
        self._switches_together = False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the own role."""
        self.is_coordinator = is_coordinator
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        if self.save_id == self._last_committed_id:
            self.save_id = str(uuid.uuid4())  # nobody called reset since the last save, whose id must stay its own
        self._generation = layout.new_generation()
        self._has_looked = False
        self._commit = Commit()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder. A rank that saves on its own also looks for an earlier checkpoint and names its files."""
        self.fs.mkdir(self.path)
        self._present_before = {PurePath(path).name for path in self._present()}
        if self.use_collectives:
            return plan
        self._refuse_or_announce_overwriting()
        return self._named(plan, self.rank or 0)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Look for an earlier checkpoint, once for all ranks, and give every rank's files unused names."""
        if self.use_collectives and not self._has_looked:
            self._refuse_or_announce_overwriting()
        return [self._named(plan, rank) for rank, plan in enumerate(plans)]

    # Where every rank computes the whole plan, these take the places of ``prepare_*_plan`` and ``finish``.

    def prepare_shared_plan(self) -> str | None:
        """Make the folder. The coordinator looks for an earlier checkpoint, and says what is in the names of files."""
        self.fs.mkdir(self.path)
        if not self.is_coordinator:
            return None
        self._present_before = {PurePath(path).name for path in self._present()}
        self._refuse_or_announce_overwriting()
        self._has_looked = True
        return self._generation

    def shared_prefix(self, generation: str) -> _StoragePrefix:
        """How the names of this rank's files start."""
        return _StoragePrefix(layout.data_prefix(self.rank or 0, generation))

    def finish_shared_plan(self, metadata: Metadata, places: PlaceColumns, hosts: list[dict[str, str]]) -> None:
        """Commit, given where all items are, and for each rank its files and the machine that wrote them."""
        metadata.leave_places(places)
        self._describe_save(metadata)
        self._put_in_place(metadata, hosts)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all items; every file is durable when this returns. The first error of any thread is raised."""
        files = self._data_files(plan)
        results: list[WriteResult] = []
        try:
            for part in map_in_threads(
                lambda file: self._write_file(file, planner), files, self.thread_count, "holdfast-write"
            ):
                results.extend(part)
            if self.sync_files and files:
                self.fs.sync_folder(self.path)
        except BaseException:
            self._remove(file.name for file in files)
            raise
        _warn_of_values_that_need_pickle(results)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def share_save(self, save_id: str) -> None:
        """Called where ranks save for themselves: all parts carry this id, and are switched to together.

        The index that ``finish`` writes is then put in place by ``commit_rank_local`` and ``finish_rank_local``.
        """
        self.save_id = save_id
        self._switches_together = True

    @property
    def may_be_committed(self) -> bool:
        """Whether the index that this rank puts in place may be there, or may get there yet."""
        return self._commit.may_have_happened

    def discard_unfinished(self) -> None:
        """After a failure on any rank: remove what was written for this save.

        Once the index may be in place nothing is removed any more, whatever fails after that.
        """
        if not self.may_be_committed:
            names = layout.names_of_generation(self._present(), self._generation)
            self._remove([*names, self._temporary_index_name()])
        self._switches_together = False

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: check that everything was written, put the index in place, remove what it made useless.

        Where the ranks switch together the index is written here, and gets its name later.
        """
        stored = [result for part in results for result in part]
        metadata.storage_data = {result.index: result.storage_data for result in stored}
        self._describe_save(metadata)
        refuse_incomplete(metadata)
        record_real_dtypes(metadata, stored)
        here = socket.gethostname()
        hosts = [
            {result.storage_data.relative_path: getattr(result, "host", here) for result in part} for part in results
        ]
        self._put_in_place(metadata, hosts)

    def _describe_save(self, metadata: Metadata) -> None:
        metadata.version = layout.FORMAT_VERSION
        metadata.storage_meta = self.storage_meta()

    def _put_in_place(self, metadata: Metadata, hosts: list[dict[str, str]]) -> None:
        self._write_index(metadata)
        self._in_use = {name for files in hosts for name in files} | {self._index_name()}
        # Another save into this folder removes what it finds useless. Either it does so before we look, or not at all.
        with self.fs.lock_folder(self.path):
            self._look_for_files(hosts)
            if self._switches_together and not self.use_collectives:
                if self.sync_files:
                    self.fs.sync_folder(self.path)  # the index must be there once rank 0's says so
                return
            self._put_index_in_place()
            if self.use_collectives:
                stale = layout.stale_names(self._present_before, self._in_use)
                self._remove(layout.without_running_saves(stale, self._present_before, self._present()))

    def commit_rank_local(self, world_size: int) -> None:
        """After every rank has written its index: rank 0 commits, and removes the indexes that would hide the new ones.

        Rank 0's index says which save the checkpoint is of. Readers find the other ranks' indexes of that save, even if
        these never get their final names. Until ``.metadata`` is gone, an earlier checkpoint of all ranks is loaded.
        """
        if self.rank:
            return
        gone = [name for name in self._present_before if (layout.rank_of_index(name) or 0) >= world_size]
        try:
            with self.fs.lock_folder(self.path):
                self._put_index_in_place()
                for name in [layout.METADATA_NAME, *gone]:
                    file = self.fs.concat_path(self.path, name)
                    if self.fs.exists(file):
                        self.fs.rm_file(file)
                if self.sync_files:
                    self.fs.sync_folder(self.path)
        except BaseException:
            self.discard_unfinished()
            raise

    def finish_rank_local(self, world_size: int) -> None:
        """After ``commit_rank_local``: name the index, and remove what only the earlier checkpoint needed."""
        if self.rank:
            self._put_index_in_place()
        self._switches_together = False
        self._remove(layout.stale_names_of_rank(self._present_before, self._in_use, self.rank or 0, world_size))

    def _index_name(self) -> str:
        return layout.metadata_name(None if self.use_collectives else self.rank)

    def _named(self, plan: SavePlan, rank: int) -> SavePlan:
        if plan.storage_data is not None:
            return plan
        return replace(plan, storage_data=_StoragePrefix(layout.data_prefix(rank, self._generation)))

    def _refuse_or_announce_overwriting(self) -> None:
        found = [name for name in self._index_names() if self.fs.exists(self.fs.concat_path(self.path, name))]
        if not found:
            return
        if not self.overwrite:
            raise CheckpointExistsError(
                f"Checkpoint already exists and self.overwrite=False. ({self.path}: {', '.join(found)}) "
                "Save to another path, or allow overwriting.",
                path=str(self.path),
            )
        warn_caller(
            f"{self.path} holds a checkpoint ({', '.join(found)}), which this save will replace once it is complete"
        )

    def _index_names(self) -> Iterable[str]:
        yield layout.METADATA_NAME
        yield layout.metadata_name(0 if self.use_collectives else self.rank)

    def _data_files(self, plan: SavePlan) -> list[DataFile]:
        if self.single_file_per_rank:
            groups = [group for group in split_by_size_and_type(self.thread_count, plan.items) if group]
        else:
            groups = [[item] for item in plan.items]
        names = [f"{plan.storage_data.prefix}{number}{layout.DATA_SUFFIX}" for number in range(len(groups))]
        return [
            DataFile(self.fs.concat_path(self.path, name), name, group)
            for name, group in zip(names, groups, strict=True)
        ]

    def _write_file(self, file: DataFile, planner: SavePlanner) -> list[WriteResult]:
        create_stream: Callable[[AnyPath, str], AbstractContextManager[Any]] = self.fs.create_stream
        expected = file.expected_size()
        if expected >= DIRECT_FROM and is_plain(self.fs):
            memory = self._memory_budget // self.thread_count
            create_stream = lambda path, mode: large_stream(path, expected, memory)  # noqa: E731 - as the other one
        return write_file(
            create_stream,
            file,
            planner,
            self.transforms,
            copy_ahead=self.per_thread_copy_ahead,
            sync=self.sync_files,
            elements=self._elements,
        )

    def _look_for_files(self, files: list[dict[str, str]]) -> None:
        """The files of each rank must be where the index says. Those of other machines may be out of sight."""
        lost: list[str] = []
        elsewhere: list[int] = []
        here = socket.gethostname()
        # One listing instead of a request for every file, where requests are slow and listings are never behind.
        listed = {PurePath(path).name for path in self._present()} if self.fs.puts_atomically else set()
        for rank, hosts in enumerate(files):
            unseen = {name for name in hosts if name not in listed and not self._is_there(name)}
            if unseen and (len(unseen) < len(hosts) or here in hosts.values()):
                lost.extend(sorted(unseen))
            elif unseen:
                elsewhere.append(rank)
        if lost:
            raise IncompleteSaveError(
                f"{self.path}: {', '.join(lost)} disappeared before the save was committed. Another save into the same "
                "folder may have removed it; nothing was committed, save again to a folder of its own.",
                missing=lost,
            )
        if elsewhere:
            warn_caller(
                f"rank {self.rank} does not see the files that ranks {elsewhere} wrote to {self.path}. If the path is "
                "not on a shared disk, the checkpoint can only be loaded after bringing the files together."
            )

    def _is_there(self, name: str) -> bool:
        return self.fs.exists(self.fs.concat_path(self.path, name))

    def _temporary_index_name(self) -> str:
        return layout.temporary_name(self._index_name(), self.save_id if self._switches_together else self._generation)

    def _write_index(self, metadata: Metadata) -> None:
        """Write the index under its temporary name, or hold it ready where it can be put in place from memory."""
        self._index = encode_index(metadata)
        if not self._has_temporary_index():
            return
        write_durably(self.fs, self._temporary_index(), self._index, sync=self.sync_files)

    def _has_temporary_index(self) -> bool:
        """Ranks that switch together need one in any case: readers look for it once rank 0 has committed."""
        return not self.fs.puts_atomically or (self._switches_together and not self.use_collectives)

    def _put_index_in_place(self) -> None:
        commits = self.use_collectives or not self.rank
        self._commit.may_have_happened = True
        try:
            if self.fs.puts_atomically:
                self.fs.put(self._final_index(), self._index)
            else:
                self._rename_index()
        except BaseException as error:
            # Where rank 0 has committed for all, the index of another rank counts even under its temporary name.
            if commits:
                self._commit.may_have_happened = not self._has_failed(error)
            raise
        self._last_committed_id = self.save_id
        self._index = b""
        if self.fs.puts_atomically and self._has_temporary_index():
            self._remove([self._temporary_index_name()])
        if self.sync_files:
            self.fs.sync_folder(self.path)

    def _has_failed(self, error: BaseException) -> bool:
        """Whether the index is surely not in place. Its temporary file is removed."""
        if isinstance(error, IncompleteSaveError):  # it was looked at already
            return True
        if self.fs.puts_atomically:
            self._remove([self._temporary_index_name()])
            return put_has_failed(self.fs, self._final_index(), self._index, error)
        return rename_has_failed(self.fs, self._temporary_index(), self._final_index(), self._index, error)

    def _rename_index(self) -> None:
        temporary = self._temporary_index()
        try:
            self.fs.rename(temporary, self._final_index())
        except FileNotFoundError as error:
            # Network disks may try twice, and then miss what they have renamed themselves.
            if holds(self.fs, self._final_index(), self._index, if_unknown=True):
                return
            raise IncompleteSaveError(
                f"{temporary} disappeared before the save was committed. Another save into the same folder may have "
                "removed it; nothing was committed, save again to a folder of its own.",
                missing=[str(temporary)],
            ) from error

    def _final_index(self) -> AnyPath:
        return self.fs.concat_path(self.path, self._index_name())

    def _temporary_index(self) -> AnyPath:
        return self.fs.concat_path(self.path, self._temporary_index_name())

    def _present(self) -> list[str]:
        with suppress(OSError):
            return self.fs.ls(self.path)
        return []

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files that no checkpoint needs, so a failure is only untidy."""
        for name in names:
            with suppress(OSError):
                self.fs.rm_file(self.fs.concat_path(self.path, name))


def _warn_of_values_that_need_pickle(results: list[WriteResult]) -> None:
    found = [result for result in results if isinstance(result, ValueNeedingPickle)]
    if found:
        shown = ", ".join(f"'{result.index.fqn}' ({result.needs})" for result in found[:10])
        warn_caller(
            f"{len(found)} saved value(s) are objects that only pickle can rebuild: {shown}. Loading them will need "
            "torch.serialization.add_safe_globals([TheClass]) or DefaultLoadPlanner(allow_pickle=True)."
        )


def refuse_incomplete(metadata: Metadata) -> None:
    """No index without every item that it promises."""
    missing: list[str] = []
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            wanted = [MetadataIndex(key, chunk.offsets) for chunk in entry.chunks]
        else:
            wanted = [MetadataIndex(key)]
        missing.extend(str(index) for index in wanted if index not in metadata.storage_data)
    if missing:
        raise IncompleteSaveError(
            f"{len(missing)} planned item(s) were not written by any rank: {', '.join(missing[:10])}. "
            "Nothing was committed; look for a writer that dropped them.",
            missing=missing,
        )


def record_real_dtypes(metadata: Metadata, results: Iterable[WriteResult]) -> None:
    """A planner may have converted tensors on the way; the index says what is really in the files."""
    written: dict[str, set[torch.dtype]] = defaultdict(set)
    for result in results:
        dtype = getattr(result, "dtype", None)
        if dtype is not None:
            written[result.index.fqn].add(dtype)
    for key, dtypes in written.items():
        if len(dtypes) > 1:
            raise IncompleteSaveError(
                f"the planner wrote '{key}' as {sorted(map(str, dtypes))}, but a tensor has one dtype. Nothing was "
                "committed; let it convert all chunks of the tensor alike, on all ranks.",
                missing=[key],
            )
        entry = metadata.state_dict_metadata.get(key)
        (dtype,) = dtypes
        if isinstance(entry, TensorStorageMetadata) and entry.properties.dtype != dtype:
            properties = replace(entry.properties, dtype=dtype)
            metadata.state_dict_metadata[key] = replace(entry, properties=properties)
