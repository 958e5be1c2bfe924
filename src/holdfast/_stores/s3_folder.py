"""A folder of S3, or of a server that speaks like it, which does nothing if something has changed since."""

from __future__ import annotations

import asyncio
import errno
import logging
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from holdfast._base.tuning import REMOTE_READ_BYTES, REMOTE_START_BYTES
from holdfast._stores.fsspec_filesystem import FsspecFileSystem, name_is_taken, only_os_errors, was_replaced
from holdfast._stores.fsspec_folder import FoundObject, FsspecFolder
from holdfast._stores.s3_upload import MARK, S3Upload, call_if, is_refused
from holdfast._stores.store import Sink, wrong_size

log = logging.getLogger("holdfast.stores")

_ATTEMPTS = 5
"""How often a read is begun again whose connection broke, or a put that met another one."""


def is_s3(fs: Any) -> bool:
    """Whether a file system is of s3fs. If that was never imported, it is not."""
    s3fs = sys.modules.get("s3fs")
    return s3fs is not None and isinstance(fs, s3fs.S3FileSystem)


class S3Folder(FsspecFolder):
    """Objects are told apart by their ETag: a range is read, and a record replaced, only if it is still the same.

    Servers that do not know conditional puts and say so get plain ones, after a look at what is there.
    """

    read_bytes = 2 * REMOTE_READ_BYTES

    def __init__(self, files: FsspecFileSystem, url: str) -> None:
        super().__init__(files, url)
        self._bucket, prefix, _ = self._fs.split_path(files.inner(url))
        if not self._bucket:
            raise ValueError(f"{url} names no bucket; write it like s3://bucket/folder")
        self._prefix = f"{prefix}/" if prefix else ""

    def find(self, name: str) -> FoundObject | None:
        """Its size and ETag."""
        try:
            head = self._call("head_object", name)
        except FileNotFoundError:
            return None
        return FoundObject(head["ContentLength"], head["ETag"])

    def open(self, name: str) -> tuple[FoundObject, bytes] | None:
        """One request returns everything about an object, and all of a small one."""
        from fsspec.asyn import sync

        try:
            opened: tuple[FoundObject, bytes] = sync(self._fs.loop, self._open, name)
            return opened
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EINVAL:  # which servers answer if the object is empty, and so has no first byte
                raise
        found = self.find(name)
        return None if found is None else (found, b"")

    def read_into(self, name: str, found: FoundObject, begin: int, memory: memoryview) -> None:
        """Read ranges at once, on condition that the object is still the one that was found."""
        from fsspec.asyn import sync

        async def read_all() -> None:
            parts = range(0, memory.nbytes, REMOTE_READ_BYTES)
            await asyncio.gather(
                *(self._read(name, found, begin + at, memory[at : at + REMOTE_READ_BYTES]) for at in parts)
            )

        sync(self._fs.loop, read_all)

    @contextmanager
    def create(self, name: str, size: int | None, memory: int | None = None) -> Iterator[Sink]:
        """Upload in parts, which become an object when the last one is there."""
        path = self._path(name)
        with only_os_errors(path):
            if self.find(name) is not None:
                raise name_is_taken(path)
        upload = S3Upload(self._fs, self._at(name), path, size, memory)
        try:
            yield upload
            if size is not None and upload.size != size:
                raise wrong_size(path, size, upload.size)
            with only_os_errors(path):
                upload.complete()
        except BaseException:
            upload.abandon()
            raise

    def compare_and_put(self, name: str, content: bytes, replaces: bytes | None) -> bool:
        """A put with a condition. Should it be refused, it is found out by whom: an answer may have been lost."""
        mark = uuid.uuid4().hex
        for attempt in range(_ATTEMPTS):
            found, there = self._look(name)
            if there != replaces:
                return attempt > 0 and self._is_marked(name, mark)
            condition = {"IfNoneMatch": "*"} if found is None else {"IfMatch": found.version}
            try:
                call_if(self._fs, condition, "put_object", **self._at(name), Body=content, Metadata={MARK: mark})
            except FileNotFoundError:
                if found is None:  # there is no such bucket
                    raise
            except OSError as error:
                if not is_refused(error):
                    raise
            else:
                return True
        raise OSError(errno.EBUSY, "others are writing to it all the time", self._path(name))

    def entries(self) -> Sequence[tuple[str, dict[str, Any]]]:
        """Names of all that is in the folder. A folder without objects is empty, but a bucket has to be there."""
        found = super().entries()
        if not found:
            try:
                self._fs.call_s3("list_objects_v2", Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)
            except FileNotFoundError as error:
                raise FileNotFoundError(errno.ENOENT, "there is no such bucket", self._url) from error
        return found

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._call("delete_object", name)

    def _call(self, method: str, name: str, **arguments: Any) -> Any:
        return self._fs.call_s3(method, **self._at(name), **arguments)

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    async def _open(self, name: str) -> tuple[FoundObject, bytes]:
        start = {"Range": f"bytes=0-{REMOTE_START_BYTES - 1}"}
        for _ in range(_ATTEMPTS):
            answer = await self._fs._call_s3("get_object", **self._at(name), **start)
            size = int(answer["ContentRange"].rpartition("/")[2])
            memory = bytearray(min(size, REMOTE_START_BYTES))
            if await _fill(memoryview(memory), answer["Body"]):
                return FoundObject(size, answer["ETag"]), bytes(memory)
        raise self._broken(name)

    def _broken(self, name: str) -> OSError:
        return OSError(errno.EIO, f"the connection broke {_ATTEMPTS} times", self._path(name))

    async def _read(self, name: str, found: FoundObject, begin: int, memory: memoryview) -> None:
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(0.1 * 2**attempt)
            try:
                part = {"Range": f"bytes={begin}-{begin + memory.nbytes - 1}", "IfMatch": found.version}
                answer = await self._fs._call_s3("get_object", **self._at(name), **part)
            except OSError as error:
                if isinstance(error, FileNotFoundError) or is_refused(error):
                    raise was_replaced(self._path(name)) from error
                raise
            if await _fill(memory, answer["Body"]):
                return
        raise self._broken(name)

    def _is_marked(self, name: str, mark: str) -> bool:
        try:
            return bool(self._call("head_object", name)["Metadata"].get(MARK) == mark)
        except FileNotFoundError:
            return False


async def _fill(memory: memoryview, body: Any) -> bool:
    """Take the bytes of an answer as they come; False if the connection breaks before all are there."""
    filled = 0
    try:
        async for piece in body.iter_chunks(1 << 20):
            memory[filled : filled + len(piece)] = piece
            filled += len(piece)
    except Exception as error:
        log.debug("reading again, since the connection broke: %s", error)
        return False
    finally:
        body.close()
    return filled == memory.nbytes
