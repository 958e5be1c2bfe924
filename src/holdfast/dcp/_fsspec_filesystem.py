"""The former name of ``fsspec_filesystem``, with the arguments of ``FsspecWriter`` in their former order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast._formats.dcp.transforms import StreamTransform
from holdfast._stores.filesystem import AnyPath
from holdfast._stores.fsspec_filesystem import FsspecFileSystem as FileSystem
from holdfast.dcp import fsspec_filesystem
from holdfast.dcp.filesystem import SerializationFormat
from holdfast.dcp.fsspec_filesystem import FsspecReader

__all__ = ["FileSystem", "FsspecReader", "FsspecWriter"]


class FsspecWriter(fsspec_filesystem.FsspecWriter):
    """Writes a checkpoint to a URL. ``kwargs`` are options of its protocol."""

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
        **kwargs: Any,
    ) -> None:
        super().__init__(
            path,
            single_file_per_rank,
            sync_files,
            thread_count,
            per_thread_copy_ahead,
            overwrite=overwrite,
            _extensions=_extensions,
            serialization_format=serialization_format,
            **kwargs,
        )
