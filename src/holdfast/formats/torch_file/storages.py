"""Whether the storages that a ``torch.save`` file describes are as large as the entries that hold them.

Elements are read from the file by the size that the description claims, which torch does not compare: a wrong one would
show bytes of something else as elements.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

from holdfast.formats.dcp.tensor_records import LEGACY_STORAGES
from holdfast.formats.dcp.zip_layout import Entry, damaged

_ITEM_SIZES = {name: dtype.itemsize for dtype, name in LEGACY_STORAGES.items()} | {"UntypedStorage": 1}


class _Stub:
    """Stands for whatever a description makes. It takes part in everything and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """As a list would."""

    def extend(self, items: Any) -> None:
        """As a list would."""

    def add(self, item: Any) -> None:
        """As a set would."""


class _StorageCollector(pickle.Unpickler):
    """Goes through a description without making any of the objects that it describes."""

    def __init__(self, description: bytes) -> None:
        super().__init__(io.BytesIO(description))
        self.claims: list[tuple[str, int]] = []

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Stub,), {})

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage" and isinstance(pid[4], int):
            item_size = _ITEM_SIZES.get(getattr(pid[1], "__name__", ""))
            if item_size is not None:
                self.claims.append((f"data/{pid[2]}", pid[4] * item_size))
        return _Stub()


def check_storage_sizes(description: bytes, entries: Mapping[str, Entry], *, source: str) -> None:
    """Compare the sizes that ``description`` claims with those of the file's ``entries``."""
    collector = _StorageCollector(description)
    try:
        collector.load()
    except Exception:  # torch says what is wrong with it, and in its own words
        return
    for name, size in collector.claims:
        if name in entries and entries[name].length != size:
            raise damaged(source, name, "another number of bytes than described", size, entries[name].length)
