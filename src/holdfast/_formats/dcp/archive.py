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
from itertools import pairwise
from math import prod
from typing import NamedTuple, cast

import torch

from holdfast._formats.archives import opcodes as op
from holdfast._formats.archives import zip_layout as layout
from holdfast._formats.archives.safe_pickle import load
from holdfast._formats.archives.stored_tensors import StoredArchive, StoredTensors, check_crc
from holdfast._formats.archives.tensor_records import (
    LEGACY_STORAGES,
    QUANTIZED_DTYPES,
    StorageRecord,
    TensorRecord,
    describe_tensor,
)
from holdfast._formats.archives.zip_layout import (
    CENTRAL,
    CENTRAL_MAGIC,
    CRC_FOLLOWS,
    DESCRIPTOR,
    END,
    END_MAGIC,
    ZipEntry,
    read_directory,
)
from holdfast.errors import UnsupportedTensorError

__all__ = [
    "ALIGNMENT",
    "StorageRecord",
    "TensorArchive",
    "TensorRecord",
    "ZipEntry",
    "check_crc",
    "describe_tensor",
    "read_directory",
    "read_tensor",
]


ALIGNMENT = 64
"""Raw tensor bytes start at a multiple of this, counted from the start of the blob."""

_DESCRIPTION, _PAYLOAD = "data.pkl", "data/0"
_PAYLOAD_NAME = (layout.ROOT + _PAYLOAD).encode()
_CRC_IN_DESCRIPTOR, _CRC_IN_LINE = 4, 16
"""Where the record behind an entry, and its line in the directory, have the CRC."""


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

    @property
    def crc_places(self) -> tuple[int, ...]:
        """Where the blob has the CRC-32 of the raw bytes: behind these, and in their line of the directory."""
        behind = len(self.prefix) + self.payload_length
        form = layout.DESCRIPTOR64 if self.payload_length >= layout.MAX32 else layout.DESCRIPTOR
        return behind + _CRC_IN_DESCRIPTOR, behind + form.size + len(self._envelope.lines) + _CRC_IN_LINE

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


# Archives that differ from one seen before only in their elements and CRCs: they need not be taken apart again.
#
# Of thousands of small tensors in a checkpoint most have the same dtype and shape, and then all bytes around their
# elements are the same but for a few sums.


_MOST = 1024
"""Forms that are remembered. A model has a few dozen; where every tensor has its own, remembering them is no use."""
_UNCHECKED = ".data/serialization_id"
"""An id of the content, which differs from archive to archive. Nothing is made of it."""


class Familiar(NamedTuple):
    """What is in an archive of a form that is known."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    elements: memoryview
    crc: int


class _Form(NamedTuple):
    """What archives of one form have in common."""

    same: tuple[tuple[int, int], ...]
    """The ranges that are the same in all of them."""
    content: bytes
    """What is in those."""
    dtype: torch.dtype
    sizes: tuple[int, ...]
    payload: ZipEntry
    crc_at: int
    """Where the directory has the CRC of the elements."""


class FamiliarArchives:
    """Remembers a form for every length."""

    def __init__(self) -> None:
        self._forms: dict[int, _Form] = {}
        self._lengths: set[int] = set()  # a number for every small blob at most, of which the index has much more

    def recognize(self, blob: memoryview) -> Familiar | None:
        """What is in an archive, if its form is known."""
        form = self._forms.get(len(blob))
        if form is None or b"".join([blob[begin:end] for begin, end in form.same]) != form.content:
            return None
        offset, length, _ = form.payload
        crc = int.from_bytes(blob[form.crc_at : form.crc_at + 4], "little")
        return Familiar(form.dtype, form.sizes, blob[offset : offset + length], crc)

    def is_worth_learning(self, length: int) -> bool:
        """Whether there was one of that length before: forms that are met once are not worth remembering."""
        if length in self._lengths:
            return len(self._forms) < _MOST
        self._lengths.add(length)
        return False

    def remember(self, blob: memoryview, position: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        """Learn from a sound archive, whose elements are a row-major array at ``position``."""
        entries = read_directory(lambda at, length: bytes(blob[at : at + length]), len(blob), source="an archive")
        lines = _lines(blob)
        name = next((name for name, entry in entries.items() if entry.offset == position and entry.length), None)
        if name is None or name not in lines or entries[name].crc is None:
            return
        differing = []
        for other in {name, _UNCHECKED} & entries.keys() & lines.keys():
            entry, (crc_at, flags) = entries[other], lines[other]
            # With the CRC that may follow it, and the one in the directory.
            behind = DESCRIPTOR.size if flags & CRC_FOLLOWS else 0
            differing.append((entry.offset, entry.offset + entry.length + behind))
            differing.append((crc_at, crc_at + 4))
        edges = sorted([(0, 0), *differing, (len(blob), len(blob))])
        same = tuple((before, after) for (_, before), (after, _) in pairwise(edges) if after > before)
        content = b"".join([blob[begin:end] for begin, end in same])
        self._forms[len(blob)] = _Form(same, content, dtype, sizes, entries[name], lines[name][0])


def _lines(blob: memoryview) -> dict[str, tuple[int, int]]:
    """Where the directory has each CRC, and the flags of the entry; nothing if the archive is of no simple kind."""
    start = len(blob) - END.size
    if start < 0 or blob[start : start + 4] != END_MAGIC:
        return {}
    _, _, _, _, count, _, at, _ = END.unpack_from(blob, start)
    found = {}
    for _ in range(count):
        if at + CENTRAL.size > len(blob) or blob[at : at + 4] != CENTRAL_MAGIC:
            return {}
        header = CENTRAL.unpack_from(blob, at)
        names, extras, comments = header[10:13]
        name = bytes(blob[at + CENTRAL.size : at + CENTRAL.size + names])
        found[name.partition(b"/")[2].decode("latin-1")] = at + _CRC_IN_LINE, header[3]
        at += CENTRAL.size + names + extras + comments
    return found
