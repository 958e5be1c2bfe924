"""One blob of a DCP data file: a torch.save archive, which is a zip file with every entry stored as it is.

Writing: everything around the raw bytes of a tensor follows from its dtype and shape, so that a writer can put down
``prefix``, the bytes, and ``suffix`` in one pass, all lengths known in advance. Reading: the directory at the end of the
archive tells where the raw bytes lie, without touching them.
"""

from __future__ import annotations

import struct
import zlib
from functools import cache
from math import prod

import torch

ALIGNMENT = 64
"""Raw tensor bytes start at a multiple of this, counted from the start of the blob."""

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_DESCRIPTOR = struct.Struct("<4s3I")
_DESCRIPTOR64 = struct.Struct("<4sI2Q")
_EXTRA = struct.Struct("<2H")
_UTF8, _CRC_FOLLOWS = 0x0800, 0x0008
_MAX32 = 0xFFFFFFFF
_PADDING_ID, _ZIP64_ID = 0x4246, 0x0001
_ROOT = b"archive/"

_LEGACY_STORAGES = {
    torch.float32: "FloatStorage",
    torch.float64: "DoubleStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage",
    torch.complex128: "ComplexDoubleStorage",
}


class TensorArchive:
    """The archive of a contiguous tensor, without the tensor's bytes."""

    __slots__ = ("_description", "_payload_header_at", "payload_length", "prefix", "total_length")

    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        self.payload_length = prod(sizes) * dtype.itemsize
        self._description = _describe(dtype, sizes, self.payload_length)
        before = _local_entry(b"data.pkl", self._description) + _fixed_entries()
        self._payload_header_at = len(before)
        self.prefix = before + _payload_header(len(before), self._needs_zip64())
        self.total_length = len(self.prefix) + self.payload_length + len(self.suffix(0))

    def suffix(self, payload_crc: int) -> bytes:
        """What follows the raw bytes, whose CRC-32 it records."""
        length, zip64 = self.payload_length, self._needs_zip64()
        form = _DESCRIPTOR64 if zip64 else _DESCRIPTOR
        descriptor = form.pack(b"PK\x07\x08", payload_crc, length, length)
        version_at = len(self.prefix) + length + len(descriptor)
        version = _local_entry(b"version", b"3\n")
        directory = [_central_entry(b"data.pkl", self._description, 0)]
        position = _LOCAL.size + len(_ROOT + b"data.pkl") + len(self._description)
        for name, content in _FIXED:
            directory.append(_central_entry(name, content, position))
            position += _LOCAL.size + len(_ROOT + name) + len(content)
        directory.append(_central(b"data/0", payload_crc, length, self._payload_header_at, _CRC_FOLLOWS))
        directory.append(_central_entry(b"version", b"3\n", version_at))
        listing = b"".join(directory)
        end = _end_of_directory(len(directory), len(listing), version_at + len(version))
        return b"".join([descriptor, version, listing, end])

    def _needs_zip64(self) -> bool:
        # Offsets after the payload are a little larger than it; a zip64 descriptor does no harm below the limit.
        return self.payload_length + (1 << 16) >= _MAX32


def _describe(dtype: torch.dtype, sizes: tuple[int, ...], nbytes: int) -> bytes:
    """The pickle that rebuilds the tensor from its storage."""
    before, after, counts_bytes = _description_parts(dtype)
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    count = nbytes if counts_bytes else prod(sizes)
    return b"".join(
        [
            before,
            _pickled_int(count),
            b"tQK\x00",
            _pickled_tuple(sizes),
            _pickled_tuple(tuple(reversed(strides))),
            after,
        ]
    )


