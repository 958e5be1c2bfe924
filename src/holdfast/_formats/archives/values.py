"""Values that are not tensors, in their stored form: what ``torch.save`` writes, read as data.

Reading runs nothing that a file names, unless the caller allows it (``allow_pickle``).
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable
from typing import Any

import torch

from holdfast._formats.archives import zip_layout as layout
from holdfast._formats.archives.known_names import AllowedName
from holdfast._formats.archives.safe_pickle import load
from holdfast._formats.archives.stored_tensors import StoredArchive, StoredTensors
from holdfast._formats.archives.tensor_records import TensorNames, storage_record
from holdfast._formats.archives.value_names import find_plain
from holdfast.errors import DamagedCheckpointError, RefusedPickleError

PROTOCOL = 2
"""What ``torch.save`` writes."""

_DESCRIPTION = "data.pkl"
_NAMES_SOMETHING = (b"c", b"\x93")
"""The opcodes without which a pickle is nothing but numbers, texts and containers."""


def encode_value(value: Any) -> bytes:
    """``value`` as an archive that ``torch.load`` reads."""
    stream = io.BytesIO()
    try:
        _TensorFreePickler(stream, PROTOCOL).dump(value)
    except _HoldsTensors:
        stream = io.BytesIO()
        torch.save(value, stream)
        return stream.getvalue()
    return _archive_of(stream.getvalue())


def decode_value(
    blob: bytes | bytearray | memoryview,
    *,
    source: str,
    key: str | None = None,
    allow_pickle: bool = False,
    verify: bool = True,
    find_also: Callable[[str, str], AllowedName | None] | None = None,
) -> Any:
    """The value in a blob. ``allow_pickle`` lets it run whatever code it names: for trusted authors only.

    ``find_also(module, name)`` may know classes beyond those that are plain data.
    """
    archive = StoredArchive(blob, source=source, key=key, verify=verify)
    if allow_pickle:
        archive.check()
        return torch.load(io.BytesIO(blob), weights_only=False)
    tensors = StoredTensors(archive)

    def find(module: str, name: str) -> AllowedName | None:
        known = find_plain(module, name) or tensors.find(module, name)
        return find_also(module, name) if known is None and find_also is not None else known

    return load(archive.pickle(), find, source=source, key=key, persistent_load=tensors.reference)


def needs_pickle(blob: bytes) -> str | None:
    """The name of the first thing in a blob that cannot be loaded without ``allow_pickle``; None if all can.

    Bytes that are not an archive are a custom planner's own business, and its own to read.
    """
    try:
        description = _description_of(blob)
    except DamagedCheckpointError:
        return None
    if not any(opcode in description for opcode in _NAMES_SOMETHING):
        return None
    names = TensorNames(lambda record, _: [record])

    def reference(persistent_id: Any) -> Any:
        record = storage_record(persistent_id)
        names.add_storage(record, record)
        return record

    def find(module: str, name: str) -> AllowedName | None:
        return find_plain(module, name) or names.find(module, name)

    try:
        load(description, find, source="the new value", persistent_load=reference)
    except RefusedPickleError as error:
        return error.global_name
    except DamagedCheckpointError as error:
        return str(error.found)
    return None


class _HoldsTensors(Exception):
    pass


class _TensorFreePickler(pickle.Pickler):
    """Gives up at the first tensor or storage, whose bytes have no place in a pickle."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage)):
            raise _HoldsTensors
        return NotImplemented


def _archive_of(description: bytes) -> bytes:
    position = len(layout.FIXED_ENTRIES)
    entry = layout.local_entry(_DESCRIPTION, description)
    line = layout.central_entry(_DESCRIPTION, zlib.crc32(description), len(description), position)
    lines = layout.FIXED_LINES + line
    end = layout.end_of_archive(len(layout.FIXED) + 1, len(lines), position + len(entry))
    return b"".join((layout.FIXED_ENTRIES, entry, lines, end))


def _description_of(blob: bytes) -> bytes:
    position = len(layout.FIXED_ENTRIES)
    if blob.startswith(layout.FIXED_ENTRIES):  # ours: the description is next
        *_, length, names, extras = layout.LOCAL.unpack_from(blob, position)
        start = position + layout.LOCAL.size + names + extras
        return blob[start : start + length]
    return StoredArchive(blob, source="the new value", key=None, verify=False).pickle()
