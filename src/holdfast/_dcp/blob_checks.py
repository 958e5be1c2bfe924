"""What a blob must be by the index, and the errors if it is not."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast._base.crc import crc32
from holdfast._dcp.blob_steps import StoredItems
from holdfast._formats.archives.zip_layout import damaged
from holdfast._formats.dcp.metadata import MetadataIndex, _StorageInfo
from holdfast._formats.dcp.plan import ReadItem
from holdfast._formats.ranged_files import Ranges
from holdfast.errors import DamagedCheckpointError, HoldfastError


def refuse_short_file(file: Ranges, blob: StoredItems, source: str) -> None:
    """Raise if a file ends before a blob does."""
    info, index = blob.info, blob.items[0].storage_index
    found = max(0, min(info.length, file.size - info.offset))
    if found == info.length:
        return
    raise DamagedCheckpointError(
        f"{source} ends {info.length - found} byte(s) too early: {name_of(index)} should be the "
        f"{info.length} bytes at {info.offset}. The file was cut off; copy it again, or load another one.",
        file=source,
        key=index.fqn,
        expected=info.length,
        found=found,
    )


def refuse_regions_outside(items: Sequence[ReadItem], sizes: Sequence[int]) -> None:
    """Raise if a planner asks for what is not in a chunk: bytes of something else would be taken for it."""
    for item in items:
        starts, lengths = item.storage_offsets, item.lengths
        fits = len(starts) == len(lengths) == len(sizes) and all(
            start >= 0 and start + length <= size for start, length, size in zip(starts, lengths, sizes, strict=True)
        )
        if not fits:
            raise HoldfastError(
                f"{name_of(item.storage_index)}: a region at {list(starts)} of sizes {list(lengths)} was asked for, "
                f"and the stored chunk is of size {list(sizes)}. The planner must ask for regions inside of it."
            )


def check_seal(blob: bytes | bytearray | memoryview, info: _StorageInfo, source: str, index: MetadataIndex) -> None:
    """Raise if a blob is not what the index says."""
    seal = info.seal
    assert seal is not None
    end = seal.payload_offset + seal.payload_length
    view = memoryview(blob)
    found = (
        crc32(view[seal.payload_offset : end]),
        crc32(view[end:], crc32(view[: seal.payload_offset])),
    )
    expected = (seal.payload_crc, seal.envelope_crc)
    if found != expected:
        raise DamagedCheckpointError(
            f"{source} is damaged: {name_of(index)} (bytes {info.offset} to {info.offset + info.length}) has CRC "
            f"{found[0]:08x}/{found[1]:08x} where the index says {expected[0]:08x}/{expected[1]:08x}. Copy the file "
            "again, or load another checkpoint.",
            file=source,
            key=index.fqn,
            expected=expected,
            found=found,
        )


def wrong_crc(
    info: _StorageInfo, source: str, index: MetadataIndex, expected: int, found: int
) -> DamagedCheckpointError:
    """The error for elements that are not those that were saved."""
    if info.seal is None:
        return damaged(source, index.fqn, "wrong CRC-32 of its elements", f"{expected:08x}", f"{found:08x}")
    return DamagedCheckpointError(
        f"{source} is damaged: {name_of(index)} (bytes {info.offset} to {info.offset + info.length}) has CRC "
        f"{found:08x} where the index says {expected:08x}. Copy the file again, or load another checkpoint.",
        file=source,
        key=index.fqn,
        expected=expected,
        found=found,
    )


def name_of(index: MetadataIndex) -> str:
    """How errors call a stored item."""
    return f"'{index.fqn}'" + (f" at offsets {list(index.offset)}" if index.offset else "")
