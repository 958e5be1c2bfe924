"""What the names in a stored index stand for: each record is checked field by field when it is complete.

The classes of stock torch are known here by name only. Their records become the classes of ``metadata.py``; a field of
the wrong type, a negative size or a path that leaves the checkpoint is an error on the spot, so that nothing after this
layer has to distrust an index.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any, TypeVar

import torch

from holdfast._compat.tensors import DTYPES
from holdfast._formats.archives.known_names import AllowedName, Inert, Name, brief, draft_of
from holdfast._formats.archives.value_names import find_plain
from holdfast._formats.dcp.index_alike import repeat_tensor
from holdfast._formats.dcp.index_shortcut import SIZE, FlatRecord, count, make_size
from holdfast._formats.dcp.metadata import (
    _MEM_FORMAT_ENCODING,
    SEAL_STATE_KEY,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    Seal,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)
from holdfast.errors import UnsafePathError, UnsupportedVersionError

T = TypeVar("T")

# The second of each pair is where torch 1.12 and 1.13 had it.
METADATA_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed._shard.checkpoint.metadata")
STORAGE_MODULES = (
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.checkpoint.filesystem",
)
# Until torch 2.2 tensor properties were those of sharded tensors.
PROPERTIES_MODULE = "torch.distributed._shard.sharded_tensor.metadata"

_READABLE_VERSION = re.compile(r"1(\.\d+)*")
_DRIVE = re.compile(r"[A-Za-z]:")
_ENCODINGS = {int(encoding.value): encoding for encoding in _MEM_FORMAT_ENCODING}


class IndexRecords:
    """The table for one index. ``source`` is its path, for messages."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._checked_paths: set[str] = set()
        self._table = {**_SHARED, **dict(self._own())}

    def find(self, module: str, name: str) -> AllowedName | None:
        """The entry of a name. Custom planners may store whatever plain values they like."""
        return self._table.get((module, name)) or find_plain(module, name)

    def _own(self) -> Iterator[tuple[Name, AllowedName]]:
        for module in METADATA_MODULES:
            yield (module, "Metadata"), draft_of("Metadata", self.metadata)
        names = ("relative_path", "offset", "length", SEAL_STATE_KEY, "transform_descriptors")
        places = FlatRecord("_StorageInfo", names, self.storage_info).known()
        for module in STORAGE_MODULES:
            yield (module, "_StorageInfo"), places

    def metadata(self, state: Any) -> Metadata:
        """The whole index."""
        fields = _fields(state)
        described = _typed(fields["state_dict_metadata"], dict, "state_dict_metadata")
        for key, value in described.items():
            if type(key) is not str or type(value) not in (TensorStorageMetadata, BytesStorageMetadata):
                raise TypeError(f"{type(value).__name__} as the description of {brief(key)}")
        origin = fields.get("storage_meta")
        if origin is not None:
            _typed(origin, StorageMeta, "storage_meta")
        version = fields.get("version")
        self.check_version(version)
        return Metadata(
            state_dict_metadata=described,
            planner_data=fields.get("planner_data"),
            storage_data=fields.get("storage_data"),
            storage_meta=origin,
            version=version,
        )

    def storage_info(
        self, relative_path: Any, offset: Any, length: Any, holdfast_seal: Any = None, transform_descriptors: Any = None
    ) -> _StorageInfo:
        """Where one item is stored."""
        if relative_path not in self._checked_paths:
            self._checked_paths.add(self.checked_path(relative_path))
        if transform_descriptors is not None:
            transform_descriptors = [_typed(name, str, "transform") for name in _sequence(transform_descriptors)]
        seal = None if holdfast_seal is None else _seal(holdfast_seal)
        return _StorageInfo(relative_path, count(offset), count(length), transform_descriptors, seal)

    def checked_path(self, name: Any) -> str:
        """Refuse file names that are not below the checkpoint."""
        path = _typed(name, str, "relative_path")
        parts = re.split(r"[/\\]", path)
        if not parts[0] or ".." in parts or "\0" in path or _DRIVE.match(path) or set(parts) <= {"", "."}:
            raise UnsafePathError(
                f"{self._source}: the index names the file {name!r:.200}, which is not inside the checkpoint. "
                "A checkpoint that a save has written never does that, so do not trust this one.",
                name=name,
            )
        return path

    def check_version(self, version: Any) -> None:
        """Refuse indexes of a format that does not exist yet."""
        if version is None or _READABLE_VERSION.fullmatch(_typed(version, str, "version")):
            return
        raise UnsupportedVersionError(
            f"{self._source}: the index says that it has format version {version!r:.40}; this version of "
            "Holdfast reads 1.x. Load it with the library that wrote it, or with a newer Holdfast.",
            file=self._source,
            version=version,
        )


