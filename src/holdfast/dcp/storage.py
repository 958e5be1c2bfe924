"""The contracts of storages."""

from holdfast._dcp.storage import StorageReader, StorageWriter, WriteResult

__all__ = ["StorageReader", "StorageWriter", "WriteResult"]
