"""Stores and roots at URLs keep the contract that all others are held to: on a real S3 server, in memory, on a disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._stores.fsspec_store import FsspecRoot, FsspecStore
from holdfast._stores.roots import Root
from holdfast._stores.store import Store
from holdfast.testing import RootConformance, StoreConformance
from tests import s3_server

needs_s3 = pytest.mark.skipif(bool(s3_server.MISSING), reason=s3_server.WHY_SKIPPED)


@pytest.fixture(scope="module")
def bucket() -> s3_server.Bucket:
    return s3_server.new_bucket()


class _OnS3:
    bucket: s3_server.Bucket

    @pytest.fixture(autouse=True)
    def _bucket(self, bucket: s3_server.Bucket) -> None:
        self.bucket = bucket

    def url(self, folder: Path) -> str:
        return self.bucket.url(*folder.parts[1:], "größe 100%")


@needs_s3
class TestS3Store(_OnS3, StoreConformance):
    rounds = 4

    def make_store(self, folder: Path) -> Store:
        return FsspecStore(self.url(folder), **self.bucket.options)


@needs_s3
class TestS3Root(_OnS3, RootConformance):
    def make_root(self, folder: Path) -> Root:
        return FsspecRoot(self.url(folder), **self.bucket.options)


class TestStoreInMemoryOfFsspec(StoreConformance):
    def make_store(self, folder: Path) -> Store:
        return FsspecStore(f"memory://{folder}/step")


class TestRootInMemoryOfFsspec(RootConformance):
    def make_root(self, folder: Path) -> Root:
        return FsspecRoot(f"memory://{folder}/run")


class TestStoreOnADiskOfFsspec(StoreConformance):
    """As other disks that fsspec reaches, which rename in one step."""

    def make_store(self, folder: Path) -> Store:
        return FsspecStore(f"file://{folder}/runs/step")


class TestRootOnADiskOfFsspec(RootConformance):
    def make_root(self, folder: Path) -> Root:
        return FsspecRoot(f"file://{folder}/run")