def size(value: Any) -> torch.Size:
    """A shape, or an offset in every dimension, as the index has it."""
    return value if type(value) is torch.Size else make_size(value)


def chunk(offsets: Any, sizes: Any) -> ChunkStorageMetadata:
    """One stored box of a tensor."""
    offsets, sizes = size(offsets), size(sizes)
    if len(offsets) != len(sizes):
        raise ValueError(f"a chunk of shape {tuple(sizes)} at {tuple(offsets)}")
    return ChunkStorageMetadata(offsets, sizes)


def item(fqn: Any, index: Any = None, offset: Any = None) -> MetadataIndex:
    """The name of one stored item."""
    return MetadataIndex(
        _typed(fqn, str, "fqn"),
        None if offset is None else size(offset),
        None if index is None else count(index),
    )


def tensor(state: Any) -> TensorStorageMetadata:
    """A tensor and the boxes it is stored in."""
    fields = _fields(state)
    whole = size(fields["size"])
    chunks = _typed(fields["chunks"], list, "chunks")
    for piece in chunks:
        if type(piece) is not ChunkStorageMetadata or len(piece.sizes) != len(whole):
            raise ValueError(f"{brief(piece)} that does not fit a tensor of shape {tuple(whole)}")
    return TensorStorageMetadata(_typed(fields["properties"], TensorProperties, "properties"), whole, chunks)


def _properties(state: Any) -> TensorProperties:
    # Until torch 2.14 there are five fields, then strides as the sixth. What later versions may add behind them says
    # how a tensor was in memory, and nothing about its bytes in the file, so it is passed over.
    dtype, layout, requires_grad, encoding, pin_memory, *newer = _typed(state, tuple, "properties")
    strides = newer[0] if newer else None
    properties = TensorProperties.__new__(TensorProperties)
    properties.__setstate__(
        (
            _typed(dtype, torch.dtype, "dtype"),
            _typed(layout, torch.layout, "layout"),
            _typed(requires_grad, bool, "requires_grad"),
            _typed(encoding, _MEM_FORMAT_ENCODING, "memory format"),
            _typed(pin_memory, bool, "pin_memory"),
            None if strides is None else tuple(count(stride) for stride in _typed(strides, tuple, "strides")),
        )
    )
    return properties


def storage_meta(state: Any) -> StorageMeta:
    """Where and as what the checkpoint was saved."""
    fields = _fields(state)
    texts = {name: fields.get(name) for name in ("checkpoint_id", "save_id", "load_id")}
    if isinstance(texts["checkpoint_id"], PurePath):
        texts["checkpoint_id"] = str(texts["checkpoint_id"])
    for name, text in texts.items():
        if text is not None:
            _typed(text, str, name)
    modules = [_typed(name, str, "module") for name in _sequence(fields.get("modules") or [])]
    return StorageMeta(**texts, modules=modules)


def _seal(value: Any) -> Seal:
    if type(value) is not tuple or len(value) != len(Seal._fields):
        raise ValueError(f"{brief(value)} as a seal")
    return Seal(*map(count, value))


def _fields(state: Any) -> Mapping[str, Any]:
    return _typed(state, dict, "state")


def _sequence(value: Any) -> Any:
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{type(value).__name__} instead of a sequence")
    return value


def _typed(value: Any, cls: type[T], what: str) -> T:
    if type(value) is not cls:
        raise TypeError(f"{type(value).__name__} as {what} instead of {cls.__name__}")
    return value


def _shared() -> Iterator[tuple[Name, AllowedName]]:
    tensors = draft_of("TensorStorageMetadata", tensor)
    chunks = FlatRecord("ChunkStorageMetadata", ("offsets", "sizes"), chunk).known()
    items = FlatRecord("MetadataIndex", ("fqn", "index", "offset"), item).known()
    for module in METADATA_MODULES:
        yield (module, "TensorStorageMetadata"), replace(tensors, shortcut=repeat_tensor)
        yield (module, "ChunkStorageMetadata"), chunks
        yield (module, "MetadataIndex"), items
        yield (module, "StorageMeta"), draft_of("StorageMeta", storage_meta)
        yield (
            (module, "BytesStorageMetadata"),
            AllowedName(BytesStorageMetadata, new=BytesStorageMetadata, build=lambda value, _: value),
        )
    for module in (*METADATA_MODULES, PROPERTIES_MODULE):
        yield (module, "TensorProperties"), draft_of("TensorProperties", _properties)
        for name in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"):
            yield (module, name), AllowedName(Inert(name), call=lambda number: _ENCODINGS[count(number)])
    yield ("torch", "Size"), SIZE
    for name, dtype in DTYPES.items():
        yield ("torch", name), AllowedName(dtype)


_SHARED = dict(_shared())
