"""The stores of Holdfast keep the contract that others are held to."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from holdfast._stores.local_store import LocalStore
from holdfast._stores.memory_store import MemoryStore
from holdfast._stores.places import store_at
from holdfast._stores.store import Store
from holdfast.testing import StoreConformance


class TestLocalStore(StoreConformance):
    def make_store(self, folder: Path) -> Store:
        return LocalStore(folder / "runs" / "step")


class TestLocalStoreOnSharedMemory(StoreConformance):
    """Another kind of file system: tmpfs."""

    def make_store(self, folder: Path) -> Store:
        return LocalStore(self.shared / str(folder).strip("/").replace("/", "_"))

    @pytest.fixture(autouse=True)
    def _shared_memory(self):
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("there is no shared memory")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            self.shared = Path(folder)
            yield


class TestLocalStoreAtAUrl(StoreConformance):
    def make_store(self, folder: Path) -> Store:
        return store_at((folder / "100% größe").as_uri())


class TestMemoryStore(StoreConformance):
    def make_store(self, folder: Path) -> Store:
        return MemoryStore(str(folder))
