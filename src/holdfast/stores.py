"""Where the files of a checkpoint live. ``docs/stores.md`` shows how to write a store of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast._stores.local_store import LocalStore
from holdfast._stores.memory_store import MemoryStore
from holdfast._stores.places import store_at
from holdfast._stores.roots import LocalRoot, MemoryRoot, Root, root_at
from holdfast._stores.store import (
    BufferedSink,
    CachedReader,
    InPlaceSink,
    Listed,
    Reader,
    SharedReader,
    Sink,
    Store,
    checked_name,
    conflict,
    too_short,
    wrong_size,
)

if TYPE_CHECKING:
    from holdfast._stores.fsspec_store import FsspecRoot, FsspecStore

__all__ = [
    "BufferedSink",
    "CachedReader",
    "FsspecRoot",
    "FsspecStore",
    "InPlaceSink",
    "Listed",
    "LocalRoot",
    "LocalStore",
    "MemoryRoot",
    "MemoryStore",
    "Reader",
    "Root",
    "SharedReader",
    "Sink",
    "Store",
    "checked_name",
    "conflict",
    "root_at",
    "store_at",
    "too_short",
    "wrong_size",
]


def __getattr__(name: str) -> Any:
    """What needs fsspec is only imported where it is used."""
    if name == "FsspecStore":
        from holdfast._stores.fsspec_store import FsspecStore

        return FsspecStore
    if name == "FsspecRoot":
        from holdfast._stores.fsspec_store import FsspecRoot

        return FsspecRoot
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
