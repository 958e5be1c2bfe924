"""The contracts of storages."""

from holdfast.storage.contract import StorageReader, StorageWriter, WriteResult

__all__ = ["StorageReader", "StorageWriter", "WriteResult"]
