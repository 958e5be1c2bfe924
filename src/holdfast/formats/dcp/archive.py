"""One blob of a DCP data file: an archive as ``torch.save`` writes it.

Writing: everything around the raw bytes of a tensor follows from its dtype and shape, so that a writer can put down
``prefix``, the bytes and ``suffix`` in one pass, with all lengths known in advance. Reading: ``read_directory`` finds
the raw bytes without touching them and ``describe_tensor`` says what they are; ``read_tensor`` does both for a blob
that is in memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple, cast

import torch

from holdfast.errors import UnsupportedTensorError
from holdfast.formats.dcp import opcodes as op
from holdfast.formats.dcp import zip_layout as layout
from holdfast.formats.dcp.safe_pickle import load
from holdfast.formats.dcp.stored_tensors import StoredArchive, StoredTensors, check_crc
from holdfast.formats.dcp.tensor_records import (
    LEGACY_STORAGES,
    QUANTIZED_DTYPES,
    StorageRecord,
    TensorRecord,
    describe_tensor,
)
from holdfast.formats.dcp.zip_layout import Entry, read_directory

__all__ = [
    "ALIGNMENT",
    "Entry",
    "StorageRecord",
    "TensorArchive",
    "TensorRecord",
    "check_crc",
    "describe_tensor",
    "read_directory",
    "read_tensor",
]

ALIGNMENT = 64
"""Raw tensor bytes start at a multiple of this, counted from the start of the blob."""

_DESCRIPTION, _PAYLOAD = "data.pkl", "data/0"
_PAYLOAD_NAME = (layout.ROOT + _PAYLOAD).encode()


class _Envelope(NamedTuple):
    """What a dtype and a shape decide about an archive."""

    prefix: bytes
    prefix_crc: int
    payload_length: int
    payload_entry: int
    """Where the local header of the payload starts."""
    lines: bytes
    """The directory, except for the payload's line."""


class TensorArchive:
    """The archive of a tensor, without the tensor's bytes, which go in row-major order between prefix and suffix.

    >>> archive = TensorArchive(torch.float32, (2, 3))
    >>> archive.payload_length
    24
    """

    __slots__ = ("_envelope", "payload_length", "prefix", "prefix_crc")

    def __init__(self, dtype: torch.dtype, sizes: Sequence[int]) -> None:
        self._envelope = _envelope(dtype, tuple(sizes))
        self.prefix = self._envelope.prefix
        self.prefix_crc = self._envelope.prefix_crc
        self.payload_length = self._envelope.payload_length

    @property
    def total_length(self) -> int:
        """The length of the blob."""
        return len(self.prefix) + self.payload_length + len(self.suffix(0))

    def suffix(self, payload_crc: int) -> bytes:
        """What follows the raw bytes, whose CRC-32 it records."""
        prefix, _, length, payload_entry, lines = self._envelope
        form = layout.DESCRIPTOR64 if length >= layout.MAX32 else layout.DESCRIPTOR
        descriptor = form.pack(layout.DESCRIPTOR_MAGIC, payload_crc, length, length)
        line = layout.central_entry(_PAYLOAD, payload_crc, length, payload_entry, flags=layout.CRC_FOLLOWS)
        position = len(prefix) + length + len(descriptor)
        end = layout.end_of_archive(len(layout.FIXED) + 2, len(lines) + len(line), position)
        return b"".join((descriptor, lines, line, end))


@lru_cache(maxsize=4096)
def _envelope(dtype: torch.dtype, sizes: tuple[int, ...]) -> _Envelope:
    count = prod(sizes)
    length = count * dtype.itemsize
    description = _describe(dtype, count, sizes)
    before = layout.FIXED_ENTRIES + layout.local_entry(_DESCRIPTION, description)
    line = layout.central_entry(_DESCRIPTION, zlib.crc32(description), len(description), len(layout.FIXED_ENTRIES))
    prefix = before + _payload_header(len(before), length)
    return _Envelope(prefix, zlib.crc32(prefix), length, len(before), layout.FIXED_LINES + line)


def _payload_header(position: int, length: int) -> bytes:
    """The header at ``position`` in front of the raw bytes, padded so that they are aligned."""
    version, size, extra = 20, 0, b""
    if length >= layout.MAX32:
        version, size = 45, layout.MAX32
        extra = layout.EXTRA.pack(layout.ZIP64_ID, 16) + length.to_bytes(8, "little") * 2
    padding = -(position + layout.LOCAL.size + len(_PAYLOAD_NAME) + len(extra) + layout.EXTRA.size) % ALIGNMENT
    extra += layout.EXTRA.pack(layout.PADDING_ID, padding) + bytes(padding)
    flags, lengths = layout.UTF8 | layout.CRC_FOLLOWS, (size, size, len(_PAYLOAD_NAME), len(extra))
    header = layout.LOCAL.pack(layout.LOCAL_MAGIC, version, flags, layout.STORED, 0, 0, 0, *lengths)
    return header + _PAYLOAD_NAME + extra


def _describe(dtype: torch.dtype, count: int, sizes: tuple[int, ...]) -> bytes:
    """The pickle that rebuilds a contiguous tensor from its storage."""
    before, after, unit = _description_parts(dtype)
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(op.integer(step))
        step *= max(size, 1)
    shape = op.tuple_of([op.integer(size) for size in sizes]) + op.tuple_of(strides[::-1])
    return b"".join((before, op.integer(count * unit), op.TUPLE, op.PERSISTENT_ID, op.integer(0), shape, after))


@cache
def _description_parts(dtype: torch.dtype) -> tuple[bytes, bytes, int]:
    """The description before the storage's length and after the shape, and the unit in which that length counts."""
    name = str(dtype).removeprefix("torch.")
    if dtype in QUANTIZED_DTYPES:
        raise UnsupportedTensorError(
            f"{dtype} has no bytes without its scales; save torch.save's form of the tensor, or its int_repr().",
            key="",
            kind=name,
        )
    legacy = LEGACY_STORAGES.get(dtype)
    rebuild = op.name("torch._utils", "_rebuild_tensor_v2" if legacy else "_rebuild_tensor_v3")
    storage = op.name("torch", legacy) if legacy else op.name("torch.storage", "UntypedStorage")
    reference = op.MARK + op.text("storage") + storage + op.text("0") + op.text("cpu")
    no_hooks = op.name("collections", "OrderedDict") + op.CALL_WITHOUT_ARGUMENTS
    own_dtype = b"" if legacy else op.name("torch", name)
    before = op.PROTO_2 + rebuild + op.MARK + reference
    after = op.FALSE + no_hooks + own_dtype + op.TUPLE + op.REDUCE + op.STOP
    return before, after, 1 if legacy else dtype.itemsize


def read_tensor(
    blob: bytes | bytearray | memoryview, *, source: str, key: str | None = None, verify: bool = True
) -> torch.Tensor:
    """The tensor in a blob, with the CRCs of all that it is made from checked.

    It uses the memory of ``blob`` if that may be written to (a ``bytearray``, say), else a copy.
    """
    archive = StoredArchive(blob, source=source, key=key, verify=verify)
    tensors = StoredTensors(archive, share=True)
    description = archive.pickle()
    record = describe_tensor(description, source=source, key=key)
    try:
        if record.quantizer is None:
            return tensors.tensor(record).detach()
        # Its scales may be tensors of their own, with storages of their own.
        made = load(description, tensors.find, source=source, key=key, persistent_load=tensors.reference)
        return cast(torch.Tensor, made).detach()
    except (RuntimeError, ValueError, TypeError) as error:
        raise layout.damaged(source, key, f"its description does not fit its bytes: {error}") from error
