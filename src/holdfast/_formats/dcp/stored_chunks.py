"""Where in a file the elements of a chunk are, so that they can be read without the archive around them."""

from __future__ import annotations

import sys
from math import prod
from typing import NamedTuple

import torch

from holdfast._base.crc import crc32
from holdfast._formats.dcp.archive import TensorRecord, ZipEntry, check_crc, describe_tensor, read_directory
from holdfast._formats.dcp.metadata import ChunkStorageMetadata, Seal, _StorageInfo
from holdfast._formats.ranged_files import Ranges
from holdfast._formats.tensor_places import arrangement_of
from holdfast.errors import DamagedCheckpointError


class ChunkElements(NamedTuple):
    """The elements of a chunk, side by side."""

    position: int
    """Of the first of them, in the file."""
    dtype: torch.dtype
    crc: int | None
    """Of all of them; None if the writer recorded none."""
    order: tuple[int, ...] | None = None
    """The dimensions of the chunk as they are in the file, slowest first, if that is not their own order."""


def sealed_elements(info: _StorageInfo, dtype: torch.dtype, chunk: ChunkStorageMetadata) -> ChunkElements | None:
    """Where the index says that the elements are; None if it does not, or if they are not what it describes."""
    seal = info.seal
    if seal is None or not seal.payload_length < info.length or not _fits(seal.payload_length, dtype, chunk):
        return None
    return ChunkElements(info.offset + seal.payload_offset, dtype, seal.payload_crc)


def archived_elements(
    file: Ranges, info: _StorageInfo, chunk: ChunkStorageMetadata, *, source: str, key: str, verify: bool
) -> ChunkElements | None:
    """Where the archive says that the elements are; None if they are not a plain contiguous array of this machine."""
    found = archived_tensor(file, info, source=source, key=key, verify=verify)
    if found is None or not _is_all_of(*found, chunk):
        return None
    record, payload = found
    if record.is_row_major:
        return ChunkElements(info.offset + payload.offset, record.dtype, payload.crc)
    arrangement = arrangement_of(record.sizes, record.strides)
    if arrangement is None or prod(arrangement.sizes) != prod(record.sizes) or record.conj or record.neg:
        return None
    return ChunkElements(info.offset + payload.offset, record.dtype, payload.crc, arrangement.order)


def archived_tensor(
    file: Ranges, info: _StorageInfo, *, source: str, key: str, verify: bool
) -> tuple[TensorRecord, ZipEntry] | None:
    """The tensor in an archive as a view of one of its entries; None if this machine cannot use that as it is."""

    def read_at(offset: int, length: int) -> bytes:
        content = bytearray(length)
        file.read_into(info.offset + offset, content)
        return bytes(content)

    def content(name: str) -> bytes:
        entry = entries[name]
        found = read_at(entry.offset, entry.length)
        if verify:
            check_crc(found, entry, name, source=source, key=key)
        return found

    entries = read_directory(read_at, info.length, source=source, key=key)
    if "data.pkl" not in entries:
        return None
    record = describe_tensor(content("data.pkl"), source=source, key=key)
    payload = entries.get(f"data/{record.storage.key}")
    if payload is None or record.quantizer is not None or payload.length != record.storage.nbytes:
        return None
    if "byteorder" in entries and content("byteorder") != sys.byteorder.encode():
        return None
    return record, payload


def check_envelope(file: Ranges, info: _StorageInfo, seal: Seal, source: str, key: str) -> None:
    """Compare what stands around the elements with the index, before anything is done with them."""
    end = seal.payload_offset + seal.payload_length
    before, after = bytearray(seal.payload_offset), bytearray(info.length - end)
    file.read_into(info.offset, before)
    file.read_into(info.offset + end, after)
    found = crc32(after, crc32(before))
    if found != seal.envelope_crc:
        raise DamagedCheckpointError(
            f"{source} is damaged: what is around '{key}' (bytes {info.offset} to {info.offset + info.length}) has "
            f"CRC {found:08x} where the index says {seal.envelope_crc:08x}. Copy the file again, or load another "
            "checkpoint.",
            file=source,
            key=key,
            expected=seal.envelope_crc,
            found=found,
        )


def _is_all_of(record: TensorRecord, payload: ZipEntry, chunk: ChunkStorageMetadata) -> bool:
    return (
        record.storage_offset == 0 and record.sizes == tuple(chunk.sizes) and _fits(payload.length, record.dtype, chunk)
    )


def _fits(nbytes: int, dtype: torch.dtype, chunk: ChunkStorageMetadata) -> bool:
    return nbytes == chunk.sizes.numel() * dtype.itemsize
