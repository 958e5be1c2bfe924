"""Checkpoints wherever fsspec reaches: ``s3://``, ``gs://``, ``memory://`` and many more.

fsspec is an extra: this module can be imported without it, and says what to install when a URL is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast._formats.dcp.transforms import StreamTransform, TransformRegistry
from holdfast._stores.filesystem import AnyPath
from holdfast.dcp.filesystem import FileSystemReader, FileSystemWriter, SerializationFormat
from holdfast.errors import MissingPackageError

if TYPE_CHECKING:
    from holdfast._stores.fsspec_filesystem import FsspecFileSystem as _FileSystem

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
        cache_staged_state_dict: bool = False,
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
            cache_staged_state_dict=cache_staged_state_dict,
            overwrite=overwrite,
            _extensions=_extensions,
            serialization_format=serialization_format,
        )
        self.fs, self.path = _connected(path, kwargs)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Whether fsspec is there and knows the protocol."""
        return _takes(checkpoint_id)


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
        self.fs, self.path = _connected(path, kwargs)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Whether fsspec is there and knows the protocol."""
        return _takes(checkpoint_id)


def _file_system() -> type[_FileSystem]:
    from holdfast._stores.fsspec_filesystem import FsspecFileSystem

    return FsspecFileSystem


def _connected(path: AnyPath, options: dict[str, Any]) -> tuple[_FileSystem, str]:
    try:
        files = _file_system()()
    except ImportError as error:
        raise MissingPackageError(
            f"{path} is reached through fsspec, which cannot be imported ({error}): pip install 'holdfast[fsspec]', "
            "and the package of the protocol, such as s3fs for s3://.",
            install="holdfast[fsspec]",
        ) from error
    return files, files.init_path(path, **options)


def _takes(checkpoint_id: AnyPath) -> bool:
    try:
        return _file_system().validate_checkpoint_id(checkpoint_id)
    except ImportError:
        return False


def __getattr__(name: str) -> Any:
    # Not at the top: this module is part of the package, and fsspec takes a while to import.
    if name == "_FileSystem":
        return _file_system()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
