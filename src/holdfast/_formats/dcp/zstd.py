"""Compression of items with Zstandard, as DCP's ``stream.zstd/1``."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator
from types import ModuleType
from typing import IO, Any, cast

from holdfast._formats.dcp.extensions import StreamTransformExtension
from holdfast.errors import MissingPackageError

# The frames of a Zstandard stream, taken apart into pieces that are small however much they decompress to.
#
# A block of a few bytes may stand for 128 KiB, and never for more; so memory is bounded if blocks are decompressed
# one at a time. That a stream was cut off shows here too, where some decompressors just end.


_MAGIC = 0xFD2FB528
_SKIPPABLE_MAGIC = 0x184D2A50  # and the 15 numbers after it
_RUN = 1  # the type of blocks that are one byte, repeated
_PIECE = 1 << 17


def frame_pieces(stream: IO[bytes]) -> Iterator[Iterator[bytes]]:
    """The pieces of each frame. Take all pieces of one frame before the next frame."""
    while start := stream.read(1):
        magic = int.from_bytes(start + _exactly(stream, 3), "little")
        if magic & ~0xF == _SKIPPABLE_MAGIC:
            _skip(stream, int.from_bytes(_exactly(stream, 4), "little"))
        elif magic == _MAGIC:
            yield _pieces(stream)
        else:
            raise ValueError(f"these are not the bytes of a zstd frame: {magic:08x}")


def _pieces(stream: IO[bytes]) -> Iterator[bytes]:
    flags = _exactly(stream, 1)
    yield _MAGIC.to_bytes(4, "little") + flags + _exactly(stream, _rest_of_header(flags[0]))
    is_last = False
    while not is_last:
        head = _exactly(stream, 3)
        word = int.from_bytes(head, "little")
        is_last, kind, size = bool(word & 1), (word >> 1) & 3, word >> 3
        yield head + _exactly(stream, 1 if kind == _RUN else size)
    if flags[0] & 0b100:
        yield _exactly(stream, 4)  # the checksum


def _rest_of_header(flags: int) -> int:
    """Bytes of the header behind its flags: the window's size, the dictionary's id, the content's size."""
    is_single_segment = bool(flags & 0b10_0000)
    window = 0 if is_single_segment else 1
    dictionary = (0, 1, 2, 4)[flags & 0b11]
    content = (1 if is_single_segment else 0, 2, 4, 8)[flags >> 6]
    return window + dictionary + content


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size) if size else b""
    while len(data) < size:
        more = stream.read(size - len(data))
        if not more:
            raise EOFError("the compressed data ends too early")
        data += more
    return data


def _skip(stream: IO[bytes], size: int) -> None:
    while size:
        size -= len(_exactly(stream, min(size, _PIECE)))


_PACKAGES = ("zstandard", "pyzstd")


class ZStandard(StreamTransformExtension):
    """Compresses every item by itself.

    Example:
        >>> import tempfile, torch, holdfast.dcp as dcp
        >>> path = tempfile.mkdtemp()
        >>> writer = dcp.FileSystemWriter(path, _extensions=[ZStandard()])
        >>> _ = dcp.save({"zeros": torch.zeros(1_000_000)}, storage_writer=writer)
        >>> state = {"zeros": torch.ones(1_000_000)}
        >>> dcp.load(state, checkpoint_id=path)
        >>> state["zeros"].sum()
        tensor(0.)
    """

    def __init__(self) -> None:
        package = _installed()
        if package is None:
            raise MissingPackageError(
                f"{self.registry_name()} needs the package zstandard or pyzstd: pip install 'holdfast[zstd]'",
                install="holdfast[zstd]",
            )
        self._package = package

    @staticmethod
    def is_available() -> bool:
        """Whether a package that can do it is installed."""
        return _installed() is not None

    @staticmethod
    def registry_name() -> str:
        """The name in descriptors."""
        return "stream.zstd"

    @staticmethod
    def from_descriptor(version: str) -> ZStandard:
        """There has been one version so far."""
        if version.partition(".")[0] not in ("", "1"):
            raise ValueError(f"Unknown extension version='{version}'")
        return ZStandard()

    def get_descriptor(self) -> str:
        """Name and version."""
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Compress into ``output``, with a checksum at the end."""
        if self._package.__name__ == "pyzstd":
            options = {self._package.CParameter.checksumFlag: 1}
            return cast("IO[bytes]", self._package.ZstdFile(output, "wb", level_or_option=options))
        return cast("IO[bytes]", self._package.ZstdCompressor(write_checksum=True).stream_writer(output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        """Decompress, piece by piece. What ends too early is an ``EOFError``."""
        if self._package.__name__ == "pyzstd":
            return cast("IO[bytes]", self._package.ZstdFile(input, "rb"))
        return cast("IO[bytes]", _Decompressed(self._package, input))


def _installed() -> ModuleType | None:
    for name in _PACKAGES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


class _Decompressed(io.RawIOBase):
    """What a stream of zstd frames holds."""

    def __init__(self, zstandard: ModuleType, input: IO[bytes]) -> None:
        super().__init__()
        self._contents = _contents(zstandard, input)
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        filled = 0
        while filled < target.nbytes:
            if not self._ready:
                self._ready = memoryview(next(self._contents, b""))
                if not self._ready:
                    break
            count = min(target.nbytes - filled, self._ready.nbytes)
            target[filled : filled + count] = self._ready[:count]
            self._ready = self._ready[count:]
            filled += count
        return filled


def _contents(zstandard: ModuleType, input: IO[bytes]) -> Iterator[bytes]:
    for pieces in frame_pieces(input):
        frame = zstandard.ZstdDecompressor().decompressobj()
        for piece in pieces:
            content = frame.decompress(piece)
            if content:
                yield content
        if not frame.eof:
            raise EOFError("the compressed data ends too early")
