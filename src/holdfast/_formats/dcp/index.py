"""The index of a DCP checkpoint, ``.metadata``, as bytes and back.

It is a pickle of stock torch's classes, which stock torch loads. After its end stands a trailer with a CRC-32 of
the pickle, which readers that stop at the end of the pickle, as stock torch does, never see.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from typing import Any

from holdfast._formats.archives.safe_pickle import damaged_pickle, load
from holdfast._formats.dcp import index_records
from holdfast._formats.dcp import metadata as nouns
from holdfast._formats.dcp.index_records import METADATA_MODULES, PROPERTIES_MODULE, STORAGE_MODULES
from holdfast._formats.dcp.index_writer import IndexWriter
from holdfast._formats.dcp.metadata import Metadata, MetadataIndex, _StorageInfo
from holdfast.errors import DamagedCheckpointError, HoldfastError, RefusedPickleError

_TRAILER = struct.Struct("<8sI")
_TRAILER_MAGIC = b"hf-crc32"


def encode_index(metadata: Metadata) -> bytes:
    """The bytes of ``.metadata``."""
    body = IndexWriter().write(metadata)
    return body + _TRAILER.pack(_TRAILER_MAGIC, zlib.crc32(body))


def decode_index(data: bytes, *, source: str, allow_pickle: bool = False) -> Metadata:
    """The index behind the bytes of ``.metadata``, every field checked. ``source`` is its path, for messages.

    ``allow_pickle`` lets the pickle import and call what it likes, where it does not consist of known classes.
    """
    body = _checked_body(data, source)
    records = index_records.IndexRecords(source)
    try:
        metadata = load(body, records.find, source=source)
    except RefusedPickleError:
        if not allow_pickle:
            raise
        metadata = _load_trusting(body, records, source)
    if type(metadata) is not Metadata:
        problem = TypeError(f"{type(metadata).__name__} instead of an index")
        raise damaged_pickle(problem, source=source, key=None, position=len(body))
    return metadata


def _checked_body(data: bytes, source: str) -> bytes:
    end = len(data) - _TRAILER.size
    if end < 0:
        return data
    magic, expected = _TRAILER.unpack_from(data, end)
    if magic != _TRAILER_MAGIC:
        return data
    body = data[:end]
    found = zlib.crc32(body)
    if found != expected:
        raise DamagedCheckpointError(
            f"{source}: the index is damaged: its CRC-32 is {found:08x}, but {expected:08x} was saved. Load "
            "another checkpoint, or copy this file again from where it came from.",
            file=source,
            key=None,
            expected=expected,
            found=found,
        )
    return body


def _load_trusting(body: bytes, records: index_records.IndexRecords, source: str) -> Any:
    stream = io.BytesIO(body)
    try:
        loaded = _TrustingUnpickler(stream, records).load()
        return _checked_again(loaded, records) if type(loaded) is Metadata else loaded
    except (HoldfastError, ImportError, AttributeError):
        raise  # of a class that is not installed here: the error says which
    except Exception as error:
        raise damaged_pickle(error, source=source, key=None, position=stream.tell()) from error


class _TrustingUnpickler(pickle.Unpickler):
    """Ordinary unpickling, except that stock torch's index classes become ours."""

    def __init__(self, stream: io.BytesIO, records: index_records.IndexRecords) -> None:
        super().__init__(stream)
        self._records = records

    def find_class(self, module: str, name: str) -> Any:
        if module in (*METADATA_MODULES, *STORAGE_MODULES, PROPERTIES_MODULE) and name in _OUR_CLASSES:
            return _OUR_CLASSES[name]
        # Paths of another system or Python cannot be imported under their own names.
        known = self._records.find(module, name) if module.startswith("pathlib") else None
        return super().find_class(module, name) if known is None else known.value


_OUR_CLASSES: dict[str, Any] = {
    "MEM_FORMAT_ENCODING": nouns._MEM_FORMAT_ENCODING,
    "_MEM_FORMAT_ENCODING": nouns._MEM_FORMAT_ENCODING,
    "_StorageInfo": _StorageInfo,
    **{
        cls.__name__: cls
        for cls in (
            nouns.BytesStorageMetadata,
            nouns.ChunkStorageMetadata,
            nouns.Metadata,
            nouns.MetadataIndex,
            nouns.StorageMeta,
            nouns.TensorProperties,
            nouns.TensorStorageMetadata,
        )
    },
}


def _checked_again(loaded: Metadata, records: index_records.IndexRecords) -> Metadata:
    """The checks of the safe way for an index that came in the trusting way."""
    state = dict(vars(loaded))
    for described in state["state_dict_metadata"].values():
        if isinstance(described, nouns.TensorStorageMetadata):
            index_records.tensor({**vars(described), "size": tuple(described.size)})
            for chunk in described.chunks:
                index_records.chunk(tuple(chunk.offsets), tuple(chunk.sizes))
    if isinstance(state.get("storage_data"), dict):
        for item, place in state["storage_data"].items():
            if isinstance(item, MetadataIndex):
                index_records.item(item.fqn, item.index, None if item.offset is None else tuple(item.offset))
            if isinstance(place, _StorageInfo):
                records.storage_info(**place.__getstate__())
    if state.get("storage_meta") is not None:
        state["storage_meta"] = index_records.storage_meta(vars(state["storage_meta"]))
    return records.metadata(state)
