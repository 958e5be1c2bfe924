"""Which storage a checkpoint id asks for."""

from __future__ import annotations

from holdfast.dcp.filesystem import FileSystemReader, FileSystemWriter
from holdfast.storage.contract import StorageReader, StorageWriter
from holdfast.stores.filesystem import AnyPath


def _storage_setup(
    storage: StorageReader | StorageWriter | None, checkpoint_id: AnyPath | None, reader: bool = False
) -> StorageReader | StorageWriter | None:
    """The storage to use: the given one, told where the checkpoint is, or one that takes ``checkpoint_id``."""
    if storage is not None:
        if checkpoint_id is not None:
            storage.reset(checkpoint_id)
        return storage
    if not checkpoint_id:
        raise RuntimeError("`checkpoint_id` must be specified if storage_reader/storage_writer is None.")
    kinds: list[type[FileSystemReader] | type[FileSystemWriter]] = [FileSystemReader if reader else FileSystemWriter]
    for kind in kinds:
        if kind.validate_checkpoint_id(checkpoint_id):
            found = kind(checkpoint_id)
            found.reset(checkpoint_id)
            return found
    raise RuntimeError(
        f"Cannot detect which StorageReader or StorageWriter to use for {str(checkpoint_id)!r}. "
        "Give a path below a folder that exists and can be written to, or pass a storage_reader/storage_writer."
    )
