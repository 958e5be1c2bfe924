"""Writing an index as a pickle of stock torch's classes, without stock torch.

The stream starts by naming every class and function that it needs, into the memo, and refers to them by number
from then on. What an index has by the thousand (tensors, chunks, item names and places) is written opcode by
opcode. Everything else (what custom planners and storages put there) goes through a C pickler whose memo knows
our classes under the numbers of stock's, so that it writes the others' names instead of ours.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from operator import index as as_int
from typing import Any

import torch

from holdfast.formats.dcp.storage_info import SEAL_STATE_KEY, _StorageInfo
from holdfast.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

PROTOCOL = 4
"""The newest that every Python since 3.8 reads, and what stock torch writes on them."""

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_MODULE = "torch.distributed.checkpoint.filesystem"

_STOCK_CLASSES = {
    Metadata: _METADATA_MODULE,
    TensorStorageMetadata: _METADATA_MODULE,
    TensorProperties: _METADATA_MODULE,
    _MEM_FORMAT_ENCODING: _METADATA_MODULE,
    ChunkStorageMetadata: _METADATA_MODULE,
    BytesStorageMetadata: _METADATA_MODULE,
    MetadataIndex: _METADATA_MODULE,
    StorageMeta: _METADATA_MODULE,
    _StorageInfo: _STORAGE_MODULE,
}

_GLOBALS: dict[Any, tuple[str, str]] = {
    **{cls: (module, cls.__name__) for cls, module in _STOCK_CLASSES.items()},
    torch.Size: ("torch", "Size"),
    torch.serialization._get_layout: ("torch.serialization", "_get_layout"),
}

_FIELD_NAMES = (
    *(field.name for cls in (ChunkStorageMetadata, TensorStorageMetadata, MetadataIndex) for field in fields(cls)),
    *("relative_path", "offset", "length", SEAL_STATE_KEY),
)

_PROTO = b"\x80" + bytes([PROTOCOL])
_EMPTY_DICT, _MARK, _SETITEMS, _BUILD = b"}", b"(", b"u", b"b"
_NEW = b")\x81"
_TUPLE, _TUPLE1, _REDUCE = b"t", b"\x85", b"R"
_MEMOIZE, _POP, _STOP = b"\x94", b"0", b"."
_EMPTY_LIST, _APPENDS = b"]", b"e"
_NONE, _TRUE, _FALSE = b"N", b"\x88", b"\x89"
_SHORT_TUPLES = (b")", b"\x85", b"\x86", b"\x87")
_INT8 = [b"K" + bytes([number]) for number in range(256)]


class IndexWriter:
    """One index on its way into bytes.

    The methods that return bytes give the opcodes that push something. They put it into the memo at its first
    use, in the middle of whatever is being written, which leaves the stack as it was.
    """

    def __init__(self) -> None:
        self._parts = [_PROTO]
        self._in_memo = 0
        self._texts: dict[str, bytes] = {}
        self._sizes: dict[tuple[int, ...], bytes] = {}
        self._states: dict[tuple[Any, ...], bytes] = {}
        self._others: dict[int, bytes] = {}
        # First the names of fields, which come in every record: references to the first 256 slots are short.
        self._names = {value: self._remember(_raw_global(*name)) for value, name in _GLOBALS.items()}
        for name in _FIELD_NAMES:
            self._text(name)

    def write(self, metadata: Metadata) -> bytes:
        """The whole pickle."""
        known = {field.name for field in fields(Metadata)}
        last = {
            "storage_meta": _portable(metadata.storage_meta),
            "version": metadata.version,
            **{name: value for name, value in vars(metadata).items() if name not in known},
        }
        self._prepare([*_unusual_parts(metadata), *last.values()])
        self._parts += (self._names[Metadata], _NEW, _EMPTY_DICT, _MARK)
        self._mapping("state_dict_metadata", metadata.state_dict_metadata, self._described)
        self._mapping("planner_data", metadata.planner_data, self._path)
        self._mapping("storage_data", metadata.storage_data, self._place)
        for name, value in last.items():
            self._parts += (self._text(name), self._others[id(value)])
        self._parts += (_SETITEMS, _BUILD, _STOP)
        return b"".join(self._parts)

    # Entries of the three mappings

    def _mapping(self, name: str, mapping: Any, entry: Callable[[Any, Any], tuple[bytes, ...]]) -> None:
        other = self._others.get(id(mapping))
        if other is not None:
            self._parts += (self._text(name), other)
            return
        parts = self._parts
        parts += (self._text(name), _EMPTY_DICT, _MARK)
        for key, value in mapping.items():
            parts += entry(key, value)
        parts += (_SETITEMS,)

    def _described(self, fqn: str, described: Any) -> tuple[bytes, ...]:
        if type(described) is BytesStorageMetadata:
            return self._text(fqn), self._names[BytesStorageMetadata], _NEW
        if type(described) is not TensorStorageMetadata:
            return self._text(fqn), self._others[id(described)]
        chunk_class = self._names[ChunkStorageMetadata] + _NEW + _EMPTY_DICT + _MARK + self._text("offsets")
        middle, end = self._text("sizes"), _SETITEMS + _BUILD
        chunks: list[bytes] = []
        for chunk in described.chunks:
            chunks += (chunk_class, self._size(chunk.offsets), middle, self._size(chunk.sizes), end)
        return (
            self._text(fqn),
            self._names[TensorStorageMetadata] + _NEW + _EMPTY_DICT + _MARK,
            self._text("properties"),
            self._names[TensorProperties] + _NEW,
            self._state(described.properties),
            _BUILD,
            self._text("size"),
            self._size(described.size),
            self._text("chunks"),
            _EMPTY_LIST + _MARK,
            *chunks,
            _APPENDS + _SETITEMS + _BUILD,
        )

    def _path(self, fqn: str, path: tuple[str | int, ...]) -> tuple[bytes, ...]:
        steps = [self._text(step) if type(step) is str else _integer(step) for step in path]
        return self._text(fqn), _tuple_of(steps)

    def _place(self, item: MetadataIndex, place: _StorageInfo) -> tuple[bytes, ...]:
        return (*self._item(item), *self._info(place))

    def _item(self, item: MetadataIndex) -> tuple[bytes, ...]:
        if type(item) is not MetadataIndex:
            return (self._others[id(item)],)
        offset = () if item.offset is None else (self._text("offset"), self._size(item.offset))
        return (
            self._names[MetadataIndex] + _NEW + _EMPTY_DICT + _MARK + self._text("fqn"),
            self._text(item.fqn),
            self._text("index"),
            _NONE if item.index is None else _integer(item.index),
            *offset,
            _SETITEMS + _BUILD,
        )

    def _info(self, place: _StorageInfo) -> tuple[bytes, ...]:
        if type(place) is not _StorageInfo:
            return (self._others[id(place)],)
        optional: tuple[bytes, ...] = ()
        if place.transform_descriptors is not None:
            names = b"".join(map(self._text, place.transform_descriptors))
            optional = (self._text("transform_descriptors"), _EMPTY_LIST + _MARK + names + _APPENDS)
        if place.seal is not None:
            optional += (self._text(SEAL_STATE_KEY), _tuple_of([_integer(number) for number in place.seal]))
        return (
            self._names[_StorageInfo] + _NEW + _EMPTY_DICT + _MARK + self._text("relative_path"),
            self._text(place.relative_path),
            self._text("offset"),
            _integer(place.offset),
            self._text("length"),
            _integer(place.length),
            *optional,
            _SETITEMS + _BUILD,
        )

    # The memo

    def _remember(self, opcodes: bytes) -> bytes:
        self._parts += (opcodes, _MEMOIZE, _POP)
        push = _recall(self._in_memo)
        self._in_memo += 1
        return push

    def _text(self, text: str) -> bytes:
        push = self._texts.get(text)
        if push is None:
            push = self._texts[text] = self._remember(_raw_text(text))
        return push

    def _size(self, size: Sequence[int]) -> bytes:
        key = size if isinstance(size, torch.Size) else tuple(size)
        push = self._sizes.get(key)
        if push is None:
            numbers = _tuple_of([_integer(number) for number in size])
            push = self._sizes[key] = self._remember(self._names[torch.Size] + numbers + _TUPLE1 + _REDUCE)
        return push

    def _state(self, properties: TensorProperties) -> bytes:
        state = properties.__getstate__()
        push = self._states.get(state)
        if push is None:
            dtype, layout, requires_grad, encoding, pin_memory = state
            parts = (
                _raw_global("torch", str(dtype).removeprefix("torch.")),
                self._names[torch.serialization._get_layout] + self._text(str(layout)) + _TUPLE1 + _REDUCE,
                _TRUE if requires_grad else _FALSE,
                self._names[_MEM_FORMAT_ENCODING] + _integer(encoding.value) + _TUPLE1 + _REDUCE,
                _TRUE if pin_memory else _FALSE,
            )
            push = self._states[state] = self._remember(_tuple_of(parts))
        return push

    def _prepare(self, objects: Iterable[Any]) -> None:
        """Pickle what has no form of its own here, each object into a slot of the memo."""
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, PROTOCOL)
        memo = {id(value): (slot, value) for slot, value in enumerate([*self._names, *self._texts])}
        for value in objects:
            if id(value) in self._others:
                continue
            pickler.memo = memo
            buffer.seek(0)
            buffer.truncate()
            pickler.dump(value)
            memo = pickler.memo.copy()
            self._in_memo = len(memo)
            # MEMOIZE takes the place of STOP, so the length of the frame around it stays right.
            opcodes = buffer.getvalue().removeprefix(_PROTO).removesuffix(_STOP)
            self._others[id(value)] = self._remember(opcodes)
            # The pickler numbers by the size of its memo, which must stay that of the stream's.
            placeholder = object()
            memo[id(placeholder)] = (len(memo), placeholder)


def _portable(meta: StorageMeta | None) -> StorageMeta | None:
    """Text instead of a path object, whose pickle only loads on the same system and Python."""
    if meta is None or meta.checkpoint_id is None:
        return meta
    return replace(meta, checkpoint_id=os.fsdecode(meta.checkpoint_id))


def _unusual_parts(metadata: Metadata) -> Iterator[Any]:
    """What of the three mappings is not made of the classes that every index has."""
    yield from (
        described
        for described in metadata.state_dict_metadata.values()
        if type(described) not in (TensorStorageMetadata, BytesStorageMetadata)
    )
    if not _is_paths(metadata.planner_data):
        yield metadata.planner_data
    places = metadata.storage_data
    if type(places) is not dict:
        yield places
        return
    yield from (item for item in places if type(item) is not MetadataIndex)
    yield from (place for place in places.values() if type(place) is not _StorageInfo)


def _is_paths(planner_data: Any) -> bool:
    return type(planner_data) is dict and all(
        type(fqn) is str and type(path) is tuple and all(type(step) in (str, int) for step in path)
        for fqn, path in planner_data.items()
    )


# Opcodes


def _recall(slot: int) -> bytes:
    return b"h" + bytes([slot]) if slot < 256 else b"j" + slot.to_bytes(4, "little")


def _raw_global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _raw_text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    if len(encoded) < 256:
        return b"\x8c" + bytes([len(encoded)]) + encoded
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def _integer(value: Any) -> bytes:
    number = as_int(value)
    if 0 <= number < 256:
        return _INT8[number]
    if 0 <= number < 1 << 16:
        return b"M" + number.to_bytes(2, "little")
    if -(1 << 31) <= number < 1 << 31:
        return b"J" + number.to_bytes(4, "little", signed=True)
    size = number.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + number.to_bytes(size, "little", signed=True)


def _tuple_of(pushes: Sequence[bytes]) -> bytes:
    if len(pushes) < len(_SHORT_TUPLES):
        return b"".join(pushes) + _SHORT_TUPLES[len(pushes)]
    return _MARK + b"".join(pushes) + _TUPLE
