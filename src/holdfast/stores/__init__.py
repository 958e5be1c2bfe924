"""Where the files of a checkpoint live. ``docs/stores.md`` shows how to write a store of one's own."""

from __future__ import annotations

from holdfast.stores.local_store import LocalStore
from holdfast.stores.memory_store import MemoryStore
from holdfast.stores.places import store_at
from holdfast.stores.roots import LocalRoot, MemoryRoot, Root, root_at
from holdfast.stores.store import (
    Listed,
    Reader,
    Sink,
    Store,
    checked_name,
    conflict,
    too_short,
    wrong_size,
)

__all__ = [
    "Listed",
    "LocalRoot",
    "LocalStore",
    "MemoryRoot",
    "MemoryStore",
    "Reader",
    "Root",
    "Sink",
    "Store",
    "checked_name",
    "conflict",
    "root_at",
    "store_at",
    "too_short",
    "wrong_size",
]
