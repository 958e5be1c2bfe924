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
from itertools import repeat
from typing import Any

import torch

from holdfast._compat.tensors import layout_named
from holdfast._formats.archives import opcodes as op
from holdfast._formats.dcp.columns import ChunkColumns, ChunksLater, PlaceColumns
from holdfast._formats.dcp.metadata import (
    _MEM_FORMAT_ENCODING,
    SEAL_STATE_KEY,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
    still_to_be_made,
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
    layout_named: ("torch.serialization", "_get_layout"),
}

_FIELD_NAMES = (
    *(field.name for cls in (ChunkStorageMetadata, TensorStorageMetadata, MetadataIndex) for field in fields(cls)),
    *("relative_path", "offset", "length", SEAL_STATE_KEY),
)

_PARTS_AT_ONCE = 10_000
"""Opcodes that are put together in one go, which takes a fraction of a millisecond. No other thread runs meanwhile."""

_RECORD = op.NEW_WITHOUT_ARGUMENTS + op.EMPTY_DICT + op.MARK
_END_OF_RECORD = op.SETITEMS + op.BUILD


class IndexWriter:
    """One index on its way into bytes.

    The methods that return bytes give the opcodes that push something. They put it into the memo at its first
    use, in the middle of whatever is being written, which leaves the stack as it was.
    """

    def __init__(self) -> None:
        self._stream = io.BytesIO()
        self._parts = [op.PROTO_4]
        self._in_memo = 0
        self._texts: dict[str, bytes] = {}
        self._sizes: dict[tuple[int, ...], bytes] = {}
        self._states: dict[tuple[Any, ...], bytes] = {}
        self._others: dict[int, bytes] = {}
        self._alike: dict[tuple[Any, ...], tuple[ChunkColumns, bytes]] = {}
        # First the names of fields, which come in every record: references to the first 256 slots are short.
        self._names = {value: self._remember(op.name(*name)) for value, name in _GLOBALS.items()}
        for name in _FIELD_NAMES:
            self._text(name)

    def write(self, metadata: Metadata) -> bytes:
        """The whole pickle."""
        known = {field.name for field in fields(Metadata)}
        last = {
            "storage_meta": _portable(metadata.storage_meta),
            "version": metadata.version,
            **{name: value for name, value in vars(metadata).items() if name not in known and name != "_later"},
        }
        later = still_to_be_made(metadata)
        self._prepare([*_unusual_parts(metadata), *last.values()])
        self._parts += (self._names[Metadata], _RECORD)
        self._mapping("state_dict_metadata", metadata.state_dict_metadata, self._described)
        self._mapping("planner_data", metadata.planner_data, self._path)
        if isinstance(later, PlaceColumns):
            self._places(later)
        else:
            self._mapping("storage_data", metadata.storage_data, self._place)
        for name, value in last.items():
            self._parts += (self._text(name), self._others[id(value)])
        self._parts += (_END_OF_RECORD, op.STOP)
        self._put_together()
        return self._stream.getvalue()

    def _put_together(self) -> None:
        self._stream.write(b"".join(self._parts))
        self._parts.clear()

    # Entries of the three mappings

    def _mapping(self, name: str, mapping: Any, entry: Callable[[Any, Any], tuple[bytes, ...]]) -> None:
        other = self._others.get(id(mapping))
        if other is not None:
            self._parts += (self._text(name), other)
            return
        parts = self._parts
        parts += (self._text(name), op.EMPTY_DICT, op.MARK)
        for key, value in mapping.items():
            parts += entry(key, value)
            if len(parts) > _PARTS_AT_ONCE:
                self._put_together()
        parts += (op.SETITEMS,)

    def _described(self, fqn: str, described: Any) -> tuple[bytes, ...]:
        if type(described) is BytesStorageMetadata:
            return self._text(fqn), self._names[BytesStorageMetadata], op.NEW_WITHOUT_ARGUMENTS
        if type(described) is not TensorStorageMetadata:
            return self._text(fqn), self._others[id(described)]
        later = still_to_be_made(described)
        if not isinstance(later, ChunksLater):
            chunks = self._chunks((chunk.offsets, chunk.sizes) for chunk in described.chunks)
            return (self._text(fqn), *self._tensor(described, chunks))
        # Tensors that are divided alike have the same columns, and if they are alike otherwise the same opcodes.
        columns = later.columns()
        which = id(columns), described.size, described.properties.__getstate__()
        known = self._alike.get(which)
        if known is None:
            boxes = zip(map(tuple, columns.offsets.tolist()), map(tuple, columns.sizes.tolist()), strict=True)
            opcodes = b"".join(self._tensor(described, self._chunks(boxes)))
            known = self._alike[which] = columns, opcodes
        return self._text(fqn), known[1]

    def _tensor(self, described: TensorStorageMetadata, chunks: list[bytes]) -> tuple[bytes, ...]:
        return (
            self._names[TensorStorageMetadata] + _RECORD,
            self._text("properties"),
            self._names[TensorProperties] + op.NEW_WITHOUT_ARGUMENTS,
            self._state(described.properties),
            op.BUILD,
            self._text("size"),
            self._size(described.size),
            self._text("chunks"),
            op.EMPTY_LIST + op.MARK,
            *chunks,
            op.APPENDS + _END_OF_RECORD,
        )

    def _chunks(self, boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[bytes]:
        chunk_class = self._names[ChunkStorageMetadata] + _RECORD + self._text("offsets")
        middle, end = self._text("sizes"), _END_OF_RECORD
        chunks: list[bytes] = []
        for offsets, sizes in boxes:
            chunks += (chunk_class, self._size(offsets), middle, self._size(sizes), end)
        return chunks

    def _places(self, columns: PlaceColumns) -> None:
        """What ``_place`` makes of each item, with all that items have in common made once."""
        parts = self._parts
        parts += (self._text("storage_data"), op.EMPTY_DICT, op.MARK)
        item_begin = self._names[MetadataIndex] + _RECORD + self._text("fqn")
        index, at = self._text("index"), self._text("offset")
        info_begin = _END_OF_RECORD + self._names[_StorageInfo] + _RECORD + self._text("relative_path")
        length_name, seal_name = self._text("length"), self._text(SEAL_STATE_KEY)
        sealed_end, end = op.TUPLE + _END_OF_RECORD, _END_OF_RECORD
        integer = op.integer
        fqns = [item_begin + self._text(fqn) + index for fqn in columns.fqns]
        files = [info_begin + self._text(name) + at for name in columns.files]
        offsets = self._offsets_of_chunks(columns)
        seals: Any = repeat(None)
        if columns.seals is not None:
            seals = zip(*(column.tolist() for column in columns.seals), strict=True)
        for (key, hint, file, offset, length), seal in zip(
            zip(*(column.tolist() for column in columns.places), strict=True), seals, strict=False
        ):
            named = offsets[key]
            parts += (
                fqns[key],
                op.NONE if named is None else integer(hint) + at + named[hint],
                files[file],
                integer(offset),
                length_name,
                integer(length),
            )
            if seal is None:
                parts.append(end)
            else:
                parts += (seal_name, op.MARK, *map(integer, seal), sealed_end)
            if len(parts) > _PARTS_AT_ONCE:
                self._put_together()
        parts += (op.SETITEMS,)

    def _offsets_of_chunks(self, columns: PlaceColumns) -> list[list[bytes] | None]:
        known: dict[int, list[bytes]] = {}
        for chunks in columns.chunks:
            if chunks is not None and id(chunks) not in known:
                known[id(chunks)] = [self._size(tuple(offsets)) for offsets in chunks.offsets.tolist()]
        return [None if chunks is None else known[id(chunks)] for chunks in columns.chunks]

    def _path(self, fqn: str, path: tuple[str | int, ...]) -> tuple[bytes, ...]:
        steps = [self._text(step) if type(step) is str else op.integer(step) for step in path]
        return self._text(fqn), op.tuple_of(steps)

    def _place(self, item: MetadataIndex, place: _StorageInfo) -> tuple[bytes, ...]:
        return (*self._item(item), *self._info(place))

    def _item(self, item: MetadataIndex) -> tuple[bytes, ...]:
        if type(item) is not MetadataIndex:
            return (self._others[id(item)],)
        offset = () if item.offset is None else (self._text("offset"), self._size(item.offset))
        return (
            self._names[MetadataIndex] + _RECORD + self._text("fqn"),
            self._text(item.fqn),
            self._text("index"),
            op.NONE if item.index is None else op.integer(item.index),
            *offset,
            _END_OF_RECORD,
        )

    def _info(self, place: _StorageInfo) -> tuple[bytes, ...]:
        if type(place) is not _StorageInfo:
            return (self._others[id(place)],)
        optional: tuple[bytes, ...] = ()
        if place.transform_descriptors is not None:
            names = b"".join(map(self._text, place.transform_descriptors))
            optional = (self._text("transform_descriptors"), op.EMPTY_LIST + op.MARK + names + op.APPENDS)
        if place.seal is not None:
            optional += (self._text(SEAL_STATE_KEY), op.tuple_of([op.integer(number) for number in place.seal]))
        return (
            self._names[_StorageInfo] + _RECORD + self._text("relative_path"),
            self._text(place.relative_path),
            self._text("offset"),
            op.integer(place.offset),
            self._text("length"),
            op.integer(place.length),
            *optional,
            _END_OF_RECORD,
        )

    # The memo

    def _remember(self, opcodes: bytes) -> bytes:
        self._parts += (opcodes, op.MEMOIZE, op.POP)
        push = op.recall(self._in_memo)
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
            numbers = op.tuple_of([op.integer(number) for number in size])
            push = self._sizes[key] = self._remember(self._names[torch.Size] + numbers + op.TUPLE1 + op.REDUCE)
        return push

    def _state(self, properties: TensorProperties) -> bytes:
        # No more than the five fields that every torch can read. Strides came with 2.15, and older ones refuse six.
        state = properties.__getstate__()[:5]
        push = self._states.get(state)
        if push is None:
            dtype, layout, requires_grad, encoding, pin_memory = state
            parts = (
                op.name("torch", str(dtype).removeprefix("torch.")),
                self._names[layout_named] + self._text(str(layout)) + op.TUPLE1 + op.REDUCE,
                op.TRUE if requires_grad else op.FALSE,
                self._names[_MEM_FORMAT_ENCODING] + op.integer(encoding.value) + op.TUPLE1 + op.REDUCE,
                op.TRUE if pin_memory else op.FALSE,
            )
            push = self._states[state] = self._remember(op.tuple_of(parts))
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
            opcodes = buffer.getvalue().removeprefix(op.PROTO_4).removesuffix(op.STOP)
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
    if isinstance(still_to_be_made(metadata), PlaceColumns):
        return
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


def _raw_text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return b"\x8c" + bytes([len(encoded)]) + encoded if len(encoded) < 256 else op.text(text)
