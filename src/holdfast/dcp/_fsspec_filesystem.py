"""Checkpoints wherever fsspec reaches: ``s3://``, ``gs://``, ``memory://`` and many more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.dcp.filesystem import FileSystemReader, FileSystemWriter, SerializationFormat
from holdfast.storage.transforms import StreamTransform, TransformRegistry
from holdfast.stores.filesystem import AnyPath
from holdfast.stores.fsspec_filesystem import FsspecFileSystem as FileSystem

__all__ = ["FsspecReader", "FsspecWriter"]


class FsspecWriter(FileSystemWriter):
    """Writes a checkpoint to a URL. ``kwargs`` are options of its protocol, and stay when ``reset`` names another URL.

    Example:
        >>> import torch, holdfast.dcp as dcp
        >>> writer = FsspecWriter("memory://example/writer")
        >>> _ = dcp.save({"weights": torch.ones(4)}, storage_writer=writer)
        >>> writer.fs.exists("memory://example/writer/.metadata")
        True
    """

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
            single_file_per_rank=single_file_per_rank,
            sync_files=sync_files,
            thread_count=thread_count,
            per_thread_copy_ahead=per_thread_copy_ahead,
            overwrite=overwrite,
            _extensions=_extensions,
            serialization_format=serialization_format,
        )
        files = FileSystem()
        self.path = files.init_path(path, **kwargs)
        self.fs = files

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Whether fsspec knows the protocol."""
        return FileSystem.validate_checkpoint_id(checkpoint_id)


class FsspecReader(FileSystemReader):
    """Reads a checkpoint from a URL. ``kwargs`` are options of its protocol, and stay when ``reset`` names another URL.

    Example:
        >>> import torch, holdfast.dcp as dcp
        >>> _ = dcp.save({"step": 7}, checkpoint_id="memory://example/reader")
        >>> state = {"step": 0}
        >>> dcp.load(state, storage_reader=FsspecReader("memory://example/reader"))
        >>> state
        {'step': 7}
    """

    def __init__(
        self,
        path: AnyPath,
        *,
        _extension_registry: TransformRegistry | None = None,
        allow_pickle: bool | None = None,
        verify: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(path, _extension_registry, allow_pickle=allow_pickle, verify=verify)
        files = FileSystem()
        self.path = files.init_path(path, **kwargs)
        self.fs = files

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Whether fsspec knows the protocol."""
        return FileSystem.validate_checkpoint_id(checkpoint_id)