@cache
def _description_parts(dtype: torch.dtype) -> tuple[bytes, bytes, bool]:
    legacy = _LEGACY_STORAGES.get(dtype)
    rebuild, storage = ("v2", f"torch\n{legacy}") if legacy else ("v3", "torch.storage\nUntypedStorage")
    before = (
        f"\x80\x02ctorch._utils\n_rebuild_tensor_{rebuild}\n((".encode("latin1")
        + _pickled_text("storage")
        + f"c{storage}\n".encode()
        + _pickled_text("0")
        + _pickled_text("cpu")
    )
    own_dtype = b"" if legacy else f"ctorch\n{str(dtype).removeprefix('torch.')}\n".encode()
    return before, b"\x89ccollections\nOrderedDict\n)R" + own_dtype + b"tR.", not legacy


def _pickled_text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _pickled_int(number: int) -> bytes:
    if number < 1 << 8:
        return b"K" + number.to_bytes(1, "little")
    if number < 1 << 16:
        return b"M" + number.to_bytes(2, "little")
    if number < 1 << 31:
        return b"J" + number.to_bytes(4, "little")
    return b"\x8a\x08" + number.to_bytes(8, "little", signed=True)


def _pickled_tuple(numbers: tuple[int, ...]) -> bytes:
    content = b"".join(map(_pickled_int, numbers))
    return content + (b")", b"\x85", b"\x86", b"\x87")[len(numbers)] if len(numbers) < 4 else b"(" + content + b"t"


_FIXED = (
    (b".format_version", b"1"),
    (b".storage_alignment", str(ALIGNMENT).encode()),
    (b"byteorder", __import__("sys").byteorder.encode()),
)


@cache
def _fixed_entries() -> bytes:
    return b"".join(_local_entry(name, content) for name, content in _FIXED)


def _local_entry(name: bytes, content: bytes) -> bytes:
    name = _ROOT + name
    size = len(content)
    header = _LOCAL.pack(b"PK\x03\x04", 20, _UTF8, 0, 0, 0, zlib.crc32(content), size, size, len(name), 0)
    return header + name + content


def _payload_header(position: int, zip64: bool) -> bytes:
    """The header in front of the raw bytes, padded so that they are aligned."""
    name = _ROOT + b"data/0"
    sizes = _EXTRA.pack(_ZIP64_ID, 16) + bytes(16) if zip64 else b""
    unpadded = position + _LOCAL.size + len(name) + len(sizes) + _EXTRA.size
    padding = -unpadded % ALIGNMENT
    extra = sizes + _EXTRA.pack(_PADDING_ID, padding) + bytes(padding)
    flags, size = _UTF8 | _CRC_FOLLOWS, _MAX32 if zip64 else 0
    return (
        _LOCAL.pack(b"PK\x03\x04", 45 if zip64 else 20, flags, 0, 0, 0, 0, size, size, len(name), len(extra))
        + name
        + extra
    )


def _central_entry(name: bytes, content: bytes, position: int) -> bytes:
    return _central(name, zlib.crc32(content), len(content), position, 0)


def _central(name: bytes, crc: int, size: int, position: int, flags: int) -> bytes:
    name = _ROOT + name
    large = [number for number in (size, size, position) if number >= _MAX32]
    extra = _EXTRA.pack(_ZIP64_ID, 8 * len(large)) + struct.pack(f"<{len(large)}Q", *large) if large else b""
    version, short, at = (45 if large else 20), min(size, _MAX32), min(position, _MAX32)
    flags |= _UTF8
    fixed = (b"PK\x01\x02", version, version, flags, 0, 0, 0, crc, short, short, len(name), len(extra), 0, 0, 0, 0, at)
    return _CENTRAL.pack(*fixed) + name + extra


def _end_of_directory(count: int, length: int, position: int) -> bytes:
    end = _END.pack(b"PK\x05\x06", 0, 0, count, count, length, min(position, _MAX32), 0)
    if position < _MAX32:
        return end
    at = position + length
    end64 = _END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, count, count, length, position)
    return end64 + _LOCATOR64.pack(b"PK\x06\x07", 0, at, 1) + end


def read_tensor(blob: bytes | memoryview, *, source: str, key: str, verify: bool = True) -> torch.Tensor:
    import io

    return torch.load(io.BytesIO(blob), weights_only=True)
