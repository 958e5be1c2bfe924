"""Which storage a checkpoint id asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast._dcp.storage import StorageReader, StorageWriter
from holdfast._stores.filesystem import AnyPath
from holdfast.dcp.filesystem import FileSystem, FileSystemReader, FileSystemWriter

if TYPE_CHECKING:
    from holdfast.dcp._fsspec_filesystem import FsspecReader, FsspecWriter

_STOCK = "torch.distributed.checkpoint"


def _storage_setup(
    storage: StorageReader | StorageWriter | None, checkpoint_id: AnyPath | None, reader: bool = False
) -> StorageReader | StorageWriter | None:
    """The storage to use: the given one, with the path of the checkpoint, or one that takes ``checkpoint_id``."""
    if storage is None:
        return _storage_for(checkpoint_id, reader)
    if checkpoint_id is not None:
        storage.reset(checkpoint_id)
    return storage


def _refuse_stock_objects(*given: object) -> None:
    """Planners and storages of torch look like ours and speak of other classes; say so instead of failing later."""
    for thing in given:
        home = next((cls for cls in type(thing).__mro__ if cls.__module__.startswith(_STOCK)), None)
        if home is not None:
            raise TypeError(
                f"{type(thing).__name__} is built on {home.__module__}.{home.__name__}, which does not go with "
                f"holdfast.dcp. Import {home.__name__} from {home.__module__.replace(_STOCK, 'holdfast.dcp')} instead."
            )


def _storage_for(checkpoint_id: AnyPath | None, reader: bool) -> StorageReader | StorageWriter:
    if checkpoint_id is None or str(checkpoint_id) == "":
        raise RuntimeError("`checkpoint_id` must be specified if storage_reader/storage_writer is None.")
    kind: type[FileSystemReader] | type[FileSystemWriter] = FileSystemReader if reader else FileSystemWriter
    if kind.validate_checkpoint_id(checkpoint_id):
        return kind(checkpoint_id)
    if _is_url(checkpoint_id):
        _refuse_without_fsspec(checkpoint_id)
        remedy = "a URL of a protocol that fsspec knows"
    else:
        remedy = "a local path" if reader else "a path below a folder that exists and can be written to"
    # A local path that cannot be written to is refused here, where the reason is known. fsspec would fail later.
    if _is_url(checkpoint_id) or reader or FileSystem.validate_checkpoint_id(checkpoint_id):
        other = _fsspec_storage(reader)
        if other is not None and other.validate_checkpoint_id(checkpoint_id):
            return other(checkpoint_id)
    raise RuntimeError(f"{_cannot_detect(checkpoint_id)} Give {remedy}, or pass a storage_reader/storage_writer.")


def _is_url(checkpoint_id: AnyPath) -> bool:
    return isinstance(checkpoint_id, str) and "://" in checkpoint_id


def _fsspec_storage(reader: bool) -> type[FsspecReader] | type[FsspecWriter] | None:
    """The storage for URLs, by the name that all versions of torch know; None without fsspec, which is an extra."""
    try:
        from holdfast.dcp._fsspec_filesystem import FsspecReader, FsspecWriter
    except ImportError:
        return None
    return FsspecReader if reader else FsspecWriter


def _refuse_without_fsspec(url: AnyPath) -> None:
    try:
        import fsspec  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"{_cannot_detect(url)} URLs need fsspec, which cannot be imported ({error}): "
            "pip install 'holdfast[fsspec]', and the package of the protocol, such as s3fs for s3://."
        ) from error


def _cannot_detect(checkpoint_id: AnyPath) -> str:
    return f"Cannot detect which StorageReader or StorageWriter to use for {str(checkpoint_id)!r}."
