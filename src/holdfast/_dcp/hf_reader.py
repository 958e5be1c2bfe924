"""Carries out load plans on Hugging Face folders, whoever wrote them. Only the slices that are needed are read."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.futures import Future

from holdfast._base.boxes import Box
from holdfast._base.threads import work_through
from holdfast._dcp.blob_steps import how_far
from holdfast._dcp.destinations import resolve_target
from holdfast._dcp.hf_files import _HFStorageInfo
from holdfast._dcp.planner import LoadPlanner
from holdfast._dcp.reader import FileSystemReader
from holdfast._formats.dcp.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast._formats.dcp.plan import LoadPlan, ReadItem
from holdfast._formats.hf_folder.commit import Folder
from holdfast._formats.hf_folder.folder import StoredKey, read_contents
from holdfast._formats.hf_folder.names import opened_as_described
from holdfast._formats.safetensors.header import Header, read_header
from holdfast._formats.safetensors.torch_dtypes import to_torch
from holdfast._formats.tensor_places import read_region
from holdfast._stores.filesystem import AnyPath
from holdfast.errors import DamagedCheckpointError, HoldfastError


class HuggingFaceStorageReader(FileSystemReader):
    """Reads Hugging Face folders: model files with an index, or files with parts of tensors.

    ``thread_count`` files are read at a time.

    Example:
        >>> import tempfile, torch
        >>> import holdfast.dcp as dcp
        >>> from holdfast.dcp.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
        >>> path = tempfile.mkdtemp()
        >>> _ = dcp.save({"weight": torch.ones(3)}, storage_writer=HuggingFaceStorageWriter(path), no_dist=True)
        >>> state = {"weight": torch.zeros(3)}
        >>> dcp.load(state, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
        >>> state["weight"]
        tensor([1., 1., 1.])
    """

    def __init__(self, path: AnyPath, thread_count: int = 1) -> None:
        if thread_count < 1:
            raise ValueError(f"thread_count is {thread_count}; it takes at least 1 thread to read")
        super().__init__(path)
        self.thread_count = thread_count
        self._headers: dict[str, Header] = {}

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the index and the own role."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._headers = {}

    def read_metadata(self) -> Metadata:
        """The tensors of the folder. There are no ranks' own indexes in this layout, so there is nothing to ask for."""
        contents = read_contents(Folder(self.fs, self.path), self.thread_count)
        described: dict[str, Any] = {}
        places: dict[MetadataIndex, _HFStorageInfo] = {}
        for key, stored in contents.keys.items():
            described[key] = _describe(stored)
            for chunk in stored.chunks:
                shape = torch.Size(chunk.sizes)
                info = _HFStorageInfo(chunk.file, shape, stored.dtype, chunk.position, chunk.header_digest)
                places[MetadataIndex(key, chunk.offsets)] = info
        meta = StorageMeta(save_id=contents.save_id, load_id=self.load_id)
        return Metadata(described, storage_data=places, storage_meta=meta)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items. The error of any thread is raised, and says whether the state was already changed."""
        done: list[ReadItem] = []
        stop = threading.Event()

        def read(items: Sequence[ReadItem]) -> None:
            try:
                with opened_as_described(
                    self.fs, self._info(items[0]).relative_path, self._info(items[0]).header_digest
                ) as stream:
                    for item in items:
                        if stop.is_set():
                            return
                        self._read_item(stream, item, planner)
                        done.append(item)
            except BaseException:
                stop.set()
                raise

        try:
            work_through(self._shares(plan.items), read, self.thread_count, "holdfast-read")
        except HoldfastError as error:
            error.message = f"{error.message} {how_far(len(done), len(plan.items))}"
            raise
        except Exception as error:
            note = how_far(len(done), len(plan.items))
            raise HoldfastError(f"reading {self.path} failed: {type(error).__name__}: {error}. {note}") from error
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_item(self, stream: Any, item: ReadItem, planner: LoadPlanner) -> None:
        """Read one item from its file into the place that the planner has for it."""
        info = self._info(item)
        target = resolve_target(item, planner)
        region = Box(tuple(item.storage_offsets), tuple(item.lengths))
        read_region(
            stream,
            info.position,
            info.shape,
            info.dtype,
            region,
            target,
            source=info.relative_path,
            key=item.dest_index.fqn,
        )
        planner.commit_tensor(item, target)

    def _info(self, item: ReadItem) -> _HFStorageInfo:
        places: Mapping[MetadataIndex, Any] = self.storage_data
        info: _HFStorageInfo | None = places.get(item.storage_index)
        if info is None:
            raise DamagedCheckpointError(
                f"{self.path}: there is no part {item.storage_index} in the files of the folder. The "
                "planner must ask for what the metadata of the folder says.",
                file=str(self.path),
                key=item.storage_index.fqn,
                expected=item.storage_index,
                found=None,
            )
        return info if info.header_digest else self._looked_up(info, item.storage_index.fqn)

    def _looked_up(self, info: _HFStorageInfo, key: str) -> _HFStorageInfo:
        """Where a tensor is that a program says is in this file. The file is looked into when it is needed."""
        if info.relative_path not in self._headers:
            with self.fs.create_stream(info.relative_path, "rb") as stream:
                self._headers[info.relative_path] = read_header(stream, info.relative_path)
        header = self._headers[info.relative_path]
        if key not in header.tensors:
            raise DamagedCheckpointError(
                f"{info.relative_path} has no tensor '{key}', which the metadata that the reader was given says. Give "
                "it what read_metadata returns, or the names that are in the file.",
                file=info.relative_path,
                key=key,
                expected=key,
                found=sorted(header.tensors)[:20],
            )
        stored = header.tensors[key]
        dtype, shape = to_torch(key, stored.dtype, stored.shape, info.relative_path)
        return _HFStorageInfo(info.relative_path, torch.Size(shape), dtype, header.position(key), header.digest)

    def _shares(self, items: Sequence[ReadItem]) -> list[list[ReadItem]]:
        """Items of one file in the order of the file; large files in several shares if there are threads."""
        files: dict[str, list[ReadItem]] = defaultdict(list)
        for item in items:
            files[self._info(item).relative_path].append(item)
        shares: list[list[ReadItem]] = []
        per_file = max(1, self.thread_count // max(1, len(files)))
        for wanted in files.values():
            wanted.sort(key=lambda item: self._info(item).position)
            count = -(-len(wanted) // per_file)
            shares.extend(wanted[first : first + count] for first in range(0, len(wanted), count))
        return shares


def _describe(stored: StoredKey) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in stored.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=stored.dtype), torch.Size(stored.size), chunks)
