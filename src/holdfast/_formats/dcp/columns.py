"""Chunks and places of a DCP index as columns: arrays with a row for each, instead of objects.

An index has as many of both as there are tensors times ranks. Arrays of them are made, sent and searched in a
hundredth of the time, and whoever wants the objects of ``metadata.py`` gets those that are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast._formats.dcp.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    Seal,
    TensorStorageMetadata,
    _StorageInfo,
    still_to_be_made,
)

Column = npt.NDArray[np.integer[Any]]

ChunkBox = tuple[torch.Size, torch.Size]

NO_HINT = -1


@dataclass(frozen=True, eq=False)
class ChunkColumns:
    """The chunks of a tensor, one row for each and one column per dimension."""

    offsets: Column
    sizes: Column
    _touching: dict[ChunkBox, list[int]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, entry: TensorStorageMetadata) -> ChunkColumns:
        """Those of a tensor in an index, without making objects of them if there are none yet."""
        maker = still_to_be_made(entry)
        if isinstance(maker, ChunksLater):
            return maker.columns()
        shape = len(entry.chunks), len(entry.size)
        return cls(
            np.array([chunk.offsets for chunk in entry.chunks], np.int64).reshape(shape),
            np.array([chunk.sizes for chunk in entry.chunks], np.int64).reshape(shape),
        )

    def chunk(self, row: int) -> ChunkStorageMetadata:
        """One of them."""
        return ChunkStorageMetadata(torch.Size(self.offsets[row].tolist()), torch.Size(self.sizes[row].tolist()))

    def chunks(self) -> list[ChunkStorageMetadata]:
        """All of them."""
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in zip(self.offsets.tolist(), self.sizes.tolist(), strict=True)
        ]

    def touching(self, box: ChunkStorageMetadata) -> list[int]:
        """The rows of those that share cells with a box.

        >>> columns = ChunkColumns(np.array([[0], [4], [8]]), np.array([[4], [4], [4]]))
        >>> columns.touching(ChunkStorageMetadata(torch.Size([3]), torch.Size([2])))
        [0, 1]
        """
        which = box.offsets, box.sizes
        if which not in self._touching:  # tensors that are divided alike are mostly asked for alike
            begin = np.array(box.offsets, np.int64)
            end = begin + np.array(box.sizes, np.int64)
            shared = np.minimum(self.offsets + self.sizes, end) > np.maximum(self.offsets, begin)
            self._touching[which] = np.flatnonzero(shared.all(axis=1)).tolist()
        return self._touching[which]


@dataclass(frozen=True, eq=False)
class ChunksLater:
    """Makes the chunks of a tensor when somebody looks at them."""

    columns: Callable[[], ChunkColumns]

    def made(self) -> list[ChunkStorageMetadata]:
        """The chunks as objects."""
        return self.columns().chunks()


@dataclass(frozen=True, eq=False)
class AtHand:
    """Columns that are there already."""

    columns: ChunkColumns

    def __call__(self) -> ChunkColumns:
        return self.columns


@dataclass(frozen=True, eq=False)
class PlaceColumns:
    """Where the items of a checkpoint are, one row for each, in the order of the index."""

    fqns: Sequence[str]
    chunks: Sequence[ChunkColumns | None]
    """Of each key; None if it is a value."""
    files: Sequence[str]
    places: tuple[Column, ...]
    """The numbers of the key, of the chunk (``NO_HINT`` for values) and of the file, and the offset and the length."""
    seals: tuple[Column, ...] | None
    """One column per field of ``Seal``; None if there are no seals."""

    @property
    def key(self) -> Column:
        """For each item the number of its key."""
        return self.places[0]

    @property
    def hint(self) -> Column:
        """For each item which chunk of its tensor it is."""
        return self.places[1]

    def made(self) -> dict[MetadataIndex, _StorageInfo]:
        """All of them, as objects."""
        return dict(self.rows())

    def info(self, row: int) -> _StorageInfo:
        """Where one of them is."""
        _, _, file, offset, length = (int(column[row]) for column in self.places)
        seal = None if self.seals is None else Seal(*(int(column[row]) for column in self.seals))
        return _StorageInfo(self.files[file], offset, length, None, seal)

    def rows(self) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
        """All of them, one after the other."""
        numbers = [column.tolist() for column in self.places]
        seals: Any = repeat(None)
        if self.seals is not None:
            seals = map(Seal._make, zip(*(column.tolist() for column in self.seals), strict=True))
        for key, hint, file, offset, length, seal in zip(*numbers, seals, strict=False):
            yield self._index(key, hint), _StorageInfo(self.files[file], offset, length, None, seal)

    def _index(self, key: int, hint: int) -> MetadataIndex:
        chunks = self.chunks[key]
        if chunks is None:
            return MetadataIndex(self.fqns[key])
        return MetadataIndex(self.fqns[key], chunks.offsets[hint].tolist(), hint)


class PlaceTable(Mapping[MetadataIndex, _StorageInfo]):
    """Places that are looked up in columns, and made when they are found."""

    def __init__(self, columns: PlaceColumns) -> None:
        self._columns = columns

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {fqn: number for number, fqn in enumerate(self._columns.fqns)}

    @cached_property
    def _first_rows(self) -> tuple[Column, Column]:
        order = np.lexsort((self._columns.hint, self._columns.key))
        return order, np.searchsorted(self._columns.key[order], np.arange(len(self._columns.fqns) + 1))

    def _row(self, index: MetadataIndex) -> int | None:
        key = self._numbers.get(index.fqn)
        if key is None:
            return None
        chunks = self._columns.chunks[key]
        order, first = self._first_rows
        rows = order[first[key] : first[key + 1]]
        if chunks is None or index.offset is None:
            return int(rows[0]) if chunks is None and index.offset is None and len(rows) else None
        at = index.index
        if at is None or not (0 <= at < len(chunks.offsets) and tuple(chunks.offsets[at].tolist()) == index.offset):
            same = np.flatnonzero((chunks.offsets == np.array(index.offset, np.int64)).all(axis=1))
            if not len(same):
                return None
            at = int(same[0])
        hints = self._columns.hint[rows]
        place = int(np.searchsorted(hints, at))
        return int(rows[place]) if place < len(hints) and hints[place] == at else None

    def __getitem__(self, index: MetadataIndex) -> _StorageInfo:
        row = self._row(index)
        if row is None:
            raise KeyError(index)
        return self._columns.info(row)

    def __iter__(self) -> Iterator[MetadataIndex]:
        return (index for index, _ in self._columns.rows())

    def __len__(self) -> int:
        return len(self._columns.key)
