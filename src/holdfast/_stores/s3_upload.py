"""An object of S3 that is being uploaded in parts, some at once. It exists when it is complete, and not before."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from holdfast._base.tuning import KIB, MIB, UPLOADS, WRITE_BUFFER_BYTES
from holdfast._stores.fsspec_filesystem import name_is_taken, only_os_errors
from holdfast._stores.store import Buffer, BufferedSink

log = logging.getLogger("holdfast.stores")

MARK = "holdfast-put"
"""The name of a note by which a put is known again whose answer was lost."""

SMALLEST_PART = 5 * MIB
"""S3 refuses to complete an object of smaller ones, the last one aside."""

_MOST_PARTS = 10_000
_PARTS_OF_A_SIZE = 1_000
"""If nobody knows how large an object will become, so many parts have one size and the next are twice as large."""

_UNKNOWN = {"NotImplemented", "501"}
_REFUSED = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409", "OperationAborted"}


class S3Upload(BufferedSink):
    """A sink. Its buffers are the parts: while one is filled, those before are on their way."""

    def __init__(
        self, fs: Any, place: dict[str, str], path: str, expected: int | None, memory: int | None = None
    ) -> None:
        self.size = 0
        self._fs = fs
        self._place = place
        self._path = path
        self._expected = expected
        self._mark = uuid.uuid4().hex
        self._part_bytes, self._uploads = _sizes(expected, memory)
        self._buffer: bytearray | None = None
        self._filled = 0
        self._free: list[bytearray] = []
        self._under_way: deque[tuple[Future[Any], bytearray]] = deque()
        self._upload_id: str | None = None
        self._etags: list[str] = []
        self._parts = 0
        self._ended = False

    def write(self, buffer: Buffer) -> None:
        """Copy everything to the parts."""
        view = memoryview(buffer)
        if view.nbytes == 0:  # a shape with a zero in it cannot be cast
            return
        view = view.cast("B")
        while view.nbytes:
            free = self.buffer()
            count = min(free.nbytes, view.nbytes)
            free[:count] = view[:count]
            self.advance(count)
            view = view[count:]

    def buffer(self) -> memoryview:
        """What is free of the part that is being filled."""
        if self._ended:
            raise ValueError(f"{self._path} is complete, or was given up")
        if self._buffer is None:
            with only_os_errors(self._path):
                self._buffer = self._next_buffer()
            self._filled = 0
        return memoryview(self._buffer)[self._filled :]

    def advance(self, count: int) -> None:
        """So many bytes of the buffer are filled. A full one is sent."""
        assert self._buffer is not None
        self._filled += count
        self.size += count
        if self._filled == len(self._buffer):
            with only_os_errors(self._path):
                self._send_part(self._buffer, self._buffer)

    def complete(self) -> None:
        """Make it an object. If its answer is lost, and it is sent again, the mark shows whose object is there."""
        last = b"" if self._buffer is None else bytes(memoryview(self._buffer)[: self._filled])
        try:
            if self._upload_id is None:
                self._call("put_object", Body=last, Metadata={MARK: self._mark})
            else:
                if last:
                    assert self._buffer is not None
                    self._send_part(last, self._buffer)
                while self._under_way:
                    self._finish_one()
                parts = [{"PartNumber": at + 1, "ETag": etag} for at, etag in enumerate(self._etags)]
                upload = {"UploadId": self._upload_id, "MultipartUpload": {"Parts": parts}}
                self._call("complete_multipart_upload", **upload)
        except OSError as error:
            if not self._is_there():
                raise (name_is_taken(self._path) if is_refused(error) else error) from error
        self._ended = True

    def abandon(self) -> None:
        """Nothing of it is kept. What cannot be reached now is for the rule that every bucket should have."""
        self._ended = True
        for sent, _ in self._under_way:
            sent.cancel()
        for sent, _ in self._under_way:
            with suppress(Exception):  # a part that arrives later than the end of its upload would stay
                sent.result()
        if self._upload_id is not None:
            with suppress(Exception):
                self._fs.call_s3("abort_multipart_upload", **self._place, UploadId=self._upload_id)

    def _next_buffer(self) -> bytearray:
        while len(self._under_way) > self._uploads:
            self._finish_one()
        size = self._part_bytes
        if self._expected is None:
            size *= 2 ** (self._parts // _PARTS_OF_A_SIZE)
        if self._free and len(self._free[-1]) == size:
            return self._free.pop()
        self._free.clear()
        return bytearray(size)

    def _send_part(self, content: bytes | bytearray, buffer: bytearray) -> None:
        if self._upload_id is None:
            begun = self._fs.call_s3("create_multipart_upload", **self._place, Metadata={MARK: self._mark})
            self._upload_id = begun["UploadId"]
        self._parts += 1
        part = {"UploadId": self._upload_id, "PartNumber": self._parts, "Body": content}
        sending = self._fs._call_s3("upload_part", **self._place, **part)
        self._under_way.append((asyncio.run_coroutine_threadsafe(sending, self._fs.loop), buffer))
        self._buffer = None

    def _finish_one(self) -> None:
        """Wait for the part that is under way for longest."""
        sent, buffer = self._under_way[0]
        self._etags.append(sent.result()["ETag"])
        self._under_way.popleft()
        self._free.append(buffer)

    def _call(self, method: str, **arguments: Any) -> None:
        """Make the object, if there is none."""
        call_if(self._fs, {"IfNoneMatch": "*"}, method, **self._place, **arguments)

    def _is_there(self) -> bool:
        with suppress(Exception):
            head = self._fs.call_s3("head_object", **self._place)
            return bool(head["Metadata"].get(MARK) == self._mark and head["ContentLength"] == self.size)
        return False


def _sizes(expected: int | None, memory: int | None) -> tuple[int, int]:
    """How large parts are, and how many may be under way besides the one that is being filled.

    If there is less memory than the smallest part that S3 takes, it is one of those.
    """
    wanted, uploads = WRITE_BUFFER_BYTES, UPLOADS
    if memory is not None:
        wanted = min(WRITE_BUFFER_BYTES, max(SMALLEST_PART, memory))
        uploads = max(0, min(UPLOADS, memory // wanted - 1))
    if expected is not None and expected <= wanted:
        wanted = expected + 1  # it never becomes full, so that there is a single request
    return _whole_blocks(max(wanted, -(-(expected or 0) // _MOST_PARTS))), uploads


def call_if(fs: Any, condition: dict[str, Any], method: str, **arguments: Any) -> None:
    """Have a server do something on a condition. One that knows no such conditions, and says so, does it anyway."""
    try:
        fs.call_s3(method, **arguments, **condition)
    except OSError as error:
        if _code(error) not in _UNKNOWN:
            raise
        place = f"s3://{arguments['Bucket']}/{arguments['Key']}"
        log.warning("%s: its server has no conditional puts; docs/stores.md says what that means", place)
        fs.call_s3(method, **arguments)


def is_refused(error: OSError) -> bool:
    """Whether a server has not done it because its condition does not hold, or because another one was in the way."""
    return isinstance(error, FileExistsError) or _code(error) in _REFUSED


def _code(error: OSError) -> str | None:
    response = getattr(error.__cause__, "response", None) or {}
    code = response.get("Error", {}).get("Code")
    return None if code is None else str(code)


def _whole_blocks(nbytes: int) -> int:
    """So many bytes or some more: whoever fills buffers does it by blocks."""
    return -(-nbytes // (64 * KIB)) * 64 * KIB
