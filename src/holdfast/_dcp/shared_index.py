"""An index that one rank has read, on its way to the others as columns.

To make an index of its bytes takes as long as there are tensors times ranks that saved them. So where all ranks see the
same bytes, one of them does it, and the others look up in columns what they want to know.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast._formats.dcp.columns import NO_HINT, AtHand, ChunkColumns, ChunksLater, Column, PlaceColumns
from holdfast._formats.dcp.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    Seal,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)


class SharedIndex(NamedTuple):
    """All that an index says."""

    fqns: list[str]
    properties: list[TensorProperties]
    """The different ones."""
    kinds: list[tuple[int, tuple[int, ...]] | None]
    """For each key the number of its properties and its size; None for a value."""
    chunks: list[ChunkColumns]
    """The different ones."""
    chunks_of: list[int | None]
    planner_data: Any
    storage_meta: StorageMeta | None
    version: str | None
    files: list[str]
    places: tuple[Column, ...]
    seals: tuple[Column, ...] | None

    def metadata(self) -> Metadata:
        """The index again. What it has by the thousand is made when somebody looks at it."""
        described: dict[str, STORAGE_TYPES] = {}
        for fqn, kind, chunks in zip(self.fqns, self.kinds, self.chunks_of, strict=True):
            if kind is None or chunks is None:
                described[fqn] = BytesStorageMetadata()
            else:
                later = ChunksLater(AtHand(self.chunks[chunks]))
                described[fqn] = TensorStorageMetadata.with_chunks_later(
                    self.properties[kind[0]], torch.Size(kind[1]), later
                )
        metadata = Metadata(described, self.planner_data, None, self.storage_meta, self.version)
        columns = [None if number is None else self.chunks[number] for number in self.chunks_of]
        metadata.leave_places(PlaceColumns(self.fqns, columns, self.files, self.places, self.seals))
        return metadata


def in_columns(metadata: Metadata) -> SharedIndex | None:
    """An index as columns; None if it has something that has no place in them."""
    fqns = list(metadata.state_dict_metadata)
    properties: dict[tuple[Any, ...], int] = {}
    known: dict[tuple[bytes, bytes, int], int] = {}
    columns: list[ChunkColumns] = []
    kinds: list[tuple[int, tuple[int, ...]] | None] = []
    chunks_of: list[int | None] = []
    records: list[TensorProperties] = []
    for entry in metadata.state_dict_metadata.values():
        if not isinstance(entry, TensorStorageMetadata):
            kinds.append(None)
            chunks_of.append(None)
            continue
        number = properties.setdefault(entry.properties.__getstate__(), len(records))
        if number == len(records):
            records.append(entry.properties)
        kinds.append((number, tuple(entry.size)))
        found = ChunkColumns.of(entry)
        which = found.offsets.tobytes(), found.sizes.tobytes(), len(entry.size)
        if which not in known:
            known[which] = len(columns)
            columns.append(found)
        chunks_of.append(known[which])
    places = _places_in_columns(metadata.storage_data, fqns, columns, chunks_of)
    if places is None:
        return None
    return SharedIndex(
        fqns,
        records,
        kinds,
        columns,
        chunks_of,
        metadata.planner_data,
        metadata.storage_meta,
        metadata.version,
        *places,
    )


_Places = tuple[list[str], tuple[Column, ...], tuple[Column, ...] | None]


def _places_in_columns(
    storage_data: Any, fqns: list[str], columns: list[ChunkColumns], chunks_of: list[int | None]
) -> _Places | None:
    if type(storage_data) is not dict:
        return None
    keys = {fqn: number for number, fqn in enumerate(fqns)}
    at = [{tuple(offset): row for row, offset in enumerate(chunks.offsets.tolist())} for chunks in columns]
    if any(len(rows) < len(chunks.offsets) for rows, chunks in zip(at, columns, strict=True)):
        return None
    files: dict[str, int] = {}
    rows: list[tuple[int, ...]] = []
    seals: list[Seal] = []
    for index, info in storage_data.items():
        key = keys.get(index.fqn) if type(index) is MetadataIndex else None
        if key is None or type(info) is not _StorageInfo or info.transform_descriptors:
            return None
        chunks = chunks_of[key]
        hint: int | None = NO_HINT
        if chunks is not None:
            hint = None if index.offset is None else at[chunks].get(index.offset)
        if hint is None or (chunks is None and index.offset is not None):
            return None
        rows.append((key, hint, files.setdefault(info.relative_path, len(files)), info.offset, info.length))
        if info.seal is not None:
            seals.append(info.seal)
    if seals and len(seals) < len(rows):
        return None
    stored = _small(np.array(rows, np.int64).reshape(len(rows), 5))
    return list(files), stored, _small(np.array(seals, np.int64)) if seals else None


def _small(table: Column) -> tuple[Column, ...]:
    """The columns of a table, each in the smallest type that takes its numbers."""
    kinds = [
        np.result_type(*map(np.min_scalar_type, (column.min(initial=0), column.max(initial=0)))) for column in table.T
    ]
    return tuple(np.ascontiguousarray(column.astype(kind)) for column, kind in zip(table.T, kinds, strict=True))
