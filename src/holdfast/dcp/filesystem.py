"""Checkpoints as files."""

from __future__ import annotations

import io
import queue
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from holdfast._dcp.data_files import DataFile, write_file
from holdfast._dcp.data_files import split_by_size_and_type as _split_by_size_and_type
from holdfast._dcp.data_files import write_item as _write_one
from holdfast._dcp.device_copies import OverlappingCpuLoader as _OverlappingCpuLoader
from holdfast._dcp.device_copies import SerialCpuLoader as _SerialCpuLoader
from holdfast._dcp.device_copies import TensorLoader as _TensorLoader
from holdfast._dcp.planner import SavePlanner
from holdfast._dcp.reader import FileSystemReader
from holdfast._dcp.storage import WriteResult
from holdfast._dcp.writer import SerializationFormat, _FileSystemWriter
from holdfast._formats.dcp import names as layout
from holdfast._formats.dcp.metadata import _StorageInfo, _StoragePrefix
from holdfast._formats.dcp.plan import WriteItem, written_bytes
from holdfast._formats.dcp.transforms import ReaderTransforms as _StorageReaderTransforms
from holdfast._formats.dcp.transforms import StreamTransform
from holdfast._formats.dcp.transforms import WriterTransforms as _StorageWriterTransforms
from holdfast._stores.filesystem import AnyPath, FileSystemBase
from holdfast._stores.local_filesystem import FileSystem
from holdfast.dcp._hf_utils import CUSTOM_METADATA_KEY, DCP_VERSION_KEY, FORMAT_KEY, FORMAT_VALUE, HF_DCP_VERSION
from holdfast.dcp.staging import BlockingAsyncStager

__all__ = [
    "CURRENT_DCP_VERSION",
    "CUSTOM_METADATA_KEY",
    "DCP_VERSION_KEY",
    "DEFAULT_SUFFIX",
    "FORMAT_KEY",
    "FORMAT_VALUE",
    "HF_DCP_VERSION",
    "FileSystem",
    "FileSystemBase",
    "FileSystemReader",
    "FileSystemWriter",
    "SerializationFormat",
    "_FileSystemWriter",
    "_OverlappingCpuLoader",
    "_SerialCpuLoader",
    "_StorageInfo",
    "_StoragePrefix",
    "_StorageReaderTransforms",
    "_StorageWriterTransforms",
    "_TensorLoader",
    "_generate_uuid",
    "_item_size",
    "_metadata_fn",
    "_split_by_size_and_type",
    "_write_files_from_queue",
    "_write_item",
]

_metadata_fn: str = layout.METADATA_NAME
DEFAULT_SUFFIX: str = layout.DATA_SUFFIX
CURRENT_DCP_VERSION: str = layout.FORMAT_VERSION


class FileSystemWriter(_FileSystemWriter, BlockingAsyncStager):
    """Writes a checkpoint into a folder of the local file system.

    ``overwrite`` replaces an earlier checkpoint there, which stays valid until the new one is complete. It is also the
    stager of ``async_save``; ``cache_staged_state_dict`` keeps the memory of its copies from save to save.
    """

    def __init__(
        self,
        path: AnyPath,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransform] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
    ) -> None:
        super().__init__(
            path,
            single_file_per_rank=single_file_per_rank,
            sync_files=sync_files,
            thread_count=thread_count,
            per_thread_copy_ahead=per_thread_copy_ahead,
            overwrite=overwrite,
            _extensions=_extensions,
            serialization_format=serialization_format,
        )
        self.cache_staged_state_dict = cache_staged_state_dict


def _generate_uuid() -> str:
    """An id for a save or a load."""
    return str(uuid.uuid4())


def _item_size(item: WriteItem) -> int:
    """Bytes that writing a tensor item takes."""
    return written_bytes(item)


def _write_item(
    transforms: _StorageWriterTransforms,
    stream: io.IOBase,
    data: io.BytesIO | torch.Tensor,
    write_item: WriteItem,
    storage_key: str,
    serialization_format: SerializationFormat,
) -> WriteResult:
    """Write one item at the position of ``stream``, a file that the index calls ``storage_key``."""
    _refuse_safetensors(serialization_format)
    return _write_one(stream, stream.tell(), storage_key, write_item, data, transforms)


def _write_files_from_queue(
    create_stream: Callable[[AnyPath, str], AbstractContextManager[Any]],
    file_queue: queue.Queue[tuple[AnyPath, str, list[WriteItem]]],
    result_queue: queue.Queue[list[WriteResult]],
    planner: SavePlanner,
    transforms: _StorageWriterTransforms,
    inflight_threshhold: int,
    use_fsync: bool,
    thread_count: int,
    serialization_format: SerializationFormat,
) -> None:
    """Write files until ``file_queue`` is empty; several threads may share the queues.

    The queue holds ``(path, name in the index, items)``. Each file's results are one entry of ``result_queue``. An
    error is raised here, in the thread that met it, and it is for the caller to see to it that it is noticed. How many
    threads there are makes no difference here.
    """
    _refuse_safetensors(serialization_format)
    while True:
        try:
            path, storage_key, items = file_queue.get_nowait()
        except queue.Empty:
            return
        file = DataFile(path, storage_key, items)
        result_queue.put(
            write_file(create_stream, file, planner, transforms, copy_ahead=inflight_threshhold, sync=use_fsync)
        )


def _refuse_safetensors(serialization_format: SerializationFormat) -> None:
    if serialization_format is not SerializationFormat.TORCH_SAVE:
        raise ValueError(f"items of .distcp files are written as {SerializationFormat.TORCH_SAVE} only")
