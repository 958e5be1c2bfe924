"""Which storage a checkpoint id asks for."""

from __future__ import annotations

from holdfast.dcp.filesystem import FileSystemReader, FileSystemWriter
from holdfast.storage.contract import StorageReader, StorageWriter
from holdfast.stores.filesystem import AnyPath

_STOCK = "torch.distributed.checkpoint"


def _storage_setup(
    storage: StorageReader | StorageWriter | None, checkpoint_id: AnyPath | None, reader: bool = False
) -> StorageReader | StorageWriter | None:
    """The storage to use: the given one, told where the checkpoint is, or one that takes ``checkpoint_id``."""
    if storage is None:
        return _storage_for(checkpoint_id, FileSystemReader if reader else FileSystemWriter)
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


def _storage_for(
    checkpoint_id: AnyPath | None, kind: type[FileSystemReader] | type[FileSystemWriter]
) -> FileSystemReader | FileSystemWriter:
    if checkpoint_id is None or str(checkpoint_id) == "":
        raise RuntimeError("`checkpoint_id` must be specified if storage_reader/storage_writer is None.")
    if kind.validate_checkpoint_id(checkpoint_id):
        return kind(checkpoint_id)
    remedy = "a local path" if kind is FileSystemReader else "a path below a folder that exists and can be written to"
    raise RuntimeError(
        f"Cannot detect which StorageReader or StorageWriter to use for {str(checkpoint_id)!r}. "
        f"Give {remedy}, or pass a storage_reader/storage_writer."
    )
